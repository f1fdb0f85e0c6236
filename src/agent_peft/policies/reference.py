"""The frozen policy that others are compared with: the policy as it was at one moment, or the base model
under its adapter.

Of the policy at one moment there is a copy of what is trained: A and B of an adapter, or all weights. They
take the places of the trained ones while it is asked, so it goes through the very forward of the policy
itself, packed or padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from peft import PeftModel
from torch import Tensor, nn

from agent_peft.policies import adapters
from agent_peft.types import AgentPeftError

ReferenceKind = Literal["stage_start", "base"]


@dataclass(frozen=True)
class Reference:
    """``weights`` are copies of the trained parameters, in their order; None is the base model: the
    adapter is off.
    """

    weights: tuple[Tensor, ...] | None

    @contextmanager
    def acting(self, model: nn.Module) -> Iterator[None]:
        """Inside, ``model`` is the reference; afterwards it is what it was, to the bit. Not for a
        gradient, nor while sampling.
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
    """The model as it is now, or its base.

    An adapter that is still zero makes both the same: then nothing is copied.

    Raises:
        AgentPeftError: the base of a model without an adapter.
    """
    if not isinstance(model, PeftModel):
        if kind == "base":
            raise AgentPeftError(
                "reference: base is the policy with its adapter off, and there is none; set policy.lora, or stage_start"
            )
    elif kind == "base" or adapters.delta_norm(model) == 0:
        return Reference(None)
    return Reference(tuple(parameter.detach().clone() for parameter in trained(model)))


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Whatever the trained parameters become inside, afterwards they are what they were."""
    copies = [parameter.detach().clone() for parameter in trained(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, copy in zip(trained(model), copies, strict=True):
                parameter.copy_(copy)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
