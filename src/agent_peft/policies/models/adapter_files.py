"""The files of a LoRA adapter in PEFT's layout. They may come from a stranger: nothing in them is run, and no
pattern in them is evaluated.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agent_peft.files import MEGABYTE, check_regular, opened, parse_json, read_text
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.policies.config import LoraSettings
from agent_peft.printable import cause_of
from agent_peft.types import AgentPeftError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"  # as older versions of PEFT write it
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    check_regular(folder)
    file = folder / CONFIG
    try:
        content = parse_json(read_text(file, "an adapter's configuration", MEGABYTE))
        if not isinstance(content, dict):
            raise ValueError("it holds no mapping")
    except ValueError as error:
        raise AgentPeftError(
            f"the adapter in {folder} cannot be read: {CONFIG} is damaged ({error})"
        ) from error
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors by name, on the CPU, from ``adapter_model.safetensors`` or, without it,
    from ``adapter_model.bin``.
    """
    from safetensors.torch import load_file

    check_regular(folder)
    pickled = not (folder / WEIGHTS).is_file()
    if pickled and not (folder / PICKLE).is_file():
        raise AgentPeftError(f"{folder} holds no adapter: it needs {CONFIG} and {WEIGHTS} (or {PICKLE})")
    try:
        if not pickled:
            with opened(folder / WEIGHTS, unlinked=0) as place:
                return load_file(place)
        with opened(folder / PICKLE, unlinked=0) as place:
            content = torch.load(place, map_location="cpu", weights_only=True)  # which runs no code
        if not isinstance(content, dict) or not all(
            isinstance(part, torch.Tensor) for part in content.values()
        ):
            raise ValueError(f"{PICKLE} holds more than tensors")
        return content
    except Exception as error:  # a damaged file may raise anything
        raise AgentPeftError(f"the adapter in {folder} cannot be read: {cause_of(error)}") from error


def lora_settings(folder: Path, dropout: float) -> LoraSettings:
    """Return the settings with which an adapter can be loaded: its rank, its alpha and its layers.

    Layers that the configuration names by a pattern are read from the names of the tensors.
    """
    content = read_adapter_config(folder)
    targets = content.get("target_modules")
    if not isinstance(targets, list) or content.get("layers_to_transform") or content.get("exclude_modules"):
        names = (_TENSOR.fullmatch(name) for name in read_tensors(folder))
        targets = sorted({name[1] for name in names if name})
    try:
        return LoraSettings(
            rank=content["r"], alpha=content["lora_alpha"], dropout=dropout, target_modules=targets
        )
    except (KeyError, ValueError) as error:
        raise AgentPeftError(f"{folder} holds no LoRA adapter: see r and lora_alpha in {CONFIG}") from error
