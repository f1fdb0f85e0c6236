"""The configuration of a policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agent_peft.config import ASKED, FREE, Config
from agent_peft.replies import DIALECTS

ReferenceKind = Literal["stage_start", "base"]
Dtype = Literal["auto", "float32", "bfloat16"]


def _check_device(device: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d\d?)?", device, re.ASCII) is None:
        raise ValueError(f"{device!r} is not a supported device; give auto, cpu, cuda or cuda:1")
    return device


# keys of every kind of policy
Device = Annotated[
    str,
    AfterValidator(_check_device),
    Field(description="auto, cpu, cuda, cuda:1 …", json_schema_extra=FREE),
]
Matmul = Annotated[
    Literal["auto", "torch", "onednn"],
    Field(
        description="library of float32 matrix products on a CPU; auto is onednn where it is faster than "
        "torch's own; a run keeps the one that it began with",
        json_schema_extra=FREE,
    ),
]
Packing = Annotated[bool, Field(description="train on the token trie; false pads", json_schema_extra=FREE)]
ActivationCheckpointing = Annotated[
    bool,
    Field(
        description="uses less memory in training: the backward computes each layer again",
        json_schema_extra=FREE,
    ),
]


class LoraSettings(Config):
    """The layers that get a LoRA adapter, and its size. Biases are never trained."""

    rank: int = Field(default=16, gt=0, description="rank of the adapter's matrices")
    alpha: float = Field(default=32, gt=0, description="the adapter's change is scaled by alpha / rank")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="on the adapter's input, in training only",
        json_schema_extra=ASKED,
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="names of linear layers; all-linear is all but the output layer"
    )


class PretrainedConfig(Config):
    """A Transformers causal language model, with or without a LoRA adapter."""

    kind: Literal["pretrained"] = "pretrained"
    model: str = Field(
        description="a bundled name (smollm2-135m, gemma3-270m), a folder, a .gguf file or a hub id; or what "
        "was trained: a run directory, RUN:step_000012, a checkpoint or the folder of an adapter",
        json_schema_extra=ASKED,  # the same model may lie elsewhere
    )
    dtype: Dtype = Field(
        default="auto",
        description="auto is bfloat16 where the device multiplies it natively and faster than float32; "
        "a run keeps the dtype that it began with",
    )
    device: Device = "auto"
    matmul: Matmul = "auto"
    lora: LoraSettings | None = Field(default=LoraSettings(), description="null trains every parameter")
    adapter: Path | None = Field(
        default=None, description="an adapter in PEFT's layout to start from, if policy.model is its model"
    )
    merge_adapter: bool = Field(
        default=False,
        description="true adds the adapter that the policy starts from to the weights and trains a new one "
        "(or every parameter); false continues with that adapter",
    )
    template: dict[str, bool | int | float | str] = Field(
        default={},
        description="keys of the model's chat template, such as {enable_thinking: false}; one that changes "
        "no text is an error",
    )
    chat_template: Literal["chatml_tools"] | Path | None = Field(
        default=None,
        description="a file with a chat template (Jinja) in place of the model's own, or chatml_tools: "
        "ChatML with tools, calls as JSON, results and thoughts",
    )
    thoughts: Literal["template", "keep"] = Field(
        default="template",
        description="template: where the chat template rewrites earlier turns, such as their thoughts, the "
        "episode continues in another row, with the template's text; keep: turns stay as sampled, in one row",
    )
    tools: Literal["auto", *DIALECTS] = Field(  # type: ignore[valid-type]  # the keys of a table
        default="auto",
        description="dialect of the calls of tools; auto is the one that reads the chat template's own calls",
    )
    packing: Packing = True
    activation_checkpointing: ActivationCheckpointing = False


class ScratchConfig(Config):
    """A model of random weights, of any architecture that Transformers knows, or of a class of your own."""

    kind: Literal["scratch"] = "scratch"
    architecture: dict[str, Any] = Field(
        description="a Transformers configuration with its model_type (or package.module:Class and its "
        "arguments); vocab_size comes from the tokenizer"
    )
    alphabet: str = Field(description="the characters that the model reads and writes, each one a token")
    dtype: Dtype = Field(default="auto", description="as for a pretrained model")
    device: Device = "auto"
    matmul: Matmul = "auto"
    lora: LoraSettings | None = Field(default=None, description="null trains every parameter")
    packing: Packing = True
    activation_checkpointing: ActivationCheckpointing = False


PolicyConfig = Annotated[PretrainedConfig | ScratchConfig, Field(discriminator="kind")]
