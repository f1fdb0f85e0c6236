"""Checks that are always on. A run whose numbers could not be trusted stops; it does not go on with a warning."""

from __future__ import annotations

import torch
from torch import Tensor

from agent_peft.batch import Batch, collate
from agent_peft.policies import adapters
from agent_peft.policies.engine import Engine
from agent_peft.policies.language_model import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import Task, Trajectory, TrustError, Turn

CANARY_TOKENS = 16


def assert_on_policy(policy: Policy, batch: Batch, logprobs: Tensor, sampling: SamplingConfig) -> None:
    """The first minibatch after a rollout is on policy: ratio 1, KL 0, clip fraction 0. Anything else means that the trainer and the
    sampler disagree about the tokens, the mask, the distribution or the weights.

    In fp32 over the whole vocabulary no token may differ. Where rounding can move a token across the border of top-p or top-k, or in
    16 bits, the mean may not.
    """
    mask = batch.action_mask
    if not mask.any():
        return
    drift = (logprobs.detach().to(batch.logprobs.device) - batch.logprobs)[mask].abs()
    strict = policy.dtype == torch.float32 and not sampling.truncates
    worst = float(drift.max() if strict else drift.mean())
    if not worst <= policy.rounding:  # NaN is no agreement either
        raise TrustError(
            f"the trainer's log-probabilities of freshly sampled tokens differ from the sampler's by {worst:.3g} nats "
            f"({'at most' if strict else 'on average'}; {policy.rounding:g} is rounding): the loss mask, the sampling distribution or "
            "the sampler's weights are not what the trainer takes them for"
        )


def assert_same_policy(engine: Engine, tokens: list[int]) -> None:
    """Sampler and trainer give a few tokens the same log-probabilities: the update has reached the sampler.

    Args:
        tokens: of a trajectory, whose beginning is scored. A piece out of its middle would be text as the model never sees it: an end
            token in second place makes hidden states of SmolLM2 24,000 large, and what fp32 rounds off there is 0.002 nats.
    """
    tokens = tokens[:CANARY_TOKENS]
    if len(tokens) < 2:
        return
    plain = SamplingConfig()
    sampled = torch.tensor(engine.score(tokens, plain))
    whole = collate([Trajectory(Task("canary"), (Turn((tokens[0],), tuple(tokens[1:]), (0.0,) * (len(tokens) - 1)),))], [0])
    with torch.no_grad():
        trained = engine.policy.forward(whole, plain).logprobs[0, 1:].cpu()
    drift = float((sampled - trained).abs().max())
    if not drift <= engine.policy.rounding:
        raise TrustError(
            f"sampler and trainer score the same tokens {drift:.3g} nats apart ({engine.policy.rounding:g} is rounding): "
            "the sampler does not act with the weights that were just updated"
        )


def assert_learning(policy: Policy) -> None:
    """After the first update the adapter's delta is no longer zero."""
    if policy.has_adapter and not adapters.delta_norm(policy.model) > 0.0:
        raise TrustError(
            "the adapter's delta is still zero after the first update: its parameters get no gradient, or the optimizer does not hold them"
        )
