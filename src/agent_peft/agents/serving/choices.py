"""The choices of an answer: replies as text, with their calls, tokens and log-probabilities."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from agent_peft.agents.serving.answers import (
    Alternative,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    Reply,
    TokenLogprob,
)
from agent_peft.agents.serving.draws import Draw, Drawn
from agent_peft.agents.serving.requests import Call, CalledFunction, Tool
from agent_peft.agents.serving.text import TextStream, reply_text
from agent_peft.agents.serving.tools import OPEN, may_be_call, split_calls
from agent_peft.environments.tool_calls import ToolCall
from agent_peft.policies.tokenization import ChatTokenizer


@dataclass(frozen=True)
class Wish:
    """What a request wants of its choices.

    >>> Wish(token_ids=True).logprobs
    False
    """

    stops: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    logprobs: bool = False
    token_ids: bool = False


def chat_choice(index: int, draw: Draw, chat: ChatTokenizer, wish: Wish) -> ChatChoice:
    """A whole message."""
    content, calls = _split(reply_text(chat, draw.tokens, wish.stops), wish)
    return ChatChoice(
        index=index,
        message=Reply(
            content=content if content.strip() or not calls else None,
            tool_calls=_calls(calls, indexed=False) if calls else None,
        ),
        logprobs=_chat_logprobs(draw.drawn, chat) if wish.logprobs else None,
        finish_reason=_reason(draw, chat, calls),
        token_ids=draw.tokens if wish.token_ids else None,
    )


def completion_choice(index: int, draw: Draw, chat: ChatTokenizer, wish: Wish) -> CompletionChoice:
    """A whole continuation."""
    return CompletionChoice(
        index=index,
        text=reply_text(chat, draw.tokens, wish.stops),
        logprobs=_completion_logprobs(draw.drawn, chat, 0) if wish.logprobs else None,
        finish_reason=_reason(draw, chat, ()),
        token_ids=draw.tokens if wish.token_ids else None,
        prompt_token_ids=list(draw.tokens_before) if wish.token_ids else None,
    )


class ChoiceStream:
    """One choice, part by part. Calls come whole, at the end."""

    def __init__(self, index: int, draw: Draw, chat: ChatTokenizer, wish: Wish) -> None:
        self.index, self.draw, self.chat, self.wish = index, draw, chat, wish
        self.over = False
        self._text = TextStream(chat, (*wish.stops, OPEN) if wish.tools else wish.stops)
        self._held, self._sent, self._read, self._offset = "", "", 0, 0

    def chat_deltas(self) -> list[ChatDelta]:
        """What is new of a message; the last one has a finish reason."""
        text, drawn, reason, calls = self._news()
        if not (text or reason or (drawn and self._tells_tokens)):
            return []
        return [
            ChatDelta(
                index=self.index,
                delta=Delta(content=text or None, tool_calls=_calls(calls, indexed=True) if calls else None),
                logprobs=_chat_logprobs(drawn, self.chat) if self.wish.logprobs else None,
                finish_reason=reason,
                token_ids=[one.token for one in drawn] if self.wish.token_ids else None,
            )
        ]

    def completion_parts(self) -> list[CompletionChoice]:
        """What is new of a continuation; the last part has a finish reason."""
        first = not self._read
        text, drawn, reason, _ = self._news()
        if not (text or reason or (drawn and self._tells_tokens)):
            return []
        logprobs = _completion_logprobs(drawn, self.chat, self._offset) if self.wish.logprobs else None
        self._offset += sum(map(len, logprobs.tokens)) if logprobs else 0
        return [
            CompletionChoice(
                index=self.index,
                text=text,
                logprobs=logprobs,
                finish_reason=reason,
                token_ids=[one.token for one in drawn] if self.wish.token_ids else None,
                prompt_token_ids=list(self.draw.tokens_before) if first and self.wish.token_ids else None,
            )
        ]

    @property
    def _tells_tokens(self) -> bool:
        return self.wish.logprobs or self.wish.token_ids

    def _news(self) -> tuple[str, Sequence[Drawn], FinishReason | None, Sequence[ToolCall]]:
        ended = self.draw.ended  # asked for first: what is drawn before it is in ``drawn``
        drawn = self.draw.drawn[self._read :]
        self._read += len(drawn)
        self._held += "".join(self._text.push(one.token) for one in drawn)
        reason: FinishReason | None = None
        calls: Sequence[ToolCall] = ()
        if ended:
            whole = reply_text(self.chat, self.draw.tokens, self.wish.stops)
            content, calls = _split(whole, self.wish)
            text, self._held = content[len(self._sent) :], ""
            reason, self.over = _reason(self.draw, self.chat, calls), True
        elif self.wish.tools and not self._sent and may_be_call(self._held):
            text = ""
        else:
            text, self._held = self._held, ""
        self._sent += text
        return text, drawn, reason, calls


def _split(text: str, wish: Wish) -> tuple[str, list[ToolCall]]:
    return split_calls(text, wish.tools) if wish.tools else (text, [])


def _reason(draw: Draw, chat: ChatTokenizer, calls: Sequence[ToolCall]) -> FinishReason:
    if calls:
        return "tool_calls"
    return "length" if draw.is_cut(chat) else "stop"


def _calls(calls: Sequence[ToolCall], indexed: bool) -> list[Call]:
    return [
        Call.model_construct(
            id=f"call_{secrets.token_hex(12)}",
            type="function",
            function=CalledFunction.model_construct(
                name=call.name, arguments=json.dumps(dict(call.arguments))
            ),
            index=number if indexed else None,
        )
        for number, call in enumerate(calls)
    ]


def _alternative(token: int, logprob: float, chat: ChatTokenizer) -> Alternative:
    raw = chat.token_bytes(token)
    return Alternative(token=raw.decode("utf-8", "replace"), logprob=logprob, bytes=list(raw))


def _chat_logprobs(drawn: Sequence[Drawn], chat: ChatTokenizer) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_alternative(one.token, one.logprob, chat).model_dump(),
                top_logprobs=[_alternative(*other, chat) for other in one.alternatives],
            )
            for one in drawn
        ]
    )


def _completion_logprobs(drawn: Sequence[Drawn], chat: ChatTokenizer, offset: int) -> CompletionLogprobs:
    texts = [chat.token_bytes(one.token).decode("utf-8", "replace") for one in drawn]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[one.logprob for one in drawn],
        top_logprobs=[
            {  # of two tokens of one text the likelier
                chat.token_bytes(token).decode("utf-8", "replace"): value
                for token, value in reversed(one.alternatives)
            }
            for one in drawn
        ],
        text_offset=list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    )
