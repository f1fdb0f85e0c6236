"""The prompts of conversations: by the chat template where it writes tools, in plain messages where it
writes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

from agent_peft.agents.serving.conversation import ChatMessage, Tool, arguments_of, plain_messages
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.policies.models.chat_template import TemplateFacts, TemplateKey, probe_template
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import open_thought
from agent_peft.types import AgentPeftError

PLAIN = "plain"  # the dialect of ``plain_messages``
_WRITTEN = {"tools", "call", "result"}  # by a template that can use tools


class Prompt(NamedTuple):
    """The tokens of a prompt, how it opens a thought, and the dialect of the calls that may follow."""

    tokens: Sequence[int]
    open_thought: str = ""
    dialect: str = PLAIN


EMPTY = Prompt(())


@lru_cache(maxsize=16)
def facts_of(chat: ChatTokenizer) -> TemplateFacts | None:
    """What the chat template does."""
    return probe_template(chat.tokenizer)


def chat_prompt(chat: ChatTokenizer, request: ChatRequest) -> Prompt:
    """The prompt of a conversation. What the chat template leaves out or refuses is an `AgentPeftError`."""
    facts, messages, tools = facts_of(chat), request.messages, request.offered
    keys = template_keys(request, facts)
    written = set(facts.tools) if facts else set[str]()
    native = facts is not None and facts.dialect is not None and written >= _WRITTEN
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        if not native and written & {"tools", "call"}:
            missing = ", ".join(sorted(_WRITTEN - written)) or "calls in a dialect that can be read"
            raise AgentPeftError(
                f"tools: the chat template of this model does not write {missing}; send none"
            )
    elif not keys and not any(message.thought for message in messages):
        opening = chat.opening(plain_messages(messages, ()), typed=native)
        return Prompt(opening, chat.open_thought, PLAIN)
    if facts is None or not (native or keys):
        return Prompt(chat.opening(plain_messages(messages, tools)), chat.open_thought)
    if native:
        rendered = [_as_template(message, messages[:place]) for place, message in enumerate(messages)]
        declared = [_with_parameters(tool) for tool in tools] or None
        dialect = str(facts.dialect)
    else:
        plain = plain_messages(messages, tools)
        rendered, declared, dialect = (
            [{"role": one.role, "content": one.content} for one in plain],
            None,
            PLAIN,
        )
    try:
        _check_complete(chat, rendered, declared, keys)
        cut = [
            _cut(chat, message, controls=not native or message["role"] == "assistant") for message in rendered
        ]
        offered = _cut(chat, declared, controls=not native)
        text = chat.render(cut, True, tools=offered, **keys)
        before = chat.render(cut, False, tools=offered, **keys)
    except TemplateError as error:
        raise AgentPeftError(f"messages: the chat template refuses the conversation: {error}") from error
    return Prompt(chat.encode_rendered(text), open_thought(text.removeprefix(before)), dialect)


def template_keys(request: ChatRequest, facts: TemplateFacts | None) -> dict[str, TemplateKey]:
    """The keys of the template that a request sets. ``reasoning_effort`` is a hint, and needs no such key."""
    known, effort = facts.keys if facts else (), request.reasoning_effort
    keys: dict[str, TemplateKey] = {}
    if effort == "none" and "enable_thinking" in known:
        keys["enable_thinking"] = False
    elif effort not in (None, "none") and "reasoning_effort" in known:
        keys["reasoning_effort"] = str(effort)
    commands = request.chat_template_kwargs or {}
    if request.enable_thinking is not None:
        commands = {**commands, "enable_thinking": request.enable_thinking}
    for key in commands:
        if key not in known:
            there = ", ".join(known) or "none"
            raise AgentPeftError(
                f"chat_template_kwargs: the chat template has no key {key[:80]!r}; it has: {there}"
            )
    return keys | commands


def _as_template(message: ChatMessage, before: Sequence[ChatMessage]) -> dict[str, Any]:
    """A message as chat templates read it: the arguments of a call are an object."""
    role = "system" if message.role == "developer" else message.role
    content: dict[str, Any] = {"role": role, "content": message.text}
    if message.thought:
        content["reasoning_content"] = message.thought
    if message.tool_calls:
        functions = [
            {"name": call.function.name, "arguments": arguments_of(call)} for call in message.tool_calls
        ]
        content["tool_calls"] = [
            {"type": "function", "id": call.id, "function": function}
            for call, function in zip(message.tool_calls, functions, strict=True)
        ]
    if message.role == "tool":
        calls = {call.id: call.function.name for one in before for call in one.tool_calls or ()}
        content["tool_call_id"] = message.tool_call_id or ""
        content["name"] = message.name or calls.get(message.tool_call_id or "", "")
    return content


def _with_parameters(tool: Tool) -> dict[str, Any]:
    content = tool.model_dump(exclude_none=True)
    content["function"].setdefault("description", "")
    content["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return content


def _check_complete(
    chat: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    keys: Mapping[str, TemplateKey],
) -> None:
    """Refuse a conversation of which the template leaves out a text or a call. Thoughts may be dropped."""
    words: list[str] = []  # what each sentinel stands for

    def word(what: str) -> str:
        words.append(what)
        return f"xsentinel{len(words) - 1}x"

    marked = []
    for message in messages:
        one = dict(message)
        if one["content"]:
            one["content"] = word(f"the text of a message of the role {one['role']}")
        if "tool_calls" in one:
            called = [call["function"]["name"] for call in one["tool_calls"]]
            arguments = [{"words": word(f"a call of {name!r:.80}")} for name in called]
            one["tool_calls"] = [
                call | {"function": {"name": call["function"]["name"], "arguments": new}}
                for call, new in zip(one["tool_calls"], arguments, strict=True)
            ]
        marked.append(one)
    text = chat.render(marked, True, tools=tools, **keys)
    for number, what in enumerate(words):
        if f"xsentinel{number}x" not in text:
            raise TemplateError(f"it leaves out {what}")


def _cut(chat: ChatTokenizer, value: Any, controls: bool) -> Any:
    """``value`` with a cut in each mark of its texts."""
    if isinstance(value, str):
        return chat.cut(value, controls)
    if isinstance(value, Mapping):
        return {_cut(chat, key, controls): _cut(chat, one, controls) for key, one in value.items()}
    return [_cut(chat, one, controls) for one in value] if isinstance(value, list) else value
