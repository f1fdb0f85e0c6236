"""The command that starts a trainer and its servers."""

from __future__ import annotations

import shutil
import signal
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agent_peft.types import AgentPeftError


class Place(StrEnum):
    """Where the parts run."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


def launch(
    cluster: Annotated[Path, typer.Argument(help="YAML file with the parts", metavar="CLUSTER")],
    on: Annotated[
        Place, typer.Option("--on", help="local and ray run them; the others write a file")
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
    from agent_peft.launch.cluster import LOOPBACK, parts_of, read_cluster, supervisor_of
    from agent_peft.launch.manifests import batch_script, kubernetes_manifest, skypilot_task
    from agent_peft.launch.ray import run_on_ray

    config, run = read_cluster(cluster)
    hosted = tuple(hosts.split(",")) if hosts else (LOOPBACK,)
    servers, _ = parts_of(config, run, hosted)
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
        raise AgentPeftError(f"--submit: --on {on} writes no file to submit; leave it out")
    if on is Place.RAY:
        if hosts or part:
            raise AgentPeftError("--on ray: Ray places the parts; leave out --hosts and --part")
        code = run_on_ray(cluster, config, servers)
    else:
        supervisor = supervisor_of(config, run, hosted, part)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.stop())
        code = supervisor.run()
    if code:
        raise typer.Exit(code)
