"""A run directory that a stranger has prepared: a link, a pipe or a folder where a run has a file. No command
waits, none writes outside, and each ends in one line.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from agent_peft.cli import run
from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs.layout import FOLDERS
from agent_peft.runs.run import train
from tests.conftest import ARCHITECTURE, case

KINDS = ("link", "dangling link", "pipe", "device", "folder", "hard link")
COMMANDS = ("runs", "report", "show", "evaluate", "train", "from", "start", "episodes", "chat", "merge")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, policy_config_of_module) -> Path:
    """A folder with a configuration, its run of 2 steps, and another run."""
    place = tmp_path_factory.mktemp("whole")
    settings = {
        "run_dir": "runs/run",
        "threads": 1,
        "policy": policy_config_of_module,
        "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
        "evaluation": {"environment": {"kind": "arithmetic", "num_tasks": 2, "split": "heldout"}},
        "checkpoint": {"keep_best": {"metric": "evaluation.success"}},
        "stages": [
            {"algorithm": {"kind": "rloo"}, "steps": 2, "tasks_per_step": 1, "group_size": 2,
             "sampling": {"max_new_tokens": 3}},
        ],
    }  # fmt: skip
    (place / "c.yaml").write_text(dump(settings))
    (place / "longer.yaml").write_text(dump(settings).replace("steps: 2", "steps: 3", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        train(read_config(Path("c.yaml"))[0])
        shutil.copytree("runs/run", "runs/other")
    return place


@pytest.fixture(scope="module")
def policy_config_of_module() -> dict[str, object]:
    from agent_peft.environments.arithmetic import ALPHABET
    from agent_peft.policies.config import LoraSettings, ScratchConfig

    lora = LoraSettings(rank=4, alpha=8)
    config = ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, lora=lora, device="cpu")
    return config.model_dump(mode="json")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def put(kind: str, path: Path, victims: Path) -> None:
    """What a stranger puts in place of a file or a folder."""
    is_folder = path.is_dir()
    if os.path.lexists(path):
        shutil.rmtree(path) if is_folder else path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hard link":
        os.link(victims / "victim", path)
    else:
        target = {"link": victims if is_folder else victims / "victim", "device": "/dev/zero"}
        path.symlink_to(target.get(kind, victims / "nowhere"))


def arguments(command: str) -> list[str]:
    return {
        "runs": ["runs", "runs"],
        "report": ["report", "runs/run"],
        "show": ["show", "runs/run"],
        "evaluate": ["evaluate", "runs/run"],
        "train": ["train", "longer.yaml"],
        "from": ["train", "longer.yaml", "run_dir=new", "--from", "runs/run"],
        "start": ["train", "c.yaml", "run_dir=new", "policy={kind: pretrained, model: runs/run}"],
        "episodes": [
            *("train", "c.yaml", "run_dir=new", "evaluation=null"),
            "stages=[{algorithm: dpo, steps: 1, episodes_of: {run: runs/run}}]",
        ],
        "chat": ["chat", "runs/run"],
        "merge": ["merge", "runs/run", "--output", "merged"],
    }[command]


def state_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


PLACES = (
    *("config.yaml", "run.json", "metrics.jsonl", "timing.jsonl", "log.txt", "stopped.json", "origin.json"),
    *("checkpoints", "checkpoints/best.json", "checkpoints/step_000002"),
    *(f"checkpoints/step_000002/adapter_{name}" for name in ("model.safetensors", "config.json")),
    *(f"checkpoints/step_000002/{name}.json" for name in ("position", "training_stats", "replays")),
    *("checkpoints/step_000002/trainer.pt", "checkpoints/step_000002/value_head.safetensors"),
    *("evaluations", *(f"evaluations/step_000000.{kind}" for kind in ("json", "jsonl", "safetensors"))),
    *("trajectories", "trajectories/step_000001.jsonl", "trajectories/step_000001.safetensors"),
    *("trackers", "trackers/tensorboard.json", "trackers/tensorboard", "start", "start/adapter_config.json"),
    *("schedule", "schedule/step_000001.rank_0.json"),
)
A_FOLDER = (*FOLDERS, "checkpoints/step_000002", "trackers/tensorboard")


@pytest.fixture
def attacked(whole, tmp_path, monkeypatch, capsys) -> Callable[[str, str, str], tuple[int, str, str, str]]:
    """``attacked(kind, place, command)``: its exit code, what it printed, and the case in words. It neither
    waits nor writes outside.
    """
    (victims := tmp_path / "victims").mkdir()
    (victims / "victim").write_text('{"step": 0}\n')
    monkeypatch.setenv("COLUMNS", "400")

    def attacked(kind: str, place: str, command: str) -> tuple[int, str, str, str]:
        shutil.rmtree(here := tmp_path / "here", ignore_errors=True)
        other = None if command == "runs" else shutil.ignore_patterns("other")
        shutil.copytree(whole, here, ignore=other)
        monkeypatch.chdir(here)
        if place in A_FOLDER:
            Path("runs/run", place).mkdir(parents=True, exist_ok=True)
        put(kind, Path("runs/run", place), victims)
        before = state_of(victims)
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with within(60):
            code = run(arguments(command))
        out, err = capsys.readouterr()
        case = f"{command} with {place} as a {kind}: {code} {out[-500:]} {err}"
        assert "Traceback" not in err and "it waits" not in err, case
        assert state_of(victims) == before, case
        return code, out, err, case

    return attacked


@pytest.mark.parametrize("place", [*PLACES, ".lock"])
@pytest.mark.parametrize("part", [case(part, fast=part == 0) for part in range(len(KINDS))])
def test_a_strangers_run_neither_stops_a_command_nor_leads_it_outside(attacked, place, part):
    """Each part has each place with each kind and each command."""
    number = [*PLACES, ".lock"].index(place)
    for (j, kind), (k, command) in product(enumerate(KINDS), enumerate(COMMANDS)):
        if (number + j + k) % len(KINDS) != part and place != ".lock":
            continue
        if place in A_FOLDER and kind in ("folder", "hard link"):
            continue
        if place == ".lock" and (command != "train" or part):
            continue
        appended = place in (".lock", "metrics.jsonl", "timing.jsonl", "log.txt")
        if command == "train" and kind == "hard link" and not appended:
            continue
        code, out, err, case = attacked(kind, place, command)
        lines = [line for line in err.splitlines() if line.startswith("agent-peft: ")]
        assert len(lines) == (code != 0) and "unforeseen" not in err, case
        if command == "runs":
            assert code == 0 and "runs/other" in out and "done" in out, case
            assert kind in ("hard link", "folder") or "damaged" in out or place == "config.yaml", case
        elif kind not in ("hard link", "folder") and command not in ("start", "episodes"):
            assert code == 2, case
        elif kind == "hard link" and command == "train":
            assert code == 2 and "other names" in err, case


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "hard link"])
def test_what_is_put_there_after_the_check_is_not_opened_either(attacked, monkeypatch, kind):
    """The first check finds nothing, as if the stranger had been faster: the opened file counts."""
    for module in ("runs.folder", "runs.overview", "runs.reading", "runs.targets", "runs.branch"):
        monkeypatch.setattr(f"agent_peft.{module}.check_run_files", lambda folder: None)
    monkeypatch.setattr("agent_peft.files.check_tree", lambda path, depth=8: None)
    for place in PLACES:
        for command in ("runs", "report", "show", "train"):
            if place not in A_FOLDER or kind != "hard link":
                attacked(kind, place, command)
