"""A run that ends at any file operation, and is started again, ends in the bytes of one that was never
killed, whatever state it carries.

`KILLED_RUNS=48 pytest -m slow tests/runs/test_kill_operations.py` kills so many runs, each twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agent_peft.configuration.yaml12 import dump
from agent_peft.seeding import generator

# The n-th operation that changes the file system ends the process, as a power cut would. Prints their number.
PROGRAM = """\
import os, sys
count, last = 0, int(sys.argv.pop(1))
def ends(event, arguments):
    global count
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
        count += 1
        if count == last:
            os._exit(9)
sys.addaudithook(ends)
from agent_peft.cli import run
code = run(sys.argv[1:])
print(f"operations: {count}")
sys.exit(code)
"""
STAGE = {"tasks_per_step": 3, "group_size": 4, "rewards": {"invalid_action": -0.5}}
SAMPLED = {**STAGE, "sampling": {"max_new_tokens": 3}, "optimizer": {"learning_rate": 0.02}}
SFT = {"algorithm": "sft", "steps": 3, "tasks_per_step": 4, "optimizer": {"learning_rate": 0.02}}
HELDOUT = {"kind": "arithmetic", "digits": 1, "num_tasks": 6, "split": "heldout"}
RUNS: dict[str, dict[str, Any]] = {
    "what is remembered of episodes": {
        "checkpoint": {"keep_last": 2, "keep_best": {"metric": "evaluation.success"}},
        "stages": [
            SFT,
            {
                **SAMPLED,
                "algorithm": {"kind": "grpo", "minibatches": 2, "update_epochs": 2},
                "steps": 6,
                "refill": 1,
                "replay_in_prompt": 2,
                "until": {"metric": "evaluation.success", "patience": 9},
            },
        ],
    },
    "critic and master weights in 16 bits": {
        "policy": {"dtype": "bfloat16", "lora": None},
        "stages": [
            SFT,
            {**SAMPLED, "algorithm": {"kind": "ppo", "target_kl": 0.01, "kl_coef": 0.05}, "steps": 6},
        ],
    },
    "dropout and preferences": {
        "policy": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.3}},
        "stages": [
            SFT,
            {
                **SAMPLED,
                "algorithm": {"kind": "grpo", "minibatches": 3},
                "sampling": {"max_new_tokens": 2},
                "steps": 4,
            },
            *(
                {
                    "algorithm": kind,
                    "steps": 3,
                    "tasks_per_step": 2,
                    "episodes_of": {"run": "run"},
                    "rewards": {"invalid_action": -0.5},
                }
                for kind in ("kto", "dpo")
            ),
        ],
    },
}


class Folder:
    def __init__(
        self, path: Path, changes: dict[str, Any], policy: dict[str, Any], warm_process: Any
    ) -> None:
        self.path, self.warm_process = path, warm_process
        path.mkdir()
        (path / "program.py").write_text(PROGRAM)
        settings = {
            "run_dir": "run",
            "threads": 1,
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "evaluation": {"environment": HELDOUT, "every": 3, "sampling": {"max_new_tokens": 3}},
            **changes,
            "policy": {**policy, **changes.get("policy", {})},
        }
        (path / "c.yaml").write_text(dump(settings))

    def train(self, last: int) -> tuple[int, str]:
        """Train until the operation of this number; -1 is none."""
        done = self.warm_process.run("program.py", str(last), "train", "c.yaml", folder=self.path)
        return done.returncode, done.stdout + done.stderr


def assert_kills_change_nothing(name, tmp_path, policy_config, run_contents, warm_process, numbers) -> None:
    policy = policy_config.model_dump(mode="json")
    whole = Folder(tmp_path / "whole", RUNS[name], policy, warm_process)
    code, output = whole.train(-1)
    assert code == 0, output
    operations = int(output.split("operations: ")[1].split()[0])
    expected = run_contents(whole.path / "run")
    for number in numbers:
        killed = Folder(tmp_path / f"killed-{number}", RUNS[name], policy, warm_process)
        for kill in range(2):
            last = 1 + generator(0, "operation", name, number, kill).randrange(operations)
            code, output = killed.train(last)
            assert code in (0, 9), output  # the second part of a run has fewer operations
        code, output = killed.train(-1)
        assert code == 0, output
        found = run_contents(killed.path / "run")
        assert found.keys() == expected.keys(), number
        assert [path for path in expected if found[path] != expected[path]] == [], number


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_ends_at_any_operation_resumes_to_the_same_bytes(
    name, tmp_path, policy_config, run_contents, warm_process
):
    runs = int(os.environ.get("KILLED_RUNS", "6")) // len(RUNS)
    assert_kills_change_nothing(name, tmp_path, policy_config, run_contents, warm_process, range(runs))
