from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.nn.functional import linear

from agent_peft.policies.forward import lora_linear
from agent_peft.policies.forward.lora_linear import FusedLoraLinear


def layer(
    kind: type[LoraLinear], bias: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> LoraLinear:
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
def test_output_and_gradients_are_those_of_peft(fused, bias, learns):
    x, weights = torch.randn(2, 4, 7, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    found = []
    for kind in (LoraLinear, FusedLoraLinear):
        made, given = layer(kind, bias), x.clone().requires_grad_(learns)
        out = made(given)
        (out * weights).sum().backward()
        found.append(
            [
                out,
                made.lora_A["default"].weight.grad,
                made.lora_B["default"].weight.grad,
                *([given.grad] if learns else []),
            ]
        )
    assert len(fused) == 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_are_right_by_finite_differences():
    x, w, bias, a, b = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((4, 7), (5, 7), (5,), (3, 7), (5, 3))
    )
    for tensor in (x, a, b):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, a, b: lora_linear._Sum.apply(x, w, bias, a, b, 2.0, linear), (x, a, b)
    )


def test_what_is_more_than_the_sum_is_peft_s_own(fused):
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
    made.lora_A.half()
    made.lora_B.half()
    made(x)
    made.double()
    made.base_layer.weight.requires_grad_(True)
    made(x).sum().backward()
    assert made.base_layer.weight.grad is not None
    assert len(fused) == 1, "merged, of two precisions, or with weights that are trained"


def wide_layer(kind: type[LoraLinear], size: float) -> LoraLinear:
    """A layer of 256 inputs in bf16 whose adapter, in fp32, changes the output by about ``size`` of it."""
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(256, 192, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    base.weight.data.copy_(torch.randn(192, 256, generator=generator) / 16)
    made = kind(base, "default", config=LoraConfig(r=8, lora_alpha=16), r=8, lora_alpha=16)
    made.lora_A.float()  # as in a model that PEFT adapts
    made.lora_B.float()
    with torch.no_grad():
        made.lora_A["default"].weight.copy_(torch.randn(8, 256, generator=generator) / 16)
        made.lora_B["default"].weight.copy_(torch.randn(192, 8, generator=generator) * size / 6)
    return made


def kept(made: LoraLinear, x: torch.Tensor) -> float:
    """The share of the adapter's change that is found in the output, by projection."""
    a, b = made.lora_A["default"].weight.detach().double(), made.lora_B["default"].weight.detach().double()
    exact = 2 * x.double() @ a.T @ b.T
    with torch.no_grad():
        changed = made(x).double()
        made.enable_adapters(False)
        change = changed - made(x).double()
    return float((change * exact).sum() / (exact * exact).sum())


def test_a_small_change_is_not_rounded_away_in_16_bits(fused):
    """PEFT rounds W x before it adds: what is less than half a unit in its last place is lost."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert kept(wide_layer(FusedLoraLinear, 1e-3), x) == pytest.approx(1, abs=0.1)
    assert len(fused) == 1, "A and B are fp32"
    assert kept(wide_layer(LoraLinear, 1e-3), x) < 0.7, "or there is nothing to mend"


def test_gradients_in_16_bits_are_those_of_fp32():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weights = torch.randn(64, 192, generator=generator)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made, given = wide_layer(FusedLoraLinear, 0.1), x.detach().clone().to(dtype).requires_grad_()
        made.get_base_layer().to(dtype)
        (made(given) * weights).sum().backward()
        found.append([made.lora_A["default"].weight.grad, made.lora_B["default"].weight.grad, given.grad])
    for ours, exact in zip(*found, strict=True):
        assert ours.dtype == (torch.bfloat16 if ours.shape == x.shape else torch.float32)
        assert (ours.float() - exact).norm() < 0.01 * exact.norm()
