"""What a chat template does with its keys, with thoughts and with tools, found by rendering short
conversations. A template ignores a key that it does not read, and may drop a message: none of it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError, meta
from transformers import PreTrainedTokenizerBase

from agent_peft.lookup import nearest
from agent_peft.policies.models.template_probe import sandbox
from agent_peft.replies import DIALECTS, read_calls, read_reply
from agent_peft.types import AgentPeftError, Message

TemplateKey = bool | int | float | str
Render = Callable[[list[dict[str, Any]], bool], str]  # of messages, and whether with the generation prompt

_CONTEXT = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_TRIED: tuple[TemplateKey, ...] = (True, False, "low", "high")
_THOUGHT, _ANSWER, _RESULT = "xthoughtx", "xanswerx", "xresultx"
_OPENING, _INLINE = "xopeningx", f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
_NAMES = ("xfirstx", "xotherx")  # of tools
_ARGUMENTS = {"words": _ANSWER}


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template does.

    Attributes:
        keys: the keys that change its text.
        prompt: how the generation prompt ends.
        prompts: for each value of ``enable_thinking``, how the generation prompt ends, if it has the key.
        thoughts: what becomes of the thought of an earlier reply.
        tools: what it writes of tools: ``tools``, ``call``, ``several calls`` and ``result``.
        dialect: the dialect of `replies` that reads its calls back; None where none does.
        history: what becomes of the earlier turns of an episode (`ChatTokenizer.history`).
    """

    keys: tuple[str, ...]
    prompt: str
    prompts: Mapping[bool, str]
    thoughts: str
    tools: tuple[str, ...]
    dialect: str | None
    history: str = ""

    def __str__(self) -> str:
        keys = ", ".join(self.keys) or "none"
        prompts = "".join(
            f" ({key}: {prompt!r})"
            for key, prompt in zip(("thinking on", "off"), self.prompts.values(), strict=False)
        )
        tools = ", ".join(self.tools) or "not written"
        tools += f" (calls: {self.dialect})" if self.dialect else ""
        tools += self.history and f"; history: {self.history}"
        return (
            f"keys: {keys}; prompt ends {self.prompt!r}{prompts}; thoughts: {self.thoughts}; tools: {tools}"
        )


def probe_template(tokenizer: PreTrainedTokenizerBase, dialect: str = "auto") -> TemplateFacts | None:
    """The facts of the tokenizer's template; None where it has none, or has several by name. ``dialect`` is
    the only one that is tried, or "auto".
    """
    if not isinstance(tokenizer.chat_template, str):
        return None
    plain, keys = _texts(tokenizer), []
    for key in sorted(_named(tokenizer)):
        texts = [_texts(tokenizer, **{key: value}) for value in _TRIED]
        if any(any(text) and text != plain for text in texts):
            keys.append(key)
    switches = (True, False) if "enable_thinking" in keys else ()
    return TemplateFacts(
        tuple(keys),
        _prompt_end(tokenizer),
        {value: _prompt_end(tokenizer, enable_thinking=value) for value in switches},
        _thoughts(tokenizer),
        _tools(tokenizer),
        _dialect(tokenizer, tuple(DIALECTS) if dialect == "auto" else (dialect,)),
    )


def with_keys(tokenizer: PreTrainedTokenizerBase, keys: Mapping[str, TemplateKey]) -> None:
    """Make ``keys`` the defaults of the tokenizer's template, in its text, so that every rendering has them:
    also that of a merged model, elsewhere. A key that changes nothing is refused.
    """
    if not keys:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        kind = "no chat template" if not template else f"{len(template)} chat templates"
        raise AgentPeftError(f"policy.template: the model has {kind}; leave the key out")
    facts, named = probe_template(tokenizer), _named(tokenizer)
    for key, value in keys.items():
        texts = [] if key not in named else _texts(tokenizer, **{key: value})
        # a default may be written out; a text must differ from another text, or from no key
        others = [{key: not value}] if isinstance(value, bool) else [{}, {key: "low"}, {key: "high"}]
        if not texts or all(texts == _texts(tokenizer, **other) for other in others):
            known = facts.keys if facts else ()
            advice = "it takes no keys: leave it out" if not known else nearest(key, known)
            if key in known:
                advice = "give another value"
            raise AgentPeftError(
                f"policy.template.{key}: {value!r} has no effect on the chat template; {advice}"
            )
        if not any(texts):
            raise AgentPeftError(
                f"policy.template.{key}: the chat template refuses {value!r}; give another value"
            )
    defaults = "".join(
        f"{{% set {key} = {key} | default({value!r}) %}}" for key, value in sorted(keys.items())
    )
    tokenizer.chat_template = f"{defaults}\n{template}"  # Jinja drops a newline after a block


def check_dialect(tokenizer: PreTrainedTokenizerBase, dialect: str) -> None:
    """Refuse a dialect that does not read the calls that the template writes."""
    if dialect != "auto" and _dialect(tokenizer, (dialect,)) is None:
        raise AgentPeftError(
            f"policy.tools: the chat template writes no calls that {dialect} reads; set auto "
            f"({_dialect(tokenizer, tuple(DIALECTS)) or 'no dialect reads them'})"
        )


def rewriting(render: Render, lead: str) -> str | None:
    """How a longer conversation changes its own beginning, or None where it does not. ``lead`` comes before a
    reply and after the generation prompt.
    """
    user, reply, again = _user(), _reply(), {"role": "user", "content": _RESULT}
    for opening in ([{"role": "system", "content": _OPENING}, user], [user]):
        try:
            first, longer = render(opening, True), render([*opening, reply, again], True)
        except TemplateError:
            continue
        if not longer.startswith(first + lead + _ANSWER):
            return "a new turn rewrites what was there before it"
    dropped = _THOUGHT not in render([user, _reply(_INLINE), again], True)
    return "a new turn drops the thoughts of earlier ones" if dropped else None


def reads_replies(render: Render, opened: str) -> bool:
    """Whether a reply, without the thought that the prompt has ``opened``, is its content. Harmony's names a
    channel first.
    """
    try:
        first, whole = render([_user()], True), render([_user(), _reply()], False)
    except TemplateError:
        return True
    written = opened + whole.removeprefix(first).partition(_ANSWER)[0] + _ANSWER
    return not whole.startswith(first) or read_reply(written).text.strip() == _ANSWER


def check_thoughts(tokenizer: PreTrainedTokenizerBase, rewrites: bool) -> None:
    """Refuse ``policy.thoughts: keep`` where it changes nothing, or a key of the template keeps thoughts."""
    facts = probe_template(tokenizer)
    for key in facts.keys if facts else ():
        for value in (True, False):
            if (
                rewrites
                and facts
                and facts.thoughts != "kept"
                and _thoughts(tokenizer, **{key: value}) == "kept"
            ):
                raise AgentPeftError(
                    f"policy.thoughts: keep: the chat template has a key for it, with which a server of the "
                    f"model keeps them, too: set policy.template: {{{key}: {str(value).lower()}}} instead"
                )
    if not rewrites:
        raise AgentPeftError(
            "policy.thoughts: keep has no effect: an episode of this chat template is one row; leave it out"
        )


def fold(messages: Sequence[Message]) -> list[Message]:
    """The conversation with alternating roles: system becomes user, and neighbors of one role are joined."""
    folded: list[Message] = []
    for message in messages:
        role = "user" if message.role == "system" else message.role
        if folded and folded[-1].role == role:
            folded[-1] = Message(role, f"{folded[-1].content}\n\n{message.content}")
        else:
            folded.append(Message(role, message.content))
    return folded


def _named(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The names that a template reads and does not set. Some are its own variables."""
    try:
        names = meta.find_undeclared_variables(sandbox().parse(str(tokenizer.chat_template)))
        return names - _CONTEXT - set(tokenizer.special_tokens_map) - {"bos_token", "eos_token", "unk_token"}
    except TemplateError:  # reported where the template is used
        return set()


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], generate: bool = True, /, **keys: Any
) -> str | None:
    """The text of a conversation, or None where the template refuses it, in any way it likes."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **keys)
    except Exception:
        return None
    assert isinstance(text, str)
    return text


def _texts(tokenizer: PreTrainedTokenizerBase, **keys: TemplateKey) -> list[str | None]:
    render = partial(_render, tokenizer, **keys)
    thought = _reply(reasoning_content=_THOUGHT)
    return [
        render([_user()]),
        render([{"role": "system", "content": "words"}, _user()]),
        render([_user()], tools=[_tool(_NAMES[0])]),
        render([_user(), thought, _user()]),
        render([_user(), thought], False),
    ]


def _prompt_end(tokenizer: PreTrainedTokenizerBase, **keys: TemplateKey) -> str:
    """What follows the user's message."""
    text = _render(tokenizer, [_user()], **keys) or ""
    return text.rpartition("words")[2]


def _thoughts(tokenizer: PreTrainedTokenizerBase, **keys: TemplateKey) -> str:
    for thought in (_reply(reasoning_content=_THOUGHT), _reply(_INLINE)):
        if _THOUGHT in (_render(tokenizer, [_user(), thought], False, **keys) or ""):
            longer = _render(tokenizer, [_user(), thought, _user()], **keys) or ""
            return "kept" if _THOUGHT in longer else "dropped when a user message follows"
    return "not written"


def _tools(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    tools = [_tool(name) for name in _NAMES]
    calls = [_call(name) for name in _NAMES]
    results = [
        {"role": "tool", "name": name, "tool_call_id": call["id"], "content": _RESULT}
        for name, call in zip(_NAMES, calls, strict=True)
    ]
    declared = _render(tokenizer, [_user()], tools=tools) or ""
    # the declaration holds the names, too; the argument's value is in the call alone
    one = _render(tokenizer, [_user(), _reply("", tool_calls=calls[:1]), results[0]], tools=tools) or ""
    two = _render(tokenizer, [_user(), _reply("", tool_calls=calls), *results], tools=tools) or ""
    written = {
        "tools": all(name in declared for name in _NAMES),
        "call": _ANSWER in one,
        "several calls": two.count(_ANSWER) == 2,
        "result": _RESULT in one,
    }
    return tuple(name for name, holds in written.items() if holds)


def _dialect(tokenizer: PreTrainedTokenizerBase, dialects: Sequence[str]) -> str | None:
    call, plain = (
        _render(tokenizer, [_user(), reply], False, tools=[_tool(_NAMES[0])]) or ""
        for reply in (_reply("", tool_calls=[_call(_NAMES[0])]), _reply())
    )
    lead, _, end = plain.rpartition(_ANSWER)
    body = call.removeprefix(lead.rstrip()).removesuffix(end)
    for dialect in dialects:
        calls = read_calls(body, dialect)[1]
        if [(one.name, one.arguments, one.fault) for one in calls] == [(_NAMES[0], _ARGUMENTS, "")]:
            return dialect
    return None


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": _ARGUMENTS}
    return {"type": "function", "id": f"{name}00"[:9], "function": function}


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "words"}


def _reply(content: str = _ANSWER, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]}
    function = {"name": name, "description": "It reads words.", "parameters": parameters}
    return {"type": "function", "function": function}
