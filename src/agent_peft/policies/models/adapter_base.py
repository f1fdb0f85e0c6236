"""Which model an adapter is of: its tensors fit every model of the same shapes, and mean something to one
of them only.
"""

from __future__ import annotations

import logging
from pathlib import Path

from peft import LoraConfig
from transformers import PreTrainedModel

from agent_peft.policies.models.bundled import BUNDLED, cached, config_here
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

_ARCHITECTURE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def check_base(model: PreTrainedModel, adapter: LoraConfig, folder: Path) -> None:
    """Warn where the adapter in ``folder`` names another model than the one it is loaded into.

    Folders are moved, and a hub id names what another user has in a folder: the last part of a name counts.

    Raises:
        AgentPeftError: that other model is here, and of another architecture.
    """
    theirs, ours = adapter.base_model_name_or_path, model.name_or_path
    if not theirs or not ours or _place(theirs) == _place(ours):  # models from scratch have no name
        return
    if (named := config_here(theirs)) is not None:
        own, other = model.config.get_text_config(), named.get_text_config()
        for key in _ARCHITECTURE:
            was, here = getattr(other, key, None), getattr(own, key, None)
            if was != here:
                raise AgentPeftError(
                    f"the adapter in {folder} is of {theirs!r}, whose {key} is {was}; that of the model {ours!r} is {here}: "
                    "name the model it is of as policy.model"
                )
    if _place(theirs).name.lower() != _place(ours).name.lower():
        logger.warning(
            "the adapter in %s is of %r, and the model is %r: what it has learnt means little to other weights, though it fits them",
            folder, theirs, ours,
        )  # fmt: skip


def _place(name: str) -> Path:
    """The folder of a model; for a hub id what would be one."""
    return (cached(name) if name in BUNDLED else None) or Path(name).expanduser().resolve()
