"""Taking what belongs there out of an entry, or saying what does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_peft.types import AgentPeftError


def wrong(name: str, key: str, wanted: str) -> AgentPeftError:
    """The one line that tells what to do."""
    return AgentPeftError(f"entry {name!r}: {key} must be {wanted}")


def object_of(name: str, holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under the last part of ``key``, a dotted path from the entry."""
    found = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(found, Mapping):
        raise wrong(name, key, "an object")
    return found


def text_of(name: str, holder: Mapping[str, Any], key: str) -> str:
    """The text, not blank, under the last part of ``key``."""
    found = holder.get(key.rsplit(".", 1)[-1])
    if not isinstance(found, str) or not found.strip():
        raise wrong(name, key, "a text")
    return found
