"""A run that is killed at any moment, and started again by the same command, ends in the very bytes of one
that never was.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from agent_peft.configuration.yaml12 import dump
from agent_peft.seeding import generator

STAGES = [
    {
        "algorithm": {"kind": "sft"},
        "steps": 8,
        "tasks_per_step": 8,
        "optimizer": {"learning_rate": 0.02, "schedule": "linear"},
    },
    {
        "algorithm": {"kind": "reinforce"},  # its baseline must be remembered, too
        "steps": 12,
        "tasks_per_step": 3,
        "group_size": 4,
        "rewards": {"invalid_action": -0.5},
        "sampling": {"max_new_tokens": 3},
        "optimizer": {"learning_rate": 0.02, "warmup_steps": 5},
    },
    {
        "algorithm": {"kind": "sft"},
        "name": "own",
        "learn_from": "successes",
        "steps": 5,
        "tasks_per_step": 3,
        "group_size": 4,
        "sampling": {"max_new_tokens": 3},
    },
    {
        "algorithm": {"kind": "grpo", "kl_coef": 0.05, "update_epochs": 2, "minibatches": 2},
        "steps": 30,
        "lag": 1,
        "tasks_per_step": 3,
        "group_size": 4,
        "refill": 1,
        "rewards": {"invalid_action": -0.5},
        "sampling": {"max_new_tokens": 3},
    },
]


class Killed:
    """its own run in processes."""

    def __init__(
        self, folder: Path, policy: dict[str, object], steps: tuple[int, ...], warm_process: Any
    ) -> None:
        self.warm_process = warm_process
        self.run_dir, self.config, self.output = folder / "run", folder / "config.yaml", folder / "output.txt"
        folder.mkdir()
        stages = [{**stage, "steps": count} for stage, count in zip(STAGES, steps, strict=True)]
        heldout = {"kind": "arithmetic", "digits": 1, "num_tasks": 6, "split": "heldout"}
        settings = {
            "run_dir": "run",
            "threads": 1,
            "policy": policy,
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "evaluation": {"environment": heldout, "every": 3, "sampling": {"max_new_tokens": 3}},
            "stages": stages,
        }
        self.config.write_text(dump(settings))

    def start(self) -> Any:
        command = ["-m", "agent_peft", "train", self.config.name]
        with self.output.open("wb") as output:
            return self.warm_process.start(*command, folder=self.config.parent, output=output)

    def finish(self) -> float:
        """To the end; the seconds of a step."""
        process = self.start()
        self.wait(process, lambda: self.begun)
        start, before = time.monotonic(), self.steps
        assert process.wait(timeout=600) == 0, self.output.read_text()
        return (time.monotonic() - start) / max(1, self.steps - before)

    def kill(self, steps: int, seconds: float) -> None:
        """Start it, and kill it that long after its n-th step from there on (the 0-th is the start
        itself).
        """
        process = self.start()
        self.wait(process, lambda: self.begun)
        before = self.steps
        self.wait(process, lambda: self.steps >= before + steps)
        time.sleep(seconds)
        assert process.poll() is None, "the run was over before it could be killed"
        process.kill()
        process.wait()

    def wait(self, process: Any, until) -> None:
        deadline = time.monotonic() + 300
        while not until():
            assert process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @property
    def begun(self) -> bool:
        """Past the imports: it has spoken."""
        return self.output.stat().st_size > 0

    @property
    def steps(self) -> int:
        return lines(self.run_dir / "timing.jsonl")

    @property
    def traces(self) -> set[str]:
        """What a kill left half done."""
        checkpoints = sorted(p.name for p in self.run_dir.glob("checkpoints/step_*"))
        saved = int(checkpoints[-1].removeprefix("step_")) if checkpoints else 0
        found = set()
        if list(self.run_dir.glob("checkpoints/.*")):
            found.add("checkpoint")
        if lines(self.run_dir / "metrics.jsonl") > saved:
            found.add("written, not saved")
        if (
            self.output.read_text().rstrip().endswith("tasks")
        ):  # "evaluating after sft on 6 tasks" was its last word
            found.add("evaluation")
        return found or {"rollout or update"}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def killed_run_equals_whole(folder, policy, run_contents, warm_process, steps, kills) -> set[str]:
    whole, killed = (Killed(folder / name, policy, steps, warm_process) for name in ("whole", "killed"))
    seconds = whole.finish()
    traces = set()
    for number in range(kills):
        random = generator(0, "kill", number)
        killed.kill(random.randrange(2), random.random() * seconds)
        traces |= killed.traces
    killed.finish()
    expected, found = run_contents(whole.run_dir), run_contents(killed.run_dir)
    assert len(lines_of(expected["metrics.jsonl"])) == sum(steps)
    assert {
        "checkpoints/" + f"step_{sum(steps):06d}/adapter_model.safetensors",
        f"evaluations/step_{sum(steps):06d}.json",
    } <= expected.keys()
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    return traces


def lines_of(content: object) -> list[bytes]:
    assert isinstance(content, bytes)
    return content.splitlines()


@pytest.mark.slow
def test_two_kills_change_nothing(tmp_path, policy_config, run_contents, warm_process):
    policy = policy_config.model_dump(mode="json")
    killed_run_equals_whole(tmp_path, policy, run_contents, warm_process, (3, 3, 2, 4), kills=2)


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path, policy_config, run_contents, warm_process):
    policy = policy_config.model_dump(mode="json")
    traces = killed_run_equals_whole(tmp_path, policy, run_contents, warm_process, (10, 20, 5, 30), kills=20)
    print("kills left:", sorted(traces))
    assert len(traces) > 1, "all kills landed in the same place"
