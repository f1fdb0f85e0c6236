"""The commands that compare configurations: sweep trains them, compare tests for differences."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_peft.cli.app import LINE, AsJson, ConfigFile, print_output
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError, InfrastructureError

if TYPE_CHECKING:
    from agent_peft.runs.comparison import RunComparison


def sweep(
    config: ConfigFile,
    values: Annotated[
        list[str],
        typer.Argument(
            help="overrides; a list is the values to try, and seeds=3 is seed=[0,1,2]",
            metavar="KEY=[VALUE,...]...",
        ),
    ],
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time; they share the cores")] = 1,
) -> None:
    """Train CONFIG with each combination of values and seeds, and compare the runs. The same command resumes
    a sweep that was stopped.
    """
    from agent_peft.runs.sweep import OUTPUT, plan, train_cells

    cells = plan(config, values, jobs)
    if jobs > 1:
        print(f"each run prints to its {OUTPUT}; agent-peft runs {cells[0].folder.parent} lists their steps")
    failed, started = [], 0
    for cell, code in train_cells(config, cells, jobs):
        started += code is None
        state = (
            f"run {started} of {len(cells)}" if code is None else "done" if code == 0 else f"exit code {code}"
        )
        print(printable(f"{cell.folder}: {state}", LINE), flush=True)
        if code:
            failed.append(cell.folder)
    if failed:
        raise InfrastructureError(
            f"{len(failed)} of {len(cells)} runs failed, such as {failed[0]}; agent-peft runs "
            f"{failed[0].parent} shows the causes, and the same command resumes"
        )
    compare([cell.folder for cell in cells])


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="run directories, and folders with some", metavar="RUN...")
    ],
    evaluation: Annotated[
        str | None, typer.Option(help="an evaluation such as after_sft; by default, that at the end of a run")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV, a line for each configuration")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs on their held-out tasks: means over seeds by what differs in their configurations, 95 %
    intervals and paired tests.
    """
    from agent_peft.runs.comparison import compare_runs

    if as_csv and as_json:
        raise AgentPeftError("--csv and --json are two forms of one output; leave one of them out")
    comparison = compare_runs(runs, evaluation)
    if as_json:
        print_output(comparison.to_json())
        return
    if as_csv:
        print(_csv(comparison), end="")
    else:
        print_output(comparison.table())
    for warning in comparison.warnings:
        typer.echo("agent-peft: " + printable(warning, LINE), err=True)


def _csv(comparison: RunComparison) -> str:
    rows, text = comparison.rows(), io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
