"""The texts of tokens. They come from the tokenizer of a run's model, if this machine has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer

logger = logging.getLogger(__name__)


class Words:
    """The text of each token of one model.

    >>> Words(None).of(7)
    '⟨7⟩'
    """

    def __init__(self, chat: ChatTokenizer | None) -> None:
        self._chat = chat
        self._known: dict[int, str | list[int]] = {}

    def of(self, token: int) -> str | list[int]:
        """The text of a token. Where the token is not a whole number of characters: its bytes, so that
        a reader can join them with those of its neighbours.
        """
        if token not in self._known:
            self._known[token] = self._spelled(token)
        return self._known[token]

    def _spelled(self, token: int) -> str | list[int]:
        if self._chat is None:
            return f"⟨{token}⟩"
        content = self._chat.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return list(content)


def model_words(policy: Any) -> Words:
    """The words of the model that a run's ``policy`` section names. Nothing is downloaded."""
    import transformers

    from agent_peft.policies.loading import policy_config
    from agent_peft.policies.models.bundled import BUNDLED, cached, resolve_model
    from agent_peft.policies.models.start import start_of
    from agent_peft.policies.models.tokenizer import character_tokenizer
    from agent_peft.policies.tokenization import ChatTokenizer

    if not isinstance(policy, Mapping):
        raise AgentPeftError("the configuration names no model")
    try:
        config = policy_config(policy)
        if config.kind == "scratch":
            return Words(ChatTokenizer(character_tokenizer(config.alphabet)))
        name = start_of(config).model
        if name in BUNDLED:
            folder = cached(name)
            if folder is None:
                raise AgentPeftError(f"the model {name!r} is not in the cache")
            place = str(folder)
        else:
            place = resolve_model(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
        return Words(ChatTokenizer(tokenizer))
    except AgentPeftError:
        raise
    except Exception as error:  # what a library raises for files that are damaged or absent
        logger.debug("no tokenizer", exc_info=True)
        raise AgentPeftError(
            f"the tokenizer of {policy.get('model')!r} cannot be loaded ({type(error).__name__})"
        ) from error
