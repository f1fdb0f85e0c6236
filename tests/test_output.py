"""What a command prints may find no reader: a closed pipe or a terminal that is gone ends no run."""

import json
import os
import pty
import subprocess
import sys

import pytest

from agent_peft.output import lasting_output
from tests.conftest import case

CONFIG = """\
run_dir: run
policy:
  kind: scratch
  alphabet: "0123456789+*-= "
  architecture:
    {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
      num_attention_heads: 2, num_key_value_heads: 2}
environment: {kind: arithmetic, num_tasks: 8, digits: 1}
evaluation: {environment: {kind: arithmetic, num_tasks: 3, digits: 1, split: heldout}}
sampling: {max_new_tokens: 3, max_tokens: 16}
tasks_per_step: 2
group_size: 2
steps: 11
algorithm: rloo
"""


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def gone_terminal():
    master, terminal = pty.openpty()
    os.close(master)
    return terminal


@pytest.mark.parametrize(
    ("output", "closed"),
    [
        case(closed_pipe, "stdout", fast=False),
        case(closed_pipe, "stderr", fast=False),
        case(closed_pipe, "both", fast=False),
        case(gone_terminal, "both", fast=True),
    ],
)
def test_a_run_outlives_its_reader(tmp_path, warm_process, output, closed):
    (tmp_path / "c.yaml").write_text(CONFIG)
    with os.fdopen(output(), "w") as broken, open(tmp_path / "out", "w") as whole:
        process = warm_process.start(
            *("-m", "agent_peft", "train", "c.yaml"),
            folder=tmp_path,
            output=whole if closed == "stderr" else broken,
            errors=whole if closed == "stdout" else broken,
            TERM="xterm",
        )
        assert process.wait() == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "done"
    assert "without a signal" in (tmp_path / "run" / "log.txt").read_text()  # a warning went to stderr
    assert ("done: " in (tmp_path / "out").read_text()) is (closed == "stderr")
    assert "rror" not in (tmp_path / "out").read_text()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(tmp_path, closed):
    done = subprocess.run(
        f"{sys.executable} -m agent_peft runs . {closed}", shell=True, capture_output=True, cwd=tmp_path
    )
    assert done.returncode == 0 and b"rror" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["runs", "."], ["trian"]])
def test_other_commands_end_quietly(tmp_path, arguments):
    with os.fdopen(closed_pipe(), "w") as broken:
        command = [sys.executable, "-m", "agent_peft", *arguments]
        done = subprocess.run(command, cwd=tmp_path, stdout=broken, stderr=subprocess.PIPE, text=True)
        assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=broken)
        assert done.returncode == (2 if arguments == ["trian"] else 0)


def test_streams_are_as_before(capsys):
    before = sys.stdout, sys.stderr
    with lasting_output(), lasting_output():
        print("a")
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out == "a\n"
