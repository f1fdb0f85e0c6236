"""LoRA adapters: attach, prove, merge, save and load, in PEFT's own layout.

A LoRA layer computes ``W x + s B A x`` with ``s = alpha / rank``; A is random, B starts at zero, so the first
output is the base model's. The base model is the same model ``with model.disable_adapter()``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agent_peft.files import check_regular
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.forward.lora_linear import FusedLoraConv1D, FusedLoraLinear
from agent_peft.policies.models.adapter_files import (
    CONFIG,
    WEIGHTS,
    lora_settings,
    read_adapter_config,
    read_tensors,
)
from agent_peft.policies.models.bundled import BUNDLED
from agent_peft.policies.models.shape import config_here
from agent_peft.policies.models.start import START, own_base
from agent_peft.printable import cause_of
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, TrustError

logger = logging.getLogger(__name__)

ADAPTER = "default"
_ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Settings that must be equal for stored A and B to mean the same change of the weights.
_MEANING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias")
# next to an adapter of a bundled model, whose name is none of the hub's
_README = """\
# A LoRA adapter of Agent-PEFT's bundled model {base}

To load it with plain PEFT and Transformers, in this folder:

```python
from agent_peft.policies.models.bundled import fetch
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(fetch("{base}"), dtype="{dtype}")
policy = PeftModel.from_pretrained(model, ".")
```
"""


def attach(model: PreTrainedModel, settings: LoraSettings, seed: int) -> PeftModel:
    """Put a LoRA adapter on ``model`` (in place) and freeze the rest. The same seed and layer names give the
    same A; B is zero.

    A ~ uniform(-1/√fan_in, 1/√fan_in), drawn per layer, in fp32, on the CPU: independent of device, dtype and
    the order of layers.
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
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            # refused below
            warnings.filterwarnings("ignore", message=".*ensure_weight_tying", category=UserWarning)
            adapted = cast(PeftModel, get_peft_model(model, config))
    except ValueError as error:
        cause = str(error).splitlines()[0].partition(" Please ")[0]
        layers = sorted(
            {
                name.rpartition(".")[2]
                for name, m in model.named_modules()
                if isinstance(m, nn.Linear | Conv1D)
            }
        )
        raise AgentPeftError(
            f"cannot attach a LoRA adapter: {cause} policy.lora.target_modules may name its linear layers: "
            f"{', '.join(layers)}"
        ) from error
    for name, layer in lora_layers(adapted):
        if not isinstance(layer, LoraLinear):
            raise AgentPeftError(
                f"LoRA trains linear layers only, and {name} is not one: change target_modules"
            )
        if layer.get_base_layer().weight is tied:  # merging would change the embeddings, too
            raise AgentPeftError(
                f"{name} shares its weight with the embeddings: leave it out of target_modules"
            )
        a, _ = factors(layer)  # PEFT has made B zero; assert_zero_delta proves it
        bound = 1 / math.sqrt(a.shape[1])
        generator = torch.Generator().manual_seed(derive(seed, "lora", name))
        with torch.no_grad():
            a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
    return adapted


def assert_zero_delta(model: nn.Module) -> None:
    """Prove that the adapter does nothing yet: every element of every B is exactly zero."""
    for name, layer in lora_layers(model):
        if wrong := int(torch.count_nonzero(factors(layer)[1])):
            raise TrustError(
                f"the adapter is not zero at step 0: {wrong} elements of {name}.lora_B are not 0; "
                "attach a new adapter"
            )


def delta_norm(model: nn.Module) -> float:
    """``sqrt(Σ ‖s B A‖²)`` (Frobenius) over all LoRA layers, from products of rank × rank: ‖BA‖² = Σ BᵀB ∘
    AAᵀ.
    """
    total = 0.0
    for _, layer in lora_layers(model):
        a, b = (factor.detach().double() for factor in factors(layer))
        total += layer.scaling[ADAPTER] ** 2 * float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(total, 0.0))


def digest(model: PeftModel) -> str:
    """The SHA-256 of the adapter's tensors and their names, in hexadecimal."""
    return hashlib.sha256(to_bytes(_weights(model))).hexdigest()


def save(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Write the adapter, for ``PeftModel.from_pretrained``; or a model without one, for ``from_pretrained``.

    This is not atomic: write into another folder and rename it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(model, PeftModel):
        model.save_pretrained(folder)
        return
    save_file(_weights(model), folder / WEIGHTS, metadata={"format": "pt"})
    config = cast(LoraConfig, copy.deepcopy(model.peft_config[ADAPTER]))
    config.inference_mode = True  # as PEFT stores it
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # a set's order differs between processes
    config.save_pretrained(str(folder))
    if (base := config.base_model_name_or_path) in BUNDLED:
        dtype = str(model.get_base_model().dtype).removeprefix("torch.")
        (folder / "README.md").write_text(_README.format(base=base, dtype=dtype), encoding="utf-8")


def load(model: PreTrainedModel | PeftModel, folder: Path) -> None:
    """Read into ``model`` (in place) what ``save`` wrote, bit for bit."""
    if isinstance(model, PeftModel):
        _load_adapter(model, folder)
    else:
        _load_whole(model, folder)


def _load_adapter(model: PeftModel, folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise AgentPeftError(f"{folder} holds no adapter: it needs {CONFIG} and {WEIGHTS}")
    ours, stored = model.peft_config[ADAPTER], read_tensors(folder)
    try:
        theirs = LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # a damaged file may raise anything
        raise AgentPeftError(f"the adapter in {folder} cannot be read: {cause_of(error)}") from error
    check_base(cast(PreTrainedModel, model.get_base_model()), theirs, folder)
    for key in _MEANING:
        if getattr(ours, key) != getattr(theirs, key):
            raise AgentPeftError(
                f"the adapter in {folder} has {key} {getattr(theirs, key)}, the model's has "
                f"{getattr(ours, key)}: set policy.lora as it was when the adapter was trained"
            )
    state = _adapter_state(model)
    for problem, names in (
        ("lacks", state.keys() - stored.keys()),
        ("holds unexpected", stored.keys() - state.keys()),
    ):
        if names:
            raise AgentPeftError(
                f"the adapter in {folder} {problem} {len(names)} tensors, first {min(names)}: "
                "is it of another model?"
            )
    for name, tensor in state.items():
        if tensor.shape != stored[name].shape:
            raise AgentPeftError(
                f"the adapter in {folder} has {name} of shape {tuple(stored[name].shape)}, "
                f"not {tuple(tensor.shape)}: is it of another model?"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(stored[name])  # a state dict shares its tensors with the parameters


def _load_whole(model: PreTrainedModel, folder: Path) -> None:
    check_regular(folder)
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
        raise AgentPeftError(f"the model in {folder} does not fit: {cause_of(error)}") from error


def copy_adapter(source: Path, folder: Path, base: str) -> None:
    """Write the adapter in ``source`` once more, with ``base`` as the name of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(read_tensors(source), folder / WEIGHTS, metadata={"format": "pt"})
    content = {**read_adapter_config(source), "base_model_name_or_path": base}
    (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")


def fold_in(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add the adapter in a folder to the weights of ``model`` (in place), in fp32 and rounded once. All
    parameters can be trained afterwards.
    """
    adapted = attach(model, lora_settings(folder, dropout=0.0), seed=0)
    load(adapted, folder)
    with torch.no_grad():
        for _, layer in lora_layers(adapted):
            weight = cast(Tensor, layer.get_base_layer().weight)
            weight.copy_(weight.float() + delta_of(layer))
    plain = cast(PreTrainedModel, adapted.unload())
    plain.requires_grad_(True)
    return plain


def merge(model: PeftModel) -> PreTrainedModel:
    """A copy of ``model`` in fp32 with the adapter added to the weights, as a plain Transformers model."""
    if not isinstance(model, PeftModel):
        raise AgentPeftError("the model has no adapter to merge")
    merged = cast(PreTrainedModel, copy.deepcopy(model).float().merge_and_unload(safe_merge=True))
    merged.config.dtype = torch.float32
    return merged


def lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    """The LoRA layers of a model, by name."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise AgentPeftError("the model has no LoRA layers (none attached, or it is folded)")
    return layers


def factors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank)."""
    return cast(Tensor, layer.lora_A[ADAPTER].weight), cast(Tensor, layer.lora_B[ADAPTER].weight)


def delta_of(layer: LoraLayer) -> Tensor:
    """``s B A`` in fp32, laid out as the layer's weight (GPT-2's Conv1D keeps it transposed)."""
    a, b = factors(layer)
    delta: Tensor = b.float() @ a.float() * layer.scaling[ADAPTER]
    return delta.T if getattr(layer, "fan_in_fan_out", False) else delta


def _adapter_state(model: PeftModel) -> dict[str, Tensor]:
    return cast(
        dict[str, Tensor],
        get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False),
    )


def _weights(model: PeftModel) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _adapter_state(model).items()}


def check_base(model: PreTrainedModel, adapter: LoraConfig, folder: Path) -> None:
    """Warn if the adapter in ``folder`` names another model than the one it is loaded into.

    Only the last part of a name counts, since folders are moved, and one user's hub id is another user's
    folder. The model that a run keeps is called as its run.
    """
    theirs, ours = str(own_base(folder) or adapter.base_model_name_or_path or ""), model.name_or_path or ""
    # a hub id is a relative path here
    places = [Path(name).expanduser().resolve() for name in (theirs, ours)]
    if not theirs or not ours or places[0] == places[1]:  # models from scratch have no name
        return
    if (named := config_here(theirs)) is not None:
        configs = named.get_text_config(), model.config.get_text_config()
        for key in _ARCHITECTURE:
            expected, actual = (getattr(config, key, None) for config in configs)
            if expected != actual:
                raise AgentPeftError(
                    f"the adapter in {folder} was trained on {theirs!r}, whose {key} is {expected}; that of "
                    f"the model {ours!r} is {actual}: set policy.model to the model that the adapter was "
                    "trained on"
                )
    if _called(places[0]) != _called(places[1]):
        logger.warning(
            "the adapter in %s was trained on %r, and the model is %r: it fits the weights of another model, "
            "but means little to them",
            folder,
            theirs,
            ours,
        )


def _called(place: Path) -> str:
    return (f"{place.parent.name}/{START}" if place.name == START else place.name).lower()
