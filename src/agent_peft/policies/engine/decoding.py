"""One call of the local engine: conversations decode side by side, and wait for their environments."""

from __future__ import annotations

import heapq
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import islice

import torch

from agent_peft.hardware import is_out_of_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig, EngineStatistics, NewRow, prompt_of
from agent_peft.policies.engine.daemon_threads import DaemonThreads
from agent_peft.policies.engine.kv_cache import COMMON, PROMPTS, ROWS, TierCache, padded
from agent_peft.policies.engine.prefill import Job, prefill
from agent_peft.policies.engine.prompt_lookup import PLACES, PromptLookup
from agent_peft.policies.engine.schedule import DecodeClock, PendingTurn, Schedule
from agent_peft.policies.forward.trie import common_length, common_prefix
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig, StopMatcher, draw, uniform
from agent_peft.policies.thinking import ThinkingBudget
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

AHEAD = 4  # conversations that are opened before there is a row for them, so that no row stays empty
CacheMaker = Callable[[tuple[int, int, int], tuple[int, int, int], int], TierCache]


@dataclass(eq=False)
class _Prompt:
    """A prompt whose first ``length`` keys are in a slot, for the rows that will continue it."""

    slot: int
    length: int
    logits: torch.Tensor | None = None  # (V,) after its last token, once that was read
    rows: int = 0


@dataclass(eq=False)
class Row:
    """A conversation that has a row or waits for one. ``tokens`` are all tokens that it reads except the
    present action, and ``length`` of them are in its slot. ``before`` were in earlier rows of its episode.
    """

    conversation: Conversation
    number: int
    tokens: list[int] = field(default_factory=list)
    before: int = 0
    turns: int = 0
    slot: int = -1
    length: int = 0
    prompt: tuple[int, ...] | None = None  # that it continues, once it was read
    action: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    matcher: StopMatcher | None = None
    budget: ThinkingBudget | None = None
    answer: PendingTurn | None = None
    lookup: PromptLookup = field(default_factory=PromptLookup)


class Decoding:
    """One call of ``LocalEngine.generate``. Rows that decode hold slots [0, decoding); the others follow.
    With ``drafts``, a few rows decode with drafts (``prompt_lookup``).
    """

    def __init__(
        self,
        policy: Policy,
        config: EngineConfig,
        new_cache: CacheMaker,
        *,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        threads: DaemonThreads | Executor,
        shares: bool,
        capacity: int,
        drafts: bool,
        schedule: Schedule | None = None,
    ) -> None:
        self.policy, self.config, self.sampling, self.threads = policy, config, sampling, threads
        self.new_cache, self.shares, self.capacity, self.drafts = new_cache, shares, capacity, drafts
        self.queue = deque(Row(conversation, number) for number, conversation in enumerate(conversations))
        self.clock = DecodeClock(config.overlap, schedule, conversations)
        self.prefilled = self.prefilled_naive = self.sampled = self.row_halvings = 0
        self._clear()

    def drive(self) -> EngineStatistics:
        """Run until every conversation is over."""
        for row in islice(self.queue, self.capacity + AHEAD):
            self._open(row, due=0)
        while self.queue or self.rows:
            self.advance()
        return EngineStatistics(
            prefilled=self.prefilled,
            prefilled_naive=self.prefilled_naive,
            sampled=self.sampled,
            steps=self.clock.step,
            row_halvings=self.row_halvings,
            late=len(self.clock.recorded),
            waited=self.clock.waited,
            schedule=tuple(sorted(self.clock.recorded)),
        )

    def advance(self) -> None:
        """Let rows join and leave, read what is new, and draw tokens for each row that decodes."""
        self._join()
        try:
            self._compute()
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._halve(error)
        # The error is gone here, and with it the tensors of its frames. Without a GPU this does nothing.
        torch.cuda.empty_cache()

    def _compute(self) -> None:
        begin = time.perf_counter()
        self._read()
        self._decode()
        self.clock.decoded(time.perf_counter() - begin)

    def _clear(self) -> None:
        """Drop all rows, and all keys and values."""
        self.rows: list[Row] = []  # rows[i] holds slot i
        self.decoding = 0
        self.common: list[int] = []  # tokens that prompts begin with; each prompt continues its part of them
        self.prompts: dict[tuple[int, ...], _Prompt] = {}
        self.free: list[int] = []  # free slots for prompts; a heap
        self.prompt_slots = 0  # slots for prompts, free or not
        self.last_prompt: tuple[int, ...] | None = None
        self._cache: TierCache | None = None

    def _halve(self, error: Exception) -> None:
        """Continue with half the rows, each from its last whole turn: its action is drawn again, the same."""
        if self.capacity == 1:
            raise AgentPeftError(
                f"out of memory while sampling: one row of up to {self.sampling.max_tokens} tokens does not "
                "fit with the model; lower sampling.max_tokens or engine.prefill_tokens, or set "
                "policy.dtype=auto"
            ) from error
        self.capacity //= 2
        self.row_halvings += 1
        logger.warning("out of memory while sampling: continuing with engine.rows=%d", self.capacity)
        for row in self.rows:
            row.length, row.prompt, row.action, row.logprobs = 0, None, [], []
        self.queue.extendleft(sorted(self.rows, key=lambda row: -row.number))
        self._clear()

    # -- rows join and leave ---------------------------------------------------------------------------------

    def _open(self, row: Row, due: int) -> None:
        if row.answer is None and not row.tokens:
            prompt = self.threads.submit(prompt_of, row.conversation, self.policy.bound)
            row.answer = PendingTurn(row.number, 0, due, prompt)

    def _join(self) -> None:
        """Take in the answers that join at this step, in slot order; then waiting conversations."""
        for row in islice(self.queue, AHEAD):
            self._open(row, due=self.clock.step + self.clock.overlap)
        while True:
            for row in [row for row in self.rows[self.decoding :] if row.answer is not None]:
                self._receive(row)
            while self.queue and len(self.rows) < self.capacity:
                row = self.queue.popleft()
                self._open(row, due=self.clock.step + self.clock.overlap)
                row.slot = len(self.rows)
                self.rows.append(row)
                if row.answer is not None:
                    row.answer.due = max(row.answer.due, self.clock.step)
                    self._receive(row)
            waiting = [row.answer for row in self.rows if row.answer is not None]
            if not self.rows or len(waiting) < len(self.rows):
                return
            self.clock.skip(waiting)

    def _receive(self, row: Row) -> None:
        assert row.answer is not None
        if not self.clock.joins(row.answer):
            return
        tokens, row.answer = row.answer.future.result(), None
        if isinstance(tokens, NewRow):
            self._rewrite(row, tokens)
        elif tokens is not None:
            row.tokens += tokens
        else:
            self._swap(row.slot, len(self.rows) - 1)
            self.rows.pop()
            if row.prompt is not None:
                self._release(row.prompt)

    def _rewrite(self, row: Row, tokens: NewRow) -> None:
        """Let a row read other tokens. The keys of those that stay at its beginning are kept."""
        kept = min(common_length(row.tokens, list(tokens)), row.length, len(tokens) - 1)
        row.tokens, row.before, row.lookup = list(tokens), tokens.before, PromptLookup()
        if row.prompt is not None and kept < len(row.prompt):
            slot = self.prompts[row.prompt].slot
            if kept > self.cache.tiers[PROMPTS].starts[slot]:
                self.cache.fork(ROWS, [row.slot], slot, kept)
            else:
                self._release(row.prompt)
                row.prompt, kept = None, 0
        row.length = kept

    def _release(self, tokens: tuple[int, ...]) -> None:
        prompt = self.prompts[tokens]
        prompt.rows -= 1
        if not prompt.rows:
            heapq.heappush(self.free, self.prompts.pop(tokens).slot)

    def _swap(self, a: int, b: int) -> None:
        if a != b:
            if self._cache is not None:
                self._cache.swap(a, b)
            first, second = self.rows[a], self.rows[b]
            self.rows[a], self.rows[b], first.slot, second.slot = second, first, b, a

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def cache(self) -> TierCache:
        assert self._cache is not None
        return self._cache

    def _read(self) -> None:
        """Prefill new prompts, each once for its rows, then observations; sample a first token of each."""
        ready = [row for row in self.rows[self.decoding :] if row.answer is None]
        if not ready:
            return
        families: dict[tuple[int, ...], list[Row]] = {}
        for row in ready:
            if row.length == 0:
                families.setdefault(tuple(row.tokens), []).append(row)
        self._read_prompts([tokens for tokens in families if tokens not in self.prompts])
        logits: dict[int, torch.Tensor] = {}
        for tokens, siblings in families.items():
            prompt = self.prompts[tokens]
            if prompt.logits is None:  # its rest is read at later steps
                ready = [row for row in ready if row not in siblings]
                continue
            prompt.rows += len(siblings)
            self.cache.fork(ROWS, [row.slot for row in siblings], prompt.slot, len(tokens))
            for row in siblings:
                row.prompt, logits[row.slot] = tokens, prompt.logits
        if not ready:
            return
        jobs = [(row.slot, row.tokens[row.length :], row.length) for row in ready if row.length > 0]
        logits |= {slot: out for (slot, _, _), out in zip(jobs, self._prefill(ROWS, jobs), strict=True)}
        drawn_from = torch.stack([logits[row.slot] for row in ready])
        for row in ready:
            self.prefilled_naive += len(row.tokens)
            row.length, row.action, row.logprobs = len(row.tokens), [], []
            stop = [text.encode() for text in self._sampling_of(row).stop]
            row.matcher = StopMatcher(stop, self.policy.chat.token_bytes)
            if (limit := self._sampling_of(row).max_thinking_tokens) is not None:
                row.budget = ThinkingBudget(self.policy.chat, limit, row.tokens)
        for row in ready:  # rows that can decode move to the front
            self._swap(row.slot, self.decoding)
            self.decoding += 1
        self._sample(ready, drawn_from)

    def _read_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Give new prompts a slot each, and read those that have one, as many tokens as this step may."""
        if prompts:
            self._add_prompts(prompts)
        left, jobs, read = self._step_tokens(), list[Job](), []
        for tokens, prompt in self.prompts.items():  # in the order of their arrival
            if prompt.logits is None and left > 0:
                part = tokens[prompt.length : prompt.length + left]
                jobs.append((prompt.slot, part, prompt.length))
                prompt.length += len(part)
                left -= len(part)
                read.append((prompt, prompt.length == len(tokens)))
        for (prompt, is_whole), logits in zip(read, self._prefill(PROMPTS, jobs), strict=True):
            prompt.logits = logits if is_whole else None

    def _add_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        if not self.common:
            self.common = common_prefix(
                [*self.prompts, *([] if self.last_prompt is None else [self.last_prompt]), *prompts]
            )[: self._step_tokens()]
            if self._cache is None:
                self._cache = self._make_cache(prompts)
            if self.common:
                self._prefill(COMMON, [(0, self.common, 0)])
        while len(self.free) < len(prompts):
            old = self.prompt_slots
            self.prompt_slots = min(2 * old, len(self.cache.tiers[ROWS].parents))
            self.cache.widen(PROMPTS, self.prompt_slots)
            self.free += range(old, self.prompt_slots)
        for tokens in prompts:
            slot = heapq.heappop(self.free)
            begin = min(common_length(list(tokens), self.common), len(tokens) - 1)
            self.cache.fork(PROMPTS, [slot], 0, begin)
            self.prompts[tokens] = _Prompt(slot, begin)
        self.last_prompt = prompts[-1]

    def _make_cache(self, prompts: Sequence[tuple[int, ...]]) -> TierCache:
        """A cache for the first rows' prompts and first turn. Zeroing costs time, so it starts small."""
        sampling, longest = self.sampling, max(map(len, prompts))
        self.prompt_slots = len(prompts)
        self.free = list(range(self.prompt_slots))
        turn = min(sampling.max_new_tokens, max(1, sampling.max_tokens - 1))
        sizes = len(self.common), longest - len(self.common), turn
        if not self.shares:
            sizes = len(self.common), longest, min(longest + sampling.max_new_tokens, sampling.max_tokens)
        return self.new_cache((1, self.prompt_slots, self._most_rows()), sizes, sampling.max_tokens)

    def _most_rows(self) -> int:
        """The rows that there will be at once."""
        return min(self.capacity, len(self.rows) + len(self.queue))

    def _prefill(self, tier: int, jobs: Sequence[Job]) -> list[torch.Tensor]:
        self.prefilled += sum(len(tokens) for _, tokens, _ in jobs)
        return prefill(self.policy, self.cache, tier, jobs, self.config.prefill_tokens)

    # -- decoding --------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        rows = self.rows[: self.decoding]
        if not rows:
            return
        most = PLACES // len(rows) - 1 if self.drafts else 0
        drafts = [row.lookup.draft(row.tokens, row.action, min(most, self._room(row) - 1)) for row in rows]
        read = [[row.action[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
        tokens, positions = padded(read, [row.length for row in rows], self.policy.device)
        hidden = self.cache.read(self.policy, ROWS, range(len(rows)), tokens, positions)
        for row in rows:
            row.length += 1
        self._sample(rows, self.policy.logits(hidden.flatten(0, 1)), drafts)

    def _sample(self, rows: Sequence[Row], logits: torch.Tensor, drafts: Sequence[list[int]] = ()) -> None:
        """Draw a token for each row, and a further one after each draft that equals the token drawn before.
        Rows whose action is complete go to their environment. In ``logits`` (rows * (1 + longest draft), V)
        those after a shorter draft are padding.
        """
        drafts, width = drafts or [[]] * len(rows), len(logits) // len(rows)
        places = [(row, row.length + i) for row in rows for i in range(width)]
        drawn = [uniform(row.conversation.seed, row.before + at) for row, at in places]
        uniforms = torch.tensor(drawn, dtype=torch.float64).to(logits.device)
        tokens, logprobs = self._draw([row for row, _ in places], logits, uniforms)
        complete = []
        for number, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            for place, drafted in enumerate([*draft, None], number * width):
                token, logprob = tokens[place], logprobs[place]
                if row.budget is not None and row.budget.forced is not None:
                    token, logprob = row.budget.forced, 0.0
                ended = self._take(row, token, logprob, logits[place])
                if ended or token != drafted:
                    break
                row.length += 1
            if ended:
                complete.append(row)
        for row in complete:
            self.decoding -= 1
            self._swap(row.slot, self.decoding)
            row.tokens += row.action  # the last of them was sampled, but not read yet
            row.turns += 1
            room = self._sampling_of(row).max_tokens - row.length - 1
            future = self.threads.submit(row.conversation.act, tuple(row.action), tuple(row.logprobs), room)
            row.answer = PendingTurn(row.number, row.turns, self.clock.step + self.clock.overlap, future)

    # -- what differs between rows where conversations bring their own sampling ------------------------------

    def _sampling_of(self, row: Row) -> SamplingConfig:
        return self.sampling

    def _step_tokens(self) -> int:
        """How many tokens of prompts this step may read."""
        return sys.maxsize

    def _room(self, row: Row) -> int:
        """How many further tokens the limits leave to the action."""
        sampling = self._sampling_of(row)
        return min(sampling.max_new_tokens - len(row.action), sampling.max_tokens - row.length - 1)

    def _take(self, row: Row, token: int, logprob: float, logits: torch.Tensor) -> bool:
        """Append a token that was drawn from ``logits`` (V,). Return whether the action is complete."""
        self.sampled += 1
        row.action.append(token)
        row.logprobs.append(logprob)
        if row.budget is not None:
            row.budget.push(token)
        assert row.matcher is not None
        stopped = row.matcher.push(token) or token in self.policy.chat.end_of_turn
        return stopped or self._room(row) <= 0

    def _draw(
        self, rows: Sequence[Row], logits: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """A token for each row, which may occur several times, and its log-probability in nats."""
        tokens, logprobs = draw(logits, uniforms, self.sampling)
        return tokens.tolist(), logprobs.tolist()
