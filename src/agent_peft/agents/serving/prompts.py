"""The prompts of conversations: by the chat template where it writes tools, in plain messages where it
writes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from agent_peft.agents.serving.constraint import Grammar, grammar_of
from agent_peft.agents.serving.conversation import PLAIN, ChatMessage, Tool, arguments_of, plain_messages
from agent_peft.agents.serving.requests import ChatRequest
from agent_peft.policies.models.chat_template import TemplateFacts, TemplateKey
from agent_peft.policies.native import WRITTEN, facts_of, rendered_prompt, template_call
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import open_thought
from agent_peft.types import AgentPeftError


class Prompt(NamedTuple):
    """The tokens of a prompt, how it opens a thought, the dialect of the calls that may follow, and the form
    that the reply must have.
    """

    tokens: Sequence[int]
    open_thought: str = ""
    dialect: str = PLAIN
    grammar: Grammar | None = None


EMPTY = Prompt(())


def chat_prompt(chat: ChatTokenizer, request: ChatRequest) -> Prompt:
    """The prompt of a conversation. What the chat template leaves out or refuses is an `AgentPeftError`."""
    prompt = _prompt(chat, request)
    return prompt._replace(grammar=grammar_of(chat, request, prompt.dialect))


def _prompt(chat: ChatTokenizer, request: ChatRequest) -> Prompt:
    facts, messages, tools = facts_of(chat), request.messages, request.offered
    keys = template_keys(request, facts)
    written = set(facts.tools) if facts else set[str]()
    native = facts is not None and facts.dialect is not None and written >= WRITTEN
    if tools or any(message.tool_calls or message.role == "tool" for message in messages):
        if not native and written & {"tools", "call"}:
            missing = ", ".join(sorted(WRITTEN - written)) or "calls in a dialect that can be read"
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
    before, text = rendered_prompt(chat, rendered, declared, keys, native)
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
        content["tool_calls"] = [
            template_call(call.id, call.function.name, arguments_of(call)) for call in message.tool_calls
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
