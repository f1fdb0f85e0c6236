"""What a chat template does with its keys, with thoughts and with tools, found by rendering short
conversations. A template ignores a key that it does not read, and may drop a message: none of it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError, meta
from transformers import PreTrainedTokenizerBase

from agent_peft.lookup import nearest
from agent_peft.policies.models.template_probe import sandbox
from agent_peft.replies import DIALECTS, read_calls
from agent_peft.types import AgentPeftError

TemplateKey = bool | int | float | str

_CONTEXT = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_TRIED: tuple[TemplateKey, ...] = (True, False, "low", "high")
_THOUGHT, _ANSWER, _RESULT = "xthoughtx", "xanswerx", "xresultx"
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
    """

    keys: tuple[str, ...]
    prompt: str
    prompts: Mapping[bool, str]
    thoughts: str
    tools: tuple[str, ...]
    dialect: str | None

    def __str__(self) -> str:
        keys = ", ".join(self.keys) or "none"
        prompts = "".join(
            f" ({key}: {prompt!r})"
            for key, prompt in zip(("thinking on", "off"), self.prompts.values(), strict=False)
        )
        tools = ", ".join(self.tools) or "not written"
        tools += f" (calls: {self.dialect})" if self.dialect else ""
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


def _thoughts(tokenizer: PreTrainedTokenizerBase) -> str:
    inline = _reply(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}")
    for thought in (_reply(reasoning_content=_THOUGHT), inline):
        if _THOUGHT in (_render(tokenizer, [_user(), thought], False) or ""):
            longer = _render(tokenizer, [_user(), thought, _user()]) or ""
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
