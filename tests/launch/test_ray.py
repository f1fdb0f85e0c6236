"""What the launcher makes of Ray's answers, with a stand-in for Ray. test_launch.py has Ray itself."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_peft.cli import app
from agent_peft.launch.cluster import ClusterConfig
from agent_peft.launch.ray import PartActor, run_on_ray
from agent_peft.supervisor import Part
from agent_peft.types import AgentPeftError, InfrastructureError

SERVERS = [Part("sampler-0", ("serve",)), Part("environment-0", ("serve",))]


class LostError(Exception):
    """What Ray raises of an actor that has ended."""


class UnavailableError(LostError):
    """What it raises while the actor is started again."""


class Call:
    """What a method of an actor gives back at once: none, or one answer."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers


class Keeper:
    """The handle of an actor. Each call takes the next answer; an exception is raised where it is read."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers, self.asked, self.options = answers, [], {}

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*given: Any) -> Call:
            self.asked.append((method, *given))
            return Call([self.answers[method].pop(0)] if self.answers.get(method) else [])

        return SimpleNamespace(remote=remote)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Puts a Ray in place whose actors are these, the learner's first."""

    def make(*keepers: Keeper, fits: bool = True) -> ModuleType:
        made = iter(keepers)

        def get(call: Call | list[Call], timeout: float | None = None) -> Any:
            (answer,) = call.answers if isinstance(call, Call) else [None]
            if isinstance(answer, Exception):
                raise answer
            return answer

        class Options:
            def options(self, **options: Any) -> SimpleNamespace:
                keeper = next(made)
                keeper.options = options
                return SimpleNamespace(remote=lambda *given: keeper)

        modules = {name: ModuleType(name) for name in ("ray", "ray.util", "ray.util.placement_group")}
        modules["ray.util.scheduling_strategies"] = ModuleType("strategies")
        module = modules["ray"]
        module.init = module.shutdown = lambda *given, **keys: None
        module.exceptions = SimpleNamespace(
            RayError=Exception,
            RayActorError=LostError,
            ActorUnavailableError=UnavailableError,
            GetTimeoutError=TimeoutError,
        )
        module.get, module.remote = get, lambda actor: Options()
        module.wait = lambda calls, **keys: ([call for call in calls if call.answers], [])
        module.available_resources = lambda: {"CPU": 2.0}
        group = SimpleNamespace(wait=lambda seconds: fits)
        modules["ray.util.placement_group"].placement_group = lambda bundles: group
        modules["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = lambda *given: given
        for name, one in modules.items():
            monkeypatch.setitem(sys.modules, name, one)
        monkeypatch.setattr(signal, "signal", lambda *given: None)
        return module

    return make


def cluster_of(**keys: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"train": "quickstart", "folder": "parts", **keys})


def test_the_trainers_exit_code_ends_all(ray) -> None:
    learner = Keeper(host=["10.0.0.1"], keep=[(3, "")])
    servers = [Keeper(host=["10.0.0.2"]), Keeper(host=["10.0.0.3"])]
    ray(learner, *servers)
    resources = {"learner": {"GPU": 4, "CPU": 8}, "server": {"GPU": 1, "fast": 0.5}}
    assert run_on_ray(Path("cluster.yaml"), cluster_of(ray=resources, restarts=2), SERVERS) == 3
    for keeper in (learner, *servers):
        assert keeper.asked == [("host",), ("keep", ("10.0.0.2", "10.0.0.3")), ("end",)]
        assert (keeper.options["max_restarts"], keeper.options["max_task_retries"]) == (2, 0)
    assert (learner.options["num_gpus"], learner.options["num_cpus"]) == (4, 8)
    assert servers[0].options["num_gpus"] == 1 and servers[0].options["resources"] == {"fast": 0.5}


def test_one_machine_keeps_to_itself(ray) -> None:
    keepers = [Keeper(host=["10.0.0.1"], keep=answers) for answers in ([(0, "")], [], [])]
    ray(*keepers)
    assert run_on_ray(Path("cluster.yaml"), cluster_of(), SERVERS) == 0
    assert keepers[1].asked[1] == ("keep", ("127.0.0.1",)), "no port is open to others"


def test_a_lost_actor_is_called_again(ray, capsys: pytest.CaptureFixture[str]) -> None:
    learner = Keeper(host=["a"] * 4, keep=[LostError("killed"), (0, "")])
    starting = [UnavailableError("restarting"), UnavailableError("restarting")]
    server = Keeper(host=["b", *starting, "b"], keep=[LostError("killed")])
    ray(learner, server)
    assert run_on_ray(Path("cluster.yaml"), cluster_of(), SERVERS[:1]) == 0
    assert [method for method, *_ in server.asked] == ["host", "keep", "host", "host", "host", "keep", "end"]
    assert "sampler-0: its actor was lost, and is started again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"host": ["b"], "keep": [(1, "sampler-0: no answer")]}, "^sampler-0: no answer$"),
        ({"host": ["b", "c"], "keep": [LostError()]}, "Ray has moved it from b to c; run the same command"),
        ({"host": ["b", LostError("too often")], "keep": [LostError()]}, "sampler-0: .*: too often"),
        ({"host": [TimeoutError("nothing heard")]}, "sampler-0: Ray has lost its actor: nothing heard"),
    ],
)
def test_what_ends_a_launch(ray, server: dict[str, list[Any]], message: str) -> None:
    ray(Keeper(host=["a"]), Keeper(**server))
    with pytest.raises(InfrastructureError, match=message):
        run_on_ray(Path("cluster.yaml"), cluster_of(), SERVERS[:1])


def test_a_place_that_is_not_there_is_named(ray) -> None:
    ray(fits=False)
    cluster = cluster_of(ray={"learner": {"CPU": 1, "GPU": 2}, "server": {"CPU": 2}}, ready=5)
    with pytest.raises(InfrastructureError, match=r"within 5 s .*CPU 2 of 5, GPU 0 of 2; lower ray\.learner"):
        run_on_ray(Path("cluster.yaml"), cluster, SERVERS)


def test_what_ends_a_part_is_a_line_and_not_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bad input, and of a program that cannot be started."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cluster.yaml"
    path.write_text("{train: quickstart, folder: parts, samplers: {number: 1, command: [/nowhere/vllm]}}")
    actor = PartActor(path, str(tmp_path), "sampler-0")
    assert actor.keep(["127.0.0.1"]) == (
        1,
        "sampler-0: /nowhere/vllm cannot be started (No such file or directory)",
    )
    path.write_text("{train: quickstart, folder: parts, sampler: 1}")
    code, line = actor.keep(["127.0.0.1"])
    assert code == 1 and "sampler: unknown key" in line


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AgentPeftError, match=r"--on ray needs Ray: pip install '\.\[ray\]'"):
        run_on_ray(Path("cluster.yaml"), cluster_of(), SERVERS)


def test_ray_chooses_the_machines(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"train: quickstart\nfolder: {tmp_path / 'parts'}\n")
    result = CliRunner().invoke(app, ["launch", str(cluster), "--on", "ray", "--hosts", "a"])
    assert "Ray places the parts; leave out --hosts and --part" in str(result.exception)
