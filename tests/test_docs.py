"""The pages that say how something is done: their files are written, their commands run, as a reader
would.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agent_peft.configuration import yaml12
from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.types import Outcome

DOCS = Path(__file__).parent.parent / "docs"
SRC = Path(__file__).parent.parent / "src"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")


def section(page: str, heading: str) -> str:
    """From its heading to the next one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    start = text.index(f"## {heading}\n")
    end = text.find("\n## ", start)
    return text[start : end if end >= 0 else len(text)].strip()


def follow(text: str, folder: Path) -> None:
    """Write each block that begins with a file's name, run the commands of each console block."""
    for language, block in _BLOCK.findall(text):
        if name := _NAME.match(block):
            (folder / name[1]).write_text(block)
        elif language == "console":
            for line in block.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "agent-peft", f"only our own commands are run: {line}"
                environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-m", "agent_peft", *arguments]
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def subtraction(tmp_path_factory):
    """The folder of a reader who has added subtraction."""
    folder = tmp_path_factory.mktemp("reader")
    follow(section("arithmetic.md", "Adding an operation"), folder)
    return folder


def test_adding_an_operation_takes_at_most_forty_lines():
    assert len(section("arithmetic.md", "Adding an operation").splitlines()) <= 40


def test_subtraction_is_learnt(subtraction):
    lines = (subtraction / "runs/subtraction/metrics.jsonl").read_text().splitlines()
    success = {
        stage: [m["success"] for m in map(json.loads, lines) if m["stage"] == stage]
        for stage in ("sft", "rloo")
    }
    assert set(success["sft"]) == {1.0}  # every demonstration is graded correct
    attempts = success["rloo"]
    assert sum(attempts[:5]) / 5 > 0.1, "the supervised stage has taught nothing"
    assert sum(attempts[-5:]) / 5 > sum(attempts[:5]) / 5 + 0.05, attempts


def test_subtraction_is_graded_right(subtraction, monkeypatch):
    monkeypatch.syspath_prepend(subtraction)
    written = yaml12.plain(yaml12.parse((subtraction / "subtraction.yaml").read_text(), "subtraction.yaml"))
    try:
        environment = load_environment(written["environment"])
    finally:
        sys.modules.pop("my_operations", None)
    signs = set()
    for task in environment.tasks:
        (gold,) = environment.demonstration(task)
        assert int(gold) == task.content["a"] - task.content["b"]
        assert environment.episode(task, 0).step(gold).outcome is Outcome.CORRECT
        assert environment.episode(task, 0).step(str(-1 - int(gold))).outcome is Outcome.INCORRECT
        signs.add(gold[0] == "-")
    assert signs == {True, False}


def test_a_module_of_ones_own_learns(tmp_path):
    follow(section("models.md", "A module of your own"), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [m["success"] for m in lines if m["stage"] == "rloo"][-1] > 0.3, (
        "guessing is right about one time in ten"
    )


def test_the_page_says_what_the_code_has():
    text = (DOCS / "arithmetic.md").read_text(encoding="utf-8")
    assert f'`"{ALPHABET}"`' in text
    first = next(block for language, block in _BLOCK.findall(text) if language == "yaml")
    keys = yaml12.plain(yaml12.parse(first, "arithmetic.md"))["environment"]
    assert set(keys) == set(load_environment(keys).config.model_dump())
    for row, settings in (
        ("| `312101=3201` | `840+0630=804` |", {"answer": "worked"}),
        ("| `3201` | `804` |", {"answer": "reversed"}),
    ):
        shown = re.findall(r"`(.+?)`", row)
        for gold, operation, a, b in ((shown[0], "addition", 345, 678), (shown[1], "multiplication", 12, 34)):
            environment = load_environment({"kind": "arithmetic", "operation": operation, **settings})
            task = type(environment.tasks[0])("t", content={"a": a, "b": b})
            assert row in text
            assert environment.demonstration(task) == [gold]


def test_every_attack_of_the_table_names_a_test_that_is_there():
    rows = [
        line
        for line in (DOCS / "attacks.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    assert len(rows) == 128 + 40
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)`(?: (\w+))?", row)
        assert tests, row
        for file, name in tests:
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, row
