"""The command line. Exit codes: 0 worked, 1 failed, 2 bad input, 130 interrupted; an error is one line on
stderr.

What a command needs is imported inside it, so that ``agent-peft --help`` does not wait for torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_peft import __version__
from agent_peft.printable import Printable, printable
from agent_peft.search_path import search_current_folder_last
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

app = typer.Typer(
    name="agent-peft",
    help="Teach language-model agents by letting them act.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130
LINE = 2000  # characters of an error
WIDE = 10_000  # columns of a file or a pipe, where a table's lines are never broken
TRACEBACK = "AGENT_PEFT_TRACEBACK"
_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it

Config = Annotated[Path, typer.Argument(help="a YAML file", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="such as optimizer.learning_rate=1e-4", metavar="[KEY=VALUE]...")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start over, instead of going on where the run directory stands")
    ] = False,
) -> None:
    """Train as CONFIG says, going on where an interrupted run of it stopped."""
    from agent_peft.configuration.effective import keys_of
    from agent_peft.configuration.loading import load_config
    from agent_peft.runs.folder import check_place
    from agent_peft.runs.run import train

    settings = load_config(config, overrides or ())[0]
    if "run_dir" not in keys_of(overrides or ()):
        check_place(config, settings)
    train(settings, fresh=fresh)


@app.command()
def evaluate(
    target: Annotated[
        Path, typer.Argument(help="a run directory, an adapter, or a model", metavar="RUN|MODEL")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option(help="a YAML file, where the target is no run directory")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="such as step_000012 (default: the newest)")] = None,
    base: Annotated[bool, typer.Option("--base", help="the model before any training")] = False,
    tasks: Annotated[Path | None, typer.Option(help="a task file, instead of the configuration's")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="episodes of each task, for pass@k")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained policy, or a model that was never trained."""
    from agent_peft.rollout.statistics import skill_table, table
    from agent_peft.runs.targets import evaluate_target, load_target_config

    settings = load_target_config(target, config, overrides or (), tasks, attempts)
    report = evaluate_target(target, settings, checkpoint=checkpoint, base=base)
    if as_json:
        _show(report.to_json())
    else:
        _show(table({str(target): report}))
        _show(skill_table({str(target): report}))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="a run directory", metavar="RUN")],
    output: Annotated[Path, typer.Option(help="the folder to write")],
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, typer.Option(help="such as step_000012 (default: the newest)")] = None,
    both: Annotated[
        bool, typer.Option("--evaluate", help="measure the adapter and the merged model, too")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's policy as a model of its own, its adapter folded in."""
    from agent_peft.rollout.statistics import skill_table, table
    from agent_peft.runs.targets import evaluate_target, load_for_merging, merge_run

    if as_json and not both:
        raise AgentPeftError("--json has an effect with --evaluate only; add it, or leave --json out")
    settings = load_for_merging(run, overrides or (), both)
    merge_run(run, output, checkpoint, settings)
    if not both:
        print(f"wrote {output}")
        return
    reports = {
        "adapter": evaluate_target(run, settings, checkpoint=checkpoint),
        "merged": evaluate_target(output, settings),
    }
    if as_json:
        _show({name: report.to_json() for name, report in reports.items()})
    else:
        print(f"wrote {output}")
        _show(table(reports))
        _show(skill_table(reports))


@app.command()
def generate(
    environment: Annotated[str, typer.Argument(help="db_bench or os_interaction", metavar="ENVIRONMENT")],
    output: Annotated[Path, typer.Option(help="the JSON file to write")],
    num_tasks: Annotated[int, typer.Option(help="how many")],
    seed: Annotated[int, typer.Option(help="another seed gives other tasks")] = 0,
    skills: Annotated[
        str | None, typer.Option(help="such as insert,limit_only or mkdir,chmod (default: all)")
    ] = None,
    split: Annotated[
        str, typer.Option(help="train or heldout, which share no name and no phrasing")
    ] = "train",
    combined: Annotated[
        float | None,
        typer.Option(help="os_interaction: the share of tasks that ask for several things (0.25)"),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--validate", help="replay them too, as agent-peft validate does")
    ] = False,
) -> None:
    """Make up tasks with known answers."""
    from agent_peft.environments.task_files.generation import generate_entries
    from agent_peft.runs.checkpoint import write_json_atomic

    wanted = [name.strip() for name in skills.split(",")] if skills is not None else None
    entries = generate_entries(environment, num_tasks, seed, wanted, split, {"combined": combined})
    try:
        write_json_atomic(output, entries)
    except OSError as error:
        raise AgentPeftError(
            f"{output}: cannot be written ({error.strerror}); give another --output"
        ) from error
    print(f"wrote {output}: {len(entries)} tasks of the {split} split, seed {seed}")
    if replay:
        _replay(environment, output, {}, as_json=False)


@app.command()
def validate(
    environment: Annotated[
        str, typer.Argument(help="db_bench, os_interaction, or package.module:Class", metavar="ENVIRONMENT")
    ],
    tasks: Annotated[
        Path | None, typer.Option(help="a task file; a class of your own may do without")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="db_bench: what the tasks are replayed on (sqlite)")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="os_interaction: where the tasks are replayed (namespaces)")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="os_interaction: how many at a time (4)")] = None,
    command_timeout: Annotated[
        float | None, typer.Option(help="os_interaction: seconds a ground truth may take (60)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay the golds of a task file, and doing nothing. Exit code 1 if some tasks cannot be used."""
    options = {
        "database": database,
        "sandbox": sandbox,
        "threads": threads,
        "command_timeout": command_timeout,
    }
    _replay(environment, tasks, options, as_json)


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="gsm8k or lifelong_agent_bench", metavar="NAME")],
    output: Annotated[Path | None, typer.Option(help="the folder to write (default: data/NAME)")] = None,
) -> None:
    """Fetch a set of tasks from the Hugging Face hub."""
    from agent_peft.environments.task_files.download import download

    for file in download(name, output or Path("data") / name):
        print(f"wrote {file}")


@app.command()
def serve(
    config: Config,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="another than this machine's own needs a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    examples_port: Annotated[
        int | None, typer.Option(help="of the example conversations (default: the next one)")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="the name of the environment variable that holds it", metavar="VARIABLE"),
    ] = None,
    max_episodes: Annotated[int, typer.Option(min=1, help="at once")] = 1024,
    idle_seconds: Annotated[
        float, typer.Option(min=1, help="until an episode whose client is silent is closed")
    ] = 600.0,
) -> None:
    """Serve CONFIG's environments over HTTP, until SIGTERM or SIGINT."""
    from agent_peft.configuration.effective import EFFECTIVE, refuse_ineffective
    from agent_peft.configuration.loading import load_config
    from agent_peft.environments import load_environment
    from agent_peft.environments.http.connection import read_token
    from agent_peft.environments.http.limits import Limits
    from agent_peft.environments.http.server import Address, serve

    settings = load_config(config, overrides or ())[0]
    refuse_ineffective("serve", overrides or (), EFFECTIVE["serve"])
    served = {"train": load_environment(settings.environment)}
    if settings.evaluation is not None:
        served["evaluation"] = load_environment(settings.evaluation.environment)
    limits = Limits(episodes=max_episodes, idle_seconds=idle_seconds)
    serve(served, Address(host, port, examples_port), limits, read_token(token) if token else None)


@app.command()
def explain(
    config: Config,
    overrides: Overrides = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="import and run the code that CONFIG names, as train does")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what CONFIG will really do: every effective value, and where it came from. Code that CONFIG
    names (package.module:Name, or commands without a sandbox) is run only with --trust; train, evaluate,
    merge and serve run it always.
    """
    from agent_peft.configuration.explain import explain, explanation
    from agent_peft.configuration.loading import load_config
    from agent_peft.lookup import without_imports

    with nullcontext(()) if trust else without_imports() as passed_over:
        found = load_config(config, overrides or ())
        shown = explanation(*found) if as_json else explain(*found)
    _show({**shown, "not_run": list(passed_over)} if isinstance(shown, dict) else shown)
    if passed_over and not as_json:
        print(
            f"not run and not checked: {printable(', '.join(passed_over), LINE)}; this is code that CONFIG names: --trust runs it"
        )


def _replay(environment: str, tasks: Path | None, options: dict[str, Any], as_json: bool) -> None:
    from agent_peft.environments.task_files.validation import validate

    found = validate(environment, tasks, options)
    if as_json:
        _show(found)
    else:
        print(
            f"{found['tasks']} tasks: {found['gold_correct']} golds are correct, doing nothing is correct in {found['nothing_correct']}"
        )
        for rejection in found["rejected"]:
            print(f"cannot be used: {printable(rejection['id'], 200)}: {printable(rejection['cause'], LINE)}")
    if found["rejected"]:
        raise typer.Exit(1)


def _show(content: Any) -> None:
    from rich.console import Console

    if isinstance(content, dict):
        print(json.dumps(content, indent=2))
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = WIDE
        console.print(Printable(content))


def run(arguments: Sequence[str]) -> int:
    """One command; its exit code."""
    try:
        code: int = app(args=list(arguments), prog_name="agent-peft", standalone_mode=False) or 0
        if code != INTERRUPTED:
            return code
    except _UsageError as error:
        return _fail(
            f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'agent-peft'} --help tells more)",
            2,
        )
    except (TrustError, InfrastructureError) as error:
        return _fail(str(error), 1)
    except AgentPeftError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):  # some versions of typer raise, others return 130
        pass
    except (SystemExit, GeneratorExit):
        raise
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python would complain once more at its end
        return 1
    except BaseException as error:  # also what a library in Rust raises when it panics
        if os.environ.get(TRACEBACK):
            raise
        return _fail(_unforeseen(error), 1)
    return _fail(
        "interrupted"
        + ("; run the same command (without --fresh) to go on" if arguments[:1] == ["train"] else ""),
        INTERRUPTED,
    )


def _unforeseen(error: BaseException) -> str:
    """Of what nothing below has told in words of its own."""
    if isinstance(error, OSError) and error.strerror is not None:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}; nothing that was whole is lost: mend that, then run the same command again"
    if isinstance(error, MemoryError):
        return "there is not enough memory; give it a smaller input, or more memory"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return (
        f"unforeseen: {type(error).__name__}: {error} (at {where}; {TRACEBACK}=1 shows the whole traceback)"
    )


def _fail(message: str, code: int) -> int:
    print("agent-peft: " + printable(" ".join(message.split()), LINE), file=sys.stderr)
    return code


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record).strip(), LINE)


def _make_output_printable() -> None:
    """Warnings too are one line each, without raw control characters; what a terminal's encoding lacks is
    shown as an escape.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable())
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)


def main() -> None:
    """The console script."""
    search_current_folder_last()
    _make_output_printable()
    sys.exit(run(sys.argv[1:]))
