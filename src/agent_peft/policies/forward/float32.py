"""The same weights in fp32, one layer at a time: what a model would compute if nothing were rounded to 16
bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, each layer of a model in 16 bits computes in fp32. Its weights are widened when it is called,
    and are as they were when it returns, so there is memory for one more layer only. No gradient is recorded.
    """
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # its rows are widened, and not its table
                stack.callback(module.register_forward_hook(_widen_output).remove)
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


def _widen_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()
