"""A kind of generated task: the request in several wordings, the script before it, a solution, and a check of
the result. Its names of folders, files, people and groups, and its words, come from two disjoint pools.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
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


def _read_names() -> dict[str, Names]:
    pools = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
    return {
        split: Names(
            joints=tuple(map(tuple, pool.pop("joints"))),
            **{name: tuple(words.split()) for name, words in pool.items()},
        )
        for split, pool in pools.items()
    }


SPLITS = _read_names()


class PathSlot(str):
    """A path, whose ``parent`` and ``name`` a template may ask for.

    >>> "{0.parent} {0.name}".format(PathSlot("/srv/atlas/notes.txt"))
    '/srv/atlas notes.txt'
    """

    @property
    def parent(self) -> str:
        return self.rsplit("/", 1)[0]

    @property
    def name(self) -> str:
        return self.rsplit("/", 1)[1]


class Account(str):
    """The name of a user or group, and the ``number`` that it has if a task begins with it; nothing that is
    made later has one so low.

    >>> "{0} {0.number}".format(Account("alice", 1100))
    'alice 1100'
    """

    number: int

    def __new__(cls, name: str, number: int) -> Account:
        account = super().__new__(cls, name)
        account.number = number
        return account


class Slots(dict[str, str]):
    """The values of a template's slots. A slot is drawn when it is first read. Its name without the number
    says what is drawn, and no two slots of a task are equal.
    """

    def __init__(self, names: Names, rng: random.Random, used: set[str]) -> None:
        super().__init__()
        self.names, self.rng, self.used = names, rng, used

    def __missing__(self, slot: str) -> str:
        draw = _DRAWS[slot.rstrip("0123456789")]
        while not self.used.isdisjoint(claims := _claims(value := draw(self))):
            pass
        self.used |= claims
        self[slot] = value
        return value

    def fill(self, template: str) -> str:
        return template.format_map(self)


@dataclass(frozen=True)
class Kind:
    """One kind of task.

    What there is, ``before`` and ``after``, is said in the words of ``tree`` and ``accounts`` in checks.sh:
    ``/srv/atlas/`` is a folder, ``/srv/atlas/notes.txt`` a file, ``user:alice:1100`` a user; folders above
    need not be named. Of the names that tasks use there must be nothing else, so that it does not help to
    make, change or remove all there could be. For the same reason each task begins with the same things once
    more under other names, its twin, which must stay as it is.
    """

    skills: tuple[str, ...]  # the commands its solution uses, the one that it is about first
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    gold: str
    init: str = ""
    before: str = ""  # what there is once ``init`` has run
    after: str | None = None  # what there is in the end; None: the same
    check: str = ""  # what else holds in the end, in the words of checks.sh
    kept: str = ""  # what else holds of the twin, which is as it was
    runs: str = ""  # a check that runs what the agent wrote, and thus comes last
    # fills slots that hang together, such as the lines of a file and what is found in them
    draw: Callable[[Slots], None] | None = None

    def slots(self, names: Names, rng: random.Random, used: set[str], **known: str) -> Slots:
        slots = Slots(names, rng, used)
        slots.update(known)
        if self.draw is not None:
            self.draw(slots)
        return slots


def _claims(value: str) -> set[str]:
    """The values that no other slot may have. A file claims its folder, too: no other request may use it."""
    return {value, value.parent} if isinstance(value, PathSlot) and value.count("/") == 3 else {value}


def _dir(slots: Slots) -> str:
    return PathSlot(f"{slots.rng.choice(slots.names.tops)}/{slots.rng.choice(slots.names.folders)}")


def _name(slots: Slots) -> str:
    return f"{slots.rng.choice(slots.names.stems)}.{slots.rng.choice(slots.names.extensions)}"


def _file(slots: Slots) -> str:
    return PathSlot(f"{_dir(slots)}/{_name(slots)}")


def _script(slots: Slots) -> str:
    return PathSlot(f"{_dir(slots)}/{slots.rng.choice(slots.names.stems)}.sh")


def _text(slots: Slots) -> str:
    return " ".join(slots.rng.sample(slots.names.words, slots.rng.choice((2, 2, 3))))


def _number(low: int, high: int) -> Callable[[Slots], str]:
    return lambda slots: str(slots.rng.randint(low, high))


def _account(names: Sequence[str], first: int, rng: random.Random) -> str:
    name = rng.choice(names)
    return Account(name, first + names.index(name))


MODES = ("600", "640", "644", "660", "664", "700", "750", "755", "770", "775", "444", "400")
SHELLS = ("/bin/sh", "/bin/bash")

_DRAWS: dict[str, Callable[[Slots], str]] = {
    "dir": _dir,
    "file": _file,
    "script": _script,
    "name": _name,
    "folder": lambda slots: slots.rng.choice(slots.names.folders),
    "stem": lambda slots: slots.rng.choice(slots.names.stems),
    "user": lambda slots: _account(slots.names.users, 1100, slots.rng),
    "group": lambda slots: _account(slots.names.groups, 1300, slots.rng),
    "word": lambda slots: slots.rng.choice(slots.names.words),
    "text": _text,
    "mode": lambda slots: slots.rng.choice(MODES),
    "shell": lambda slots: slots.rng.choice(SHELLS),
    "id": _number(2001, 9999),
    "days": _number(2, 120),
    "code": _number(2, 99),
}


def bash_words(lines: Sequence[str]) -> str:
    """Words of bash, one a line; the lines hold no quotes."""
    return " ".join(f"'{line}'" for line in lines)


def some_lines(slots: Slots) -> None:
    """``lines``: the ``matching`` hold ``word``, the ``others`` none; ``replaced`` has ``word2`` instead."""
    word, word2 = slots["word"], slots["word2"]
    rng = slots.rng
    pool = [other for other in slots.names.words if other not in (word, word2)]
    count = rng.randint(4, 6)
    chosen = set(rng.sample(range(count), rng.randint(1, count - 2)))
    lines = []
    for i in range(count):
        words = rng.sample(pool, 2)
        words.insert(rng.randint(0, 2), word if i in chosen else rng.choice(pool))
        lines.append(" ".join(words))
    matching = [line for i, line in enumerate(lines) if i in chosen]
    number = rng.randint(2, count)
    slots.update(
        lines=bash_words(lines),
        matching=bash_words(matching),
        others=bash_words([line for i, line in enumerate(lines) if i not in chosen]),
        replaced=bash_words([line.replace(word, word2) for line in lines]),
        hits=str(len(matching)),
        line_count=str(count),
        word_count=str(3 * count),
        byte_count=str(sum(len(line) + 1 for line in lines)),
        line_number=str(number),
        chosen_line=bash_words([lines[number - 1]]),
    )


def some_columns(slots: Slots) -> None:
    """``lines`` with three columns (a word, and two numbers), in ``commas`` too; ``column`` is the chosen
    one, ``total`` of the last.
    """
    rng = slots.rng
    rows = [
        (word, str(rng.randint(1, 99)), str(rng.randint(1, 99)))
        for word in rng.sample(slots.names.words, rng.randint(3, 5))
    ]
    column = rng.randint(1, 3)
    slots.update(
        lines=bash_words([" ".join(row) for row in rows]),
        commas=bash_words([",".join(row) for row in rows]),
        column=str(column),
        ordinal=("first", "second", "third")[column - 1],
        cells=bash_words([row[column - 1] for row in rows]),
        total=str(sum(int(row[2]) for row in rows)),
    )


def a_folder_of_files(slots: Slots) -> None:
    """``found`` and ``rest``: files of two extensions in ``dir`` and below, as words of bash; ``entries``:
    the names right in it.
    """
    rng = slots.rng
    folder = slots["dir"]
    sub = slots["folder"]
    extension, other = rng.sample(slots.names.extensions, 2)
    if slots.get("ext", extension) != extension:  # a twin's
        extension, other = slots["ext"], extension
    stems = rng.sample(slots.names.stems, 5)
    found = [f"{folder}/{stems[0]}.{extension}", f"{folder}/{sub}/{stems[1]}.{extension}"]
    found += [f"{folder}/{sub}/{stems[4]}.{extension}"] if rng.random() < 0.5 else []
    rest = [f"{folder}/{stems[2]}.{other}", f"{folder}/{sub}/{stems[3]}.{other}"]
    top = [path for path in (*found, *rest) if path.count("/") == folder.count("/") + 1]
    slots.update(
        sub=f"{folder}/{sub}",
        ext=extension,
        found=" ".join(found),
        rest=" ".join(rest),
        entries=" ".join([*(path.rsplit("/", 1)[1] for path in top), sub]),
        entry_count=str(len(top) + 1),
        found_count=str(len(found)),
    )


def a_date(slots: Slots) -> None:
    """``date``, and ``epoch_days``, which is how /etc/shadow writes it."""
    days = slots.rng.randint(21_200, 23_000)
    slots.update(
        date=(datetime.date(1970, 1, 1) + datetime.timedelta(days)).isoformat(), epoch_days=str(days)
    )


def another_shell(slots: Slots) -> None:
    """``shell``, and ``old_shell``, which is another."""
    slots["old_shell"] = "/bin/sh" if slots["shell"] == "/bin/bash" else "/bin/bash"


def paths_of_hits(slots: Slots) -> None:
    """``hit_paths``: the files of ``dir`` that hold ``word`` where ``name`` and ``name3`` do."""
    slots.update(hit_paths=f"{slots['dir']}/{slots['name']} {slots['dir']}/{slots['name3']}")


DRAWS: dict[str, Callable[[Slots], None]] = {
    draw.__name__: draw
    for draw in (some_lines, some_columns, a_folder_of_files, a_date, another_shell, paths_of_hits)
}
