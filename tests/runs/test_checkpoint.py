"""A run that is killed finds its newest checkpoint whole, whenever the kill came."""

import random
import signal
import subprocess
import sys
import time

import pytest

from agent_peft.runs.checkpoint import (
    KEEP,
    checkpoint_step,
    checkpoints,
    clean,
    latest_checkpoint,
    save_checkpoint,
)
from agent_peft.types import AgentPeftError, InfrastructureError


def writing(text):
    def write(folder):
        (folder / "deep").mkdir()
        (folder / "weights").write_text(text)
        (folder / "deep" / "state").write_text(text)

    return write


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_old_checkpoints_go_but_the_newest_and_the_kept_stay(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    for step in range(1, 7):
        saved = save_checkpoint(root, step, writing(str(step)), keep_last=2, keep=step == 2)
        assert latest_checkpoint(root) == saved == root / f"step_{step:06d}"
    assert names(root) == ["step_000002", "step_000005", "step_000006"]
    assert (root / "step_000006" / "deep" / "state").read_text() == "6"
    assert (root / "step_000002" / KEEP).is_file()


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, writing("x"), keep_last=5)
    assert [checkpoint_step(path) for path in checkpoints(tmp_path)] == [999_999, 1_000_000]


def test_a_write_that_fails_leaves_the_one_before(tmp_path):
    before = save_checkpoint(tmp_path, 1, writing("1"), keep_last=1)

    def fail(folder):
        (folder / "weights").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(
        InfrastructureError,
        match=r"no space left on device; \d+ MB are free there\); the existing ones are complete",
    ):
        save_checkpoint(tmp_path, 2, fail, keep_last=1)
    assert latest_checkpoint(tmp_path) == before
    assert names(tmp_path) == ["step_000001"]


def test_no_folder_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    clean(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_nothing_else_is_taken_for_a_checkpoint(tmp_path):
    for name in ("step_12", "step_000012.tmp", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000013").write_text("a file")
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(AgentPeftError, match="step_000012"):
        checkpoint_step(tmp_path / "other")


LOOP = """
import sys
from pathlib import Path
from agent_peft.runs.checkpoint import save_checkpoint

root, first = Path(sys.argv[1]), int(sys.argv[2])
for step in range(first, first + 100_000):
    def write(folder):
        for part in range(4):
            (folder / f"part{part}").write_text(f"{step}\\n" * 2000)
    save_checkpoint(root, step, write, keep_last=2, keep=step % 10 == 0)
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_whole_latest_one(tmp_path):
    """Eight processes, each saving as fast as it can and killed after a random while: none takes back what
    was said to be saved.
    """
    waits, said = random.Random(0), 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(tmp_path), str(said + 1)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()  # it is up and saving
        time.sleep(waits.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        said = int(rest[-1] if rest else first)

        latest = latest_checkpoint(tmp_path)
        assert latest is not None and checkpoint_step(latest) >= said
        for checkpoint in checkpoints(tmp_path):
            for part in range(4):
                assert (checkpoint / f"part{part}").read_text() == f"{checkpoint_step(checkpoint)}\n" * 2000
        clean(tmp_path)
        assert all(name.startswith("step_") for name in names(tmp_path))
        assert latest_checkpoint(tmp_path) is not None
    assert all((tmp_path / f"step_{step:06d}").is_dir() for step in range(10, said, 10))
