"""The commands that make a run, measure it and list it: train, evaluate, merge, runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_peft.cli.app import AsJson, ConfigFile, Overrides, complete_config, print_output
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.rollout.statistics import EvaluationReport

Checkpoint = Annotated[
    str | None, typer.Option(help="name of a checkpoint, such as step_000012, or best; default: the newest")
]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="remove the run directory's earlier run and start over")
    ] = False,
    change: Annotated[
        bool, typer.Option("--change", help="continue with other values of keys that decide what is learned")
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[:STEP]",
            help="begin a new run with this checkpoint of another one, and count on from there",
        ),
    ] = None,
    journal: Annotated[
        str | None,
        typer.Option(
            "--from-journal",
            metavar="RUN",
            help="learn from the episodes of a run of the same configuration, and sample none",
        ),
    ] = None,
) -> None:
    """Train the run that CONFIG describes, or resume it where it stopped."""
    from agent_peft.configuration.load import read_config

    settings = read_config(config, overrides or (), on_checked=_note_loading)[0]
    from agent_peft.runs.run import train  # with torch, which a typo need not wait for

    train(settings, fresh=fresh, change=change, begin=begin, journal=journal)


def _note_loading() -> None:
    from rich.console import Console

    from agent_peft.output import lasting_output
    from agent_peft.runs.progress import Progress

    if os.environ.get("RANK", "0") == "0":  # the other ranks print nothing
        with lasting_output():
            Progress(Console()).note("loading torch and Transformers")


def evaluate(
    target: Annotated[
        Path,
        typer.Argument(help="run directory, adapter folder, model folder or model name", metavar="RUN|MODEL"),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="configuration to measure with, if the target is not a run directory",
            autocompletion=complete_config,
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    base: Annotated[bool, typer.Option("--base", help="measure the model before any training")] = False,
    tasks: Annotated[
        Path | None, typer.Option(help="task file to measure on, instead of the configuration's tasks")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="episodes of each task, for pass@k")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="folder to write the report and the episodes to; it must be new or empty"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained policy, or a model that was never trained."""
    from rich.console import Console

    from agent_peft.runs.evaluations import write_evaluation
    from agent_peft.runs.progress import Progress
    from agent_peft.runs.targets import check_empty, evaluate_target, load_target_config

    if output is not None:
        check_empty(output)
    settings = load_target_config(target, config, overrides or (), tasks, attempts)
    with Progress(Console(stderr=True)) as progress:
        report = evaluate_target(target, settings, checkpoint=checkpoint, base=base, progress=progress)
    if as_json:
        print_output(report.to_json())
    else:
        _show_tables({" ".join(filter(None, (report.run, report.checkpoint))): report})
    if output is not None:  # last, so that a full disk does not lose the report
        write_evaluation(output.resolve() / "evaluation.json", report)


def merge(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    output: Annotated[Path, typer.Option(help="folder to write the model to; it must be new or empty")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    both: Annotated[
        bool, typer.Option("--evaluate", help="also measure the adapter and the merged model")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge a run's adapter into its model, and write a model that needs no PEFT."""
    from agent_peft.runs.targets import evaluate_target, load_for_merging, merge_run

    if as_json and not both:
        raise AgentPeftError("--json has an effect with --evaluate only; add it, or leave --json out")
    settings = load_for_merging(run, overrides or (), both)
    merge_run(run, output, checkpoint, settings)
    if not as_json:
        print(f"wrote {output}")
    if not both:
        return
    reports = {
        "adapter": evaluate_target(run, settings, checkpoint=checkpoint),
        "merged": evaluate_target(output, settings),
    }
    if as_json:
        print_output({name: report.to_json() for name, report in reports.items()})
    else:
        _show_tables(reports)


def runs(
    folder: Annotated[Path, typer.Argument(help="folder to search", metavar="[FOLDER]")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder: state, step, best evaluation and time left."""
    from dataclasses import asdict

    from agent_peft.runs.overview import find_runs, overview, summarize_run

    summaries = [summarize_run(run) for run in find_runs(folder)]
    if as_json:
        print_output({"runs": [asdict(summary) for summary in summaries]})
    else:
        print_output(overview(summaries))


def _show_tables(reports: dict[str, EvaluationReport]) -> None:
    from agent_peft.rollout.report_tables import tables

    for table in tables(reports):
        print_output(table)
