"""What was edited between two parts of a run: each edit that changes what is learned is refused, in one line,
until ``--change`` accepts it; what changes a measure alone is logged; what changes nothing resumes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments import load_environment
from agent_peft.environments.digests import shared_ids
from agent_peft.runs import run as runs
from agent_peft.runs.digests import DIGESTS
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError
from tests.conftest import case

ROWS = [{"id": f"t{n}", "question": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(8)]
HELDOUT = [{"id": f"h{n}", "question": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]


def write(path: Path, rows: list[dict[str, Any]], newline: str = "\n") -> None:
    lines = ["id,question,answer", *(",".join(row.values()) for row in rows)]
    path.write_bytes((newline.join(lines) + newline).encode())


def write_all(folder: Path) -> None:
    write(folder / "tasks.csv", ROWS)
    write(folder / "heldout.csv", HELDOUT)
    (folder / "order.txt").write_text("".join(f"{row['id']}\n" for row in ROWS))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("digests")


@pytest.fixture
def resume(place, policy_config, monkeypatch) -> Callable[..., None]:
    """Train the run in this folder to its end, or two steps of it, which are the same for each test."""
    monkeypatch.chdir(place)
    shutil.rmtree("run", ignore_errors=True)
    write_all(place)

    def resume(*overrides: str, interrupted: bool = False, change: bool = False) -> None:
        keys = {"kind": "questions", "id": "id", "grader": "number"}
        stage = {"steps": 4, "tasks_per_step": 2, "optimizer": {"learning_rate": 0.02}}
        sampled = {"group_size": 2, "sampling": {"max_new_tokens": 2}, "task_order": "order.txt"}
        settings = {
            "run_dir": "run",
            "policy": policy_config.model_dump(mode="json"),
            "environment": {**keys, "tasks": "tasks.csv"},
            "evaluation": {
                "environment": {**keys, "tasks": "heldout.csv"},
                "sampling": {"max_new_tokens": 2},
            },
            "stages": [
                {"algorithm": "rloo", **stage, **sampled},
                {"algorithm": "sft", **stage, "steps": 2},
            ],
        }
        (place / "c.yaml").write_text(dump(settings))
        config = read_config(place / "c.yaml", overrides)[0]
        if interrupted:
            if not Path("interrupted").is_dir():
                train_until(config, 2, monkeypatch)
                shutil.copytree("run", "interrupted")
            shutil.copytree("interrupted", "run", dirs_exist_ok=True)
        else:
            train(config, change=change)

    return resume


def train_until(config: TrainConfig, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and interrupt it when so many steps are written."""
    record, calls = runs.Recording.write_step, []

    def stops(self, *arguments):
        record(self, *arguments)
        calls.append(None)
        if len(calls) == steps:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs.Recording, "write_step", stops)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def edit(name: str, folder: Path) -> tuple[str, ...]:
    """Make the edit; the overrides that belong to it."""
    tasks, heldout, rows = folder / "tasks.csv", folder / "heldout.csv", [dict(row) for row in ROWS]
    match name:
        case "a question":
            rows[3]["question"] = "9+9="
        case "an answer":
            rows[3]["answer"] = "8"
        case "every question":
            rows = [{**row, "question": row["question"] + "0"} for row in rows]
        case "the order":
            rows.reverse()
        case "two rows are swapped":
            rows[2], rows[5] = rows[5], rows[2]
        case "a row less":
            del rows[7]
        case "a row more":
            rows.append({"id": "t8", "question": "8+9=", "answer": "17"})
        case "a row twice":
            rows.append({**rows[0], "id": "t8"})
        case "an id":
            rows[3]["id"] = "t30"
        case "two ids are swapped":
            rows[3]["id"], rows[4]["id"] = "t4", "t3"
        case "two answers are swapped":
            rows[3]["answer"], rows[4]["answer"] = rows[4]["answer"], rows[3]["answer"]
        case "another split":
            write(tasks, rows)
            return ("environment.split=train[:6]",)
        case "a limit":
            return ("environment.limit=6",)
        case "the order file":
            (folder / "order.txt").write_text("".join(f"{row['id']}\n" for row in reversed(rows)))
        case "a held-out question":
            write(heldout, [{**HELDOUT[0], "question": "9+9="}, *HELDOUT[1:]])
        case "a held-out row less":
            write(heldout, HELDOUT[1:])
        case "the held-out order":
            write(heldout, HELDOUT[::-1])
        case "line ends":
            write(tasks, rows, "\r\n")
            return ()
        case "a blank line at the end":
            tasks.write_bytes(tasks.read_bytes() + b"\n")
            return ()
        case "a byte order mark":
            tasks.write_bytes(b"\xef\xbb\xbf" + tasks.read_bytes())
            return ()
    write(tasks, rows)
    return ()


@pytest.mark.parametrize(
    "name",
    [
        *("a question", "an answer", "the order", "a row less", "an id", "another split", "the order file"),
        *(
            case(name, fast=False)
            for name in (
                *("every question", "two rows are swapped", "a row more", "a row twice"),
                *("two ids are swapped", "two answers are swapped", "a limit"),
            )
        ),
    ],
)
def test_an_edit_of_what_is_learned_from_is_refused_and_loses_nothing(name, resume, place):
    resume(interrupted=True)
    before = {path: path.read_bytes() for path in (place / "run").rglob("*.jsonl")}
    overrides = edit(name, place)
    with pytest.raises(AgentPeftError) as error:
        resume(*overrides)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in before} == before
    write_all(place)
    resume()  # its own files still do


def test_a_change_accepts_the_edit_and_logs_it(resume, place):
    resume(interrupted=True)
    edit("a question", place)
    resume(change=True)
    history = json.loads((place / "run" / "run.json").read_text())["history"]
    assert "tasks of other contents" in json.dumps(history)
    resume()  # and now they are those of the run


@pytest.mark.parametrize("name", ["a held-out question", "a held-out row less", "the held-out order"])
def test_an_edit_of_what_is_measured_alone_is_logged(name, resume, place):
    resume(interrupted=True)
    edit(name, place)
    resume()
    history = json.loads((place / "run" / "run.json").read_text())["history"]
    assert "tasks of evaluation" in json.dumps(history)


@pytest.mark.parametrize("name", ["line ends", "a blank line at the end", "a byte order mark"])
def test_other_bytes_of_the_same_tasks_resume(name, resume, place):
    resume(interrupted=True)
    digests = (place / "run" / DIGESTS).read_bytes()
    edit(name, place)
    resume()
    assert (place / "run" / DIGESTS).read_bytes() == digests


def test_another_chat_template_is_refused(resume, place):
    resume(interrupted=True)
    path = place / "run" / DIGESTS
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat template": "0" * 16}))
    with pytest.raises(AgentPeftError, match="chat template"):
        resume()


def test_held_out_tasks_are_those_of_other_contents(tmp_path):
    write(tmp_path / "a.csv", ROWS)
    write(tmp_path / "b.csv", [{**row, "id": f"other-{row['id']}"} for row in ROWS[:3]])
    one, other = (
        load_environment("questions", tasks=tmp_path / name, id="id", grader="number")
        for name in ("a.csv", "b.csv")
    )
    assert len(shared_ids(one, other)) == 3
    sums = {"kind": "arithmetic", "digits": 2}
    train, heldout = (load_environment({**sums, "split": split}) for split in ("train", "heldout"))
    assert shared_ids(train, heldout) == []
    assert len(shared_ids(train, train, 5)) == 5
