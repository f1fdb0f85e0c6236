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

from agent_peft.policies.forward.adapter_dropout import current_dropout
from agent_peft.policies.forward.attention_override import current_override


@contextmanager
def checkpointing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """A forward inside keeps only the inputs of the layers. Its backward computes the rest again, bit for
    bit, also after the context has ended. The attention and the adapter's dropout are those of the forward.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _both(current_override(), current_dropout())

    wrapped: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    for layer in layers:
        layer.forward = partial(wrapped, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the method of the class becomes visible again


@contextmanager
def _both(attention: AbstractContextManager[None], dropout: AbstractContextManager[None]) -> Iterator[None]:
    with attention, dropout:
        yield
