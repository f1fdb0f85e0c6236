"""The critic: a value head on the hidden states of the policy's forward."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from agent_peft.files import opened
from agent_peft.printable import cause_of
from agent_peft.types import AgentPeftError

WEIGHTS = "value_head.safetensors"


class ValueHead(nn.Module):
    """V(s_t) = w · x_t, where x_t is the last hidden state after tokens[:t], normalised to mean 0 and
    length 1.

    w starts at zero, so that a new critic returns 0. Hidden states differ in scale from model to model and
    have a few huge coordinates. Normalised, one learning rate suits all models, and the component that all
    states share (half of their length in SmolLM2) serves as the bias. All of it is computed in fp32.

    Attributes:
        detach_states: the value loss trains the head only, and not the model under it.

    >>> head = ValueHead(4)
    >>> head(torch.randn(2, 3, 4)).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.detach_states = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Values (...) of last hidden states (..., H)."""
        hidden = hidden.detach() if self.detach_states else hidden
        return layer_norm(hidden.float(), self.weight.shape) @ self.weight / math.sqrt(len(self.weight))


def save(head: ValueHead, folder: Path) -> None:
    """Write ``value_head.safetensors`` next to the adapter, in a file that PEFT ignores."""
    save_file({"weight": head.weight.detach().cpu().contiguous()}, folder / WEIGHTS)


def load(head: ValueHead, folder: Path) -> None:
    """Read into ``head`` (in place) what ``save`` wrote, bit for bit."""
    try:
        with opened(folder / WEIGHTS, unlinked=0) as place:
            stored = load_file(place)
    except (OSError, SafetensorError, ValueError) as error:
        raise AgentPeftError(f"the critic in {folder} cannot be read: {cause_of(error)}") from error
    if {name: tensor.shape for name, tensor in stored.items()} != {"weight": head.weight.shape}:
        raise AgentPeftError(
            f"{folder / WEIGHTS} is not a value head of a model with {len(head.weight)} hidden units: "
            "is it of another model?"
        )
    with torch.no_grad():
        head.weight.copy_(stored["weight"])
