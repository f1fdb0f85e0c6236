"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): keep the
input of each layer, and compute the inside of the layer again in the backward.

Transformers' own switch acts only in training mode, and our models stay in evaluation mode, so that nothing
but the adapter's dropout ever acts. Therefore the ``forward`` of each layer is wrapped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from agent_peft.policies.forward.attention_override import current_override


@contextmanager
def checkpointing(layers: Sequence[nn.Module], dropouts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """A forward inside keeps only the inputs of the layers. Its backward computes the rest again, bit for
    bit, also after the context has ended.

    Args:
        layers: the modules to compute twice.
        dropouts: modules that drop in this forward. They drop the same again in the backward, though they are
            back in evaluation mode by then.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _training(dropouts, current_override())

    wrapped: Any = partial(
        checkpoint, use_reentrant=False, preserve_rng_state=bool(dropouts), context_fn=contexts
    )
    for layer in layers:
        layer.forward = partial(wrapped, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the method of the class becomes visible again


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
