"""The adapter's dropout, with masks that do not depend on what a token is computed together with.

A mask belongs to a token and to the tokens before it: it is a hash of them, of the layer and of a seed. So
trajectories that share a prefix share its masks, as they share its computation on the token trie. Neither
microbatches nor packing nor ranks change a mask. PyTorch would draw masks in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class AdapterDropout:
    """The dropout of one forward.

    Attributes:
        layers: the dropout layers of the adapter.
        keys: int64, the keys of the tokens that the layers read, in their shape (``prefix_keys``).
    """

    layers: Sequence[nn.Module]
    seed: int
    keys: Tensor

    def at(self, places: Tensor) -> AdapterDropout:
        """The dropout of a forward that reads the tokens at these places of the flattened ones."""
        return replace(self, keys=self.keys.flatten()[places])


_current: ContextVar[AdapterDropout | None] = ContextVar("dropout", default=None)


@contextmanager
def dropping(dropout: AdapterDropout | None) -> Iterator[None]:
    """Inside, the layers drop. With None, nothing is dropped. The base model is not trained, so its own
    dropout never acts.
    """
    layers = () if dropout is None else dropout.layers
    token = _current.set(dropout)
    for number, layer in enumerate(layers):
        assert dropout is not None
        layer.train()
        seed = derive(dropout.seed, number)
        layer.forward = partial(_drop, p=float(layer.p), keys=dropout.keys, seed=seed)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _current.reset(token)
        for layer in layers:
            layer.eval()
            del layer.forward  # the method of the class becomes visible again


def current_dropout() -> AbstractContextManager[None]:
    """Capture the dropout that acts, so that activation checkpointing can re-enter it during the backward."""
    dropout = _current.get()
    return nullcontext() if dropout is None else dropping(dropout)


def prefix_keys(tokens: Tensor) -> Tensor:
    """(B, T) int64 from tokens (B, T): a hash of the tokens up to each one.

    >>> one, other = prefix_keys(torch.tensor([[1, 2, 3], [1, 2, 4]]))
    >>> (one == other).tolist()
    [True, True, False]
    """
    places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return _hash(((tokens + 1) * _hash(places)).cumsum(1))  # sums and products wrap


def _drop(x: Tensor, *, p: float, keys: Tensor, seed: int) -> Tensor:
    """x (..., n) with each number dropped with probability p, and the others divided by 1 - p."""
    if x.shape[:-1] not in (keys.shape, (keys.numel(),)):
        raise AgentPeftError(
            f"policy.lora.dropout: a layer reads {tuple(x.shape[:-1])} rows where the model reads "
            f"{tuple(keys.shape)} tokens, so its masks cannot follow the tokens; set dropout to 0, or leave "
            "such layers (experts, for example) out of policy.lora.target_modules"
        )
    columns = _high(_hash(torch.arange(1, x.shape[-1] + 1, device=x.device)))
    bits = _high(_hash(keys.view(x.shape[:-1]) ^ seed)).unsqueeze(-1) + columns
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):  # lowbias32 (Wellons, 2018)
        bits.bitwise_xor_((bits >> shift) & ((1 << (32 - shift)) - 1)).mul_(factor)
    kept = bits >= round(p * 2**32) - 2**31
    return x * (kept.to(x.dtype) / (1 - p))


def _hash(x: Tensor) -> Tensor:
    """int64 to int64, one to one: the finalizer of splitmix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _high(x: Tensor) -> Tensor:
    """The upper half of each int64, as int32."""
    return (x >> 32).int()
