"""One call of the engine: conversations come, decode side by side, wait for their environments, and go."""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import torch

from agent_peft.out_of_memory import is_out_of_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig, EngineStatistics
from agent_peft.policies.engine.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.engine.schedule import Answer, Clock, Schedule
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, draw, uniform
from agent_peft.policies.tokenization import StopMatcher
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

AHEAD = 4  # conversations that are opened before there is a row for them, so that none stays empty meanwhile
CacheMaker = Callable[[tuple[int, int, int], tuple[int, int, int], int], TierCache]


@dataclass(eq=False)
class _Prompt:
    """A prompt that was read, for the rows that continue it."""

    slot: int
    logits: torch.Tensor  # (V,) after its last token
    rows: int = 0


@dataclass(eq=False)
class _Row:
    """A conversation, in the engine or on its way there. ``tokens`` are all but the present action;
    ``length`` of them are in its slot.
    """

    conversation: Conversation
    number: int
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    slot: int = -1
    length: int = 0
    prompt: tuple[int, ...] | None = None  # what it continues, once that was read
    action: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    matcher: StopMatcher | None = None
    answer: Answer | None = None


class Decoding:
    """One call of ``Engine.generate``. Rows that decode hold slots [0, decoding); the others lie behind
    them.
    """

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        new_cache: CacheMaker,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        threads: ThreadPoolExecutor,
        shares: bool,
        capacity: int,
        schedule: Schedule | None = None,
    ) -> None:
        self.policy, self.config, self.sampling, self.threads = policy, config, sampling, threads
        self.new_cache, self.shares, self.capacity = new_cache, shares, capacity
        self.queue = deque(_Row(conversation, number) for number, conversation in enumerate(conversations))
        self.clock = Clock(config.overlap, schedule)
        self.stop = [text.encode() for text in sampling.stop]
        self.prefilled = self.naive = self.sampled = self.row_halvings = 0
        self._forget()

    def drive(self) -> EngineStatistics:
        """
        Raises:
            AgentPeftError: a single row does not fit into the memory.
        """
        for row in islice(self.queue, self.capacity + AHEAD):
            self._open(row, due=0)
        while self.queue or self.rows:
            self._join()
            try:
                self._compute()
                continue
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(error)
            # here the error is gone, and with it the tensors of the frames that it held; nothing without a
            # GPU
            torch.cuda.empty_cache()
        clock = self.clock
        counts = self.prefilled, self.naive, self.sampled, clock.step, self.row_halvings
        return EngineStatistics(*counts, len(clock.recorded), clock.waited, tuple(sorted(clock.recorded)))

    def _compute(self) -> None:
        begin = time.perf_counter()
        self._read()
        self._decode()
        self.clock.decoded(time.perf_counter() - begin)

    def _forget(self) -> None:
        """No row, and no keys and values."""
        self.rows: list[_Row] = []  # rows[i] holds slot i; the first `decoding` of them decode
        self.decoding = 0
        self.shared: list[int] = []  # what prompts begin with; each continues as much of it as it begins with
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        self.free: list[int] = []  # slots for prompts; a heap
        self.places = 0  # slots for prompts, in all
        self.earlier: tuple[int, ...] | None = None  # the prompt that was read last
        self.made: TierCache | None = None

    def _halve(self, error: Exception) -> None:
        """Go on with half the rows, from where the last whole turn of each left it. What an action had so
        far is drawn again, with the same random numbers; their worlds, and who is waited for, stay as they
        are.
        """
        if self.capacity == 1:
            raise AgentPeftError(
                f"out of memory while sampling: one row of up to {self.sampling.max_tokens} tokens does not fit beside the model; lower "
                "sampling.max_tokens or engine.prefill_tokens, or set policy.dtype=auto"
            ) from error
        self.capacity //= 2
        self.row_halvings += 1
        logger.warning("out of memory while sampling: going on with engine.rows=%d", self.capacity)
        for row in self.rows:
            row.length, row.prompt, row.action, row.logprobs = 0, None, [], []
        self.queue.extendleft(sorted(self.rows, key=lambda row: -row.number))
        self._forget()

    # -- rows come and go ------------------------------------------------------------------------------------

    def _open(self, row: _Row, due: int) -> None:
        if row.answer is None and not row.tokens:
            conversation = row.conversation
            row.answer = Answer(row.number, 0, due, self.threads.submit(lambda: _prompt_of(conversation)))

    def _join(self) -> None:
        """Answers that join at this step, in slot order; then conversations, as long as there are rows for
        them. With nothing to decode, the clock goes on to the next answer.
        """
        for row in islice(self.queue, AHEAD):
            self._open(row, due=self.clock.step + self.clock.overlap)
        while True:
            for row in [row for row in self.rows[self.decoding :] if row.answer is not None]:
                self._hear(row)
            while self.queue and len(self.rows) < self.capacity:
                row = self.queue.popleft()
                self._open(row, due=self.clock.step + self.clock.overlap)
                row.slot = len(self.rows)
                self.rows.append(row)
                if row.answer is not None:
                    row.answer.due = max(row.answer.due, self.clock.step)
                    self._hear(row)
            waiting = [row.answer for row in self.rows if row.answer is not None]
            if not self.rows or len(waiting) < len(self.rows):
                return
            self.clock.skip(waiting)

    def _hear(self, row: _Row) -> None:
        assert row.answer is not None
        if not self.clock.joins(row.answer):
            return
        found, row.answer = row.answer.future.result(), None
        if found is not None:
            row.tokens += found
            return
        self._swap(row.slot, len(self.rows) - 1)
        self.rows.pop()
        if row.prompt is not None:
            self._release(row.prompt)

    def _release(self, tokens: tuple[int, ...]) -> None:
        prompt = self.prompts[tokens]
        prompt.rows -= 1
        if not prompt.rows:
            heapq.heappush(self.free, self.prompts.pop(tokens).slot)

    def _swap(self, a: int, b: int) -> None:
        if a != b:
            if self.made is not None:
                self.made.swap(a, b)
            first, second = self.rows[a], self.rows[b]
            self.rows[a], self.rows[b], first.slot, second.slot = second, first, b, a

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def cache(self) -> TierCache:
        assert self.made is not None
        return self.made

    def _read(self) -> None:
        """Prefill what rows have to read: new prompts once for all that share them, then observations;
        then sample a first token each.
        """
        ready = [row for row in self.rows[self.decoding :] if row.answer is None]
        if not ready:
            return
        families: dict[tuple[int, ...], list[_Row]] = {}
        for row in ready:
            self.naive += len(row.tokens)
            if row.length == 0:
                families.setdefault(tuple(row.tokens), []).append(row)
        self._read_prompts([tokens for tokens in families if tokens not in self.prompts])
        logits: dict[int, torch.Tensor] = {}
        for tokens, siblings in families.items():
            prompt = self.prompts[tokens]
            prompt.rows += len(siblings)
            self.cache.fork(ROWS, [row.slot for row in siblings], prompt.slot, len(tokens))
            for row in siblings:
                row.prompt, logits[row.slot] = tokens, prompt.logits
        jobs = [(row.slot, row.tokens[row.length :], row.length) for row in ready if row.length > 0]
        logits |= {slot: out for (slot, _, _), out in zip(jobs, self._prefill(ROWS, jobs), strict=True)}
        drawn_from = torch.stack([logits[row.slot] for row in ready])
        for row in ready:
            row.length, row.action, row.logprobs = len(row.tokens), [], []
            row.matcher = StopMatcher(self.stop, self.policy.chat.token_bytes)
        for row in ready:  # rows that can decode move to the front
            self._swap(row.slot, self.decoding)
            self.decoding += 1
        self._sample(ready, drawn_from)

    def _read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        if not prompts:
            return
        if not self.shared:
            self.shared = _common_prefix(
                [*self.prompts, *([] if self.earlier is None else [self.earlier]), *prompts]
            )
            if self.made is None:
                self.made = self._make_cache(prompts)
            if self.shared:
                self._prefill(COMMON, [(0, self.shared, 0)])
        while len(self.free) < len(prompts):
            places, self.places = self.places, min(2 * self.places, len(self.cache.tiers[ROWS].parents))
            self.cache.widen(PROMPTS, self.places)
            self.free += range(places, self.places)
        jobs = []
        for tokens in prompts:
            slot, begin = heapq.heappop(self.free), _common_length(tokens, self.shared)
            self.cache.fork(PROMPTS, [slot], 0, begin)
            jobs.append((slot, tokens[begin:], begin))
        for tokens, (slot, _, _), logits in zip(prompts, jobs, self._prefill(PROMPTS, jobs), strict=True):
            self.prompts[tokens] = _Prompt(slot, logits)
        self.earlier = prompts[-1]

    def _make_cache(self, prompts: Sequence[tuple[int, ...]]) -> TierCache:
        """With slots for the prompts of the first rows, and room for their first turn: it is zeroed, so it
        costs time. It grows where there are more.
        """
        sampling, longest = self.sampling, max(map(len, prompts))
        self.places = len(prompts)
        self.free = list(range(self.places))
        own = min(sampling.max_new_tokens, max(1, sampling.max_tokens - 1))
        sizes = len(self.shared), longest - len(self.shared), own
        if not self.shares:
            sizes = len(self.shared), longest, min(longest + sampling.max_new_tokens, sampling.max_tokens)
        rows = min(self.capacity, len(self.rows) + len(self.queue))
        return self.new_cache((1, self.places, rows), sizes, sampling.max_tokens)

    def _prefill(self, tier: int, jobs: Sequence[tuple[int, Sequence[int], int]]) -> list[torch.Tensor]:
        """Read (slot, tokens, start position) jobs, in pieces of about the configured size; the logits
        (V,) after each one's last token.
        """
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
            out = self.policy.logits(
                hidden[torch.arange(take, device=device), torch.tensor(last, device=device)]
            )
            for i, j in enumerate(chosen):
                logits[j] = out[i]
        return [x for x in logits if x is not None]

    # -- writing ---------------------------------------------------------------------------------------------

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
        uniforms = torch.tensor(
            [uniform(row.conversation.seed, row.length) for row in rows], dtype=torch.float64
        )
        tokens, logprobs = draw(logits, uniforms.to(self.policy.device), self.sampling)
        self.sampled += len(rows)
        complete = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.action.append(token)
            row.logprobs.append(logprob)
            assert row.matcher is not None
            stopped = row.matcher.push(token) or token in self.policy.chat.end_of_turn
            full = (
                len(row.action) >= self.sampling.max_new_tokens or row.length + 1 >= self.sampling.max_tokens
            )
            if stopped or full:
                complete.append(row)
        for row in complete:
            self.decoding -= 1
            self._swap(row.slot, self.decoding)
            row.tokens += row.action  # the last of them was sampled, but not read yet
            row.turns += 1
            room = self.sampling.max_tokens - row.length - 1
            future = self.threads.submit(row.conversation.act, tuple(row.action), tuple(row.logprobs), room)
            row.answer = Answer(row.number, row.turns, self.clock.step + self.clock.overlap, future)


def _prompt_of(conversation: Conversation) -> Sequence[int] | None:
    prompt = conversation.prompt
    if prompt is not None and not len(prompt):
        raise ValueError(
            "a conversation has an empty prompt: there is nothing to predict its first token from"
        )
    return None if prompt is None else tuple(prompt)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """What all prompts begin with, but for one token: each must keep something to read. Empty where it
    saves nothing.
    """
    if len({tuple(p) for p in prompts}) < 2:
        return []
    low, high = min(map(list, prompts)), max(map(list, prompts))
    return low[: min(_common_length(low, high), _common_length(high, low))]


def _common_length(tokens: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with; at least one of ``tokens`` is left over."""
    most = min(len(tokens) - 1, len(other))
    return next((i for i in range(most) if tokens[i] != other[i]), most)
