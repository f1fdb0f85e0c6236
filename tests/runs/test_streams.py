"""Runs whose order of tasks is a stream: by skill, with its matrix, and by success."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_peft.configuration.load import load_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.digests import task_digest
from agent_peft.rollout.skill_matrix import MEASURES
from agent_peft.runs.evaluations import due_evaluations, skill_matrices
from agent_peft.runs.run import train
from agent_peft.runs.targets import evaluate_target, merge_run, run_config
from agent_peft.types import AgentPeftError

SKILLS, SIZE = ("odd", "even", "big"), 4  # tasks of each


GRADER = "def grade(response, answer, task): return sum(map(ord, response)) % 2 == 0\n"


@pytest.fixture
def settings(tmp_path, policy_config, monkeypatch):
    """Questions of three skills, and others of the same skills. A random reply is right every other time."""
    (tmp_path / "coin_grader.py").write_text(GRADER)
    monkeypatch.syspath_prepend(tmp_path)
    for name, first in (("tasks", 0), ("heldout", 40)):
        rows = [
            {"id": f"{skill}-{number}", "question": f"{first + number}=", "answer": "1", "skill": skill}
            for skill in SKILLS
            for number in range(SIZE)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = {"kind": "questions", "id": "id", "skills": "skill", "grader": "coin_grader:grade"}
    return {
        "run_dir": str(tmp_path / "run"),
        "threads": 1,
        "policy": policy_config.model_dump(mode="json"),
        "environment": {**questions, "tasks": str(tmp_path / "tasks.jsonl")},
        "evaluation": {
            "environment": {**questions, "tasks": str(tmp_path / "heldout.jsonl")},
            "at": ["segments"],
            "sampling": {"max_new_tokens": 2},
        },
        "algorithm": "reinforce",
        "task_order": {"kind": "by_skill", "steps": 2},
        "epochs": 1,
        "tasks_per_step": 2,
        "group_size": 4,
        "sampling": {"max_new_tokens": 2, "temperature": 1.0},
        "optimizer": {"learning_rate": 0.05},
    }


class StopAfter:
    """Stops the run when it has written so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step(self, step):
        if step.number + 1 == self.steps:
            raise KeyboardInterrupt

    def on_evaluation(self, name, report):
        pass

    def on_end(self):
        pass


def trained(run_dir) -> list[list[str]]:
    """The tasks of each step, as they are in its trajectories."""
    paths = sorted((run_dir / "trajectories").glob("step_*.jsonl"))
    return [
        list(dict.fromkeys(json.loads(line)["task"] for line in path.read_text().splitlines()))
        for path in paths
    ]


def test_one_skill_after_another_with_an_evaluation_after_each_and_the_matrix(settings, tmp_path, capsys):
    reports = train(load_config(settings))
    config = run_config(tmp_path / "run")
    assert config.stages[0].task_order.skills == SKILLS and config.stages[0].steps == 6
    assert [{name.split("-")[0] for name in step} for step in trained(tmp_path / "run")] == [
        {skill} for skill in SKILLS for _ in range(2)
    ]
    assert {name: report.step for name, report in reports.items()} == {
        "base": 0,
        "step 2": 2,
        "step 4": 4,
        "after reinforce": 6,
    }
    skills = {f"{skill}-{number}": skill for skill in SKILLS for number in range(SIZE)}
    matrix = skill_matrices(config, reports.values(), skills)["reinforce"]
    assert matrix.segments == SKILLS
    for row, report in enumerate(reports.values()):
        assert [matrix.rate(row, skill) for skill in SKILLS] == [report.by_skill[s] for s in SKILLS]
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "success by skill (its tasks) and segment" in told
        and "backward transfer" in told
        and "2 even" in told
    )


def test_segments_are_due_where_their_stage_begins_and_after_each(settings):
    warm = {"algorithm": "sft", "steps": 3, "tasks_per_step": 2}
    stream = {key: settings.pop(key) for key in ("algorithm", "task_order", "epochs", "group_size")}
    order = {**stream["task_order"], "skills": ["even", "odd"]}
    settings["stages"] = [warm, {**stream, "task_order": order, "epochs": 1.5, "name": "stream"}]

    def due(*moments: str) -> dict[int, str]:
        config: TrainConfig = load_config(settings, evaluation={"at": list(moments)})
        return due_evaluations(config.with_steps(load_environment(config.environment).tasks))

    assert due("segments") == {3: "after sft", 5: "step 5", 7: "step 7", 9: "after stream"}
    assert due("start", "stages", "segments") == {
        0: "base",
        3: "after sft",
        5: "step 5",
        7: "step 7",
        9: "after stream",
    }


def test_segments_without_a_stream_are_one_line(settings):
    with pytest.raises(AgentPeftError, match=r"segments are those of a stage with task_order\.kind: by_sk"):
        load_config(settings, task_order="shuffle")


def test_an_unknown_skill_ends_the_run_before_it_takes_its_directory(settings, tmp_path):
    settings["task_order"]["skills"] = ["odd", "evn"]
    with pytest.raises(AgentPeftError, match="'evn' is the first skill of no task; did you mean 'even'"):
        train(load_config(settings))
    assert not (tmp_path / "run").exists()


# -- replay in the prompt ------------------------------------------------------------------------------------


@pytest.fixture
def replaying(settings):
    """A stream that shows two successes. The tiny model has 64 positions, of which they may take half."""
    return settings | {
        "evaluation": settings["evaluation"] | {"at": ["start", "segments"]},
        "replay_in_prompt": 2,
        "sampling": {"max_new_tokens": 2, "temperature": 1.0},
        "checkpoint": {"keep_last": 99},
    }


def episodes(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(record: dict) -> list[str]:
    """The replies of earlier episodes that the prompt showed (an episode has one turn)."""
    return [message["content"] for message in record["messages"][:-1] if message["role"] == "assistant"]


def test_the_prompt_shows_the_latest_successes_of_the_steps_before(replaying, tmp_path):
    config = load_config(replaying)
    train(config)
    run = tmp_path / "run"
    kept: list[tuple[str, str]] = []  # what a task asks, reply
    assert config.evaluation and config.evaluation.environment
    training, heldout = (
        {task.id: task_digest(task) for task in load_environment(part).tasks}
        for part in (config.environment, config.evaluation.environment)
    )  # with equal ids, and other contents
    for step in range(6):
        records = episodes(run / "trajectories" / f"step_{step:06d}.jsonl")
        for record in records:
            others = [reply for task, reply in kept if task != training[record["task"]]]
            assert shown(record) == others[-2:], (step, training[record["task"]])
        for task in dict.fromkeys(training[record["task"]] for record in records):
            correct = (r for r in records if training[r["task"]] == task and r["outcome"] == "correct")
            # a special token is not in the model's alphabet
            of_task = (r for r in correct if "<" not in r["messages"][-1]["content"])
            if (first := next(of_task, None)) is not None:
                kept = [pair for pair in kept if pair[0] != task]
                kept.append((task, first["messages"][-1]["content"]))
        if step % 2:  # the evaluation after a segment
            for record in episodes(run / "evaluations" / f"step_{step + 1:06d}.jsonl"):
                assert (
                    shown(record) == [reply for task, reply in kept if task != heldout[record["task"]]][-2:]
                )
    assert len(kept) > 3
    assert all(shown(record) == [] for record in episodes(run / "evaluations" / "step_000000.jsonl"))


@pytest.mark.slow
def test_replays_are_resumed_to_the_same_bytes_also_for_an_evaluation_that_was_not_made(
    replaying, run_contents, tmp_path
):
    train(load_config(replaying))
    run, expected = tmp_path / "run", run_contents(tmp_path / "run")
    assert sum(name.endswith("replays.json") for name in expected) == 6, "one in each checkpoint"
    shutil.rmtree(run)
    with pytest.raises(KeyboardInterrupt):
        train(load_config(replaying), observers=[StopAfter(4)])  # before the evaluation after step 4
    assert not (run / "evaluations" / "step_000004.json").exists()
    train(load_config(replaying))
    assert run_contents(run) == expected


def test_a_checkpoint_is_measured_with_its_replays(replaying, tmp_path, caplog):
    reports = train(load_config(replaying))
    caplog.clear()
    run = tmp_path / "run"
    for name in ("step 2", "after reinforce"):
        step = reports[name].step
        measured = evaluate_target(run, checkpoint=f"step_{step:06d}")
        assert measured == reports[name], name
        assert measured.settings == reports[name].settings and measured.settings["replay_in_prompt"] == 2
    assert not caplog.records
    merge_run(run, tmp_path / "merged")
    evaluate_target(tmp_path / "merged", run_config(run))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{tmp_path / 'merged'}: holds no successful episodes (replays.json), so replay_in_prompt: 2 shows "
        "none here"
    ]


def test_replay_without_training_leaves_the_policy_as_it_is(replaying, tmp_path):
    """A learning rate of 0: the policy acts, is shown its successes, and no weight changes."""
    train(load_config(replaying, optimizer={"learning_rate": 0.0}))
    run = tmp_path / "run"
    weights = [
        (run / "checkpoints" / f"step_{step:06d}" / "adapter_model.safetensors").read_bytes()
        for step in range(1, 7)
    ]
    assert len(set(weights)) == 1
    metrics = episodes(run / "metrics.jsonl")
    assert [(m["updates_skipped"], m["learning_rate"]) for m in metrics] == [(1.0, 0.0)] * 6
    assert any(shown(record) for record in episodes(run / "trajectories" / "step_000005.jsonl"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"replay_in_prompt": 2},
            "replay_in_prompt has no effect, because stages.0 learns from demonstratio",
        ),
        ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate: 0 leaves sft nothing to do; raise"),
    ],
)
def test_keys_without_an_effect_on_demonstrations_are_one_line(settings, keys, message):
    stage = {"algorithm": "sft", "epochs": 1, **keys}
    rest = ("run_dir", "policy", "environment")
    with pytest.raises(AgentPeftError) as raised:
        load_config({**{key: settings[key] for key in rest}, "stages": [stage]})
    assert message in str(raised.value)


# -- the benchmark -------------------------------------------------------------------------------------------

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "streams.py"


@pytest.mark.slow
@pytest.mark.skipif(not BENCHMARK.is_file(), reason="the benchmarks are not here")
def test_the_benchmark_of_streams_runs_and_reads_what_is_done(tmp_path):
    output = tmp_path / "streams.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--seeds", "0", "--runs", str(tmp_path / "runs")]
    command += ["--output", str(output), "threads=1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    content = json.loads(output.read_text())
    assert [row["condition"] for row in content["rows"]] == ["lora", "replay", "both"]
    for row in content["rows"]:
        assert len(row["segments"]) == 6 and len(row["matrix"]) == 7
        assert set(row["measures"]) == set(MEASURES) and row["tokens"]["evaluation"]["read"] > 100
    weights = [
        (tmp_path / "runs" / "replay-0" / "checkpoints" / name / "adapter_model.safetensors").read_bytes()
        for name in ("step_000001", "step_000007")
    ]
    assert weights[0] == weights[1], "replay alone trains nothing after the warm-up"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert json.loads(output.read_text()) == content
