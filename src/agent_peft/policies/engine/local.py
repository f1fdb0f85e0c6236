"""Sampling that never re-reads: a prompt is prefilled once for all siblings and stays in one place, keys and
values stay across turns, finished rows leave at once.

The engine knows tokens only. A conversation hands it a prompt, is handed an action, and answers with the
tokens to read next (on a thread, while the other rows decode) or with None when it is over.

Everything the numerics depend on (who decodes beside whom) follows a clock of decode steps: an environment's
answer, asked for at step t, joins at step t + ``overlap``. Nobody waits for one that is late; it joins as
soon as it comes, and that is written into a schedule. A run that follows its schedule repeats bit for bit
(``joining``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from agent_peft.hardware import give_back_memory
from agent_peft.out_of_memory import telling_out_of_memory
from agent_peft.policies.engine.base import Conversation, EngineConfig, EngineStatistics
from agent_peft.policies.engine.decoding import AHEAD, Decoding
from agent_peft.policies.engine.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.forward.attention_override import attempt
from agent_peft.policies.models.positions import bound_of, fit
from agent_peft.policies.policy import Policy
from agent_peft.policies.proofs import opening
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

SINGLE = 8  # tokens that ``score`` reads one by one


class Engine:
    """Continuous batching over one policy."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        self.policy, self.config = policy, config
        self.rows = config.rows  # fewer, once the memory was too small for so many
        with telling_out_of_memory(
            "as the sampler read its first tokens", "set policy.dtype=auto or a smaller policy.model"
        ):
            self._prove()

    def _prove(self) -> None:
        """Read an opening through slots, and compare with the model's own forward: one that keeps a running
        state is refused.

        Siblings share what they read if the model's attention can be replaced by ours; otherwise each keeps a
        copy.
        """
        policy = self.policy
        tokens = opening(policy)
        ids = torch.tensor([tokens], device=policy.device)
        with torch.no_grad():
            own = policy.logprobs_of(policy.decoder(input_ids=ids).last_hidden_state, ids)[0]
        ways = [(policy.blocks, True), (policy.blocks, False), *([(False, False)] if policy.blocks else [])]
        problem = why = ""
        for policy.blocks, self.shares in ways:
            why = why or problem
            scores = attempt(lambda: self.score(tokens, SamplingConfig(), policy.blocks))
            if isinstance(scores, Exception):
                problem = f"cannot keep its keys and values in slots, so it cannot be sampled here: {scores}"
            elif (drift := policy.drift(torch.tensor(scores, device=policy.device) - own)) <= policy.rounding:
                break
            else:
                problem = f"says something else token by token ({drift:.2g} nats apart), so it cannot be sampled here"
        else:
            raise AgentPeftError(f"{type(policy.base).__name__} {problem}")
        if not self.shares:
            logger.warning(
                "siblings do not share what they read, each keeps a copy of its prompt: with shared attention the model %s",
                why,
            )

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
    ) -> EngineStatistics:
        """Drive every conversation to its end.

        Args:
            schedule: of an earlier call with the same conversations, to be followed; None records one.

        Raises:
            AgentPeftError: a single row does not fit into the memory. Until then the rows are halved, for
                good.
        """
        if not conversations:
            return EngineStatistics(0, 0, 0, 0)
        sampling = fit(sampling, bound_of(self.policy.base.config))
        capacity = min(self.rows, self.config.rows_of(sampling.max_tokens), len(conversations))
        threads = ThreadPoolExecutor(self.config.environment_threads or capacity + AHEAD, "environment")
        give_back_memory()  # what training has left behind, and below what this leaves
        with self.policy.sampling_mode(self.policy.blocks):
            try:
                acting = (
                    self.policy,
                    self.config,
                    self._cache,
                    conversations,
                    sampling,
                    threads,
                    self.shares,
                    capacity,
                )
                statistics = Decoding(*acting, schedule).drive()
            finally:
                threads.shutdown(cancel_futures=True)
        give_back_memory()
        if statistics.row_halvings:
            self.rows = max(1, capacity >> statistics.row_halvings)
        return statistics

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, blocks: bool = False) -> list[float]:
        """Log-probabilities (T - 1) of tokens[1:], read the way the sampler reads: its adapter, what all
        share, a prompt, then a turn, whose last tokens come one by one.

        Args:
            blocks: in the sampler's layout of the weights, which takes longer to make than a few tokens to
                read.
        """
        policy, half, last = self.policy, max(1, len(tokens) // 2), len(tokens) - 1
        begin, single = half // 2, max(half, last - SINGLE)
        pieces = [
            (COMMON, 0, begin),
            (PROMPTS, begin, half),
            (ROWS, half, single),
            *((ROWS, i, i + 1) for i in range(single, last)),
        ]
        with policy.sampling_mode(blocks):
            cache = self._cache((1, 1, 1), (begin, half, len(tokens)))
            scores = []
            for tier, start, stop in pieces:
                if start == stop:
                    continue
                if start <= half:
                    cache.fork(tier, [0], 0 if start else None, start)
                piece = torch.tensor([tokens[start:stop]], device=policy.device)
                positions = torch.arange(start, stop, device=policy.device).unsqueeze(0)
                hidden = policy.hidden_states(piece, positions, cache.place(tier, [0], positions), cache)
                targets = torch.tensor(tokens[start + 1 : stop + 1], device=policy.device)
                logp = log_distribution(policy.logits(hidden[0, : len(targets)]), sampling, keep=targets)
                scores += logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
        return scores

    def _cache(
        self, slots: tuple[int, int, int], capacities: tuple[int, int, int], most: int = sys.maxsize
    ) -> TierCache:
        policy = self.policy
        return TierCache(
            slots, capacities, policy.base.config, policy.dtype, policy.device, self.shares, most
        )


__all__ = ["Conversation", "Engine", "EngineConfig", "EngineStatistics"]
