"""The command that starts a trainer and its servers."""

from __future__ import annotations

import signal
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent_peft.printable import printable
from agent_peft.types import AgentPeftError


class Place(StrEnum):
    """Where the parts run."""

    LOCAL = "local"
    SLURM = "slurm"


def launch(
    cluster: Annotated[Path, typer.Argument(help="YAML file with the parts", metavar="CLUSTER")],
    on: Annotated[
        Place, typer.Option("--on", help="local runs them here; slurm writes a batch script")
    ] = Place.LOCAL,
    hosts: Annotated[
        str | None,
        typer.Option(help="machines of the servers, a,b,c, which they take in turn; default: this"),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="run this one here, such as sampler-0 or learner; default: all")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="hand the batch script to sbatch")] = False,
) -> None:
    """Start a training run with its servers of policies and environments, and keep them running: a part that
    ends is started again, and the trainer resumes.
    """
    from agent_peft.launch.cluster import LOOPBACK, TOKEN, parts_of, read_cluster, token_of
    from agent_peft.launch.slurm import batch_script
    from agent_peft.launch.supervisor import Supervisor

    config, run = read_cluster(cluster)
    servers, learner = parts_of(config, run, tuple(hosts.split(",")) if hosts else (LOOPBACK,))
    if submit and on is not Place.SLURM:
        raise AgentPeftError("--submit has no effect without --on slurm; leave it out")
    secrets = {TOKEN: token_of(config)}
    if on is Place.SLURM:
        script = config.folder.expanduser() / "launch.sbatch"
        script.write_text(batch_script(config, cluster, servers))
        if submit:
            raise typer.Exit(subprocess.run(["sbatch", str(script)]).returncode)
        print(f"wrote {script}; submit it with: sbatch {script}")
        return
    here = {one.name: one for one in (*servers, learner)}
    if part is not None and part not in here:
        raise AgentPeftError(f"--part {part}: there is no such part; there are {', '.join(here)}")
    supervisor = Supervisor(
        servers if part is None else [one for one in servers if one.name == part],
        learner if part in (None, learner.name) else None,
        config.folder.expanduser() / "logs",
        secrets,
        elsewhere=servers if part == learner.name else (),
        ready=config.ready,
        restarts=config.restarts,
        report=lambda line: print(printable(line), flush=True),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    if code := supervisor.run():
        raise typer.Exit(code)
