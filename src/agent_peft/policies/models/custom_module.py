"""A user's own ``nn.Module`` as a causal language model that the engine, LoRA and checkpoints can work with.

The module maps token ids to logits. The engine's slots keep the tokens themselves in place of keys and
values, and each new token re-reads its conversation. So this is right for every module, and slow for long
conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.lookup import find
from agent_peft.types import AgentPeftError


class CustomModelConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The class and its arguments. The sizes are those of the tokens that are kept in place of keys and
    values.
    """

    model_type = "agent_peft_custom_module"

    def __init__(
        self, module: str = "", arguments: Mapping[str, Any] | None = None, vocab_size: int = 1, **others: Any
    ) -> None:
        self.module, self.arguments, self.vocab_size = module, dict(arguments or {}), vocab_size
        self.num_hidden_layers = self.num_attention_heads = self.hidden_size = 1
        super().__init__(**others)


class _Decoder(nn.Module):
    """Gives the logits in place of hidden states."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        if past_key_values is None:
            return BaseModelOutputWithPast(last_hidden_state=self.logits(input_ids))
        assert position_ids is not None
        tokens = input_ids[:, None, :, None]  # as (B, heads = 1, Q, size = 1) keys
        seen, _ = past_key_values.update(tokens, tokens, 0)
        # values behind a row's last token are stale, and a causal module does not look there
        logits = self.logits(seen[:, 0, :, 0])
        index = position_ids[:, :, None].expand(-1, -1, logits.shape[-1])
        return BaseModelOutputWithPast(last_hidden_state=logits.gather(1, index))

    def logits(self, tokens: Tensor) -> Tensor:
        out = self.module(tokens)
        logits = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(out).__name__
            raise AgentPeftError(
                f"{type(self.module).__name__}: forward gave {got} for tokens {tuple(tokens.shape)}; "
                "it must give logits (B, T, V)"
            )
        return logits


class CustomModel(PreTrainedModel, GenerationMixin):  # PEFT wraps what can generate
    """The wrapper. ``policy.architecture: {model_type: "package.module:Class", …}`` makes
    ``Class(vocab_size=…, …)``.
    """

    config_class = CustomModelConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = False

    def __init__(self, config: CustomModelConfig) -> None:
        super().__init__(config)
        self.decoder = _Decoder(_build(config))
        self.head = nn.Identity()
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """The class initialises itself."""

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        return next((m for m in self.decoder.modules() if isinstance(m, nn.Embedding)), nn.Embedding(1, 1))

    def forward(self, input_ids: Tensor, **others: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.decoder(input_ids).last_hidden_state)


def is_custom_module(folder: Path) -> bool:
    """Whether a folder holds a model of a user's own class, which only a configuration can name."""
    with suppress(AgentPeftError, ValueError):
        content = parse_json(read_text(folder / "config.json", "a JSON file", MEGABYTE))
        return isinstance(content, dict) and content.get("model_type") == CustomModelConfig.model_type
    return False


def _build(config: CustomModelConfig) -> nn.Module:
    try:
        module_class = custom_class(config.module)
    except ValueError as error:
        raise AgentPeftError(f"policy.architecture.model_type: {error}") from error
    try:
        return module_class(vocab_size=config.vocab_size, **config.arguments)
    except TypeError as error:
        raise AgentPeftError(f"policy.architecture: {config.module} cannot be made: {error}") from error


def custom_class(name: str) -> type[nn.Module]:
    """The class that ``package.module:Class`` names. Only a subclass of ``nn.Module`` is ever called.

    Raises:
        ValueError: it cannot be imported, or is no such subclass.
    """
    module_class = find(name)
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ValueError(f"{name} cannot be made a model: it is not a subclass of nn.Module")
    return module_class


def build_custom(architecture: Mapping[str, Any], vocab_size: int) -> CustomModel:
    """The model of ``{model_type: "package.module:Class", **arguments}``."""
    arguments = {key: value for key, value in architecture.items() if key != "model_type"}
    model = CustomModel(
        CustomModelConfig(module=architecture["model_type"], arguments=arguments, vocab_size=vocab_size)
    )
    model.eval()  # type: ignore[no-untyped-call]
    tokens = torch.arange(8).unsqueeze(0) % vocab_size
    later = tokens.clone()
    later[0, 4:] = (later[0, 4:] + 1) % vocab_size
    with torch.no_grad():
        first, second = model(tokens).logits, model(later).logits
    if first.shape[-1] < vocab_size:
        raise AgentPeftError(
            f"{architecture['model_type']} gives {first.shape[-1]} logits for a vocabulary of {vocab_size}"
        )
    if not torch.allclose(first[:, :4], second[:, :4], atol=1e-5):
        raise AgentPeftError(
            f"{architecture['model_type']} is not causal: its logits depend on tokens that come later"
        )
    return model
