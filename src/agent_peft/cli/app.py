"""The application that the commands belong to, and what they share: arguments and printing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_peft.printable import Printable
from agent_peft.version import __version__

app = typer.Typer(
    name="agent-peft",
    help="Teach language-model agents by letting them act.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
LINE = 2000  # characters of an error
WIDE = 10_000  # columns of a file or a pipe, where a table's lines are never broken


def complete_config(incomplete: str) -> list[str]:
    """The bundled configurations and the paths that a shell may complete a text to."""
    from agent_peft.configuration import bundled_configs

    paths = [f"{path}/" if Path(path).is_dir() else path for path in glob(f"{escape(incomplete)}*")]
    return sorted([*(name for name in bundled_configs() if name.startswith(incomplete)), *paths])


ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="YAML file, or the name of a bundled configuration, such as quickstart",
        metavar="CONFIG",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="keys that replace those of the configuration, such as optimizer.learning_rate=1e-4",
        metavar="[KEY=VALUE]...",
    ),
]
Host = Annotated[str, typer.Option(help="address to listen on; anything but loopback requires --token")]
Port = Annotated[int, typer.Option(help="port to listen on; 0 chooses a free one")]
Token = Annotated[
    str | None,
    typer.Option(help="name of the environment variable that holds the token", metavar="VARIABLE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def print_output(content: Any) -> None:
    """Print a mapping as JSON, and a table to fit the terminal; in a pipe its lines are never broken."""
    from rich.console import Console

    if isinstance(content, dict):
        print(json.dumps(content, indent=2))
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = WIDE
        console.print(Printable(content))


def print_rows(renderable: Any, lines: Iterable[str]) -> None:
    """Print something that rich can draw on a terminal, and ``lines`` to a file or a pipe."""
    from rich.console import Console

    if Console().is_terminal:
        print_output(renderable)
    else:
        print("\n".join(lines))
