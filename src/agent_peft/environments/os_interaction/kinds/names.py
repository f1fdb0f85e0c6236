"""The names of folders, files, people and groups, and the words of generated tasks, in two disjoint pools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Names:
    """The pools of one split, and how it asks for several things at once (``joints``: what stands before each
    request).

    >>> set(SPLITS["train"].users) & set(SPLITS["heldout"].users)
    set()
    """

    tops: tuple[str, ...]
    folders: tuple[str, ...]
    stems: tuple[str, ...]
    extensions: tuple[str, ...]
    users: tuple[str, ...]
    groups: tuple[str, ...]
    words: tuple[str, ...]
    joints: tuple[tuple[str, str, str], ...]


def _read() -> dict[str, Names]:
    pools = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        split: Names(
            joints=tuple(map(tuple, pool.pop("joints"))),
            **{name: tuple(words.split()) for name, words in pool.items()},
        )
        for split, pool in pools.items()
    }


SPLITS = _read()
