"""Sampling that never re-reads: a prompt is prefilled once for all siblings and stays in one place, keys and values stay across turns,
finished rows leave at once.

The engine knows tokens only. A conversation hands it a prompt, is handed an action, and answers with the tokens to read next (on a
thread, while the other rows decode) or with None when it is over.

Everything the numerics depend on (who decodes beside whom) follows a clock of decode steps, never the wall: an environment's answer,
asked for at step t, joins at step t + ``overlap``, and the engine waits for it there. So a run can be repeated bit for bit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from agent_peft.policies.decoding import Conversation, Decoding, EngineConfig, EngineStatistics
from agent_peft.policies.kv_cache import COMMON, PROMPTS, ROWS, TierCache
from agent_peft.policies.language_model import Policy
from agent_peft.policies.replacement import MISFITS
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)


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
            return Decoding(self.policy, self.config, self._cache, conversations, sampling, threads, self.shares).drive()

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


__all__ = ["Conversation", "Engine", "EngineConfig", "EngineStatistics"]
