"""Places the parts of a cluster by Ray: each is an actor with its supervisor."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_peft.launch.cluster import LOOPBACK, ClusterConfig, RayConfig, read_cluster, supervisor_of
from agent_peft.lookup import install, needed
from agent_peft.printable import printable
from agent_peft.supervisor import GRACE, POLL, Part, Supervisor
from agent_peft.types import AgentPeftError, InfrastructureError

LEARNER = "learner"
STOPPED = 130  # exit code after a signal
VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}  # read when the module is imported
PRIVATE = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}  # 15, Ray's own, starves a trainer
OBJECTS = 80 << 20  # bytes of the store of a private Ray, the least that it accepts: parts exchange files


class PartActor:
    """One part, with its supervisor, on the machine that Ray has chosen."""

    def __init__(self, path: Path, folder: str, name: str) -> None:
        os.chdir(folder)
        self._path, self._name = path, name
        self._supervisor: Supervisor | None = None

    def host(self) -> str:
        """The address of the machine on which Ray has placed it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def keep(self, hosts: Sequence[str]) -> tuple[int, str]:
        """Run the part until it ends. Returns the exit code, and what went wrong, in a line."""
        try:
            cluster, run = read_cluster(self._path)
            self._supervisor = supervisor_of(cluster, run, hosts, self._name)
            return self._supervisor.run(), ""
        except (AgentPeftError, InfrastructureError) as error:
            return 1, str(error)

    def end(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()


def run_on_ray(path: Path, cluster: ClusterConfig, servers: Sequence[Part]) -> int:
    """Run the parts of a cluster file until the trainer has ended.

    Args:
        path: the cluster file. It, the current folder and the folder of the parts are on all machines.

    Returns: the exit code of the trainer; 130 after SIGINT or SIGTERM.

    Raises:
        InfrastructureError: Ray could not place the parts in time, or one failed too often.
    """
    names = [LEARNER, *(part.name for part in servers)]
    ended = threading.Event()
    with _connected(cluster.ray) as ray:
        parts = _Parts(ray, cluster, _placed(ray, path, cluster, names))
        for number in (signal.SIGINT, signal.SIGTERM):  # before, Ctrl-C interrupts what waits
            signal.signal(number, lambda *_: ended.set())
        try:
            while not ended.wait(POLL):
                if (code := parts.look()) is not None:
                    return code
            return STOPPED
        finally:
            parts.end()


@contextlib.contextmanager
def _connected(config: RayConfig) -> Iterator[Any]:
    """Ray, connected. A private one writes nothing to the user's home, and ends with this block."""
    private = config.address == "local"
    os.environ.update({**VARIABLES, **(PRIVATE if private else {}), **os.environ})
    with needed(f"--on ray needs Ray: {install('ray')}"):
        import ray
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        own = {"include_dashboard": False, "object_store_memory": OBJECTS, "_temp_dir": folder}
        try:
            ray.init(config.address, logging_level=logging.WARNING, **(own if private else {}))
        except (ConnectionError, ValueError, RuntimeError) as error:
            line = printable(" ".join(str(error).split()), 200)
            raise InfrastructureError(f"ray.address: {config.address} cannot be used: {line}") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _placed(ray: Any, path: Path, cluster: ClusterConfig, names: Sequence[str]) -> dict[str, Any]:
    """An actor for each part, in a place that has what it reserves."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [cluster.ray.learner if name == LEARNER else cluster.ray.server for name in names]
    group = placement_group(bundles)
    if not group.wait(cluster.ready):
        asked = {key: sum(bundle.get(key, 0) for bundle in bundles) for bundle in bundles for key in bundle}
        there = ray.available_resources()
        lacks = [f"{key} {there.get(key, 0):g} of {n:g}" for key, n in asked.items() if there.get(key, 0) < n]
        raise InfrastructureError(
            f"ray: no place for the parts within {cluster.ready:g} s (ready); free are "
            f"{', '.join(lacks) or 'enough in all, but not on single machines'}; "
            "lower ray.learner or ray.server"
        )
    keepers = {}
    for place, (name, bundle) in enumerate(zip(names, bundles, strict=True)):
        others = dict(bundle)
        keepers[name] = (
            ray.remote(PartActor)
            .options(
                num_cpus=others.pop("CPU", 0),
                num_gpus=others.pop("GPU", 0),
                resources=others,
                max_restarts=cluster.restarts,
                max_task_retries=0,
                max_concurrency=2,  # to be ended while it keeps
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            )
            .remote(path.absolute(), os.getcwd(), name)
        )
    return keepers


class _Parts:
    """The actors' calls. An actor that was lost is started again by Ray, and called once more by this."""

    def __init__(self, ray: Any, cluster: ClusterConfig, keepers: dict[str, Any]) -> None:
        self._ray, self._ready, self._keepers = ray, cluster.ready, keepers
        self._hosts = {name: self._host(name) for name in keepers}
        self._calls = {self._keep(name): name for name in keepers}

    def _host(self, name: str) -> str:
        deadline = time.monotonic() + self._ready
        errors = self._ray.exceptions
        while True:
            try:
                return str(self._ray.get(self._keepers[name].host.remote(), timeout=self._ready))
            except errors.ActorUnavailableError as error:  # it is being started again
                if time.monotonic() > deadline:
                    raise self._lost(name, error) from error
            except (errors.RayActorError, errors.GetTimeoutError) as error:
                raise self._lost(name, error) from error
            time.sleep(POLL)

    def _lost(self, name: str, error: Exception) -> InfrastructureError:
        line = printable(" ".join(str(error).split()), 300)
        return InfrastructureError(f"{name}: Ray has lost its actor: {line}")

    def _keep(self, name: str) -> Any:
        servers = [host for name, host in self._hosts.items() if name != LEARNER]
        alone = set(self._hosts.values()) == {self._hosts[LEARNER]}
        return self._keepers[name].keep.remote((LOOPBACK,) if alone or not servers else tuple(servers))

    def look(self) -> int | None:
        """The trainer's exit code, once it has ended."""
        for call in self._ray.wait(list(self._calls), timeout=0)[0]:
            name = self._calls.pop(call)
            try:
                code, line = self._ray.get(call)
            except self._ray.exceptions.RayActorError:
                print(f"{name}: its actor was lost, and is started again", flush=True)
                if (host := self._host(name)) != self._hosts[name]:
                    raise InfrastructureError(
                        f"{name}: Ray has moved it from {self._hosts[name]} to {host}; run the same command "
                        "again: the trainer resumes"
                    ) from None
                self._calls[self._keep(name)] = name
                continue
            if line:
                raise InfrastructureError(line)
            if name == LEARNER:
                return int(code)
        return None

    def end(self) -> None:
        """End all parts, and wait for them."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get([keeper.end.remote() for keeper in self._keepers.values()], timeout=GRACE)
        self._ray.wait(list(self._calls), num_returns=max(1, len(self._calls)), timeout=2 * GRACE)
