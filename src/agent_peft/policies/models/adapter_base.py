"""Checks the base model of an adapter. Its tensors fit every model of the same shapes, and mean something
to the model only that they were trained on.
"""

from __future__ import annotations

import logging
from pathlib import Path

from peft import LoraConfig
from transformers import PreTrainedModel

from agent_peft.policies.models.bundled import bundled_name, cached, from_gguf
from agent_peft.policies.models.shape import config_here
from agent_peft.policies.models.start import START, own_base
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

_ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def check_base(model: PreTrainedModel, adapter: LoraConfig, folder: Path) -> None:
    """Warn if the adapter in ``folder`` names another model than the one it is loaded into.

    Only the last part of a name counts, since folders are moved, and one user's hub id is another user's
    folder. The model that a run keeps is called as its run.
    """
    theirs, ours = str(own_base(folder) or adapter.base_model_name_or_path or ""), model.name_or_path
    if not theirs or not ours or _place(theirs) == _place(ours):  # models from scratch have no name
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
    if _called(_place(theirs)) != _called(_place(ours)):
        logger.warning(
            "the adapter in %s was trained on %r, and the model is %r: it fits the weights of another model, "
            "but means little to them",
            folder,
            theirs,
            ours,
        )


def _place(name: str) -> Path:
    """The folder of a model. A hub id is taken for a relative path."""
    if known := bundled_name(name):
        return cached(known) or Path(known)
    if name.endswith(".gguf") and Path(name).is_file():  # older adapters name the folder in the cache
        return from_gguf(Path(name))
    return Path(name).expanduser().resolve()


def _called(place: Path) -> str:
    return (f"{place.parent.name}/{START}" if place.name == START else place.name).lower()
