"""Activation checkpointing (Chen et al., 2016): keep the input of each layer, and compute its inside again in
the backward.

Transformers' own switch acts in training mode only, and our models never leave evaluation mode, so that
nothing but the adapter's dropout ever drops. So the layers' ``forward`` is wrapped here, while a forward that
trains runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agent_peft.policies.forward.attention_override import as_now
from agent_peft.types import AgentPeftError


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The layers to recompute: those that Transformers would; of a module of one's own, the members of its
    lists that have parts.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> len(layers_of(nn.ModuleDict({"embedding": nn.Embedding(3, 2), "blocks": nn.ModuleList([block(), block()])})))
    2

    Raises:
        AgentPeftError: there are none.
    """
    found: list[nn.Module] = [
        module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not found:
        lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        members = [member for one in lists for member in one if any(member.children())]
        inside = {id(part) for member in members for part in member.modules() if part is not member}
        found = [member for member in members if id(member) not in inside]
    if not found:
        raise AgentPeftError(
            "policy.activation_checkpointing: the model keeps no nn.ModuleList of layers, so there is nothing to recompute; set it to false"
        )
    return found


@contextmanager
def recomputing(layers: Sequence[nn.Module], dropouts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """A forward inside keeps only the layers' inputs; its backward, inside or not, computes the rest again,
    to the same bits.

    Args:
        dropouts: modules that drop in this forward; they drop the same again, though they are back in
            evaluation mode by then.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _training(dropouts, as_now())

    wrapped: Any = partial(
        checkpoint, use_reentrant=False, preserve_rng_state=bool(dropouts), context_fn=contexts
    )
    for layer in layers:
        layer.forward = partial(wrapped, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own comes to light again


@contextmanager
def _training(modules: Sequence[nn.Module], attention: AbstractContextManager[None]) -> Iterator[None]:
    for module in modules:
        module.train()
    try:
        with attention:
            yield
    finally:
        for module in modules:
            module.eval()
