"""Two ranks are one: the same trajectories, the same gradients, the same numbers; and none is left waiting
for one that is gone.

Runs of two ranks are compared with one rank in this process. Torchrun is really started where a rank ends
before the others. Elsewhere the ranks are forks of a warm process, without the seconds that imports take.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import is_available

import agent_peft
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.engine.base import EngineStatistics
from agent_peft.ranks import Ranks, RanksConfig, checksum, collective, join
from agent_peft.rollout.collector import Collection, gather_collection
from agent_peft.runs.reading import load_run
from agent_peft.runs.run import train
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Message,
    Outcome,
    StopReason,
    Task,
    Trajectory,
    TrustError,
    Turn,
)

pytestmark = pytest.mark.skipif(
    not is_available() or not Path("/proc/self").exists(), reason="needs torch.distributed, and Linux"
)

# Adam divides small gradients by themselves, noise and all: so a large epsilon, and no clipping
SMOOTH = {"learning_rate": 1e-3, "epsilon": 1e-2, "max_grad_norm": float("inf"), "schedule": "linear"}
ROLLOUTS = {"group_size": 4, "rewards": {"invalid_action": -0.5}, "sampling": {"max_new_tokens": 3}}
STAGES: list[dict[str, Any]] = [
    {"algorithm": {"kind": "sft"}, "tasks_per_step": 3},
    {"algorithm": {"kind": "reinforce"}, "tasks_per_step": 5, **ROLLOUTS},
    # nothing at all for the second rank
    {"algorithm": {"kind": "rloo", "reward_kl_coef": 0.1}, "tasks_per_step": 1, **ROLLOUTS},
    {"algorithm": {"kind": "grpo", "minibatches": 2, "update_epochs": 2}, "tasks_per_step": 5, **ROLLOUTS},
    {"algorithm": {"kind": "ppo", "update_epochs": 2}, "tasks_per_step": 1, **ROLLOUTS},
    {"algorithm": "distill", "tasks_per_step": 5, "teacher": {"prompt": "{solution}={task}"}, **ROLLOUTS},
    {"algorithm": {"kind": "gspo"}, "tasks_per_step": 5, "refill": 2, **ROLLOUTS},
    {
        "algorithm": {"kind": "sft"},
        "name": "own",
        "learn_from": "successes",
        "tasks_per_step": 3,
        **ROLLOUTS,
    },
    {"algorithm": {"kind": "dpo"}, "tasks_per_step": 3},
    {"algorithm": {"kind": "kto"}, "tasks_per_step": 3},  # its z0 is of the replies of all ranks
]
STEPS = 2


class Launch:
    """A configuration in its own folder, and torchrun on it."""

    def __init__(
        self, folder: Path, policy: ScratchConfig, stages: list[dict[str, Any]], **more: Any
    ) -> None:
        self.run_dir, self.file, self.output = folder / "run", folder / "config.yaml", folder / "output.txt"
        folder.mkdir()
        heldout = {"kind": "arithmetic", "digits": 1, "num_tasks": 5, "split": "heldout"}
        settings = {
            "run_dir": str(self.run_dir),
            "threads": 1,
            "policy": {**policy.model_dump(mode="json"), "lora": None},
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "evaluation": {
                "environment": heldout,
                "attempts": 2,
                "sampling": {"max_new_tokens": 3, "temperature": 1.0},
            },
            "checkpoint": {"keep_last": 99},
            "stages": [{"steps": STEPS, "optimizer": SMOOTH, **stage} for stage in stages],
        }
        self.file.write_text(dump({**settings, **more}))

    @property
    def config(self) -> TrainConfig:
        return read_config(self.file)[0]

    def start(self, *program: str) -> subprocess.Popen[bytes]:
        source = str(Path(agent_peft.__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, str(self.file.parent)]),
            "PYTHONUNBUFFERED": "1",
        }
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        with self.output.open("wb") as output:
            command = [*torchrun, *(program or ("-m", "agent_peft")), "train", self.file.name]
            return subprocess.Popen(
                command, cwd=self.file.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def finish(self, warm_process: Any, *program: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [*(program or ("-m", "agent_peft")), "train", self.file.name]
        with self.output.open("wb") as output:
            ranks = [
                warm_process.start(
                    *command, folder=self.file.parent, output=output, RANK=rank, LOCAL_RANK=rank, **world
                )
                for rank in "01"
            ]
        assert [rank.wait(600) for rank in ranks] == [0, 0], self.said

    @property
    def said(self) -> str:
        return self.output.read_text()

    def json_lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def policy() -> ScratchConfig:
    from agent_peft.environments.arithmetic import ALPHABET

    architecture = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    return ScratchConfig(architecture=architecture, alphabet=ALPHABET, lora=None, device="cpu")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, policy: ScratchConfig) -> Launch:
    launch = Launch(tmp_path_factory.mktemp("ranks") / "one", policy, STAGES)
    train(launch.config)
    return launch


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, policy: ScratchConfig, warm_process: Any) -> Launch:
    launch = Launch(tmp_path_factory.mktemp("ranks") / "two", policy, STAGES)
    launch.finish(warm_process)
    return launch


# -- two ranks are one ---------------------------------------------------------------------------------------


def test_the_trajectories_are_those_of_one_rank(one, two):
    """With what the other rank computed; advantages and log-probabilities are equal up to rounding."""
    expected, found = (list(load_run(run.run_dir).trajectories) for run in (one, two))
    assert {episode.step for episode in expected} == set(range(STEPS * len(STAGES)))
    scored = 0
    for ours, theirs in zip(found, expected, strict=True):
        facts = (replace(episode, advantages=None) for episode in (ours, theirs))
        assert next(facts) == next(facts)
        for name in (
            "tokens",
            "mask",
            "sampler_logprobs",
            "trainer_logprobs",
            "token_advantages",
            "advantages",
        ):
            arrays = getattr(ours, name), getattr(theirs, name)
            assert (arrays[0] is None) == (arrays[1] is None), name
            if arrays[0] is not None:
                numpy.testing.assert_allclose(*arrays, rtol=1e-5, atol=1e-5, err_msg=name)
        scored += theirs.trainer_logprobs is not None and not numpy.isnan(theirs.trainer_logprobs).any()
    assert scored > 20


def test_the_metrics_are_those_of_one_rank(one, two):
    expected, found = one.json_lines("metrics.jsonl"), two.json_lines("metrics.jsonl")
    assert len(expected) == STEPS * len(STAGES)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        numbers = {name: value for name, value in theirs.items() if isinstance(value, float)}
        assert {name: ours[name] for name in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    assert sum(line.get("gradient_norm", 0.0) > 0.01 for line in expected) > len(expected) / 2


def test_the_gradients_and_weights_are_those_of_one_rank(one, two):
    """Adam's first moment is what the gradients were."""
    compared = 0
    for checkpoint in sorted((one.run_dir / "checkpoints").iterdir()):
        expected, found = (
            torch.load(run / checkpoint.name / "trainer.pt", weights_only=True) for run in folders(one, two)
        )
        assert (found["step"], found["updates"]) == (expected["step"], expected["updates"])
        rates = ([group["lr"] for group in state["optimizer"]["param_groups"]] for state in (found, expected))
        assert next(rates) == next(rates)
        assert found["algorithm"] == pytest.approx(expected["algorithm"], rel=1e-6)
        states = found["optimizer"]["state"], expected["optimizer"]["state"]
        assert states[0].keys() == states[1].keys()
        for number, state in states[1].items():
            assert states[0][number]["step"] == state["step"]
            torch.testing.assert_close(states[0][number]["exp_avg"], state["exp_avg"], rtol=1e-6, atol=1e-6)
            compared += bool(state["exp_avg"].abs().max() > 1e-4)
    assert compared > 50


def test_the_evaluations_are_those_of_one_rank(one, two):
    names = sorted(path.name for path in (one.run_dir / "evaluations").iterdir())
    stems = [f"step_{number * STEPS:06d}" for number in range(len(STAGES) + 1)]
    assert names == sorted(f"{stem}.{kind}" for stem in stems for kind in ("json", "jsonl", "safetensors"))
    for name in names:
        expected, found = (run.run_dir / "evaluations" / name for run in (one, two))
        if expected.suffix != ".safetensors":  # their log-probabilities are equal up to rounding
            assert found.read_bytes() == expected.read_bytes(), name


def test_only_the_first_rank_speaks(one, two):
    assert two.said.count(f"grpo {STEPS}/{STEPS}") == 1
    assert two.said.count("evaluating base on 5 tasks") == 1
    assert len(two.json_lines("timing.jsonl")) == STEPS * len(STAGES)
    sampled = [sum(line["sampled"] for line in launch.json_lines("timing.jsonl")) for launch in (one, two)]
    assert sampled[0] == sampled[1]


def folders(*launches: Launch) -> list[Path]:
    return [launch.run_dir / "checkpoints" for launch in launches]


# -- one that is gone ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_the_run_resumes_to_the_bit(
    tmp_path, policy, two, run_contents, warm_process
):
    launch = Launch(tmp_path / "killed", policy, STAGES)
    process = launch.start()
    wait(
        lambda: launch.run_dir.is_dir() and (launch.run_dir / "checkpoints" / "step_000004").is_dir(),
        process,
        launch,
    )
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], 9)
    assert end(process) != 0
    assert len(launch.json_lines("metrics.jsonl")) < STEPS * len(STAGES)
    launch.finish(warm_process)
    assert "resuming after step" in launch.said
    expected, found = run_contents(two.run_dir), run_contents(launch.run_dir)
    assert found.keys() == expected.keys()
    assert [name for name in expected if name != "config.yaml" and found[name] != expected[name]] == []


RAISING = """
import os
from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.types import AgentPeftError

class Failing(Arithmetic):
    def __init__(self, settings):
        super().__init__(ArithmeticConfig(digits=1, num_tasks=10))
        self.episodes = 0

    def episode(self, task, seed):
        self.episodes += 1
        if self.episodes > 10 and os.environ["RANK"] == "1":
            raise AgentPeftError("the second rank has had enough")
        return super().episode(task, seed)
"""


@pytest.mark.slow  # three starts of a process with torch
def test_a_rank_that_raises_ends_all_with_its_error(tmp_path, policy, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "raising"))
    launch = Launch(
        tmp_path / "raising",
        policy,
        STAGES[1:2],
        environment={"kind": "failing_environment:Failing"},
        evaluation=None,
    )
    (tmp_path / "raising" / "failing_environment.py").write_text(RAISING)
    assert end(launch.start()) != 0
    assert "agent-peft: the second rank has had enough\n" in launch.said
    assert len(launch.json_lines("metrics.jsonl")) < STEPS


POISONED = """
import math, os, torch
from agent_peft.cli import main
from agent_peft.runs import run

class Poisoned(run.Trainer):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2), torch.get_num_threads()
        ours = lambda: self.step == 0 and self.ranks.rank == 1 and self.parameters is self.policy.poisoned
        self.policy.poisoned = self.parameters
        self.parameters[-1].register_hook(lambda gradient: gradient * math.nan if ours() else gradient)

run.Trainer = Poisoned
main()
"""


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all(tmp_path, policy):
    """The first stage leaves the update out, the second ends the run; with the threads that are each
    rank's due.
    """
    stages = [{**STAGES[1], "nonfinite": "skip"}, {**STAGES[3], "steps": 1}]
    launch = Launch(tmp_path / "poisoned", policy, stages, evaluation=None, threads=None)
    (tmp_path / "poisoned" / "poisoned.py").write_text(POISONED)
    assert end(launch.start("poisoned.py")) != 0
    assert [line["nonfinite_updates"] for line in launch.json_lines("metrics.jsonl")] == [1, 0]
    assert launch.said.count("the gradient's norm is nan at step 0: the update is skipped") == 1
    trajectories = launch.run_dir / "trajectories" / "step_000002.jsonl"
    assert (
        "agent-peft: stage 'grpo': the gradient's norm is nan at step 0: lower optimizer.learning_rate, "
        "or look at the step's" in launch.said
    )
    assert f"trajectories, which are in {trajectories}\n" in launch.said
    assert len(trajectories.read_text().splitlines()) == 20, "those of both ranks"
    assert json.loads((launch.run_dir / "stopped.json").read_text()) == {"stage": 1, "step": 2}


SMALL_MEMORY = """
import os, torch
from agent_peft.cli import main
from agent_peft.runs import run

class Small(run.Trainer):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        if self.ranks.rank == 1:
            layer = next(m for m in self.policy.model.modules() if type(m).__name__ == "LlamaDecoderLayer")
            layer.register_forward_hook(check)

def check(module, arguments, output):
    if torch.is_grad_enabled() and arguments[0].shape[0] * arguments[0].shape[1] > 12:
        raise torch.OutOfMemoryError("CUDA out of memory.")

run.Trainer = Small
main()
"""


@pytest.mark.slow
def test_one_rank_may_run_out_of_memory_alone(tmp_path, policy, warm_process):
    """It halves its microbatches, the other does not wait for anything but the sum, and the update is the
    same.
    """
    roomy, small = (
        Launch(tmp_path / name, policy, [STAGES[1], STAGES[3]], evaluation=None)
        for name in ("roomy", "small")
    )
    (tmp_path / "small" / "small.py").write_text(SMALL_MEMORY)
    roomy.finish(warm_process)
    small.finish(warm_process, "small.py")
    expected, found = (launch.json_lines("metrics.jsonl") for launch in (roomy, small))
    assert all(line.pop("microbatch_halvings") == 0 for line in expected)
    assert (
        sum(line.pop("microbatch_halvings") for line in found)
        == small.said.count("continuing with microbatch_tokens=")
        > 0
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.pop("stage") == theirs.pop("stage")
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


GRADER = "def grade(response, answer, task): return sum(map(ord, response)) % 2 == 0\n"


@pytest.mark.slow
def test_replays_are_those_of_one_rank(tmp_path, policy, monkeypatch, warm_process):
    """They depend on the results of all ranks."""
    rows = [{"id": f"t{number}", "question": f"{number}=", "answer": "1"} for number in range(9)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"kind": "questions", "tasks": str(tmp_path / "tasks.jsonl"), "id": "id"}
    stage = {
        "algorithm": {"kind": "reinforce"},
        "steps": 8,
        "tasks_per_step": 3,
        "replay_in_prompt": 2,
        "group_size": 4,
        "sampling": {"max_new_tokens": 2},
    }
    more = {"environment": {**tasks, "grader": "coin:grade"}, "evaluation": None}
    launches = [Launch(tmp_path / name, policy, [stage], **more) for name in ("one", "two")]
    for launch in launches:
        (launch.file.parent / "coin.py").write_text(GRADER)
    monkeypatch.syspath_prepend(launches[0].file.parent)
    train(launches[0].config)
    launches[1].finish(warm_process)

    one, two = (list(load_run(launch.run_dir).trajectories) for launch in launches)
    for ours, theirs in zip(two, one, strict=True):
        assert (ours.task, ours.messages, ours.outcome) == (theirs.task, theirs.messages, theirs.outcome)
    replays = [folder / "step_000008" / "replays.json" for folder in folders(*launches)]
    assert len(json.loads(replays[0].read_text())) == 3
    assert replays[0].read_bytes() == replays[1].read_bytes()


def end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. Half an hour is what ranks wait for each other, so a hang is told apart."""
    try:
        return process.wait(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise


def wait(until: Callable[[], bool], process: subprocess.Popen[bytes], launch: Launch) -> None:
    deadline = time.monotonic() + 300
    while not until():
        assert process.poll() is None, launch.said
        assert time.monotonic() < deadline, launch.said
        time.sleep(0.005)


# -- another number of ranks ---------------------------------------------------------------------------------


def test_another_number_of_ranks_is_refused_unless_told(tmp_path, policy, monkeypatch):
    launch = Launch(tmp_path / "run", policy, STAGES[1:2], evaluation=None)
    position = next_position(launch)
    position.write_text(json.dumps({**json.loads(position.read_text()), "ranks": 2}))
    with pytest.raises(
        AgentPeftError,
        match=r"2 ranks got this far, and now there is 1; start 2 ranks .*ranks\.allow_other_number=true",
    ):
        train(launch.config)
    train(read_config(launch.file, ["ranks.allow_other_number=true"])[0])
    assert len(launch.json_lines("metrics.jsonl")) == STEPS
    train(launch.config)  # it is a run of one rank now


def next_position(launch: Launch) -> Path:
    """Of a run that is one step short of its end."""
    train(launch.config)
    last = launch.run_dir / "checkpoints" / f"step_{STEPS:06d}"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    return last.with_name(f"step_{STEPS - 1:06d}") / "position.json"


# -- what it is made of --------------------------------------------------------------------------------------


def test_half_of_what_torchrun_sets_is_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with (
        pytest.raises(AgentPeftError, match="WORLD_SIZE is 2, but RANK is not set: start with torchrun"),
        join(RanksConfig(), "cpu"),
    ):
        pass


def test_one_gpu_for_two_ranks_is_one_line(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(AgentPeftError, match="cuda:0 is one GPU, and torchrun started 2 ranks"),
        join(RanksConfig(), "cuda:0"),
    ):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(AgentPeftError, match="this machine has 0 GPUs"), join(RanksConfig(), "cuda"):
            pass


def test_alone_it_asks_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join(RanksConfig(), "cpu") as ranks:
        assert ranks == Ranks()
    tensor = torch.ones(3)
    assert ranks.sum(tensor) is tensor
    ranks.assert_equal([tensor], "nothing")
    assert not torch.distributed.is_initialized()


@dataclass(frozen=True)
class Pretended(Ranks):
    """The first of two, and what the second says: tested is what is made of it."""

    world_size: int = 2
    other: Any = None

    def gather_objects(self, content: Any) -> list[Any]:
        return [json.loads(json.dumps(content)), self.other]


@dataclass(frozen=True)
class Heard(Ranks):
    """The second of two; what it says ends up in ``said``."""

    rank: int = 1
    world_size: int = 2
    said: list[Any] = field(default_factory=list)

    def gather_objects(self, content: Any) -> list[Any]:
        self.said.append(json.loads(json.dumps(content)))
        raise InterruptedError


def test_collections_are_put_together_in_the_tasks_order():
    tasks = [Task(str(number), content={"path": Path("not fit for JSON")}) for number in range(3)]

    def trajectory(position: int) -> Trajectory:
        turns = (
            Turn((1, 2), (position,), (-0.1 / 3,)),
            Turn((4,), (5, 6), (-1e-9, float("-inf")), valid=False),
        )
        return Trajectory(
            tasks[position],
            turns,
            (Message("user", "Zürich"),),
            Outcome.INCORRECT,
            StopReason.CRASHED,
            (0.0, 1 / 3),
            score=position / 7,
        )

    def collected(*positions: int) -> Collection:
        groups = [Group(tasks[position], [trajectory(position)] * position) for position in positions]
        return Collection(groups, failures=1, statistics=EngineStatistics(1, 2, 3, 4), defects=5)

    second = Heard()
    with pytest.raises(InterruptedError):
        gather_collection(second, collected(1), tasks)
    found = gather_collection(Pretended(other=second.said[0]), collected(0, 2), tasks)
    assert found.groups == collected(0, 1, 2).groups
    assert (found.failures, found.defects, found.crashed, found.statistics) == (
        2,
        10,
        3,
        EngineStatistics(2, 4, 6, 8),
    )


def test_other_weights_are_found_out():
    weights = [torch.ones(2, 3), torch.zeros(4, dtype=torch.bfloat16)]
    ranks = Pretended(other=checksum(weights))
    ranks.assert_equal(weights, "the weights")
    weights[0][1, 2] += 1e-7
    with pytest.raises(TrustError, match="the weights differ between the ranks"):
        ranks.assert_equal(weights, "the weights")


def test_a_collective_that_fails_is_one_line():
    with (
        pytest.raises(
            InfrastructureError, match=r"another rank has ended or does not answer.*Connection closed by peer"
        ),
        collective(),
    ):
        raise RuntimeError("[/x/gloo/pair.cc:1]\n Connection closed by peer")
