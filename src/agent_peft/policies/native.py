"""Conversations with tools, calls, results and thoughts, in the chat template's own text.

A template is given messages in OpenAI's form, with the arguments of a call as an object. All that it leaves
out is an error, but for the thoughts of earlier replies. Texts that it writes around contents may be control
tokens, and the contents may not (`ChatTokenizer.cut`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.marks import CUT
from agent_peft.policies.models.chat_template import (
    TemplateFacts,
    TemplateKey,
    fold,
    probe_template,
    with_keys,
)
from agent_peft.policies.models.pretrained import check_chat_template, load_tokenizer, use_template
from agent_peft.policies.models.shape import read_here
from agent_peft.policies.models.start import start_of
from agent_peft.policies.reply_text import as_token, marked_calls, marked_text
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import Call, ThoughtSplitter, read_reply
from agent_peft.types import AgentPeftError, Message, ToolCall

logger = logging.getLogger(__name__)

WRITTEN = frozenset({"tools", "call", "result"})  # by a template that can use tools
REFUSED = "messages: the chat template refuses the conversation"
_NO_KEYS: Mapping[str, TemplateKey] = {}
_USER = Message("user", "x")
_SHOWN = 60  # characters of a text in a message


@lru_cache(maxsize=16)
def facts_of(chat: ChatTokenizer) -> TemplateFacts | None:
    """What the chat template does."""
    return probe_template(chat.tokenizer, chat.dialect)


class RewrittenError(AgentPeftError):
    """The chat template writes earlier messages differently where others follow."""


@dataclass(frozen=True)
class NativeReply:
    """A sampled reply in parts. ``closed``: whether its thought is closed; a call may have a fault."""

    thought: str | None
    text: str
    calls: tuple[Call, ...]
    closed: bool


class NativeFormat:
    """How one policy reads and writes the messages of an episode. A template that cannot is refused.

    Args:
        tools: the functions that may be called, in OpenAI's form.
        acts: whether the policy's calls are read; False where all replies are recorded ones.
    """

    def __init__(
        self, chat: ChatTokenizer, tools: Sequence[Mapping[str, Any]] = (), acts: bool = True
    ) -> None:
        self.chat, self.tools = chat, [dict(tool) for tool in tools] or None
        functions = [tool["function"] for tool in tools]
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        facts = facts_of(chat)
        self._dialect = (facts and facts.dialect) or ""
        missing = (WRITTEN if acts else {"tools"}) - set(facts.tools if facts else ())
        if tools and (missing or (acts and not self._dialect)):
            what = ", ".join(sorted(missing)) or "calls in a dialect that can be read"
            raise AgentPeftError(
                f"the environment declares tools, and the model's chat template does not write {what}; set "
                "policy.chat_template to a file with one that does, or choose another protocol"
            )
        self._acts = bool(tools) and acts
        if self._acts:  # a template that always rewrites is refused before anything is sampled
            call = Message("assistant", "", (ToolCall(next(iter(self._schemas)), {}, "call00000"),), "x")
            self.following([_USER, call], [Message("tool", "x")], [])

    @property
    def names(self) -> str:
        """The tools, for a message to the policy."""
        return " or ".join(self._schemas)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the conversation so far and the generation prompt."""
        return self.chat.encode_rendered(rendered_prompt(self.chat, as_template(messages), self.tools)[1])

    def action_tokens(self, messages: Sequence[Message], reply: Message) -> list[int]:
        """The tokens of a demonstrated ``reply`` to ``messages``: what the template writes after the prompt,
        up to the token that ends the turn.
        """
        rendered = as_template([*messages, reply])
        _check_complete(self.chat, rendered, self.tools, _NO_KEYS, generate=False)
        prompt, whole = self._render(rendered[:-1], True), self._render(rendered, False)
        if not whole.startswith(prompt):
            raise AgentPeftError(_two_texts("a reply does not follow its prompt", prompt, whole))
        target, mark, _ = self._split_end(whole.removeprefix(prompt))
        if reply.thought and self.chat.cut(reply.thought.strip(), True) not in target:
            raise AgentPeftError(
                f"the chat template leaves out the thought {reply.thought.strip()[:_SHOWN]!r} of a reply; "
                "remove the thoughts, or set policy.chat_template to a file with one that writes them"
            )
        tokens = self.chat.encode_rendered(target + mark)
        if self._acts:
            read = [(call.name, call.arguments) for call in self.read(tokens).calls]
            if read != [(call.name, call.arguments) for call in reply.tool_calls]:
                raise AgentPeftError(
                    f"the chat template writes a call that {self._dialect} does not read back: "
                    f"{target.strip()[:200]!r}; set policy.chat_template to a file with one that quotes the "
                    "arguments, or choose another protocol"
                )
        return tokens

    def following(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        last_action: Sequence[int],
        exact: bool = False,
        keeps: bool = True,
    ) -> list[int]:
        """The tokens to append after the sampled ``last_action``, the reply that ends ``messages``, so that
        the policy can act on the ``new`` messages: what the template writes there.

        Where the template then writes earlier replies differently, they stay as they were sampled. That is a
        `RewrittenError` with ``exact``, or without ``keeps``.
        """
        *before, reply = messages
        tries = [[*before, reply]]
        if not exact:
            if [message.role for message in new] == ["user"]:
                return self.chat.following(new[0].content, last_action)
            # what follows a call does not depend on what comes before it
            replies = [reply, *(replace(reply, content="", thought=thought) for thought in ("x", None))]
            tries = [[_USER, one] for one in (replies if keeps else replies[:1])]
        texts: list[tuple[str, str]] = []  # without and with the new messages
        while not texts or (not texts[-1][1].startswith(texts[-1][0]) and len(texts) < len(tries)):
            rendered = as_template([*tries[len(texts)], *new])
            texts.append((self._render(rendered[: -len(new)], False), self._render(rendered, True)))
        whole, longer = texts[-1]
        if not longer.startswith(whole):
            raise RewrittenError(_two_texts("a new message changes the text before it", *texts[0]))
        if len(texts) > 1:
            _warn_of_rewriting(self.chat)
        _, mark, rest = self._split_end(whole)
        tokens = self.chat.encode_rendered(mark + rest + longer.removeprefix(whole))
        return tokens[bool(last_action) and last_action[-1] in self.chat.closed_by :]

    def next_prompt(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        row: Sequence[int],
        last_action: Sequence[int],
    ) -> tuple[bool, list[int]]:
        """Whether the template rewrites the history before the ``new`` messages, and what the policy reads:
        then a whole prompt, or else the tokens to append to ``row``, which the sampled ``last_action`` ends.
        """
        keeps = not self.chat.follows_template
        if not self.chat.rewrites:
            try:
                return False, self.following(messages, new, last_action, keeps=keeps)
            except RewrittenError:
                if keeps:
                    raise
        messages = list(map(_in_parts, messages))
        try:
            prompt, appends = self.opening([*messages, *new]), self._appends(messages, new)
        except AgentPeftError:
            if self.tools:
                raise
            prompt, appends = self.opening(fold([*messages, *new])), False  # as `ChatTokenizer.opening` does
        if prompt[: len(row)] == list(row):
            return False, prompt[len(row) :]
        if appends:
            return False, self.following(messages, new, last_action, keeps=False)
        return True, prompt

    def _appends(self, messages: Sequence[Message], new: Sequence[Message]) -> bool:
        """Whether the template writes the new messages after the last prompt and its whole reply."""
        *before, reply = messages
        prompt, whole = self._render(as_template(before), True), self._render(as_template(messages), False)
        thought = self.chat.cut((reply.thought or "").strip(), True)
        longer = self._render(as_template([*messages, *new]), True)
        return whole.startswith(prompt) and longer.startswith(whole) and thought in whole[len(prompt) :]

    def read(self, action: Sequence[int]) -> NativeReply:
        """The parts of a sampled reply. Takes time linear in it, and never raises. Where a mark is a token of
        the tokenizer, only that token is the mark.
        """
        splitter = ThoughtSplitter(self.chat.open_thought, lambda mark: as_token(self.chat, mark))
        parts = zip(splitter.push(marked_text(self.chat, action)), splitter.finish(), strict=True)
        thought, text = ("".join(part) for part in parts)
        text, calls = marked_calls(self.chat, text, self._dialect, self._schemas)
        return NativeReply(
            thought.replace(CUT, "").strip() if splitter.thinks else None, text, calls, splitter.closed
        )

    def _render(self, rendered: list[dict[str, Any]], generate: bool) -> str:
        return _render(self.chat, rendered, self.tools, generate, _NO_KEYS)

    def _split_end(self, text: str) -> tuple[str, str, str]:
        """A text before its last token that ends a turn, that token's text, and the rest."""
        marks = self.chat.marks
        ends = [m for m in marks.pattern.finditer(text) if marks.tokens[m[0]] in self.chat.end_of_turn]
        if not ends:
            raise AgentPeftError(
                "the chat template ends no reply with a token that ends a turn, so calls of tools cannot be "
                "trained; set policy.chat_template to a file with one that does"
            )
        return text[: ends[-1].start()], ends[-1][0], text[ends[-1].end() :]


def format_of(chat: ChatTokenizer, tools: Sequence[Mapping[str, Any]], acts: bool) -> NativeFormat:
    """The format of a policy for these tools, made and checked once."""
    return _format_of(chat, json.dumps(tools), acts)


@lru_cache(maxsize=64)
def _format_of(chat: ChatTokenizer, tools: str, acts: bool) -> NativeFormat:
    return NativeFormat(chat, json.loads(tools), acts)


def as_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them. A result belongs to the first call that has none yet."""
    rendered: list[dict[str, Any]] = []
    waiting: list[ToolCall] = []
    for message in messages:
        content: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thought:
            content["reasoning_content"] = message.thought
        if message.role == "assistant":
            waiting = list(message.tool_calls)
        if waiting and message.role == "assistant":
            content["tool_calls"] = [
                template_call(call.id or "", call.name, dict(call.arguments)) for call in waiting
            ]
        if message.role == "tool":
            call = waiting.pop(0) if waiting else ToolCall("", {})
            content |= {"tool_call_id": call.id or "", "name": call.name}
        rendered.append(content)
    return rendered


def _in_parts(message: Message) -> Message:
    """A reply whose thought is in its text, with the thought apart."""
    reply = read_reply(message.content) if message.role == "assistant" else None
    if reply is None or reply.thought is None or message.thought is not None:
        return message
    return replace(message, content=reply.text, thought=reply.thought.strip())


def template_call(ident: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call as chat templates read it."""
    return {"type": "function", "id": ident, "function": {"name": name, "arguments": arguments}}


def rendered_prompt(
    chat: ChatTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    keys: Mapping[str, TemplateKey] = _NO_KEYS,
    native: bool = True,
) -> tuple[str, str]:
    """The template's text of messages as it reads them, without and with the generation prompt, for
    `ChatTokenizer.encode_rendered`. With ``native``, no mark of a content is a token, but for the
    assistant's.
    """
    _check_complete(chat, messages, tools, keys)
    before, text = (_render(chat, messages, tools, generate, keys, native) for generate in (False, True))
    return before, text


def _render(
    chat: ChatTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generate: bool,
    keys: Mapping[str, TemplateKey],
    native: bool = True,
) -> str:
    cut = [_cut(chat, message, not native or message["role"] == "assistant") for message in messages]
    return _refusing(chat, cut, generate, _cut(chat, tools, not native), keys)


def _refusing(
    chat: ChatTokenizer,
    messages: list[dict[str, Any]],
    generate: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    keys: Mapping[str, TemplateKey],
) -> str:
    try:
        return chat.render(messages, generate, tools=tools, **keys)
    except TemplateError as error:
        raise AgentPeftError(f"{REFUSED}: {error}") from error


def _check_complete(
    chat: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    keys: Mapping[str, TemplateKey],
    generate: bool = True,
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
                template_call(call["id"], call["function"]["name"], new)
                for call, new in zip(one["tool_calls"], arguments, strict=True)
            ]
        marked.append(one)
    text = _refusing(chat, marked, generate, tools, keys)
    for number, what in enumerate(words):
        if f"xsentinel{number}x" not in text:
            raise AgentPeftError(f"{REFUSED}: it leaves out {what}")


def _cut(chat: ChatTokenizer, value: Any, controls: bool) -> Any:
    """``value`` with a cut in each mark of its texts."""
    if isinstance(value, str):
        return chat.cut(value, controls)
    if isinstance(value, Mapping):
        return {_cut(chat, key, controls): _cut(chat, one, controls) for key, one in value.items()}
    return [_cut(chat, one, controls) for one in value] if isinstance(value, list) else value


def _two_texts(fault: str, first: str, second: str) -> str:
    """One line with both texts from the place where they differ."""
    pairs = enumerate(zip(first, second, strict=False))
    place = next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))
    start = max(0, place - _SHOWN // 3)
    shown, other = (text[start : place + _SHOWN] for text in (first, second))
    return (
        f"with the model's chat template {fault}: {shown!r} becomes {other!r}; set keys of "
        "policy.template (enable_thinking: false), policy.chat_template, or turns: last of a conversation"
    )


@lru_cache(maxsize=16)
def _warn_of_rewriting(chat: ChatTokenizer) -> None:
    logger.warning(
        "with the model's chat template a result changes the thought of the reply before it; an episode "
        "keeps its replies as they were sampled, and the policy learns to act after those"
    )


def template_at_hand(config: PretrainedConfig | ScratchConfig) -> TemplateFacts | None:
    """What the chat template of a policy does, with the keys that the configuration sets. None where it has
    none, or where it is not known without a download.
    """
    if isinstance(config, ScratchConfig):
        return None
    tokenizer = read_here(start_of(config).model, load_tokenizer)
    if tokenizer is None:
        return None
    check_chat_template(tokenizer, config.model)
    use_template(tokenizer, config.chat_template)
    with_keys(tokenizer, config.template)
    facts = probe_template(tokenizer, config.tools)
    try:
        chat = ChatTokenizer(tokenizer)
    except AgentPeftError:  # reported where the policy is made
        return facts
    chat.thoughts = config.thoughts
    return facts and replace(facts, history=chat.history)
