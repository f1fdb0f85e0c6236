"""The commands that make a run and measure it: train, evaluate, merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_peft.cli.app import AsJson, ConfigFile, Overrides, complete_config, show
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.rollout.statistics import EvaluationReport

Checkpoint = Annotated[
    str | None, typer.Option(help="name of a checkpoint, such as step_000012; the newest by default")
]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="remove the run directory's earlier run and start over")
    ] = False,
) -> None:
    """Train the run that CONFIG describes, or resume it where it stopped."""
    from agent_peft.configuration.effective import keys_of
    from agent_peft.configuration.loading import read_config
    from agent_peft.runs.folder import check_place
    from agent_peft.runs.run import train

    settings = read_config(config, overrides or ())[0]
    if "run_dir" not in keys_of(overrides or ()):
        check_place(config, settings)
    train(settings, fresh=fresh)


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
    as_json: AsJson = False,
) -> None:
    """Measure a trained policy, or a model that was never trained."""
    from agent_peft.runs.targets import evaluate_target, load_target_config

    settings = load_target_config(target, config, overrides or (), tasks, attempts)
    report = evaluate_target(target, settings, checkpoint=checkpoint, base=base)
    if as_json:
        show(report.to_json())
    else:
        _show_tables({str(target): report})


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
        show({name: report.to_json() for name, report in reports.items()})
    else:
        _show_tables(reports)


def _show_tables(reports: dict[str, EvaluationReport]) -> None:
    from agent_peft.rollout.report_tables import skill_table, table

    show(table(reports))
    show(skill_table(reports))
