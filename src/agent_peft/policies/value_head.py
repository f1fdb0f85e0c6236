"""The critic: a value head on the hidden states that the policy's own forward gives anyway."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from agent_peft.types import AgentPeftError

WEIGHTS = "value_head.safetensors"


class ValueHead(nn.Module):
    """V(s_t) = w · x_t, where x_t is the last hidden state after tokens[:t], brought to mean 0 and length 1.

    w starts at zero, so that a fresh critic says 0 and disturbs nothing. Hidden states differ in scale from
    model to model and have a few huge coordinates; so brought into one form, one learning rate does for all
    of them, and what the states have in common (half of their length in SmolLM2) serves as the bias. fp32
    throughout.

    Args:
        size: H.
        trunk_gradient: whether what is learnt from values reaches the model under the head.

    >>> head = ValueHead(4)
    >>> head(torch.randn(2, 3, 4)).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, size: int, trunk_gradient: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.trunk_gradient = trunk_gradient

    def forward(self, hidden: Tensor) -> Tensor:
        """Values (...) of last hidden states (..., H)."""
        hidden = hidden if self.trunk_gradient else hidden.detach()
        return layer_norm(hidden.float(), self.weight.shape) @ self.weight / math.sqrt(len(self.weight))


def save(head: ValueHead, folder: Path) -> None:
    """Write ``value_head.safetensors``, beside the adapter and apart from it: PEFT need not know."""
    save_file({"weight": head.weight.detach().cpu().contiguous()}, folder / WEIGHTS)


def load(head: ValueHead, folder: Path) -> None:
    """Read what ``save`` wrote into ``head`` (in place), bit for bit.

    Raises:
        AgentPeftError: nothing there, or a head of another model.
    """
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise AgentPeftError(
            f"the critic in {folder} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error
    if {name: tensor.shape for name, tensor in stored.items()} != {"weight": head.weight.shape}:
        raise AgentPeftError(
            f"{folder / WEIGHTS} is no value head of a model with {len(head.weight)} hidden units: is it of another model?"
        )
    with torch.no_grad():
        head.weight.copy_(stored["weight"])
