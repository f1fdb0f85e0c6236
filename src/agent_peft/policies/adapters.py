"""LoRA adapters: attach, prove, fold, merge, save and load, in PEFT's own layout.

A LoRA layer computes ``W x + s B A x`` with ``s = alpha / rank``; A is random, B starts at zero, so the first
output is the base model's. The base model is the same model ``with model.disable_adapter()``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agent_peft.policies.engine.onednn_linear import BlockedLora
from agent_peft.policies.forward.lora_linear import FusedLoraConv1D, FusedLoraLinear
from agent_peft.policies.models.adapter_base import check_base
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, TrustError

_ADAPTER = "default"
_WEIGHTS = "adapter_model.safetensors"
# What must be equal for stored A and B to mean the same change of the weights.
_MEANING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias")


class LoraSettings(BaseModel):
    """Which layers get an adapter, and how large. Biases are never trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(default=16, gt=0)
    alpha: float = Field(default=32, gt=0, description="the adapter's change is scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="on the adapter's input, in training only")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="all but the output head, or names"
    )


def attach(model: PreTrainedModel, settings: LoraSettings, seed: int) -> PeftModel:
    """Put a LoRA adapter on ``model`` (in place) and freeze the rest. The same seed and layer names give the
    same A; B is zero.

    A ~ uniform(-1/√fan_in, 1/√fan_in), drawn per layer, in fp32, on the CPU: independent of device, dtype and
    the order of layers.

    Raises:
        AgentPeftError: the target modules are not in the model, are not linear layers, or are tied to the
            embeddings.
    """
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT only divides by the rank
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: FusedLoraLinear, Conv1D: FusedLoraConv1D})
    tied = model.get_input_embeddings().weight
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
            )  # PEFT's business
            warnings.filterwarnings(
                "ignore", message=".*ensure_weight_tying", category=UserWarning
            )  # refused below
            adapted = cast(PeftModel, get_peft_model(model, config))
    except ValueError as error:
        raise AgentPeftError(f"cannot attach a LoRA adapter: {str(error).splitlines()[0]}") from error
    for name, layer in _layers(adapted):
        if not isinstance(layer, LoraLinear):
            raise AgentPeftError(
                f"LoRA trains linear layers only, and {name} is not one: change target_modules"
            )
        if layer.get_base_layer().weight is tied:  # merging would change the embeddings, too
            raise AgentPeftError(
                f"{name} shares its weight with the embeddings: leave it out of target_modules"
            )
        a, _ = _factors(layer)  # PEFT has made B zero; assert_zero_delta proves it
        bound = 1 / math.sqrt(a.shape[1])
        generator = torch.Generator().manual_seed(derive(seed, "lora", name))
        with torch.no_grad():
            a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
    return adapted


def assert_zero_delta(model: nn.Module) -> None:
    """Prove that the adapter does nothing yet: every element of every B is exactly zero.

    Raises:
        TrustError: one is not.
    """
    for name, layer in _layers(model):
        if wrong := int(torch.count_nonzero(_factors(layer)[1])):
            raise TrustError(
                f"the adapter is not zero at step 0: {wrong} elements of {name}.lora_B are not 0; attach a fresh adapter"
            )


def delta_norm(model: nn.Module) -> float:
    """``sqrt(Σ ‖s B A‖²)`` over all LoRA layers (Frobenius), from rank by rank products: ‖BA‖² = Σ (BᵀB ∘
    AAᵀ).
    """
    total = 0.0
    for _, layer in _layers(model):
        a, b = (factor.detach().double() for factor in _factors(layer))
        total += layer.scaling[_ADAPTER] ** 2 * float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(total, 0.0))


def save(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Write the adapter for ``PeftModel.from_pretrained``; of a model without one, everything, for
    ``from_pretrained``.

    Not atomic: write into a folder aside and rename it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(model, PeftModel):
        model.save_pretrained(folder)
        return
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in _adapter_state(model).items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    config = cast(LoraConfig, copy.deepcopy(model.peft_config[_ADAPTER]))
    config.inference_mode = True  # as PEFT stores it
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(
            config.target_modules
        )  # the order of a set differs from process to process
    config.save_pretrained(str(folder))


def load(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Read what ``save`` wrote into ``model`` (in place), bit for bit.

    Raises:
        AgentPeftError: nothing there, a tensor too many or too few, another shape, or adapter settings that
            mean another change.
    """
    if isinstance(model, PeftModel):
        _load_adapter(model, folder)
    else:
        _load_whole(model, folder)


def _load_adapter(model: PeftModel, folder: Path) -> None:
    if not (folder / _WEIGHTS).is_file() or not (folder / "adapter_config.json").is_file():
        raise AgentPeftError(f"{folder} holds no adapter: it needs adapter_config.json and {_WEIGHTS}")
    ours = model.peft_config[_ADAPTER]
    try:
        theirs = LoraConfig.from_pretrained(str(folder))
        stored = load_file(folder / _WEIGHTS)
    except Exception as error:  # there is no end to what may be wrong with files
        raise AgentPeftError(
            f"the adapter in {folder} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from error
    check_base(cast(PreTrainedModel, model.get_base_model()), theirs, folder)
    for key in _MEANING:
        if getattr(ours, key) != getattr(theirs, key):
            raise AgentPeftError(
                f"the adapter in {folder} has {key} {getattr(theirs, key)}, the model's has {getattr(ours, key)}"
            )
    state = _adapter_state(model)
    for problem, names in (
        ("lacks", state.keys() - stored.keys()),
        ("holds unexpected", stored.keys() - state.keys()),
    ):
        if names:
            raise AgentPeftError(
                f"the adapter in {folder} {problem} {len(names)} tensors, first {min(names)}: is it of another model?"
            )
    for name, tensor in state.items():
        if tensor.shape != stored[name].shape:
            raise AgentPeftError(
                f"the adapter in {folder} has {name} of shape {tuple(stored[name].shape)}, not {tuple(tensor.shape)}"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(stored[name])  # a state dict shares its tensors with the parameters


def _load_whole(model: PreTrainedModel, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise AgentPeftError(f"{folder} holds no model: it needs config.json and safetensors")
    try:
        loaded: Any = type(model).from_pretrained(
            folder,
            config=copy.deepcopy(model.config),
            dtype=model.dtype,
            local_files_only=True,
            output_loading_info=True,
        )
        read, report = loaded
        for problem in ("missing", "unexpected", "mismatched"):
            if names := report[f"{problem}_keys"]:
                raise AgentPeftError(
                    f"the model in {folder} has {len(names)} {problem} tensors, first {min(names)}"
                )
        model.load_state_dict(read.state_dict())
    except AgentPeftError:
        raise
    except Exception as error:
        raise AgentPeftError(
            f"the model in {folder} does not fit: {' '.join(str(error).split())[:200]}"
        ) from error


def merge(model: PeftModel) -> PreTrainedModel:
    """A copy of ``model`` in fp32 with the adapter added to the weights, as a plain Transformers model.
    ``model`` is left alone.
    """
    if not isinstance(model, PeftModel):
        raise AgentPeftError("the model has no adapter to merge")
    merged = cast(PreTrainedModel, copy.deepcopy(model).float().merge_and_unload(safe_merge=True))
    merged.config.dtype = torch.float32
    return merged


@contextmanager
def folded(
    model: nn.Module, linear: Callable[[Tensor, Tensor | None], nn.Module] | None = None
) -> Iterator[None]:
    """While inside, each LoRA layer is a plain linear layer with weight ``W + s B A``: sampling pays nothing
    for the adapter.

    LoRA dropout does not act inside, as in evaluation mode. The original modules and parameters are put aside
    and put back, also after an exception, so no bit of W can drift. Do not train, save, nest, or ask for the
    reference inside.

    Args:
        model: one with LoRA layers, on any device; W + s B A is computed in fp32 and rounded once to W's
            dtype.
        linear: makes the layers from weight and bias, in place of plain linear ones; not asked for layers of
            other kinds.
    """
    replaced: list[tuple[nn.Module, str, LoraLayer, nn.Module, nn.Parameter]] = []
    try:
        with torch.no_grad():
            for name, layer in _layers(model):
                parent_name, _, child = name.rpartition(".")
                parent, base = model.get_submodule(parent_name), layer.get_base_layer()
                original = cast(nn.Parameter, base.weight)
                weight = (original.float() + _delta(layer)).to(original.dtype)
                replaced.append((parent, child, layer, base, original))
                if linear is not None and type(base) is nn.Linear:
                    setattr(parent, child, linear(weight, base.bias))
                else:
                    base.weight = nn.Parameter(weight, requires_grad=False)
                    setattr(parent, child, base)
        yield
    finally:
        for parent, child, layer, base, original in replaced:
            base.weight = original
            setattr(parent, child, layer)


@contextmanager
def beside(model: nn.Module) -> Iterator[None]:
    """While inside, each LoRA layer multiplies by W in the blocked layout, and adds s B A x to that product:
    for 16 bits, where a weight ``W + s B A`` would be rounded to W wherever s B A is less than half a unit in
    its last place.

    As in ``folded``, the original modules are put back. A and B are read once: do not train inside.
    """
    replaced: list[tuple[nn.Module, str, LoraLayer]] = []
    try:
        for name, layer in _layers(model):
            parent_name, _, child = name.rpartition(".")
            parent, base = model.get_submodule(parent_name), layer.get_base_layer()
            weight, (a, b) = cast(Tensor, base.weight), _factors(layer)
            if getattr(layer, "fan_in_fan_out", False):
                weight = weight.T
            replaced.append((parent, child, layer))
            bias = cast(Tensor | None, base.bias)
            setattr(
                parent,
                child,
                BlockedLora(weight, bias, a.to(weight.dtype), b.to(weight.dtype), layer.scaling[_ADAPTER]),
            )
        yield
    finally:
        for parent, child, layer in replaced:
            setattr(parent, child, layer)


def _layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    if not found:
        raise AgentPeftError("the model has no LoRA layers (none attached, or it is folded)")
    return found


def _factors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank)."""
    return cast(Tensor, layer.lora_A[_ADAPTER].weight), cast(Tensor, layer.lora_B[_ADAPTER].weight)


def _delta(layer: LoraLayer) -> Tensor:
    """``s B A`` in fp32, laid out as the layer's weight (GPT-2's Conv1D keeps it transposed)."""
    a, b = _factors(layer)
    delta: Tensor = b.float() @ a.float() * layer.scaling[_ADAPTER]
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def _adapter_state(model: PeftModel) -> dict[str, Tensor]:
    return cast(
        dict[str, Tensor],
        get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False),
    )
