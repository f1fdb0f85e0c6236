"""A file in the current folder never takes the place of an installed module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import agent_peft
from agent_peft.search_path import search_current_folder_last

SRC = str(Path(agent_peft.__file__).parents[1])
CONFIG = """\
run_dir: run
policy: {kind: scratch, alphabet: "0123456789+*-= ", architecture: {model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 8, n_positions: 16}}
environment: {kind: arithmetic, digits: 1, operation: "own_operations:minus"}
algorithm: reinforce
steps: 1
"""  # noqa: E501
OWN = 'from agent_peft.environments.arithmetic import Operation\nminus = Operation("-", lambda a, b: a - b)\n'


def test_the_current_folder_comes_last(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/usr/lib", str(tmp_path / "linked"), "."])
    search_current_folder_last()
    assert sys.path == ["/usr/lib", ""]


def test_a_current_folder_that_is_gone(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", "/usr/lib"])
    search_current_folder_last()
    assert sys.path == ["/usr/lib", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["-c", "from agent_peft.cli import main; main()"], id="script"),
        pytest.param(["-m", "agent_peft"], id="module"),
    ],
)
def test_modules_of_installed_names_are_not_imported_and_ones_own_are(tmp_path, start):
    names = (
        "yaml",
        "rich",
        "torch",
        "pydantic",
        "typer",
        "transformers",
        "peft",
        "gguf",
        "filelock",
        "sqlite3",
        "jinja2",
        "__future__",
    )
    for name in (
        names[:-1] if start[0] == "-c" else names
    ):  # -c itself would import the latter before any of our code
        (tmp_path / f"{name}.py").write_text(f"open('PWNED_{name}', 'w').close()\nraise SystemExit(7)\n")
    (tmp_path / "own_operations.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text(CONFIG)
    if start[0] == "-c":
        start = ["-P", *start]  # as a console script: its own folder comes first, not the current one
    environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, "explain", "--trust", "c.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "80" in done.stdout  # the operation was found
    assert not list(tmp_path.glob("PWNED*"))
