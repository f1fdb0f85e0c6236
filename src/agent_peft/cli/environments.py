"""The commands for tasks and environments: generate, validate, download, serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agent_peft.cli.app import LINE, AsJson, ConfigFile, Host, Overrides, Port, Token, print_output
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError

Kind = Annotated[
    str, typer.Argument(help="a kind such as db_bench, or package.module:Class", metavar="ENVIRONMENT")
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(help="keys of the environment's configuration", metavar="[KEY=VALUE]..."),
]


def generate(
    environment: Kind,
    output: Annotated[Path, typer.Option(help="the JSON file to write")],
    keys: Keys = None,
    check: Annotated[
        bool, typer.Option("--validate", help="validate the tasks too, as agent-peft validate does")
    ] = False,
) -> None:
    """Generate tasks with known answers. KEY=VALUE are keys of the environment's `generate` section, such as
    num_tasks=100 split=heldout; agent-peft explain --keys ENVIRONMENT lists them.
    """
    from agent_peft.configuration.load import parse_keys
    from agent_peft.environments.task_commands import generate_tasks
    from agent_peft.files import write_json_atomic

    entries = generate_tasks(environment, **parse_keys(keys or ()))
    try:
        write_json_atomic(output, entries)
    except OSError as error:
        raise AgentPeftError(
            f"{output}: cannot be written ({error.strerror}); give another --output"
        ) from error
    print(f"wrote {output}: {len(entries)} tasks")
    if check:
        _validate(environment, {"tasks": output}, as_json=False)


def validate(environment: Kind, keys: Keys = None, as_json: AsJson = False) -> None:
    """Replay the solution of every task, which must be correct, and replies that do nothing, which must not
    be. KEY=VALUE are keys of the environment, such as tasks=tasks.json. Exit code 1 if a task cannot be used.
    """
    from agent_peft.configuration.load import parse_keys

    _validate(environment, parse_keys(keys or ()), as_json)


def download(
    environment: Kind,
    output: Annotated[
        Path | None, typer.Option(help="the folder to write (default: data/ENVIRONMENT)")
    ] = None,
) -> None:
    """Download the published tasks of an environment from the Hugging Face hub."""
    from agent_peft.environments.task_commands import download_tasks

    for file in download_tasks(environment, output or Path("data") / environment):
        print(f"wrote {file}")


def serve(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    max_episodes: Annotated[int, typer.Option(min=1, help="maximum number of concurrent episodes")] = 1024,
    idle_seconds: Annotated[
        float, typer.Option(min=1, help="close a session after this many seconds without a step")
    ] = 3600.0,
) -> None:
    """Serve CONFIG's environments over HTTP, until SIGTERM or SIGINT."""
    from agent_peft.addresses import read_token
    from agent_peft.configuration.load import EFFECTIVE, read_config, refuse_ineffective
    from agent_peft.environments import load_environment
    from agent_peft.environments.http.guard import Limits
    from agent_peft.environments.http.server import serve
    from agent_peft.environments.http.transport import Address

    settings = read_config(config, overrides or ())[0]
    refuse_ineffective("serve", overrides or (), EFFECTIVE["serve"])
    served = {"train": load_environment(settings.environment)}
    if settings.evaluation is not None:
        served["evaluation"] = load_environment(settings.evaluation.environment)
    limits = Limits(episodes=max_episodes, idle_seconds=idle_seconds)
    serve(served, Address(host, port), limits, read_token(token) if token else None)


def _validate(environment: str, keys: Mapping[str, Any], as_json: bool) -> None:
    from agent_peft.environments import ENVIRONMENTS
    from agent_peft.environments.base import OUTCOMES
    from agent_peft.environments.task_commands import validate_tasks

    report = validate_tasks(environment, **keys)
    if as_json:
        print_output(report)
    else:
        ungraded = environment in ENVIRONMENTS and ENVIRONMENTS[environment].measures != OUTCOMES
        graded = f"golds are correct, doing nothing is correct in {report['nothing_correct']}"
        found = "can be learned; nothing is graded" if ungraded else graded
        print(f"{report['tasks']} tasks: {report['gold_correct']} {found}")
        for words, key in (("cannot be used", "rejected"), ("warning", "warnings")):
            for task in report[key]:
                print(f"{words}: {printable(task['id'], 200)}: {printable(task['cause'], LINE)}")
        for violation in report["violations"]:
            print(f"breaks the contract: {printable(violation, LINE)}")
    if report["rejected"] or report["violations"]:
        raise typer.Exit(1)
