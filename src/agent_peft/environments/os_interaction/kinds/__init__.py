"""The kinds of generated tasks, read from the YAML files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from agent_peft.environments.os_interaction.kinds.base import DRAWS, Kind, Slots

_FOLDER = Path(__file__).parent
_LISTS = ("skills", "train", "heldout")
CHECKS = "".join(  # the functions that checks are written in
    line
    for line in (_FOLDER / "checks.sh").read_text(encoding="utf-8").splitlines(keepends=True)
    if line.strip() and not line.startswith("#")
)


@cache
def kinds() -> dict[str, tuple[Kind, ...]]:
    """The kinds of tasks by the skill that they are about."""
    found = [kind for name in ("files", "listings", "text", "lines", "accounts") for kind in _read(name)]
    skills = dict.fromkeys(kind.skills[0] for kind in found)
    return {skill: tuple(kind for kind in found if kind.skills[0] == skill) for skill in skills}


@cache
def chains() -> tuple[Kind, ...]:
    """The kinds of tasks that need several commands for one thing."""
    return tuple(_read("chains"))


def _read(name: str) -> Iterator[Kind]:
    path = _FOLDER / f"{name}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for row in yaml.load(path.read_text(encoding="utf-8"), loader):
        try:
            draw = {"draw": DRAWS[row["draw"]]} if "draw" in row else {}
            yield Kind(**{**row, **{key: tuple(row[key]) for key in _LISTS}, **draw})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: {row.get('gold', row)}: {error!r}") from error


__all__ = ["CHECKS", "Kind", "Slots", "chains", "kinds"]
