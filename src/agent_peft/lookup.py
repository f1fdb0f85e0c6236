"""Code of a user's own, which a configuration names as ``package.module:Name``. Only this module imports
what is named there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent_peft.types import AgentPeftError


class NotImportedError(AgentPeftError):
    """Code that a configuration names is needed, and the command was not told to trust it."""


_passed_over: list[str] | None = (
    None  # the names that were met while nothing may be imported; None where all may be
)


@contextmanager
def without_imports() -> Iterator[list[str]]:
    """While inside, no thread imports what a configuration names. Gives the list that those names go to.

    >>> with without_imports() as names:
    ...     may_import("this:s")
    False
    >>> names
    ['this:s']
    """
    global _passed_over
    before, _passed_over = _passed_over, []
    try:
        yield _passed_over
    finally:
        _passed_over = before


def may_import(name: str) -> bool:
    """Whether what is named may be imported and run now. A check that gets False believes the name; who
    needs the code asks ``find``.
    """
    if _passed_over is not None and name not in _passed_over:
        _passed_over.append(name)
    return _passed_over is None


def find(name: str, form: str = "package.module:Class") -> Any:
    """What ``package.module:Name`` names.

    Raises:
        ValueError: it cannot be imported; with the ``form`` that a name has.
        NotImportedError: nothing may be imported now.

    >>> find("math:gcd")(12, 18)
    6
    """
    if not may_import(name):
        raise NotImportedError(
            f"{name!r} is code that the configuration names; it is imported only with --trust"
        )
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way
        raise ValueError(
            f"{name!r} cannot be imported ({type(error).__name__}: {error}); write it as {form}"
        ) from error
