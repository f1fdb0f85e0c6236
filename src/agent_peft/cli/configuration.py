"""The command that explains a configuration."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from agent_peft.cli.app import LINE, AsJson, print_output, print_rows
from agent_peft.printable import printable


def explain(
    config: Annotated[
        str | None,
        typer.Argument(help="a YAML file, or a bundled configuration such as quickstart", metavar="CONFIG"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="values to change, such as optimizer.learning_rate=1e-4", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            help="list every key with its type, default and meaning; with key paths or kinds in place of "
            "CONFIG, list only those, such as: explain --keys optimizer ppo",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="also print every value, the parts of the memory and this machine")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="DEVICES",
            help="the memory of a run on another machine: cuda:24GB, cpu:16GB, 8xcuda:80GB",
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="import and run the code that CONFIG names, as train does")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the effect of CONFIG: what happens, the memory that it takes, and what it needs. --all, a pipe
    and --json also get every effective value, where it came from and what it does. Without CONFIG, print what
    this machine offers. Code that CONFIG names (package.module:Name, or commands without a sandbox) runs only
    with --trust. The commands train, evaluate, merge and serve always run it.
    """
    if keys:
        _list_keys([*([config] if config else []), *(overrides or [])], as_json)
        return
    if config is None:
        _describe_machine(as_json)
        return
    from agent_peft.configuration.load import read_config
    from agent_peft.lookup import without_imports

    with nullcontext(()) if trust else without_imports() as names:
        settings, provenance = read_config(Path(config), overrides or (), on_checked=_note_loading)
        # with torch, which a typo need not wait for
        from agent_peft.configuration.explain import explain
        from agent_peft.configuration.planning import Target

        explanation = explain(settings, provenance, None if on is None else Target.parse(on))
    if as_json:
        print_output({**explanation.to_json(), "not_run": list(names)})
        return
    print_rows(explanation.whole if everything else explanation, explanation.lines())
    if names:
        print(
            f"not run and not checked: {printable(', '.join(names), LINE)}; this is code that CONFIG names, "
            "and --trust runs it"
        )


def _note_loading() -> None:
    if sys.stderr.isatty():  # that a person waits for it
        print("loading torch and Transformers, then the tasks", file=sys.stderr)


def _describe_machine(as_json: bool) -> None:
    from agent_peft.configuration.explain import rows_lines, rows_table
    from agent_peft.configuration.machine import machine

    offers = machine()
    if as_json:
        print_output({"machine": offers})
    else:
        print_rows(rows_table("this machine", offers), rows_lines("machine ", offers))


def _list_keys(prefixes: list[str], as_json: bool) -> None:
    from agent_peft.configuration.keys import all_keys

    keys = all_keys(*prefixes)
    from agent_peft.configuration.explain import keys_table

    names = ("path", "kind", "type", "default", "description")
    print_output(
        {"keys": [{name: getattr(key, name) for name in names} for key in keys]}
        if as_json
        else keys_table(keys)
    )
