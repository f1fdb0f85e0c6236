"""A policy that is a table of logits, for tests of losses, and the sums over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from agent_peft.algorithms.base import Algorithm
from agent_peft.batch import Batch, PolicyOutput
from agent_peft.ranks import merged

VOCABULARY = 5


def forward(parameters: Tensor, batch: Batch) -> PolicyOutput:
    """Row b, token t has the logits ``parameters[b, t, :VOCABULARY]`` and, in a wider table, the value
    ``parameters[b, t, -1]``.
    """
    here, mask = parameters[: len(batch), : batch.tokens.shape[1]], batch.action_mask
    log_softmax = here[..., :VOCABULARY].log_softmax(-1)
    logprobs = log_softmax.gather(-1, batch.tokens[..., None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    values = here[..., -1] * mask if here.shape[-1] > VOCABULARY else None
    return PolicyOutput(logprobs * mask, entropy * mask, values=values)


def normalized(algorithm: Algorithm, batch: Batch) -> Batch:
    weighted, denominator = algorithm.weigh(algorithm.prepare(batch))
    return replace(weighted, weights=weighted.weights / denominator)


def loss_and_gradient(
    algorithm: Algorithm, batches: Sequence[Batch], parameters: Tensor, rows: Sequence[Sequence[int]]
) -> tuple[float, Tensor | None, dict[str, Any]]:
    """Sums of the microbatches' losses, metrics and gradients."""
    leaf = parameters.clone().requires_grad_()
    losses, metrics = 0.0, {}
    for batch, chosen in zip(batches, rows, strict=True):
        loss, shown = algorithm.loss(forward(leaf[chosen], batch), batch)
        loss.backward()
        losses += float(loss.detach())
        metrics = {
            name: merged(name, metrics[name], value) if name in metrics else value
            for name, value in shown.items()
        }
    return losses, leaf.grad, metrics
