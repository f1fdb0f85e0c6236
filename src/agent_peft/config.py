"""The base of every configuration: frozen, checked, and an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part of a configuration. It cannot be changed, and a key that it does not know is an error.

    >>> class Limits(Config):
    ...     rows: int = 64
    >>> Limits(rows=8).rows
    8
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
