"""The choices of an answer: replies that are under way, as text, with their calls, tokens and
log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from agent_peft.agents.serving.answers import (
    ChatLogprobs,
    Choice,
    CompletionLogprobs,
    FinishReason,
    Logprob,
    PromptLogprob,
    Reply,
    Usage,
)
from agent_peft.agents.serving.conversation import Call, CalledFunction
from agent_peft.agents.serving.prompts import EMPTY, Prompt
from agent_peft.agents.serving.reading import Parts, ReplyReader
from agent_peft.agents.serving.requests import ChatRequest, CompletionRequest
from agent_peft.policies.engine.service import Constraint, Service
from agent_peft.policies.reply_text import TextStream
from agent_peft.policies.sampling import SamplingConfig, end_of
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import InfrastructureError, ToolCall


class Drawn(NamedTuple):
    """A token, its log-probability in nats, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    alternatives: Sequence[tuple[int, float]]


class Draw:
    """One reply to one prompt: a ``Request`` of the engine, whose thread draws it.

    Args:
        alternatives: how many likeliest tokens to record with each drawn one.
        streamed: call ``on_change`` at each token, and not only at the end.
        on_change: called on the engine's thread.
    """

    def __init__(
        self,
        prompt: Prompt,
        seed: int,
        sampling: SamplingConfig,
        on_change: Callable[[Draw], None],
        alternatives: int = 0,
        streamed: bool = False,
    ) -> None:
        self.tokens_before, self.seed, self.sampling = tuple(prompt.tokens), seed, sampling
        self.alternatives, self.streamed, self._on_change = alternatives, streamed, on_change
        self.constraint: Constraint | None = None
        if prompt.grammar is not None:
            self.constraint = prompt.grammar(prompt.tokens)
        self.cancelled = self.ended = False
        self.error: BaseException | None = None
        self.drawn: list[Drawn] = []

    @property
    def prompt(self) -> Sequence[int] | None:
        if self.cancelled:
            self._end()
            return None
        return self.tokens_before

    @property
    def tokens(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def take(self, place: int, token: int, logprob: float, alternatives: Sequence[tuple[int, float]]) -> None:
        if place < len(self.drawn):
            if token != self.drawn[place].token:  # of two almost equal ones, rounding has taken the other
                self.fail(InfrastructureError("the memory was too small for a moment; ask again"))
            return
        self.drawn.append(Drawn(token, logprob, alternatives))
        if self.streamed:
            self._on_change(self)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self._end()

    def fail(self, error: BaseException) -> None:
        if not self.ended:
            self.error, self.cancelled = error, True
            self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_change(self)


class ChoiceStream:
    """One choice, whole or part by part. Calls come whole, at the end."""

    def __init__(
        self,
        index: int,
        draw: Draw,
        chat: ChatTokenizer,
        request: ChatRequest | CompletionRequest,
        prompt: Prompt = EMPTY,
    ) -> None:
        self.index, self.draw, self.chat, self.request = index, draw, chat, request
        self.over = self._begun = False
        self._text = TextStream(chat, request.stops)
        self._reader: ReplyReader | None = None
        if isinstance(request, ChatRequest):
            single = request.parallel_tool_calls is False
            self._reader = ReplyReader(chat, prompt.open_thought, prompt.dialect, request.offered, single)
        self._read, self._offset = 0, 0
        self.echoed: Sequence[Drawn] = ()  # the prompt's tokens, where the answer repeats them

    def whole(self) -> Choice:
        """All of a reply that has ended."""
        return self._choice(*self._news(), whole=True)

    def parts(self) -> list[Choice]:
        """What is new. The first part of a message has its role, the last part has a finish reason."""
        parts = []
        if self._reader and not self._begun:
            parts.append(Choice(index=self.index, delta=Reply(role="assistant", content="")))
        new, drawn, reason = self._news()
        if any(new) or reason or (drawn and (self.request.has_logprobs or self.request.return_token_ids)):
            parts.append(self._choice(new, drawn, reason, whole=False))
        self._begun = True
        return parts

    def _news(self) -> tuple[Parts, Sequence[Drawn], FinishReason | None]:
        ended = self.draw.ended  # asked for first: what is drawn before it is in ``drawn``
        drawn = self.draw.drawn[self._read :]
        self._read += len(drawn)
        begin = len(self._text.sent)
        text = "".join(self._text.push(one.token) for one in drawn)
        text += self._text.finish() if ended else ""
        new = Parts(content=text)
        if self._reader:
            end = begin + len(text)
            marks = [place - begin for place in self._text.marks if begin <= place < end]
            new = self._reader.push(text, marks)
        if not ended:
            return new, drawn, None
        if self._reader:
            rest = self._reader.finish()
            new = Parts(new.thought + rest.thought, new.content + rest.content, rest.calls)
        self.over = True
        draw, chat = self.draw, self.chat
        last = end_of(draw.tokens, draw.sampling.stop, chat.token_bytes, chat.end_of_turn)
        reason: FinishReason = "length" if last is None else "stop"
        return new, drawn, "tool_calls" if new.calls else reason

    def _choice(self, new: Parts, drawn: Sequence[Drawn], reason: FinishReason | None, whole: bool) -> Choice:
        choice = Choice(index=self.index, finish_reason=reason)
        thought, text, calls = new
        if not self._reader:
            prompt = b"".join(self.chat.token_bytes(one.token) for one in self.echoed)
            choice.text = prompt.decode("utf-8", "replace") + text
        elif whole:
            content = text if text.strip() or not calls else None
            choice.message = Reply(
                role="assistant",
                content=content,
                reasoning_content=thought or None,
                tool_calls=written(calls) or None,
            )
        else:
            choice.delta = Reply(
                content=text,
                reasoning_content=thought or None,
                tool_calls=written(calls, indexed=True) or None,
            )
        if self.request.has_logprobs:
            choice.logprobs = (
                self._chat_logprobs(drawn) if self._reader else self._logprobs([*self.echoed, *drawn])
            )
        if self.request.return_token_ids:
            choice.token_ids = [one.token for one in drawn]
            if not self._reader and not self._begun:
                choice.prompt_token_ids = list(self.draw.tokens_before)
        return choice

    def _chat_logprobs(self, drawn: Sequence[Drawn]) -> ChatLogprobs:
        def logprob(token: int, value: float, others: list[Logprob] | None = None) -> Logprob:
            raw = self.chat.token_bytes(token)
            text = raw.decode("utf-8", "replace")
            return Logprob(token=text, logprob=value, bytes=list(raw), top_logprobs=others)

        return ChatLogprobs(
            content=[
                logprob(one.token, one.logprob or 0.0, [logprob(*other) for other in one.alternatives])
                for one in drawn
            ]
        )

    def _logprobs(self, drawn: Sequence[Drawn]) -> CompletionLogprobs:
        def text(token: int) -> str:
            return self.chat.token_bytes(token).decode("utf-8", "replace")

        texts = [text(one.token) for one in drawn]
        *offsets, self._offset = accumulate(map(len, texts), initial=self._offset)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[one.logprob for one in drawn],
            # of two tokens of one text the likelier
            top_logprobs=[
                None if one.logprob is None else {text(t): value for t, value in reversed(one.alternatives)}
                for one in drawn
            ],
            text_offset=offsets,
        )


def written(calls: Sequence[ToolCall], indexed: bool = False) -> list[Call]:
    """Calls as OpenAI's API writes them."""
    return [
        Call.model_construct(  # the policy's text is not checked
            id=secrets.token_hex(5)[:9],  # nine characters, as Mistral's templates want them
            function=CalledFunction.model_construct(
                name=call.name, arguments=json.dumps(dict(call.arguments))
            ),
            index=number if indexed else None,
        )
        for number, call in enumerate(calls)
    ]


async def whole_choices(choices: Sequence[ChoiceStream], service: Service, name: str) -> list[Choice]:
    """All of replies that have ended, with what a request asks for of their prompts."""
    answers = []
    for one in choices:
        request, prompt = one.request, list[Drawn]()
        if isinstance(request, CompletionRequest) and request.reads_prompt:
            prompt = await _score_prompt(service, name, one.draw)
            one.echoed = prompt if request.echo else ()
        answers.append(one.whole())
        if isinstance(request, CompletionRequest) and request.prompt_logprobs is not None:
            pairs = [(str(place.token), place.logprob) for place in prompt]
            answers[-1].prompt_logprobs = [
                None if value is None else {token: PromptLogprob(logprob=value)} for token, value in pairs
            ]
    return answers


async def _score_prompt(service: Service, name: str, draw: Draw) -> list[Drawn]:
    """The tokens of a reply's prompt with their log-probabilities, at temperature 1."""
    tokens = draw.tokens_before
    scores = await asyncio.wrap_future(service.score(name, tokens, draw.alternatives))
    rest = (Drawn(token, *scored) for token, scored in zip(tokens[1:], scores, strict=True))
    return [Drawn(tokens[0], None, ()), *rest]


def usage_of(draws: Sequence[Draw], siblings: int | None) -> Usage:
    """The tokens that were read and drawn; the choices of one prompt read it once."""
    read = sum(len(draw.tokens_before) for draw in draws[:: siblings or 1])
    drawn = sum(len(draw.drawn) for draw in draws)
    return Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn)
