"""A cluster file, and the commands of its parts."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from agent_peft.config import Config, validated
from agent_peft.configuration import yaml12
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MEGABYTE, read_text
from agent_peft.printable import printable
from agent_peft.supervisor import Part, Supervisor
from agent_peft.types import AgentPeftError

TOKEN = "AGENT_PEFT_CLUSTER_TOKEN"  # environment variable of all parts
LOOPBACK = "127.0.0.1"
CONTEXT = 4096  # tokens that serve-policy reads by default


class ServersConfig(Config):
    """Servers of one kind. Server i listens on ``port`` + i."""

    number: int = Field(ge=1, le=1024, description="how many")
    port: int = Field(ge=1, le=65535, description="port of the first; the others follow")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each; null leaves it to the server"
    )

    @model_validator(mode="after")
    def _ports(self) -> ServersConfig:
        if self.port + self.number > 65536:
            raise ValueError(f"port: {self.port} leaves no room for {self.number} servers; lower it")
        return self


class SamplersConfig(ServersConfig):
    """Servers of the policy."""

    port: int = Field(default=8101, ge=1, le=65535, description="port of the first; the others follow")
    command: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="program and arguments, such as vLLM's, where {host} and {port} stand for its address; "
        "null is agent-peft serve-policy",
    )


class EnvironmentsConfig(ServersConfig):
    """Servers of the environments."""

    port: int = Field(default=8201, ge=1, le=65535, description="port of the first; the others follow")


class LearnerConfig(Config):
    """The trainer."""

    ranks: int = Field(default=1, ge=1, description="processes that share a step, by torchrun")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; null leaves it to the trainer")


class SlurmConfig(Config):
    """What the batch script of Slurm needs in addition to the commands."""

    options: tuple[str, ...] = Field(
        default=(), description="lines of #SBATCH, such as --partition=gpu, --gres=gpu:1, --time=12:00:00"
    )
    setup: tuple[str, ...] = Field(
        default=(), description="lines of the shell before all else, such as source .venv/bin/activate"
    )


class KubernetesConfig(Config):
    """What the manifest of Kubernetes needs in addition to the commands."""

    name: str = Field(
        default="agent-peft",
        pattern=r"^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$",
        description="name of the Job and its Service: small letters, digits and hyphens",
    )
    image: str = Field(description="container image with agent-peft and bash")
    claim: str = Field(description="PersistentVolumeClaim of the volume that all pods share (ReadWriteMany)")
    mount: Path = Field(
        default=Path("/shared"), description="where pods have that volume, and their working directory"
    )
    resources: dict[str, str | int] = Field(
        default={}, description="limits of each pod, such as {nvidia.com/gpu: 1, memory: 32Gi}"
    )
    setup: tuple[str, ...] = Field(default=(), description="lines of the shell before all else")


class SkypilotConfig(Config):
    """What the task of SkyPilot needs in addition to the commands."""

    task: dict[str, Any] = Field(
        default={}, description="keys of the task, such as resources, volumes, file_mounts and setup"
    )


class RayConfig(Config):
    """What Ray needs in addition to the commands."""

    address: str = Field(
        default="local",
        description="local starts Ray on this machine, for this launch; auto takes the one that runs here; "
        "or host:port of its head",
    )
    learner: dict[str, float] = Field(
        default={"CPU": 1}, min_length=1, description="what the trainer reserves, such as {GPU: 4, CPU: 16}"
    )
    server: dict[str, float] = Field(
        default={"CPU": 1}, min_length=1, description="what each server reserves"
    )


class ClusterConfig(Config):
    """A training run and the servers around it."""

    train: str = Field(description="configuration of the run, as agent-peft train takes it")
    overrides: tuple[str, ...] = Field(
        default=(),
        description="keys that replace those of the configuration, such as run_dir=runs/big",
    )
    folder: Path = Field(
        description="where adapters, logs and the token lie, on a file system that all parts share"
    )
    samplers: SamplersConfig | None = Field(
        default=None, description="servers that sample; null samples in the trainer"
    )
    environments: EnvironmentsConfig | None = Field(
        default=None, description="servers of the environments; null runs them in the trainer"
    )
    learner: LearnerConfig = Field(default=LearnerConfig(), description="the trainer")
    ready: float = Field(
        default=600.0, gt=0, description="seconds within which a part must answer after a start"
    )
    restarts: int = Field(default=10, ge=0, description="how often a part that failed is started again")
    ray: RayConfig = Field(default=RayConfig(), description="for --on ray")
    slurm: SlurmConfig = Field(default=SlurmConfig(), description="for --on slurm")
    kubernetes: KubernetesConfig | None = Field(default=None, description="for --on kubernetes")
    skypilot: SkypilotConfig = Field(default=SkypilotConfig(), description="for --on skypilot")


def read_cluster(path: Path) -> tuple[ClusterConfig, TrainConfig]:
    """The cluster of a file, and the run that it trains. Both are checked."""
    content = yaml12.plain(yaml12.parse(read_text(path, "a cluster file", MEGABYTE), str(path)))
    if not isinstance(content, dict):
        raise AgentPeftError(f"{path}: must hold keys, such as train: quickstart")
    cluster = validated(ClusterConfig, content, str(path))
    parts = len(list(_addresses(cluster, [LOOPBACK])))
    if parts > len(set(_addresses(cluster, [LOOPBACK]))):
        raise AgentPeftError(f"{path}: two servers have one port; set environments.port apart from samplers")
    return cluster, read_config(cluster.train, cluster.overrides)[0]


def _addresses(cluster: ClusterConfig, hosts: Sequence[str]) -> Iterator[str]:
    """``host:port`` of each server: of samplers, then of environments. They take the hosts in turn."""
    servers = (cluster.samplers, cluster.environments)
    ports = (of.port + i for of in servers if of is not None for i in range(of.number))
    yield from (f"{hosts[place % len(hosts)]}:{port}" for place, port in enumerate(ports))


def parts_of(
    cluster: ClusterConfig, run: TrainConfig, hosts: Sequence[str] = (LOOPBACK,), python: str = sys.executable
) -> tuple[list[Part], Part]:
    """The servers, and the trainer that uses them.

    Args:
        hosts: of the servers, which take them in turn.
        python: the interpreter of all parts.
    """
    ours, addresses = (python, "-m", "agent_peft"), list(_addresses(cluster, hosts))
    listen = LOOPBACK if tuple(hosts) == (LOOPBACK,) else "0.0.0.0"
    servers, given = list[Part](), list(cluster.overrides)
    added: dict[str, str] = {}  # to the overrides that the user has given
    if (samplers := cluster.samplers) is not None:
        own, addresses = addresses[: samplers.number], addresses[samplers.number :]
        command = samplers.command or (*ours, *_serve_policy(cluster, run))
        servers += _servers("sampler", own, command, listen, samplers.threads)
        urls = ", ".join(f"http://{address}" for address in own)
        added |= {"engine.kind": "server", "engine.urls": f"[{urls}]", "engine.token": TOKEN}
        added |= {"engine.folder": str(_adapters(cluster)), "engine.patience": f"{cluster.ready:g}"}
    if (environments := cluster.environments) is not None:
        served = [text for text in given if text.startswith(("environment", "evaluation.environment"))]
        given = [text for text in given if text not in served]
        command = (*ours, "serve", cluster.train, *served, "--host", "{host}")
        command += ("--port", "{port}", "--token", TOKEN)
        servers += _servers("environment", addresses, command, listen, environments.threads)
        urls = ", ".join(f'"http://{address}"' for address in addresses)
        for key in ("environment", *(["evaluation.environment"] if run.evaluation else [])):
            name = "train" if key == "environment" else "evaluation"
            keys = f"url: [{urls}], token: {TOKEN}, environment: {name}, patience: {cluster.ready:g}"
            added[key] = f"{{kind: remote, {keys}}}"
    learner, set_by_user = cluster.learner, {text.partition("=")[0] for text in given}
    overrides = [*given, *(f"{key}={value}" for key, value in added.items() if key not in set_by_user)]
    start: tuple[str, ...] = ours if learner.ranks == 1 else (python, "-m", "agent_peft.launch.torchrun")
    if learner.ranks > 1:
        start += ("--standalone", "--nproc-per-node", str(learner.ranks), "-m", "agent_peft")
    return servers, Part("learner", (*start, "train", cluster.train, *overrides), learner.threads)


def supervisor_of(
    cluster: ClusterConfig, run: TrainConfig, hosts: Sequence[str], name: str | None = None
) -> Supervisor:
    """Runs all parts, or the one of this name. Each event is a line on standard output."""
    servers, learner = parts_of(cluster, run, hosts)
    names = [part.name for part in (*servers, learner)]
    if name is not None and name not in names:
        raise AgentPeftError(f"--part {name}: there is no such part; there are {', '.join(names)}")
    return Supervisor(
        [part for part in servers if name in (None, part.name)],
        learner if name in (None, learner.name) else None,
        cluster.folder.expanduser() / "logs",
        {TOKEN: token_of(cluster)},
        elsewhere=servers if name == learner.name else (),
        ready=cluster.ready,
        restarts=cluster.restarts,
        report=lambda line: print(printable(line), flush=True),
    )


def _servers(
    kind: str, addresses: Sequence[str], command: Sequence[str], listen: str, threads: int | None
) -> list[Part]:
    parts = []
    for number, address in enumerate(addresses):
        port = address.rpartition(":")[2]
        own = tuple(word.replace("{port}", port).replace("{host}", listen) for word in command)
        parts.append(Part(f"{kind}-{number}", own, threads, f"http://{address}/health"))
    return parts


def _adapters(cluster: ClusterConfig) -> Path:
    return cluster.folder.expanduser().absolute() / "adapters"


def _serve_policy(cluster: ClusterConfig, run: TrainConfig) -> list[str]:
    model, dtype = getattr(run.policy, "model", None), run.policy.dtype
    if model is None:
        raise AgentPeftError(
            "samplers: policy.kind: scratch has no model that a server could load; leave samplers out"
        )
    samplings = [stage.sampling for stage in run.stages]
    if run.evaluation is not None:
        samplings += [run.evaluation.following(sampling).sampling for sampling in samplings]
    longest = max(sampling.max_tokens for sampling in samplings)
    words = ["serve-policy", str(model), "--host", "{host}", "--port", "{port}", "--token", TOKEN]
    words += ["--adapters", str(_adapters(cluster)), "--max-tokens", str(max(CONTEXT, longest + 1))]
    return words if dtype == "auto" else [*words, "--dtype", dtype]


def token_of(cluster: ClusterConfig) -> str:
    """The secret that the parts share. The first of them makes it, in a file that only its owner reads."""
    folder = cluster.folder.expanduser()
    path = folder / "token"
    try:
        _adapters(cluster).mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=folder) as file:  # of mode 600
                file.write(secrets.token_hex(16))
                file.flush()
                with suppress(FileExistsError):  # another part was first
                    os.link(file.name, path)
        return path.read_text()
    except OSError as error:
        raise AgentPeftError(
            f"{folder}: cannot hold the files of the parts ({error.strerror}); set folder"
        ) from error
