"""One call of the engine: conversations come, decode side by side, wait for their environments, and go."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from agent_peft.policies.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.language_model import Policy
from agent_peft.policies.sampling import SamplingConfig, draw, uniform
from agent_peft.policies.tokenization import StopMatcher

CacheMaker = Callable[[tuple[int, int, int], tuple[int, int, int], int], TierCache]


class EngineConfig(BaseModel):
    """How much is computed at once. None of it changes what is sampled, but for rounding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(default=64, ge=1, description="conversations that hold keys and values at once")
    kv_tokens: int | None = Field(
        default=None, ge=1, description="memory's budget: no more rows than may each be max_tokens long within it"
    )
    prefill_tokens: int = Field(default=2048, ge=1, description="tokens of one prefill, padding included")
    environment_threads: int = Field(default=8, ge=1)
    overlap: int = Field(default=2, ge=1, description="decode steps that hide an environment's answer")

    def rows_of(self, max_tokens: int) -> int:
        """How many conversations at once, if each may be so long.

        >>> EngineConfig(rows=64, kv_tokens=8192).rows_of(max_tokens=1024)
        8
        """
        return self.rows if self.kv_tokens is None else max(1, min(self.rows, self.kv_tokens // max_tokens))


class Conversation(Protocol):
    """What the engine drives. ``prompt`` are tokens; ``seed`` alone decides what is drawn from a given distribution."""

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def seed(self) -> int: ...

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        """Take the sampled action; give the tokens to read next, or None when it is over. Called on a thread, one call at a time.

        ``room`` is how many tokens the episode may still read and sample; observations that do not fit leave one more action no place.
        """
        ...


@dataclass(eq=False)
class _Prompt:
    """A prompt that was read, for the rows that continue it."""

    slot: int
    logits: torch.Tensor  # (V,) after its last token
    rows: int = 0


@dataclass(eq=False)
class _Row:
    """A conversation in the engine. ``length`` tokens are in its slot; ``pending`` are to be read next."""

    conversation: Conversation
    prompt: tuple[int, ...]
    slot: int
    length: int = 0
    pending: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    matcher: StopMatcher | None = None
    answer: Future[Sequence[int] | None] | None = None
    due: int = 0


@dataclass(frozen=True)
class EngineStatistics:
    """What one call did: tokens read, tokens read if nothing had been shared or kept, tokens sampled, and decode steps."""

    prefilled: int
    prefilled_naive: int
    sampled: int
    steps: int

    def __add__(self, other: EngineStatistics) -> EngineStatistics:
        return EngineStatistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Decoding:
    """One call of ``Engine.generate``. Rows that decode hold slots [0, decoding); the others lie behind them."""

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        new_cache: CacheMaker,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        threads: ThreadPoolExecutor,
        shares: bool,
    ) -> None:
        self.policy, self.config, self.sampling, self.threads = policy, config, sampling, threads
        self.queue = deque(conversations)
        self.capacity = min(config.rows_of(sampling.max_tokens), len(conversations))
        self.shared = _common_prefix([c.prompt for c in conversations])
        longest, distinct = max(len(c.prompt) for c in conversations), len({tuple(c.prompt) for c in conversations})
        self.free = list(range(min(self.capacity, distinct)))  # slots for prompts; a heap
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        # room for the first turn: it is zeroed, so it costs time, and grows where there are more turns
        prompt, own = longest - len(self.shared), min(sampling.max_new_tokens, max(1, sampling.max_tokens - 1))
        if not shares:
            prompt, own = longest, min(longest + sampling.max_new_tokens, sampling.max_tokens)
        self.cache = new_cache((1, len(self.free), self.capacity), (len(self.shared), prompt, own), sampling.max_tokens)
        self.rows: list[_Row] = []  # rows[i] holds slot i; the first `decoding` of them decode
        self.decoding = 0
        self.step = 0
        self.stop = [text.encode() for text in sampling.stop]
        self.prefilled = self.naive = self.sampled = 0

    def drive(self) -> EngineStatistics:
        if self.shared:
            self._prefill(COMMON, [(0, self.shared, 0)])
        while self.queue or self.rows:
            self._collect_answers()
            self._admit()
            self._read_pending()
            self._decode()
            self.step += 1
        return EngineStatistics(self.prefilled, self.naive, self.sampled, self.step)

    # -- rows come and go ---------------------------------------------------------------------------------------------------------

    def _collect_answers(self) -> None:
        """Answers that are due, in slot order. With nothing to decode, the clock jumps to the next one."""
        waiting = [row for row in self.rows[self.decoding :] if row.answer is not None]
        if waiting and not self.decoding and not (self.queue and len(self.rows) < self.capacity):
            self.step = max(self.step, min(row.due for row in waiting))
        for row in waiting:
            assert row.answer is not None
            if row.due > self.step:
                continue
            observation, row.answer = row.answer.result(), None
            if observation is None:
                self._swap(row.slot, len(self.rows) - 1)
                self.rows.pop()
                self._release(row.prompt)
            else:
                row.pending += observation
                self.naive += row.length + len(row.pending)

    def _admit(self) -> None:
        while self.queue and len(self.rows) < self.capacity:
            conversation = self.queue.popleft()
            prompt = tuple(conversation.prompt)
            row = _Row(conversation, prompt, slot=len(self.rows), pending=list(prompt))
            self.naive += len(row.pending)
            self.rows.append(row)

    def _release(self, tokens: tuple[int, ...]) -> None:
        prompt = self.prompts[tokens]
        prompt.rows -= 1
        if not prompt.rows:
            heapq.heappush(self.free, self.prompts.pop(tokens).slot)

    def _swap(self, a: int, b: int) -> None:
        if a != b:
            self.cache.swap(a, b)
            first, second = self.rows[a], self.rows[b]
            self.rows[a], self.rows[b], first.slot, second.slot = second, first, b, a

    # -- reading ------------------------------------------------------------------------------------------------------------------

    def _read_pending(self) -> None:
        """Prefill what rows have to read: new prompts once for all that share them, then observations; then sample a first token each."""
        ready = [row for row in self.rows[self.decoding :] if row.pending and row.answer is None]
        if not ready:
            return
        families: dict[tuple[int, ...], list[_Row]] = {}
        for row in ready:
            if row.length == 0:
                families.setdefault(row.prompt, []).append(row)
        self._read_prompts([tokens for tokens in families if tokens not in self.prompts])
        logits: dict[int, torch.Tensor] = {}
        for tokens, siblings in families.items():
            prompt = self.prompts[tokens]
            prompt.rows += len(siblings)
            self.cache.fork(ROWS, [row.slot for row in siblings], prompt.slot, len(tokens))
            logits |= {row.slot: prompt.logits for row in siblings}
        jobs = [(row.slot, row.pending, row.length) for row in ready if row.length > 0]
        logits |= {slot: out for (slot, _, _), out in zip(jobs, self._prefill(ROWS, jobs), strict=True)}
        drawn_from = torch.stack([logits[row.slot] for row in ready])
        for row in ready:
            row.length += len(row.pending)
            row.pending, row.action, row.logprobs = [], [], []
            row.matcher = StopMatcher(self.stop, self.policy.chat.token_bytes)
        for row in ready:  # rows that can decode move to the front
            self._swap(row.slot, self.decoding)
            self.decoding += 1
        self._sample(ready, drawn_from)

    def _read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        jobs = []
        for tokens in prompts:
            slot = heapq.heappop(self.free)
            self.cache.fork(PROMPTS, [slot], 0 if self.shared else None, len(self.shared))
            jobs.append((slot, tokens[len(self.shared) :], len(self.shared)))
        for tokens, (slot, _, _), logits in zip(prompts, jobs, self._prefill(PROMPTS, jobs), strict=True):
            self.prompts[tokens] = _Prompt(slot, logits)

    def _prefill(self, tier: int, jobs: Sequence[tuple[int, Sequence[int], int]]) -> list[torch.Tensor]:
        """Read (slot, tokens, start position) jobs, in pieces of about the configured size; the logits (V,) after each one's last token."""
        logits: list[torch.Tensor | None] = [None] * len(jobs)
        order = sorted(range(len(jobs)), key=lambda j: (len(jobs[j][1]), j))
        while order:
            longest, take = len(jobs[order[-1]][1]), 1
            while take < len(order) and (take + 1) * longest <= self.config.prefill_tokens:
                take += 1
            chosen, order = order[-take:], order[:-take]
            device = self.policy.device
            tokens = torch.zeros(take, longest, dtype=torch.int64)
            positions = torch.zeros(take, longest, dtype=torch.int64)
            last = []
            for i, j in enumerate(chosen):
                _, piece, start = jobs[j]
                # padding repeats the last token at the last position: it writes there what is there
                tokens[i] = torch.tensor([*piece, *[piece[-1]] * (longest - len(piece))])
                positions[i] = torch.arange(start, start + longest).clamp_(max=start + len(piece) - 1)
                last.append(len(piece) - 1)
                self.prefilled += len(piece)
            tokens, positions = tokens.to(device), positions.to(device)
            mask = self.cache.place(tier, [jobs[j][0] for j in chosen], positions)
            hidden = self.policy.hidden_states(tokens, positions, mask, self.cache)
            out = self.policy.logits(hidden[torch.arange(take, device=device), torch.tensor(last, device=device)])
            for i, j in enumerate(chosen):
                logits[j] = out[i]
        return [x for x in logits if x is not None]

    # -- writing ------------------------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        rows = self.rows[: self.decoding]
        if not rows:
            return
        device = self.policy.device
        tokens = torch.tensor([[row.action[-1]] for row in rows], device=device)
        positions = torch.tensor([[row.length] for row in rows], device=device)
        mask = self.cache.place(ROWS, range(len(rows)), positions)
        hidden = self.policy.hidden_states(tokens, positions, mask, self.cache)
        for row in rows:
            row.length += 1
        self._sample(rows, self.policy.logits(hidden[:, 0]))

    def _sample(self, rows: Sequence[_Row], logits: torch.Tensor) -> None:
        """Draw a token for each row; rows whose action is complete go to their environment."""
        uniforms = torch.tensor([uniform(row.conversation.seed, row.length) for row in rows], dtype=torch.float64)
        tokens, logprobs = draw(logits, uniforms.to(self.policy.device), self.sampling)
        self.sampled += len(rows)
        complete = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.action.append(token)
            row.logprobs.append(logprob)
            assert row.matcher is not None
            stopped = row.matcher.push(token) or token in self.policy.chat.end_of_turn
            full = len(row.action) >= self.sampling.max_new_tokens or row.length + 1 >= self.sampling.max_tokens
            if stopped or full:
                complete.append(row)
        for row in complete:
            self.decoding -= 1
            self._swap(row.slot, self.decoding)
            row.pending = [row.action[-1]]  # sampled, but not read yet
            row.due = self.step + self.config.overlap
            room = self.sampling.max_tokens - row.length - 1
            row.answer = self.threads.submit(row.conversation.act, tuple(row.action), tuple(row.logprobs), room)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all prompts begin with, but for one token: each must keep something to read. Empty where it saves nothing."""
    if len({tuple(p) for p in prompts}) < 2:
        return []
    low, high = min(map(list, prompts)), max(map(list, prompts))
    length = 0
    while length < min(len(low), len(high)) - 1 and low[length] == high[length]:
        length += 1
    return low[:length]
