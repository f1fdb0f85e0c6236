"""What may take the place of a layer's ``forward``: the adapter's dropout, activation checkpointing, and the
same weights in fp32.

A dropout mask belongs to a token and to the tokens before it: it is a hash of them, of the layer and of a
seed. So trajectories that share a prefix share its masks, as they share its computation on the token trie.
Neither microbatches nor packing nor ranks change a mask. PyTorch would draw masks in the order of the rows.

Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost") keeps the input
of each layer, and computes the inside again in the backward. Transformers' own switch acts only in training
mode, and our models stay in evaluation mode, so that nothing but the adapter's dropout ever acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation

from agent_peft.policies.forward.attention import current_override
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError


def fuse_activations(model: nn.Module) -> None:
    """Replace the activation functions of ``model`` (in place) by the same functions as one kernel.

    >>> model = nn.Sequential(NewGELUActivation(), nn.ReLU())
    >>> fuse_activations(model)
    >>> [type(module).__name__ for module in model]
    ['GELUTanh', 'ReLU']
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (NewGELUActivation, FastGELUActivation):
                setattr(parent, name, GELUTanh())


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


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, each layer of a model in 16 bits computes in fp32. Its weights are widened when it is called,
    and are as they were when it returns, so there is memory for one more layer only. No gradient is recorded.
    """
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # its rows are widened, and not its table
                widening = module.register_forward_hook(lambda module, inputs, output: output.float())
                stack.callback(widening.remove)
                continue
            # a LoRA layer reads the weight of the layer inside it
            owners = list(module.modules()) if isinstance(module, LoraLayer) else [module]
            if any(_narrow(owner) for owner in owners):
                _Widened(owners).attach(module, stack)
        yield


class _Widened:
    def __init__(self, owners: list[nn.Module]) -> None:
        self.owners = owners
        self.own: list[tuple[nn.Module, str, nn.Parameter]] = []

    def attach(self, module: nn.Module, stack: ExitStack) -> None:
        before = module.register_forward_pre_hook(self.widen, with_kwargs=True)
        after = module.register_forward_hook(self.restore, always_call=True)
        stack.callback(after.remove)
        stack.callback(before.remove)

    def widen(self, module: nn.Module, inputs: Any, keywords: Any) -> Any:
        for owner in self.owners:
            for name in _narrow(owner):
                parameter = owner._parameters[name]
                assert parameter is not None
                self.own.append((owner, name, parameter))
                owner._parameters[name] = nn.Parameter(parameter.float(), requires_grad=False)
        return tuple(map(_wide, inputs)), {name: _wide(value) for name, value in keywords.items()}

    def restore(self, *call: Any) -> None:
        while self.own:
            owner, name, parameter = self.own.pop()
            owner._parameters[name] = parameter


def _narrow(module: nn.Module) -> list[str]:
    """The names of the module's own parameters in 16 bits."""
    return [
        name
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16)
    ]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
