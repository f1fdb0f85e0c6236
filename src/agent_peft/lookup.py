"""Names in a configuration: importing a user's code by ``package.module:Name``, and advice on a misspelled
name. No other module imports by name.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent_peft.types import AgentPeftError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
ALIKE = 0.7  # of difflib's ratio: below it, a name is not taken for a misspelling of another one


class NotImportedError(AgentPeftError):
    """A configuration names code that is needed, and the command does not trust it."""


_refused: list[str] | None = None  # the names asked for while nothing may be imported; None: all may be


@contextmanager
def without_imports() -> Iterator[list[str]]:
    """Inside this context, no thread imports the code that a configuration names. Yield the list that
    collects those names.

    >>> with without_imports() as names:
    ...     may_import("this:s")
    False
    >>> names
    ['this:s']
    """
    global _refused
    before, _refused = _refused, []
    try:
        yield _refused
    finally:
        _refused = before


def may_import(name: str) -> bool:
    """Whether the named code may be imported and run now. If not, a check must accept the name as it is;
    ``find`` raises.
    """
    if _refused is not None and name not in _refused:
        _refused.append(name)
    return _refused is None


def find(name: str, form: str = "package.module:Class") -> Any:
    """Import and return the object that ``package.module:Name`` names.

    Raises:
        ValueError: it cannot be imported.
        NotImportedError: nothing may be imported now.

    >>> find("math:gcd")(12, 18)
    6
    """
    if not may_import(name):
        raise NotImportedError(
            f"{name!r} is code that the configuration names; it is imported only with --trust"
        )
    module, _, attribute = name.partition(":")
    if re.search(r"[/\\]|^\.|\.py$", module):
        words = re.findall(r"\w+", module.removesuffix(".py"))
        raise ValueError(
            f"{name!r} names a path where a module is expected; write it as {form}, such as "
            f"{'.'.join(words)}:{attribute}"
        )
    try:
        return _imported(name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ValueError(
            f"{name!r} cannot be imported ({type(error).__name__}: {error}); write it as {form}"
        ) from error


class Rows(Mapping[str, Any]):
    """Our own objects by name, each named as ``package.module:Name`` and imported at its first use.

    >>> rows = Rows({"gcd": "math:gcd"})
    >>> list(rows), rows["gcd"](12, 18)
    (['gcd'], 6)
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        return _imported(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def nearest(name: object, candidates: Iterable[str] | Mapping[str, str], custom: str = "") -> str:
    """Return advice on a name that does not exist: the candidate that it resembles, or all candidates.

    Args:
        candidates: the valid names; or each of them with the text that stands for it in the advice.
        custom: how a user writes a name that is none of the candidates.

    >>> nearest("GRPO", ["grpo", "rloo"])
    "did you mean 'grpo'?"
    >>> nearest("rate", ["sft", "rloo"], "your own as package.module:row")
    'give one of sft, rloo, or your own as package.module:row'
    """
    texts = candidates if isinstance(candidates, Mapping) else {text: text for text in candidates}
    resembled = alike(name, texts)
    if resembled is not None:
        return f"did you mean {texts[resembled]!r}?"
    return f"give one of {', '.join([*texts.values(), *([f'or {custom}'] if custom else [])])}"


def alike(name: object, candidates: Iterable[str]) -> str | None:
    """The candidate of which a name is a misspelling, if there is one: first one with two letters swapped,
    then one with one other letter, then the most similar. Case does not count.

    >>> alike("lerning_rate", ["learning_rate", "steps"]), alike("gpro", ["gspo", "grpo"])
    ('learning_rate', 'grpo')
    """
    names, text = {known.lower(): known for known in candidates}, str(name).lower()
    for edit in (0, 1) if len(text) > 2 else ():
        if near := [known for known in names if _edit(text, known) == edit]:
            return names[difflib.get_close_matches(text, near, 1, 0.0)[0]]
    closest = difflib.get_close_matches(text, names, 1, ALIKE)
    return names[closest[0]] if closest else None


def _edit(text: str, known: str) -> int:
    """0 for equal texts and two swapped neighbours, 1 for one letter that is missing, added or another one,
    and 2 for more.
    """
    a, b = text, known
    for _ in range(2):  # without what both begin with; then, backwards, without what both end with
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        a, b = a[same:][::-1], b[same:][::-1]
    if len(a) in (0, 2) and a == b[::-1]:
        return 0
    return 1 if max(len(a), len(b)) == 1 else 2


def install(extra: str) -> str:
    """The command that installs an extra. No registry has the package, so it is that of a clone.

    >>> install("server")
    "pip install '.[server]' in the clone of Agent-PEFT"
    """
    return f"pip install '.[{extra}]' in the clone of Agent-PEFT"


@contextmanager
def needed(message: str) -> Iterator[None]:
    """Inside, a package is imported. If it is not installed, the error is this message."""
    try:
        yield
    except ImportError as error:
        raise AgentPeftError(message) from error


def is_hub_id(name: str) -> bool:
    """Whether a name without a path here may be one of the hub: ``name`` or ``owner/name``, of which
    ``owner`` is neither a folder here nor ``runs``, the default folder of runs.

    >>> [is_hub_id(name) for name in ("gpt2", "openai/gsm8k", "./gpt2", "../a", "~/a", "/a", "a/b/c")]
    [True, True, False, False, False, False, False]
    """
    owner, slash, _ = name.partition("/")
    return _HUB_ID.fullmatch(name) is not None and not (slash and (owner == "runs" or Path(owner).is_dir()))


def nearest_path(name: str, others: Iterable[str] = ()) -> str:
    """Advice on a path that is not there: one of ``others``, or the folder that its name resembles."""
    path = Path(name).expanduser()
    known = {} if path.name != name else {other: other for other in others}
    with suppress(OSError):
        known |= {one.name: str(one) for one in path.parent.iterdir() if one.is_dir()}
    near = alike(path.name, known)
    return "" if near is None else f"; did you mean {known[near]!r}?"
