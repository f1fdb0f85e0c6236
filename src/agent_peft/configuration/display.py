"""How an explanation looks: tables on a terminal, and lines in a file or a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_peft.configuration.keys import Key
from agent_peft.policies.memory import StageMemory, in_words
from agent_peft.printable import printable

Values = Mapping[str, tuple[Any, str, str]]  # by key path: the value, its origin, and what the key does
Rows = Mapping[str, str]

NO_SHAPE = "unknown: the model is a custom module, or it is not on this machine yet"


def tables_of(
    source: str, values: Values, facts: Rows, memory: Mapping[str, StageMemory], needs: Rows, machine: Rows
) -> RenderableType:
    """The tables of an explanation."""
    return Group(
        values_table(source, values),
        rows_table("what follows", facts),
        memory_table(memory),
        rows_table("what the run needs of this machine", needs),
        machine_table(machine),
    )


def lines_of(
    values: Values, facts: Rows, memory: Mapping[str, StageMemory], needs: Rows, machine: Rows
) -> Iterator[str]:
    """A line for each value, with tabs between the columns. No line depends on another one."""
    for path, (value, origin, description) in values.items():
        yield _line(path, _as_text(value), origin, description)
    for name, text in facts.items():
        yield _line(name, text)
    for name, one in memory.items():
        yield _line(f"memory of {name}", in_words(one.peak))
    if not memory:
        yield _line("memory", NO_SHAPE)
    for name, text in needs.items():
        yield _line(f"needs {name}", text)
    yield from machine_lines(machine)


def machine_lines(machine: Rows) -> Iterator[str]:
    """A line for each thing that the machine offers."""
    for name, text in machine.items():
        yield _line(f"machine {name}", text)


def machine_table(machine: Rows) -> Table:
    return rows_table("this machine", machine)


def values_table(source: str, values: Values) -> Table:
    table = Table(title=source, title_justify="left")
    table.add_column("key", no_wrap=True)
    for heading in ("value", "from", "what it does"):
        table.add_column(heading, overflow="fold")
    section = ""
    for path, (value, origin, description) in values.items():
        stage = ".".join(path.split(".")[:2]) if path.startswith("stages.") else ""
        if stage != section:
            section = stage
            table.add_section()
            table.add_row(Text(stage, style="bold"), "", "", "")
        table.add_row(
            Text(path.removeprefix(f"{stage}.") if stage else path),
            Text(_as_text(value)),
            Text(origin.replace(source, Path(source).name), style="dim" if origin == "default" else ""),
            Text(description),
        )
    return table


def keys_table(keys: Sequence[Key]) -> Table:
    """Every key with its type, default and description."""
    table = Table("key", "of kind", "type", "default", "what it does")
    for key in keys:
        table.add_row(*map(Text, (key.path, key.kind, key.type, key.default, key.description)))
    return table


def memory_table(memories: Mapping[str, StageMemory]) -> Table:
    """The parts of the stage (or evaluation) with the largest peak, and the numbers that each comes from."""
    table = Table(title="memory, at most", title_justify="left", show_header=False)
    if not memories:
        table.add_row(NO_SHAPE)
        return table
    largest = max(memories.values(), key=lambda memory: memory.peak)
    phases = {"always": largest.always, "sampling": largest.sampling, "training": largest.training}
    for phase, parts in phases.items():
        for part in parts:
            table.add_row(phase, part.name, in_words(part.size), Text(part.source))
        table.add_section()
    peaks = ", ".join(f"{in_words(memory.peak)} in {name}" for name, memory in memories.items())
    reason = "always + the larger phase" + (f": {peaks}" if len(memories) > 1 else "")
    table.add_row("peak", "", in_words(largest.peak), Text(reason))
    return table


def rows_table(title: str, rows: Rows) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _line(*columns: str) -> str:
    return "\t".join(map(printable, columns))
