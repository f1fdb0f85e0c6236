"""The command line. Exit codes: 0 worked, 1 failed, 2 bad input, 130 interrupted; an error is one line on stderr.

What a command needs is imported inside it, so that ``agent-peft --help`` does not wait for torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_peft import __version__
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

app = typer.Typer(
    name="agent-peft",
    help="Teach language-model agents by letting them act.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it

Config = Annotated[Path, typer.Argument(help="a YAML file", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="such as optimizer.learning_rate=1e-4", metavar="[KEY=VALUE]...")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="start over, instead of going on where the run directory stands")] = False,
) -> None:
    """Train as CONFIG says, going on where an interrupted run of it stopped."""
    from agent_peft.training.loading import load_config
    from agent_peft.training.runs import train

    train(load_config(config, overrides or ())[0], fresh=fresh)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="a run directory, an adapter, or a model", metavar="RUN|MODEL")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="a YAML file, where the target is no run directory")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="such as step_000012 (default: the newest)")] = None,
    base: Annotated[bool, typer.Option("--base", help="the model before any training")] = False,
    tasks: Annotated[Path | None, typer.Option(help="a task file, instead of the configuration's")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="episodes of each task, for pass@k")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained policy, or a model that was never trained."""
    from agent_peft.rollout.evaluation import skill_table, table
    from agent_peft.training.loading import load_for_evaluation
    from agent_peft.training.runs import evaluate_target

    source = config or target / "config.yaml"
    settings = load_for_evaluation(source, overrides or (), tasks, attempts) if config or source.is_file() else None
    chosen = settings.evaluation if settings is not None else None
    report = evaluate_target(target, chosen, config=settings, checkpoint=checkpoint, base=base)
    if as_json:
        _show(report.to_json())
    else:
        _show(table({str(target): report}))
        _show(skill_table({str(target): report}))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="a run directory", metavar="RUN")],
    output: Annotated[Path, typer.Option(help="the folder to write")],
) -> None:
    """Write a run's newest policy as a model of its own, its adapter folded in."""
    from agent_peft.training.runs import merge_run

    merge_run(run, output)
    print(f"wrote {output}")


@app.command()
def generate(
    environment: Annotated[str, typer.Argument(help="db_bench", metavar="ENVIRONMENT")],
    output: Annotated[Path, typer.Option(help="the JSON file to write")],
    num_tasks: Annotated[int, typer.Option(help="how many")],
    seed: Annotated[int, typer.Option(help="another seed gives other tasks")] = 0,
    skills: Annotated[str | None, typer.Option(help="such as insert,limit_only (default: all)")] = None,
    split: Annotated[str, typer.Option(help="train or heldout, which share no table and no phrasing")] = "train",
) -> None:
    """Make up tasks with known answers."""
    from agent_peft.environments.db_bench.generator import generate
    from agent_peft.training.checkpoint import write_json_atomic

    if environment != "db_bench":
        raise AgentPeftError(f"no tasks can be generated for {environment!r}; choose db_bench")
    entries = generate(num_tasks, seed, [name.strip() for name in skills.split(",")] if skills is not None else None, split)
    try:
        write_json_atomic(output, entries)
    except OSError as error:
        raise AgentPeftError(f"{output}: cannot be written ({error.strerror}); give another --output") from error
    print(f"wrote {output}: {len(entries)} tasks of the {split} split, seed {seed}")


@app.command()
def validate(
    environment: Annotated[str, typer.Argument(help="db_bench", metavar="ENVIRONMENT")],
    tasks: Annotated[Path, typer.Option(help="a task file")],
    database: Annotated[str, typer.Option(help="what the tasks are replayed on")] = "sqlite",
    as_json: AsJson = False,
) -> None:
    """Replay the golds of a task file, and doing nothing. Exit code 1 if some tasks cannot be used."""
    from agent_peft.environments.validation import validate

    found = validate(environment, tasks, database)
    if as_json:
        _show(found)
    else:
        print(f"{found['tasks']} tasks: {found['gold_correct']} golds are correct, doing nothing is correct in {found['nothing_correct']}")
        for rejection in found["rejected"]:
            print(f"cannot be used: {rejection['id']}: {rejection['cause']}")
    if found["rejected"]:
        raise typer.Exit(1)


@app.command()
def explain(config: Config, overrides: Overrides = None) -> None:
    """Print what CONFIG will really do: every effective value, and where it came from."""
    from agent_peft.training.explain import explain
    from agent_peft.training.loading import load_config

    _show(explain(*load_config(config, overrides or ())))


def _show(content: Any) -> None:
    from rich.console import Console

    if isinstance(content, dict):
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        Console().print(content)


def run(arguments: Sequence[str]) -> int:
    """One command; its exit code."""
    try:
        code: int = app(args=list(arguments), prog_name="agent-peft", standalone_mode=False) or 0
        if code != INTERRUPTED:
            return code
    except _UsageError as error:
        return _fail(f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'agent-peft'} --help tells more)", 2)
    except (TrustError, InfrastructureError) as error:
        return _fail(str(error), 1)
    except AgentPeftError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):  # some versions of typer raise, others return 130
        pass
    return _fail("interrupted" + ("; run the same command (without --fresh) to go on" if arguments[:1] == ["train"] else ""), INTERRUPTED)


def _fail(message: str, code: int) -> int:
    print("agent-peft: " + " ".join(message.split()), file=sys.stderr)
    return code


def main() -> None:
    """The console script."""
    sys.path.insert(0, "")  # a user's own environment is found from the current directory, as with python -m
    sys.exit(run(sys.argv[1:]))
