"""What a policy is to the floors above, and what it takes to configure one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agent_peft.policies.adapters import LoraSettings

Dtype = Literal["auto", "float32", "bfloat16"]


def _known_device(device: str) -> str:
    try:
        if device != "auto":
            torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device; give auto, cpu, cuda or cuda:1") from error
    return device


Device = Annotated[str, AfterValidator(_known_device)]


class _PolicyConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PretrainedConfig(_PolicyConfig):
    """A Transformers causal language model with (or without) a LoRA adapter."""

    kind: Literal["pretrained"] = "pretrained"
    model: str = Field(
        description="a bundled name (smollm2-135m, gemma3-270m), a folder, a .gguf file, or a hub id"
    )
    dtype: Dtype = Field(
        default="auto",
        description="auto is bfloat16 where the device multiplies it by itself, and faster than float32; a run keeps what it began in",
    )
    device: Device = Field(default="auto", description="auto, cpu, cuda, cuda:1 …")
    lora: LoraSettings | None = Field(default=LoraSettings(), description="null trains every parameter")
    adapter: Path | None = Field(default=None, description="a folder in PEFT's layout to start from")
    packing: bool = Field(default=True, description="train on the token trie; false pads")
    activation_checkpointing: bool = Field(
        default=False, description="less memory in training: layers are computed again in the backward"
    )


class ScratchConfig(_PolicyConfig):
    """A model of random weights, from any Transformers configuration; the same class as a pretrained one."""

    kind: Literal["scratch"] = "scratch"
    architecture: dict[str, Any] = Field(
        description="a Transformers configuration, with its model_type; vocab_size comes from the tokenizer"
    )
    alphabet: str = Field(description="a character tokenizer's alphabet")
    dtype: Dtype = Field(default="auto", description="as of a pretrained model")
    device: Device = "auto"
    lora: LoraSettings | None = None
    packing: bool = True
    activation_checkpointing: bool = False


PolicyConfig = Annotated[PretrainedConfig | ScratchConfig, Field(discriminator="kind")]
