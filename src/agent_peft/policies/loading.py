"""Makes the policy that a configuration describes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from agent_peft.config import validated
from agent_peft.hardware import choose_device, explain_oom
from agent_peft.hub import why_not_given
from agent_peft.lookup import nearest, nearest_path
from agent_peft.policies import adapters, value_head
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.forward.products import choose_library, use_onednn
from agent_peft.policies.models.adapter_files import read_adapter_config
from agent_peft.policies.models.bundled import BUNDLED, resolve_model
from agent_peft.policies.models.chat_template import check_dialect, check_thoughts, with_keys
from agent_peft.policies.models.custom_module import build_custom
from agent_peft.policies.models.pretrained import build_model, ends_of, load_pretrained, use_template
from agent_peft.policies.models.shape import is_custom, scratch_architecture
from agent_peft.policies.models.start import own_base, portable, start_of, with_adapter
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.precision import choose_precision
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError

_KINDS: Mapping[str, type[PretrainedConfig | ScratchConfig]] = {
    "pretrained": PretrainedConfig,
    "scratch": ScratchConfig,
}


def load_policy(
    model: str | Path | Mapping[str, Any] | PretrainedConfig | ScratchConfig, seed: int = 0, **keys: Any
) -> Policy:
    """The policy of a model. A new LoRA adapter starts at zero, which is proven: the first output equals the
    base model's. If ``model`` is an adapter, the policy continues with it; a critic next to it comes along.

    >>> alphabet, architecture = "01+=", {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}
    >>> scratch = {"kind": "scratch", "alphabet": alphabet, "architecture": architecture}
    >>> policy = load_policy(scratch, device="cpu")
    >>> policy.has_adapter, sum(p.numel() for p in policy.trainable_parameters()) > 0
    (False, True)

    Args:
        model: a bundled name (``"smollm2-135m"``), a folder, a GGUF file or a hub id; a run directory,
            ``"RUN:step_000012"``, a checkpoint or an adapter's folder; or the keys of ``policy`` in a run's
            configuration.
        seed: decides the adapter's random matrix A, and all weights of a model from scratch.
        keys: more keys of ``policy``, such as ``dtype="float32"``, ``lora=None`` or ``adapter="folder"``.
    """
    config = policy_config(model, **keys)
    critic = adapter = None
    if config.kind == "pretrained":
        config, start = with_adapter(config), start_of(config)
        adapter = None if config.merge_adapter else start.adapter
        critic = start.adapter or Path(start.model)
    device, dtype = choose_device(config.device), choose_precision(config, fetch=True).dtype
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Transformers shows one for each file
    tokenizer, base = _load_scratch(config, seed, dtype) if config.kind == "scratch" else _load(config, dtype)
    with explain_oom(
        "as the model was put on its device",
        "set policy.dtype=auto, a smaller policy.model or another device",
    ):
        base.to(device)  # type: ignore[arg-type]  # its decorator hides self
        chat = ChatTokenizer(tokenizer, ends_of(base), getattr(config, "tools", "auto"))
        if getattr(config, "thoughts", "template") == "keep":
            check_thoughts(tokenizer, chat.rewrites)
            chat.thoughts = "keep"
        if getattr(config, "chat_template", None) is not None:  # its content belongs to what a run reads
            chat.template = chat.template or str(tokenizer.chat_template)
        adapted: PreTrainedModel | PeftModel = base
        if config.lora is not None:
            adapted = adapters.attach(base, config.lora, derive(seed, "adapter"))
            adapters.assert_zero_delta(adapted)
        if choose_library(config.matmul, device, dtype).name == "onednn":
            use_onednn(adapted)
        policy = Policy(adapted, chat, config.packing, config.activation_checkpointing)
    if adapter is not None:
        adapters.load(policy.model, adapter)
    if critic is not None:
        policy.load_value_head(critic)
    return policy


def save_start(config: PretrainedConfig, folder: Path) -> None:
    """Write what a policy starts from, for ``policy.model`` of another day: the adapter that it continues
    with, or the whole model with its tokenizer, in the dtype that the policy computes in.
    """
    config, start = with_adapter(config), start_of(config)
    if start.adapter is not None and not config.merge_adapter:
        named = own_base(start.adapter) or read_adapter_config(start.adapter).get("base_model_name_or_path")
        adapters.copy_adapter(start.adapter, folder, base=portable(str(named or start.model)))
    else:
        tokenizer, model = _load(config, choose_precision(config, fetch=True).dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    critic = (start.adapter or Path(start.model)) / value_head.WEIGHTS
    if critic.is_file():
        shutil.copyfile(critic, folder / critic.name)


def policy_config(
    model: str | Path | Mapping[str, Any] | PretrainedConfig | ScratchConfig, **keys: Any
) -> PretrainedConfig | ScratchConfig:
    """The configuration that the arguments of ``load_policy`` mean.

    >>> policy_config("smollm2-135m", dtype="float32").dtype
    'float32'
    """
    if isinstance(model, PretrainedConfig | ScratchConfig):
        content = model.model_dump(exclude_unset=True) | {"kind": model.kind}
    else:
        content = dict(model) if isinstance(model, Mapping) else {"model": str(model)}
    content = {"kind": "pretrained", **content, **keys}
    if (config_class := _KINDS.get(content["kind"])) is None:
        raise AgentPeftError(
            f"policy.kind: there is no {content['kind']!r}; {nearest(content['kind'], list(_KINDS))}"
        )
    return validated(config_class, content, "policy")


def _load(config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A tokenizer and a model, with the adapter added to its weights if ``merge_adapter`` is set."""
    start = start_of(config)
    try:
        tokenizer, model = load_pretrained(resolve_model(start.model), dtype)
    except OSError as error:
        raise AgentPeftError(
            f"policy.model: {config.model!r} is no bundled model ({', '.join(BUNDLED)}), no folder and no "
            f"model that the hub gives ({why_not_given(error)}){nearest_path(start.model, BUNDLED)}"
        ) from error
    use_template(tokenizer, config.chat_template)
    with_keys(tokenizer, config.template)
    check_dialect(tokenizer, config.tools)
    model.name_or_path = portable(start.model)
    if config.merge_adapter and start.adapter is not None:
        model = adapters.fold_in(model, start.adapter)
        model.name_or_path = f"{start.adapter.absolute()} (merged)"  # no adapter may take it for its model
    return tokenizer, model


def _load_scratch(
    config: ScratchConfig, seed: int, dtype: torch.dtype
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer(config.alphabet)
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, "weights"))
        if is_custom(config):
            model: PreTrainedModel = build_custom(config.architecture, len(tokenizer))
            return tokenizer, model.to(dtype)  # type: ignore[arg-type]  # its decorator hides self
        return tokenizer, build_model(scratch_architecture(config, tokenizer), dtype)
