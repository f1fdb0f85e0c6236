"""The reference: a frozen policy that the present one is compared with. It is the policy at an earlier
moment, or the base model under the adapter.

For an earlier moment, the trained parameters (A and B of an adapter, or all weights) are copied. The copies
take the place of the parameters while the reference is computed, so it uses the policy's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn

from agent_peft.policies import adapters
from agent_peft.policies.config import ReferenceKind
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class Reference:
    """``weights`` are copies of the trained parameters, in their order. None is the base model, with the
    adapter off.
    """

    weights: tuple[Tensor, ...] | None

    @contextmanager
    def acting(self, model: nn.Module) -> Iterator[None]:
        """Inside, ``model`` is the reference; afterwards it is itself again, bit for bit. Do not compute
        gradients or sample inside.
        """
        if self.weights is None:
            assert isinstance(model, PeftModel)
            with model.disable_adapter():
                yield
            return
        parameters = trained(model)
        now = [parameter.data for parameter in parameters]
        try:
            for parameter, weight in zip(parameters, self.weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(parameters, now, strict=True):
                parameter.data = weight


def reference_of(model: nn.Module, kind: ReferenceKind = "stage_start") -> Reference:
    """The reference that is the model as it is now, or its base.

    If the adapter is still zero, both are the same, and nothing is copied.
    """
    if not isinstance(model, PeftModel):
        if kind == "base":
            raise AgentPeftError(
                "reference: base means the policy with its adapter off, and it has none; set policy.lora, or "
                "reference: stage_start"
            )
    elif kind == "base" or adapters.delta_norm(model) == 0:
        return Reference(None)
    return Reference(tuple(parameter.detach().clone() for parameter in trained(model)))


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore the trained parameters afterwards, whatever they become inside."""
    copies = [parameter.detach().clone() for parameter in trained(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, copy in zip(trained(model), copies, strict=True):
                parameter.copy_(copy)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
