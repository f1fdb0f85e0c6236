"""The local engine: sampling that never reads a token twice.

A prompt is read once for all siblings and stays in one place. Keys and values stay across turns, and
finished rows leave at once. The engine knows tokens only: a conversation hands it a prompt, takes an
action, and answers with the tokens to read next (on a thread, while the other rows decode) or with None at
its end.

Numerics depend on which rows decode together, and that follows a clock of decode steps: an environment's
answer that was asked for at step t joins at step t + ``overlap``. Rows do not wait for a late answer; it
joins when it arrives, and a schedule records that. A run that follows a schedule repeats bit for bit
(``schedule``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from agent_peft.hardware import explain_oom, give_back_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig, EngineStatistics
from agent_peft.policies.engine.daemon_threads import DaemonThreads
from agent_peft.policies.engine.decoding import AHEAD, Decoding
from agent_peft.policies.engine.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.engine.weights import Way, copies_weights, lean_copy, sampling_weights
from agent_peft.policies.forward.attention import attempt
from agent_peft.policies.models.positions import fit
from agent_peft.policies.policy import Policy
from agent_peft.policies.proofs import SINGLE
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.policies.thinking import check_thinking
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

GRACE = 5.0  # seconds for environments that work when a call fails; after it, they are left behind


class LocalEngine:
    """Continuous batching over one policy, in this process: a ``Sampler``.

    Attributes:
        rows: the most conversations at once. It is halved, for good, when the memory is too small.
        way: how it computes (``weights.Way``).
        shares: whether siblings share the keys of their prompt; otherwise each keeps a copy.
    """

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        self.policy, self.config = policy, config
        self.rows = config.rows
        self.way: Way = "lean"
        self.shares = True
        self._held: Policy | None = None
        with explain_oom(
            "as the sampler read its first tokens", "set policy.dtype=auto or a smaller policy.model"
        ):
            self._prove()

    @property
    def chat(self) -> ChatTokenizer:
        return self.policy.chat

    def _prove(self) -> None:
        """Read an opening through slots, and compare with the model's own forward.

        Siblings share their prompt if the model's attention can be overridden; otherwise each keeps a copy.
        """
        policy = self.policy
        tokens = policy.opening()
        ids = torch.tensor([tokens], device=policy.device)
        with torch.no_grad():
            own = policy.logprobs_of(policy.read(ids), ids)[0]
        ways: list[tuple[Way, bool]] = [
            ("lean", True),
            ("layers", True),
            ("layers", False),
            ("modules", False),
        ]
        problem = why = ""
        for self.way, self.shares in ways:
            why = why or problem
            scores = attempt(lambda: self._score(tokens, SamplingConfig(), self.way))
            if isinstance(scores, Exception):
                problem = f"cannot keep its keys and values in slots ({scores})"
            elif (drift := policy.drift(torch.tensor(scores, device=policy.device) - own)) <= policy.rounding:
                break
            else:
                problem = f"gives other log-probabilities token by token ({drift:.2g} nats apart)"
        else:
            raise AgentPeftError(f"{type(policy.base).__name__} cannot be sampled here: it {problem}")
        if not self.shares:
            logger.warning("each sibling keeps a copy of its prompt: with shared attention the model %s", why)

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
    ) -> EngineStatistics:
        """See ``Sampler.generate``. Out of memory, the engine continues with half the rows, for good."""
        if not conversations:
            return EngineStatistics()
        sampling = fit(sampling, self.policy.bound)
        check_thinking(self.chat, sampling.max_thinking_tokens)
        capacity = min(self.rows, self.config.rows_of(sampling.max_tokens), len(conversations))
        threads = DaemonThreads(self.config.environment_threads or capacity + AHEAD, "environment")
        give_back_memory()  # that training has left behind; below, that sampling has
        held = self._held
        with sampling_weights(self.policy, self.way) if held is None else torch.no_grad():
            try:
                decoding = Decoding(
                    held or self.policy,
                    self.config,
                    self.new_cache,
                    conversations=conversations,
                    sampling=sampling,
                    threads=threads,
                    shares=self.shares,
                    capacity=capacity,
                    drafts=sampling.temperature == 0,  # evaluation: training keeps its bits
                    schedule=schedule,
                )
                statistics = decoding.drive()
            finally:
                threads.shutdown(GRACE)
        give_back_memory()
        if statistics.row_halvings:
            self.rows = max(1, capacity >> statistics.row_halvings)
        return statistics

    def hold(self) -> AbstractContextManager[None] | None:
        """See ``Sampler.hold``. It needs our decoder with its copies of the weights. The model's own modules
        cannot serve two threads, and on a GPU both would wait in one stream.
        """
        policy = self.policy
        rope = str(getattr(getattr(policy.decoder, "rotary_emb", None), "rope_type", ""))
        moves = "dynamic" in rope or rope == "longrope"  # its frequencies are state of the module
        if self.way != "lean" or policy.device.type != "cpu" or not copies_weights(policy) or moves:
            return None
        return self._holding()

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self._held = lean_copy(self.policy)
        try:
            yield
        finally:
            self._held = None

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, adapter: bool = True) -> list[float]:
        """See ``Sampler.score``. In fp32 no weights are copied, which would take longer than to read a few
        tokens; in 16 bits they are, since that is how the sampler keeps small changes.
        """
        narrow = self.policy.dtype != torch.float32
        return self._score(tokens, sampling, self.way if narrow and adapter else "modules", adapter)

    def _score(
        self, tokens: Sequence[int], sampling: SamplingConfig, way: Way, adapter: bool = True
    ) -> list[float]:
        with sampling_weights(self.policy, way, adapter):
            return self.read_scores(tokens, sampling)

    def read_scores(
        self,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        see: Callable[[torch.Tensor], None] = lambda logprobs: None,
    ) -> list[float]:
        """As ``score``, with weights that are prepared for sampling: read as the sampler reads, what all
        share, a prompt, then a turn, its last tokens singly.

        Args:
            see: gets the log-probabilities (n, V) of the next n tokens, until all are scored.
        """
        policy, half, last = self.policy, max(1, len(tokens) // 2), len(tokens) - 1
        begin, single = half // 2, max(half, last - SINGLE)
        pieces = [
            (COMMON, 0, begin),
            (PROMPTS, begin, half),
            (ROWS, half, single),
            *((ROWS, i, i + 1) for i in range(single, last)),
        ]
        cache = self.new_cache((1, 1, 1), (begin, half, len(tokens)))
        scores = []
        for tier, start, stop in pieces:
            if start == stop:
                continue
            if start <= half:
                cache.fork(tier, [0], 0 if start else None, start)
            piece = torch.tensor([tokens[start:stop]], device=policy.device)
            positions = torch.arange(start, stop, device=policy.device).unsqueeze(0)
            hidden = cache.read(policy, tier, [0], piece, positions)
            targets = torch.tensor(tokens[start + 1 : stop + 1], device=policy.device)
            logp = log_distribution(policy.logits(hidden[0, : len(targets)]), sampling, keep=targets)
            see(logp)
            scores += logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
        return scores

    def new_cache(
        self,
        slots: tuple[int, int, int],
        capacities: tuple[int, int, int],
        max_tokens: int = sys.maxsize,
    ) -> TierCache:
        policy = self.policy
        return TierCache(
            slots, capacities, policy.base.config, policy.dtype, policy.device, self.shares, max_tokens
        )

    def close(self) -> None:
        """See ``Sampler.close``: all is in this process."""
