"""Sampling that never re-reads: a prompt is prefilled once for all siblings and stays in one place, keys and values stay across turns,
finished rows leave at once.

The engine knows tokens only. A conversation hands it a prompt, is handed an action, and answers with the tokens to read next (on a
thread, while the other rows decode) or with None when it is over.

Everything the numerics depend on (who decodes beside whom) follows a clock of decode steps, never the wall: an environment's answer,
asked for at step t, joins at step t + ``overlap``, and the engine waits for it there. So a run can be repeated bit for bit.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field

from agent_peft.policies.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.language_model import Policy
from agent_peft.policies.replacement import MISFITS
from agent_peft.policies.sampling import SamplingConfig, draw, log_distribution, uniform
from agent_peft.policies.tokenization import StopMatcher
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)


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


class Engine:
    """Continuous batching over one policy."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        self.policy, self.config = policy, config
        self.ends = policy.chat.end_of_turn
        self._prove()

    def _prove(self) -> None:
        """Read a few tokens through slots, and compare with the model's own forward: one that keeps a running state is refused.

        Siblings share what they read if the model's attention can be replaced by ours; otherwise each keeps a copy.
        """
        policy = self.policy
        tokens = [i % policy.base.config.get_text_config().vocab_size for i in range(8)]
        ids = torch.tensor([tokens], device=policy.device)
        with torch.no_grad():
            own = policy.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        ways = [(policy.blocks, True), (policy.blocks, False), *([(False, False)] if policy.blocks else [])]
        for policy.blocks, self.shares in ways:
            try:
                drift = policy.drift(torch.tensor(self.score(tokens, SamplingConfig(), policy.blocks), device=policy.device) - own)
            except MISFITS as error:
                problem = f"cannot keep its keys and values in slots, so it cannot be sampled here: {error}"
            else:
                if drift <= policy.rounding:
                    return
                problem = f"says something else token by token ({drift:.2g} nats apart), so it cannot be sampled here"
            logger.debug("blocked weights %s, shared attention %s: %s", policy.blocks, self.shares, problem)
        raise AgentPeftError(f"{type(policy.base).__name__} {problem}")

    def generate(self, conversations: Sequence[Conversation], sampling: SamplingConfig) -> EngineStatistics:
        """Drive every conversation to its end."""
        if not conversations:
            return EngineStatistics(0, 0, 0, 0)
        if not all(len(conversation.prompt) for conversation in conversations):
            raise ValueError("a conversation has an empty prompt: there is nothing to predict its first token from")
        with self.policy.sampling_mode(self.policy.blocks), ThreadPoolExecutor(self.config.environment_threads, "environment") as threads:
            return _Run(self, conversations, sampling, threads).drive()

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, blocks: bool = False) -> list[float]:
        """Log-probabilities (T - 1) of tokens[1:], read the way the sampler reads: folded adapter, a prefill, then one by one.

        Args:
            blocks: in the sampler's layout of the weights, which takes longer to make than a few tokens to read.
        """
        policy, half = self.policy, max(1, len(tokens) // 2)
        begin = half // 2
        pieces = [(COMMON, 0, begin), (PROMPTS, begin, half), *((ROWS, i, i + 1) for i in range(half, len(tokens) - 1))]
        with policy.sampling_mode(blocks):
            cache = self._cache((1, 1, 1), (begin, half, len(tokens)))
            scores = []
            for tier, start, stop in pieces:
                if start == stop:
                    continue
                if tier != ROWS or start == half:
                    cache.fork(tier, [0], 0 if start else None, start)
                piece = torch.tensor([tokens[start:stop]], device=policy.device)
                positions = torch.arange(start, stop, device=policy.device).unsqueeze(0)
                hidden = policy.hidden_states(piece, positions, cache.place(tier, [0], positions), cache)
                targets = torch.tensor(tokens[start + 1 : stop + 1], device=policy.device)
                logp = log_distribution(policy.logits(hidden[0, : len(targets)]), sampling, keep=targets)
                scores += logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
        return scores

    def _cache(self, slots: tuple[int, int, int], capacities: tuple[int, int, int], most: int = sys.maxsize) -> TierCache:
        policy = self.policy
        return TierCache(slots, capacities, policy.base.config, policy.dtype, policy.device, self.shares, most)


class _Run:
    """One call of ``Engine.generate``. Rows that decode hold slots [0, decoding); the others lie behind them."""

    def __init__(
        self, engine: Engine, conversations: Sequence[Conversation], sampling: SamplingConfig, threads: ThreadPoolExecutor
    ) -> None:
        self.engine, self.policy, self.sampling, self.threads = engine, engine.policy, sampling, threads
        self.queue = deque(conversations)
        self.capacity = min(engine.config.rows_of(sampling.max_tokens), len(conversations))
        self.shared = _common_prefix([c.prompt for c in conversations])
        longest, distinct = max(len(c.prompt) for c in conversations), len({tuple(c.prompt) for c in conversations})
        self.free = list(range(min(self.capacity, distinct)))  # slots for prompts; a heap
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        # room for the first turn: it is zeroed, so it costs time, and grows where there are more turns
        if engine.shares:
            prompt, own = longest - len(self.shared), min(sampling.max_new_tokens, max(1, sampling.max_tokens - 1))
        else:
            prompt, own = longest, min(longest + sampling.max_new_tokens, sampling.max_tokens)
        self.cache = engine._cache((1, len(self.free), self.capacity), (len(self.shared), prompt, own), sampling.max_tokens)
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
            while take < len(order) and (take + 1) * longest <= self.engine.config.prefill_tokens:
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
            stopped = row.matcher.push(token) or token in self.engine.ends
            full = len(row.action) >= self.sampling.max_new_tokens or row.length + 1 >= self.sampling.max_tokens
            if stopped or full:
                complete.append(row)
        for row in complete:
            self.decoding -= 1
            self._swap(row.slot, self.decoding)
            row.pending = [row.action[-1]]  # sampled, but not read yet
            row.due = self.step + self.engine.config.overlap
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
