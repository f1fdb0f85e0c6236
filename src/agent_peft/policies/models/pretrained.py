"""Models and tokenizers from a folder or the hub. They may come from a stranger: their code is never run,
nothing is asked on the terminal, and every fault is reported in one line.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agent_peft.files import check_regular, read_text
from agent_peft.hub import hub_or_cache
from agent_peft.policies.models import template_probe
from agent_peft.policies.models.custom_module import is_custom_module
from agent_peft.policies.models.tokenizer import TEMPLATES
from agent_peft.types import AgentPeftError

MAX_REPEATED = 1024  # layers, or experts of a layer
MAX_PER_BYTE = 8  # parameters, in any quantization that exists
PROBE_SECONDS = 5  # of processor time, to render some short conversations
PROBE_BYTES = 1 << 30
MAX_RENDERING = 1 << 20  # characters, for a conversation of a few words

_REPEATED = re.compile(r"(num|n)_\w*(layer|block|expert)\w*|n_layer|\w*depth")


def load_pretrained(folder: str, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A causal language model and its tokenizer.

    Raises:
        OSError: there is no such model.
    """
    check_regular(Path(folder))
    if (Path(folder) / "adapter_config.json").exists():
        raise AgentPeftError(
            f"policy.model: {folder!r} is named as a model and holds an adapter; name the model that it was "
            "trained on"
        )
    here = Path(folder).is_dir()
    if is_custom_module(Path(folder)):
        raise AgentPeftError(
            f"policy.model: {folder!r} holds a module of your own, which only policy.architecture can name; "
            "continue with its run (train --from RUN), or measure it with a configuration (evaluate --config)"
        )
    if here and not (Path(folder) / "config.json").is_file():
        raise AgentPeftError(
            f"policy.model: {folder!r} holds no config.json; give a folder that save_pretrained has written"
        )
    try:
        with nullcontext() if here else hub_or_cache():
            config = read_model_config(folder)
            if here:
                check_size(config, Path(folder))
            tokenizer = load_tokenizer(folder)
            model = _load_model(folder, config, dtype)
    except AgentPeftError:
        raise
    except Exception as error:  # a damaged file may raise anything
        if isinstance(error, OSError) and not here:
            raise
        raise AgentPeftError(f"policy.model: {folder!r} cannot be loaded: {cause(error)}") from error
    check_chat_template(tokenizer, folder)
    return tokenizer, model


def load_tokenizer(folder: str, download: bool = True) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=not download
        )
    except Exception as error:
        if not Path(folder).is_dir() or "trust_remote_code" in str(error):
            raise
        raise AgentPeftError(
            f"policy.model: {folder!r} holds no tokenizer that can be loaded ({cause(error).rstrip(':')}); "
            "write it there with the tokenizer's save_pretrained"
        ) from error
    return tokenizer


def _load_model(folder: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Missing weights are an error here. Transformers would draw them at random."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model: PreTrainedModel
    model, report = loaded
    for problem, keys in (
        ("are missing", report["missing_keys"]),
        ("have another size", report["mismatched_keys"]),
    ):
        if names := sorted(key if isinstance(key, str) else key[0] for key in keys):
            raise AgentPeftError(
                f"policy.model: {folder!r}: {len(names)} of the weights that its config.json describes "
                f"{problem}, first {names[0]}; they do not belong together"
            )
    return model


def ends_of(model: PreTrainedModel) -> list[int]:
    """The tokens at which Transformers' own generation stops. There may be several; the tokenizer knows
    one.
    """
    ends = getattr(model.generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def build_model(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, name: str = "policy.architecture"
) -> PreTrainedModel:
    """A model of random weights."""
    check_config(config, name)
    try:
        built: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )  # type: ignore[no-untyped-call]
    except Exception as error:
        raise AgentPeftError(f"{name}: no model can be built from it: {cause(error)}") from error
    return built


def read_model_config(folder: str, download: bool = True) -> PreTrainedConfig:
    """A model's configuration.

    Raises:
        Exception: whatever Transformers raises.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=not download
    )
    check_config(config, folder)
    return config


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse a configuration whose model would take forever to build, or would fetch code."""
    for key, number in _numbers(config.to_dict()):
        if _REPEATED.fullmatch(key) and number > MAX_REPEATED:
            raise AgentPeftError(
                f"{name}: {key}: {number} is more than {MAX_REPEATED}: no machine can hold such a model"
            )
    if "/" in str(getattr(config, "_attn_implementation", None)):
        raise AgentPeftError(
            f"{name}: asks for attention from the hub ({config._attn_implementation!r}), which is code; it "
            "is not fetched: remove attn_implementation"
        )


def check_size(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse a folder whose files are too small for the parameters that its config.json describes.
    Transformers would draw the missing ones at random, whatever memory that takes.
    """
    with torch.device("meta"):
        parameters = sum(
            parameter.numel()
            for parameter in build_model(config, name=str(folder / "config.json")).parameters()
        )
    stored = sum(
        path.stat().st_size for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}")
    )
    if not stored:
        raise AgentPeftError(
            f"policy.model: '{folder}' holds no weights (*.safetensors or *.bin); copy them there"
        )
    if parameters > MAX_PER_BYTE * stored:
        raise AgentPeftError(
            f"{folder}: its config.json describes {parameters:,} parameters, and its weights have "
            f"{stored:,} bytes; they do not belong together"
        )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, int | float):
        yield key, value


def cause(error: BaseException) -> str:
    """The first line of an error from Transformers; with our advice where theirs has no effect here."""
    if "trust_remote_code" in str(error):
        return (
            "it comes with its own code (auto_map), which is never run; take a model of a type that "
            "Transformers knows"
        )
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}"


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Render short conversations in another process, which can be stopped, before this process renders any.

    A template that is slow only at some times, or by chance, is not detected.
    """
    template = tokenizer.chat_template
    if not template:
        return
    turns = [{"role": ("user", "assistant")[turn % 2], "content": "words"} for turn in range(8)]
    conversations = [turns[:length] for length in range(1, len(turns) + 1)]
    conversations += [
        [{"role": "system", "content": "words"}, *conversation] for conversation in conversations
    ]
    request = {
        "template": template.get("default", "") if isinstance(template, dict) else template,
        "special_tokens": {key: str(token) for key, token in tokenizer.special_tokens_map.items()},
        "conversations": conversations,
        "longest": MAX_RENDERING,
        "seconds": PROBE_SECONDS,
        "bytes": PROBE_BYTES,
    }
    try:
        _probe(json.dumps(request))
    except (subprocess.TimeoutExpired, ChildProcessError) as error:
        raise AgentPeftError(
            f"{name}: the chat template takes more than {PROBE_SECONDS} seconds, {PROBE_BYTES >> 20} MB or "
            f"{MAX_RENDERING:,} characters for a conversation of a few words; take another model, or repair "
            "its chat_template"
        ) from error


def use_template(tokenizer: PreTrainedTokenizerBase, template: str | Path | None) -> None:
    """Put ``policy.chat_template`` in place of the tokenizer's own."""
    if template is None:
        return
    tokenizer.chat_template = TEMPLATES.get(str(template)) or read_text(
        Path(template).expanduser(), "a chat template", MAX_RENDERING
    )
    check_chat_template(tokenizer, f"policy.chat_template: {template}")


@lru_cache
def _probe(request: str) -> None:
    """Once for each template: a reference, a teacher and a served adapter have that of their policy."""
    command = [sys.executable, "-P", template_probe.__file__]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=60)
    if done.returncode not in (0, 1):  # 1: the template failed, and rendering it gives the reason
        raise ChildProcessError
