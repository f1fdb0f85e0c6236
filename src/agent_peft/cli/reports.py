"""The command that shows runs as a page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_peft.printable import printable
from agent_peft.types import AgentPeftError


def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(help="the file to write; by default RUN/report.html, for several runs ./report.html"),
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="serve the page on this machine, and refresh it while runs continue"),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="port of --live; by default any free one", min=0, max=65535)
    ] = None,
) -> None:
    """Write a page with the curves, evaluations, configuration and episodes of runs."""
    if not live:
        if port is not None:
            raise AgentPeftError("--port has no effect without --live; leave it out")
        _write(runs, output)
    elif output is not None:
        raise AgentPeftError(
            "--output has no effect with --live, which writes nothing; leave one of them out"
        )
    else:
        _serve(runs, port or 0)


def _write(runs: list[Path], output: Path | None) -> None:
    from agent_peft.reports.page import write_report

    place = output or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    written = write_report(runs, place)
    beside = "" if written.beside is None else f" (keep the folder {written.beside.name} next to it)"
    print(printable(f"wrote {written.page}: {written.episodes} episodes{beside}; open it in a browser"))


def _serve(runs: list[Path], port: int) -> None:
    from agent_peft.reports.live import live_server

    with live_server(runs, port) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]}/ in a browser; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
