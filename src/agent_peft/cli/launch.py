"""The command that starts a trainer and its servers."""

from __future__ import annotations

import shutil
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
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


def launch(
    cluster: Annotated[Path, typer.Argument(help="YAML file with the parts", metavar="CLUSTER")],
    on: Annotated[
        Place, typer.Option("--on", help="local runs them here; the others write a file")
    ] = Place.LOCAL,
    hosts: Annotated[
        str | None,
        typer.Option(help="machines of the servers, a,b,c, which they take in turn; default: this"),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="run this one here, such as sampler-0 or learner; default: all")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="hand the file to sbatch, kubectl or sky")] = False,
) -> None:
    """Start a training run with its servers of policies and environments, and keep them running: a part that
    ends is started again, and the trainer resumes.
    """
    from agent_peft.launch.cluster import LOOPBACK, TOKEN, parts_of, read_cluster, token_of
    from agent_peft.launch.manifests import kubernetes_manifest, skypilot_task
    from agent_peft.launch.slurm import batch_script
    from agent_peft.supervisor import Supervisor

    config, run = read_cluster(cluster)
    servers, learner = parts_of(config, run, tuple(hosts.split(",")) if hosts else (LOOPBACK,))
    written = {
        Place.SLURM: (batch_script, ".sbatch", "sbatch"),
        Place.KUBERNETES: (kubernetes_manifest, ".kubernetes.yaml", "kubectl create -f"),
        Place.SKYPILOT: (skypilot_task, ".skypilot.yaml", "sky launch"),
    }
    if on in written:
        content_of, suffix, program = written[on]
        file = cluster.with_suffix(suffix)
        file.write_text(content_of(config, cluster, servers))
        if not submit:
            print(f"wrote {file}; submit it with: {program} {file}")
            return
        if shutil.which(program.split()[0]) is None:
            raise AgentPeftError(
                f"--submit: there is no {program.split()[0]} here; take {file} to where it is"
            )
        raise typer.Exit(subprocess.run([*program.split(), str(file)]).returncode)
    if submit:
        raise AgentPeftError("--submit has no effect without --on; leave it out")
    here = {one.name: one for one in (*servers, learner)}
    if part is not None and part not in here:
        raise AgentPeftError(f"--part {part}: there is no such part; there are {', '.join(here)}")
    supervisor = Supervisor(
        servers if part is None else [one for one in servers if one.name == part],
        learner if part in (None, learner.name) else None,
        config.folder.expanduser() / "logs",
        {TOKEN: token_of(config)},
        elsewhere=servers if part == learner.name else (),
        ready=config.ready,
        restarts=config.restarts,
        report=lambda line: print(printable(line), flush=True),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    if code := supervisor.run():
        raise typer.Exit(code)
