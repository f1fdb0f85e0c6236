"""A run read back: plain objects, lazily, without torch, also while it is written."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agent_peft as ap
from agent_peft.rollout import pairs
from agent_peft.rollout.statistics import summarize
from agent_peft.runs import reading
from agent_peft.runs.evaluations import write_evaluation
from agent_peft.runs.reading import load_run, read_lines
from agent_peft.runs.trajectories import write_episodes, write_trajectories
from agent_peft.types import AgentPeftError, Group, Message, Outcome, Task, Trajectory, Turn


def episode(task, reward, seed=0):
    turns = (Turn((1, 2), (3, 4), (-0.5, -0.25)),)
    said = (Message("user", "a?"), Message("assistant", "b"))
    outcome = Outcome.CORRECT if reward > 0 else Outcome.INCORRECT
    return Trajectory(
        task, turns, said, outcome, rewards=(reward,), reward_terms={"outcome": reward}, seed=seed
    )


def groups(*names):
    return [Group(Task(name), [episode(Task(name), r, seed=r + 1) for r in (1, 0)]) for name in names]


@pytest.fixture
def run(tmp_path):
    """A run directory with two steps, the last line of which is torn, and an evaluation."""
    folder = tmp_path / "run"
    for step in (0, 10):
        write_trajectories(folder / "trajectories", step, "grpo", groups("a", "b"))
    (folder / "trajectories" / "step_of_mine.jsonl").write_text("a user's own")
    (folder / "config.yaml").write_text("run_dir: run\nseed: 3\nstages: [{name: grpo, steps: 11}]\n")
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "stage": "nan", "loss": "nan", "reward": 0.5}\n'
        '{"step": 10, "stage": "nan", "loss": "-inf"}\n{"step": 11, "sta'
    )
    (folder / "timing.jsonl").write_text('{"step": 0, "seconds": 1.5}\n\0\0\n')
    for step in (0, 11):
        report = replace(summarize(groups("x")), step=step)
        write_evaluation(folder / "evaluations" / f"step_{step:06d}.json", report)
    return folder


def test_everything_is_there(run):
    record = load_run(str(run))
    assert (record.config["seed"], record.config["stages"]) == (3, [{"name": "grpo", "steps": 11}])
    assert [line["step"] for line in record.metrics] == [0, 10], "up to the torn line"
    assert record.metrics[0]["loss"] != record.metrics[0]["loss"], "a number again"
    assert record.metrics[1]["loss"] == -float("inf")
    assert record.timing == [{"step": 0, "seconds": 1.5}], "a line of zeros is what a power cut leaves"
    assert record.trajectories.steps == [0, 10]
    assert [(e.step, e.task, e.attempt) for e in record.trajectories] == [
        (step, task, attempt) for step in (0, 10) for task in ("a", "b") for attempt in (0, 1)
    ]
    one = record.trajectories.of_step(10)[2]
    assert (one.outcome, one.reward, one.seed, one.group) == (Outcome.CORRECT, 1, 2, 1)
    assert one.messages == (Message("user", "a?"), Message("assistant", "b"))
    assert one.tokens.tolist() == [1, 2, 3, 4] and one.mask.tolist() == [False, False, True, True]
    assert one.sampler_logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert one.trainer_logprobs is None and one.token_advantages is None
    assert list(record.evaluations) == ["base", "after_grpo"], "in the order of the run"
    after = record.evaluations["after_grpo"]
    assert after.report.success.value == 0.5
    assert [e.evaluation for e in after.episodes] == ["after_grpo"] * 2
    assert record.evaluation("after grpo") == after


def test_episodes_are_read_when_they_are_asked_for(run, monkeypatch):
    opened = []
    read = reading.read_bytes
    for module in (reading, pairs):
        monkeypatch.setattr(
            module,
            "read_bytes",
            lambda path, *rest, **more: opened.append(path.name) or read(path, *rest, **more),
        )
    record = load_run(run)
    first, second = record.trajectories.of_step(10)[:2]
    assert opened == ["step_000010.jsonl"]
    assert len(first.tokens) == len(second.mask) == 4
    assert opened == ["step_000010.jsonl", "step_000010.safetensors"], "the arrays of a step are read once"


def test_it_needs_no_torch(run):
    code = (
        "import sys, agent_peft as ap; run = ap.load_run(sys.argv[1]); "
        "e = next(iter(run.trajectories)); assert len(e.tokens) == 4 and run.metrics and run.config; "
        "assert run.evaluations['base'].report.success; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch is loaded"


def told(call):
    with pytest.raises(AgentPeftError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_not_there_is_told_in_one_line(run, tmp_path):
    assert "is not a folder; give the run_dir of a run" in told(lambda: load_run(tmp_path / "nowhere"))
    assert "holds no config.yaml, so it is not a run directory" in told(lambda: load_run(tmp_path))
    record = load_run(run)
    assert "step 7 has no trajectories on disk; the nearest that has some is 10" in told(
        lambda: record.trajectories.of_step(7)
    )
    assert "has no evaluation 'after_gpro'; did you mean 'after_grpo'?" in told(
        lambda: record.evaluation("after_gpro")
    )
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").touch()
    new = load_run(tmp_path / "new")
    assert (new.metrics, new.timing, list(new.trajectories), new.evaluations) == ([], [], [], {})
    assert "there are none at all" in told(lambda: new.trajectories.of_step(0))
    assert "there is none yet" in told(lambda: new.evaluation("base"))


def test_damage_is_told_in_one_line(run):
    trajectories = run / "trajectories"
    arrays, lines = trajectories / "step_000000.safetensors", trajectories / "step_000000.jsonl"
    one = load_run(run).trajectories.of_step(0)[3]
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[: len(whole) // 2])
    assert f"{arrays}: is damaged (" in told(lambda: one.tokens)
    arrays.unlink()
    assert f"{arrays}: cannot be read" in told(lambda: load_run(run).trajectories.of_step(0)[0].mask)
    other = load_run(run).trajectories.of_step(0)[3]
    write_episodes(trajectories, "step_000000", {}, [])
    assert f"{arrays}: has no 'tokens' of row 3; it is damaged" in told(lambda: other.tokens)
    good = '{"step": 1}\n'
    lines.write_text(good + '{"st\n' + good)
    assert f"{lines}:2: is damaged (" in told(lambda: read_lines(lines))
    lines.write_text(good + "[" * 100_000 + "\n" + good)
    assert f"{lines}:2: is damaged (" in told(lambda: read_lines(lines))
    lines.write_text('{"group": 0, "outcome": "won"}\n')
    assert f"{lines}:1: is not a record of an episode (" in told(lambda: list(load_run(run).trajectories))


def test_an_evaluation_without_its_lines_has_no_episodes(run):
    (run / "evaluations" / "step_000000.jsonl").unlink()
    assert list(load_run(run).evaluations["base"].episodes) == []


# -- data frames ---------------------------------------------------------------------------------------------


def test_frames_have_a_row_for_each(run):
    pandas = pytest.importorskip("pandas")
    record = load_run(run)
    metrics, episodes = record.metrics_frame(), record.trajectories.frame()
    assert isinstance(metrics, pandas.DataFrame) and metrics["step"].tolist() == [0, 10]
    assert metrics["reward"].isna().tolist() == [False, True]
    assert len(episodes) == 8 and episodes["reward.outcome"].tolist() == [1, 0] * 4
    assert episodes.groupby("task")["reward"].mean().to_dict() == {"a": 0.5, "b": 0.5}
    assert record.evaluations["base"].episodes.frame()["evaluation"].tolist() == ["base"] * 2


def test_curves_have_held_out_points_with_their_intervals(run):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    (run / "metrics.jsonl").write_text(
        '{"step": 0, "stage": "sft", "loss": 2.0, "success": 1.0}\n'
        '{"step": 1, "stage": "grpo", "loss": 0.1, "reward": 0.2, "success": 0.3}\n'
        '{"step": 2, "stage": "grpo", "loss": 0.2, "reward": 0.4, "success": 0.5, "kl": 0.1}\n'
    )
    figure = load_run(run).plot()
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["success", "reward", "loss"] and figure.axes[-1].get_xlabel() == "steps done"
    curves = {line.get_label(): line.get_xydata().tolist() for line in panels["success"].lines}
    assert curves["grpo, each step"] == [[1, 0.3], [2, 0.5]]
    assert "sft, each step" not in curves, "that of demonstrations is not the policy's"
    ((points, _, (interval,)),) = panels["success"].containers
    assert points.get_xydata().tolist() == [[0, 0.5], [11, 0.5]]
    rate = load_run(run).evaluation("base").report.success
    assert interval.get_segments()[0].ravel().tolist() == pytest.approx([0, rate.low, 0, rate.high])
    assert [line.get_label() for line in panels["loss"].lines][:2] == ["sft, each step", "grpo, each step"]
    (axes,) = load_run(run).plot("kl").axes
    assert axes.get_ylabel() == "kl"
    (axes,) = load_run(run).plot(["kl"]).axes
    assert axes.lines[0].get_xydata().tolist() == [[2, 0.1]]
    pyplot.close("all")
    assert "has no metric 'lose'; did you mean 'loss'?" in told(lambda: load_run(run).plot(["lose"]))


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install '.[plot]'" in told(load_run(run).plot)


def test_without_pandas_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert "pip install '.[pandas]'" in told(load_run(run).metrics_frame)
    assert "pip install '.[pandas]'" in told(load_run(run).trajectories.frame)


def test_the_front_door_has_it(run):
    assert ap.load_run(run).folder == Path(run)
