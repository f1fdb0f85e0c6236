from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from agent_peft.policies import lora_linear
from agent_peft.policies.lora_linear import FusedLoraLinear


def layer(kind: type[LoraLinear], bias: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> LoraLinear:
    torch.manual_seed(0)
    base = nn.Linear(7, 5, bias=bias, dtype=dtype).requires_grad_(False)
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout)
    made = kind(base, "default", config=config, r=3, lora_alpha=6).to(dtype)
    with torch.no_grad():
        made.lora_A["default"].weight.copy_(torch.randn(3, 7))
        made.lora_B["default"].weight.copy_(torch.randn(5, 3))
    return made.train()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the sum was taken in one operation."""
    calls: list[int] = []

    class Sum(lora_linear._Sum):
        @staticmethod
        def forward(*arguments: object) -> torch.Tensor:
            calls.append(1)
            return super(Sum, Sum).forward(*arguments)

    monkeypatch.setattr(lora_linear, "_Sum", Sum)
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("learns", [False, True], ids=["first layer", "later layer"])
def test_output_and_gradients_are_those_of_peft(fused: list[int], bias: bool, learns: bool) -> None:
    x, weights = torch.randn(2, 4, 7, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    found = []
    for kind in (LoraLinear, FusedLoraLinear):
        made, given = layer(kind, bias), x.clone().requires_grad_(learns)
        out = made(given)
        (out * weights).sum().backward()
        found.append([out, made.lora_A["default"].weight.grad, made.lora_B["default"].weight.grad, *([given.grad] if learns else [])])
    assert len(fused) == 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_right_by_finite_differences() -> None:
    x, w, bias, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 7), (5, 7), (5,), (3, 7), (5, 3)))
    for tensor in (x, a, b):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a, b: lora_linear._Sum.apply(x, w, bias, a, b, 2.0), (x, a, b))


def test_what_is_more_than_the_sum_is_peft_s_own(fused: list[int]) -> None:
    x = torch.randn(4, 7, dtype=torch.float64)
    made, own = layer(FusedLoraLinear, dropout=0.5), layer(LoraLinear, dropout=0.5)
    torch.manual_seed(1)
    dropped = made(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, own(x)) and not fused, "dropout acts"
    made.eval()
    torch.testing.assert_close(made(x), own.eval()(x))
    assert len(fused) == 1, "dropout does not act"
    made.enable_adapters(False)
    assert torch.equal(made(x), made.base_layer(x)), "the reference"
    made.enable_adapters(True)
    made.merge()
    torch.testing.assert_close(made(x), own(x))
    made.unmerge()
    made.lora_A.float()
    made.lora_B.float()
    made(x)
    made.double()
    made.base_layer.weight.requires_grad_(True)
    made(x).sum().backward()
    assert made.base_layer.weight.grad is not None
    assert len(fused) == 1, "merged, of two precisions, or with weights that are trained"
