"""The programs of ``examples/`` are short, run as they stand, and do what they say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(program: Path, folder: Path) -> str:
    """What a program prints that is run in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda program: program.stem)
def test_an_example_has_at_most_thirty_lines_of_code(program):
    tree = ast.parse(program.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "it says what it does"
    lines = program.read_text(encoding="utf-8").splitlines()[tree.body[0].end_lineno :]
    assert sum(bool(line.strip()) for line in lines) <= 30


@pytest.mark.slow
@pytest.mark.parametrize("program", EXAMPLES, ids=lambda program: program.stem)
def test_an_example_runs(program, tmp_path):
    output = run(program, tmp_path)
    assert output
    if program.stem == "rl_training_example":
        *_, first, demonstrated, practiced = map(int, re.findall(r"(\d+)%", output.splitlines()[-1]))
        assert first < demonstrated < practiced
    if program.stem == "custom_environment":
        found = re.fullmatch(r"success (\S+)% .*score (\S+)%.*", output.splitlines()[-1])
        assert 90 < float(found[1]) <= float(found[2]), "what the score pays for is what is asked"


@pytest.mark.slow
def test_the_notebook_runs_and_its_attempts_teach(tmp_path):
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells.append("print(after_sft.success.value, after_rloo.success.value)")
    (tmp_path / "notebook.py").write_text("\n".join(cells), encoding="utf-8")
    taught, learnt = map(float, run(tmp_path / "notebook.py", tmp_path).splitlines()[-1].split())
    assert 0.2 < taught < learnt - 0.05
