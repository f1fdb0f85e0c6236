"""A run that continues with another configuration: what decides nothing changes freely, what decides what is
learned only where the user says so, and a prolonged run is the run that was long from the start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs import run as runs
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError

HELDOUT = {"kind": "arithmetic", "digits": 1, "num_tasks": 3, "split": "heldout"}
RLOO = {
    "algorithm": {"kind": "rloo"},
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 4,
    "rewards": {"invalid_action": -0.5},
    "sampling": {"max_new_tokens": 3},
    "optimizer": {"learning_rate": 0.02},
}
SFT = {"algorithm": {"kind": "sft"}, "steps": 2, "tasks_per_step": 2, "optimizer": {"learning_rate": 0.02}}


@pytest.fixture
def configure(tmp_path, policy_config, monkeypatch) -> Callable[..., TrainConfig]:
    monkeypatch.chdir(tmp_path)

    def configure(
        *overrides: str, run_dir: str = "run", stages: list[dict[str, Any]] | None = None, **changes: Any
    ) -> TrainConfig:
        settings = {
            "run_dir": run_dir,
            "policy": policy_config.model_dump(mode="json"),
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "stages": stages or [SFT, RLOO],
            **changes,
        }
        (tmp_path / "c.yaml").write_text(dump(settings))
        return read_config(tmp_path / "c.yaml", overrides)[0]

    return configure


def train_until(config: TrainConfig, steps: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Train, and interrupt it when so many more steps are written."""
    record, calls = runs.Recording.write_step, []

    def stops(self, *arguments):
        if len(calls) == steps:
            raise KeyboardInterrupt
        calls.append(None)
        return record(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runs.Recording, "write_step", stops)
        with pytest.raises(KeyboardInterrupt):
            train(config, **options)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


def events(config: TrainConfig) -> list[dict[str, Any]]:
    return json.loads((config.run_dir / "run.json").read_text())["history"]


def lasting(contents: Mapping[str, bytes], *also: str) -> dict[str, bytes]:
    """What two runs have in common whose directories and configurations differ."""
    return {name: content for name, content in contents.items() if name not in ("config.yaml", *also)}


# -- what decides nothing ----------------------------------------------------------------------------------

FREE = [
    "engine.rows=3",
    "stages.1.microbatch_tokens=40",
    "threads=1",
    "policy.activation_checkpointing=true",
    "checkpoint.every=2",
    "checkpoint.keep_last=1",
    "trajectories.every=2",
]


def test_a_killed_run_goes_on_with_other_keys_that_decide_nothing(configure, monkeypatch, capsys):
    """To the same numbers, up to rounding, and each change is told and written down."""
    whole = configure(run_dir="whole")
    train(whole)
    train_until(configure(), 3, monkeypatch)
    changed = configure(*FREE)
    capsys.readouterr()
    train(changed)
    told = " ".join(capsys.readouterr().out.split())
    assert "resuming after step 3 of 6" in told
    assert "engine.rows 64 -> 3 from step 3" in told
    assert "stages.1.microbatch_tokens 768 -> 40 from step 3" in told
    found, expected = metrics(changed), metrics(whole)
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.pop("stage") == theirs.pop("stage")
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert [event["event"] for event in events(changed)] == ["started", "resumed", *["changed"] * len(FREE)]
    changes = {event["key"]: (event["old"], event["new"], event["step"]) for event in events(changed)[2:]}
    assert changes["engine.rows"] == (64, 3, 3)
    assert read_config(changed.run_dir / "config.yaml")[0].engine.rows == 3


def test_without_a_change_the_bytes_are_the_same(configure, monkeypatch, run_contents):
    whole, killed = configure(run_dir="whole"), configure()
    train(whole)
    train_until(killed, 3, monkeypatch)
    train(killed)
    assert lasting(run_contents(killed.run_dir)) == lasting(run_contents(whole.run_dir))
    assert [event["event"] for event in events(killed)] == ["started", "resumed"]


# -- what decides what is learned --------------------------------------------------------------------------


def test_what_decides_is_refused_in_one_line_that_names_the_way(configure, run_contents, monkeypatch):
    train_until(configure(), 3, monkeypatch)
    before = run_contents(Path("run"))
    with pytest.raises(AgentPeftError) as told:
        train(configure("stages.1.optimizer.learning_rate=0.5", "engine.rows=3"))
    assert str(told.value) == (
        "run: holds a run of another configuration (stages.1.optimizer.learning_rate differs); set another "
        "run_dir, start over with --fresh, or add --change to continue with the new values"
    )
    for change, cause in (
        ("stages.0.optimizer.learning_rate=0.5", "belongs to a stage that is done, where it has no effect"),
        ("seed=1", "decides the weights of the model from scratch"),
        ("policy.lora.rank=2", "belongs to the weights that were trained"),
        ("stages.1.name=other", "belongs to a stage that has begun"),
    ):
        with pytest.raises(
            AgentPeftError, match=rf"or start over with --fresh: {change.partition('=')[0]} {cause}"
        ):
            train(configure(change), change=True)
    assert run_contents(Path("run")) == before


def test_change_takes_new_values_from_there_on(configure, monkeypatch):
    train(configure(run_dir="whole"))
    train_until(configure(), 4, monkeypatch)
    changed = configure("stages.1.optimizer.learning_rate=0.001", "environment.num_tasks=9")
    train(changed, change=True)
    rates = [line["learning_rate"] for line in metrics(changed) if "learning_rate" in line]
    assert rates == [0.02] * 4 + [0.001] * 2
    assert metrics(changed)[:4] == metrics(configure(run_dir="whole"))[:4]
    assert {(event.get("key"), event.get("old"), event.get("new")) for event in events(changed)[2:]} == {
        ("stages.1.optimizer.learning_rate", 0.02, 0.001),
        ("environment.num_tasks", 10, 9),
        ("tasks of environment", "10 tasks", "9 tasks"),
    }
    assert {event["step"] for event in events(changed)[1:]} == {4}
    train(changed)  # the new values are now those of the run


def test_a_key_of_all_stages_changes_in_those_that_are_not_done(configure, monkeypatch, capsys):
    train_until(configure(), 4, monkeypatch)
    train(configure("optimizer.learning_rate=0.001"), change=True)
    rates = [line["learning_rate"] for line in metrics(configure()) if "learning_rate" in line]
    assert rates == [0.02] * 4 + [0.001] * 2
    told = " ".join(capsys.readouterr().out.split())
    assert "stages.0.optimizer.learning_rate differs in a stage that is done, where it has no effect" in told
    assert [event["key"] for event in events(configure())[2:]] == ["stages.1.optimizer.learning_rate"]


# -- a run that gets longer --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{}, {"schedule": "linear", "warmup_steps": 4}])
def test_a_prolonged_run_is_the_run_that_was_long_from_the_start(configure, run_contents, caplog, optimizer):
    """Also where a schedule has a decay, if it has not begun."""
    stages = [SFT, {**RLOO, "optimizer": {"learning_rate": 0.02, **optimizer}}]
    evaluation = {"environment": HELDOUT, "sampling": {"max_new_tokens": 3}, "every": 4}
    long = configure("stages.1.steps=6", run_dir="long", stages=stages, evaluation=evaluation)
    train(long)
    train(configure(stages=stages, evaluation=evaluation))  # to its end
    prolonged = configure("stages.1.steps=6", stages=stages, evaluation=evaluation)
    reports = train(prolonged)
    assert list(reports) == ["base", "after sft", "step 4", "step 6", "after rloo"]
    ours, theirs = run_contents(prolonged.run_dir), run_contents(long.run_dir)
    assert {name: ours[name] for name in ours if name == "metrics.jsonl" or name.startswith("trajec")} == {
        name: theirs[name] for name in theirs if name == "metrics.jsonl" or name.startswith("trajec")
    }
    last = "checkpoints/step_000008/"
    assert {name: ours[name] for name in theirs if name.startswith(last)} == {
        name: theirs[name] for name in theirs if name.startswith(last)
    }
    assert not [record for record in caplog.records if "schedule" in record.getMessage()]


def test_a_schedule_that_depends_on_the_length_is_told(configure, caplog):
    stages = [{**RLOO, "optimizer": {"learning_rate": 0.02, "schedule": "linear"}}]
    train(configure(stages=stages))
    prolonged = configure("stages.0.steps=8", stages=stages)
    with caplog.at_level(logging.WARNING):
        train(prolonged)
    told = [record.getMessage() for record in caplog.records if "schedule" in record.getMessage()]
    assert len(told) == 1
    assert "had the rates of 4 steps, and the others get those of 8" in told[0]
    assert told[0] in (prolonged.run_dir / "log.txt").read_text()
    # the first new step continues where a schedule of 8 steps is half done, not at the old end's rate of 0
    rates = [line["learning_rate"] for line in metrics(prolonged)]
    assert rates == pytest.approx([0.02, 0.015, 0.01, 0.005, 0.01, 0.0075, 0.005, 0.0025])


def test_a_stage_may_be_added(configure, run_contents):
    both = configure(run_dir="both")
    train(both)
    train(configure(stages=[SFT]))
    train(configure())
    assert lasting(run_contents(Path("run"))) == lasting(run_contents(both.run_dir))
    assert [event["key"] for event in events(both.model_copy(update={"run_dir": Path("run")}))[2:]] == [
        "stages.1"
    ]


def test_a_stage_that_until_has_ended_is_not_started_again_in_silence(configure, capsys):
    until = {"metric": "surprisal", "below": 100.0, "over": 1}
    stages = [{**SFT, "steps": 5, "until": until}]
    config = configure(stages=stages)
    train(config)
    assert [line["step"] for line in metrics(config)] == [0]
    longer = configure("stages.0.steps=7", stages=stages)
    with pytest.raises(
        AgentPeftError, match=r"until has ended stage 'sft', .* add stages\.0\.until=null --cha"
    ):
        train(longer)
    capsys.readouterr()
    train(configure("stages.0.steps=7", "stages.0.until=null", stages=stages), change=True)
    assert "was ended by until, and continues with its step 5" in " ".join(capsys.readouterr().out.split())
    assert [line["step"] for line in metrics(config)] == [0, 5, 6]


def test_the_steps_that_are_made_cannot_be_taken_back(configure, monkeypatch):
    train_until(configure(), 4, monkeypatch)
    with pytest.raises(
        AgentPeftError, match=r"stages\.1\.steps cannot be less than the 2 steps that are made"
    ):
        train(configure("stages.1.steps=1"), change=True)
    shorter = configure("stages.1.steps=2")
    with pytest.raises(AgentPeftError, match="add --change"):
        train(shorter)
    train(shorter, change=True)
    assert len(metrics(shorter)) == 4


# -- old runs ----------------------------------------------------------------------------------------------


def test_a_run_of_an_earlier_version_goes_on(configure, monkeypatch, run_contents):
    """It knows nothing of newer keys and files."""
    train(configure(run_dir="whole"))
    train_until(configure(), 3, monkeypatch)
    file = Path("run/config.yaml")
    text = file.read_text()
    begin = text.index("trajectories:")
    file.write_text(text[:begin] + text[text.index("ranks:", begin) :])
    for name in ("run.json", "log.txt"):
        (file.parent / name).unlink()
    train(configure())
    assert lasting(run_contents(Path("run"))) == lasting(run_contents(Path("whole")))
