"""The layers of a model: the blocks that its decoder stacks."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_peft.types import AgentPeftError


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The layers that Transformers would checkpoint. Of a custom module: the members of its
    ``nn.ModuleList`` and ``nn.Sequential`` that have parts.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> parts = {"embedding": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])}
    >>> len(layers_of(nn.ModuleDict(parts)))
    2
    """
    layers: list[nn.Module] = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        members = [member for one in lists for member in one if any(member.children())]
        inside = {id(part) for member in members for part in member.modules() if part is not member}
        layers = [member for member in members if id(member) not in inside]
    if not layers:
        raise AgentPeftError(
            "policy.activation_checkpointing: the model has no nn.ModuleList of layers whose activations "
            "could be computed again; set it to false"
        )
    return layers
