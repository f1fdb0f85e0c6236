"""A mistake in a configuration is answered before torch is imported, which takes seconds."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, io, json, sys
from agent_peft.cli import run
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(arguments)
    loaded = sorted({"torch", "transformers", "peft"} & sys.modules.keys())
    print(json.dumps([code, out.getvalue(), err.getvalue(), loaded]))
"""
MISTAKES = {
    "train quickstart environmnt.x=1": "unknown key; did you mean 'environment'?",
    "train quickstart environment.generate.num_taks=1": "did you mean",
    "train quickstart engine.rows=many": "must be a whole number",
    "train quickstart policy.device=cud": "is not a supported device",
    "train quickstart stages.1.algorithm.kind=grop": "there is no kind 'grop'",
    "train quickstrt": "did you mean 'quickstart'?",
    "explain quickstart evaluation.evry=1": "did you mean 'evaluation.every'?",
    "explain --keys optimizr": "did you mean 'optimizer'?",
    "serve quickstart seed=x": "must be a whole number",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of one process, which shows the first of them that imports it."""
    words = json.dumps([line.split() for line in MISTAKES])
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("empty"),
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(MISTAKES, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_without_torch(answers, line):
    code, out, err, loaded = answers[line]
    assert (code, out, loaded) == (2, "", []) and MISTAKES[line] in err, answers[line]


def test_the_first_line_of_a_run_comes_before_torch(tmp_path):
    program = (
        "import sys; import agent_peft.cli; runs = sys.modules['agent_peft.cli.runs']\n"
        "runs._note_loading = lambda: sys.exit(len({'torch', 'transformers'} & sys.modules.keys()))\n"
        "runs.train('quickstart', ['run_dir=run'])"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())
