"""Safety nets: numbers that are not finite stop a run or are left out, short runs are short, and what
changed in a run is named.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_peft.configuration.explain import effective_values, explain
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.rollout.evaluation import EvaluationConfig, evaluate
from agent_peft.runs import run as runs
from agent_peft.runs.folder import recorded_measured, with_policy
from agent_peft.runs.reading import load_run
from agent_peft.runs.run import train
from agent_peft.training.trainer import NonFiniteError, Trainer
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, TrustError

ROLLOUTS = {
    "tasks_per_step": 2,
    "group_size": 4,
    "rewards": {"invalid_action": -0.5},
    "sampling": {"max_new_tokens": 3},
}


class Poisoned(Trainer):
    """At step 1 of RL, one parameter's gradient is not a number."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        if self.algorithm.on_policy:
            poison(self, math.nan)


def poison(trainer: Trainer, number: float) -> None:
    trainer.parameters[-1].register_hook(
        lambda gradient: gradient * number if trainer.step == 1 else gradient
    )


@pytest.fixture
def configure(tmp_path, policy_config):
    def configure(*overrides: str, **changes) -> TrainConfig:
        settings = {
            "run_dir": str(tmp_path / "run"),
            "policy": {**policy_config.model_dump(mode="json"), "lora": None},
            "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 10},
            "stages": [
                {"algorithm": {"kind": "sft"}, "steps": 2},
                {"algorithm": {"kind": "reinforce"}, "steps": 3, **ROLLOUTS},
            ],
        }
        path = tmp_path / "config.yaml"
        path.write_text(dump({**settings, **changes}))
        return read_config(path, overrides)[0]

    return configure


def metrics(config: TrainConfig) -> list[dict]:
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


# -- an update that is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("algorithm", ["sft", "reinforce"])
def test_a_skipped_update_touches_nothing_and_training_goes_on(make_trainer, algorithm, number, caplog):
    trainer = make_trainer(algorithm, steps=3, nonfinite="skip", policy={"lora": None})
    poison(trainer, number)
    steps = iter(trainer)
    first = next(steps)
    before = state(trainer)
    with caplog.at_level(logging.WARNING):
        second = next(steps)
    assert state(trainer) == before
    assert f"the gradient's norm is {number} at step 1: the update is skipped" in caplog.text
    third = next(steps)
    assert state(trainer)["parameters"] != before["parameters"]
    assert trainer.updates == 2
    assert [step.metrics["nonfinite_updates"] for step in (first, second, third)] == [0, 1, 0]
    assert "loss" not in second.metrics
    assert all(math.isfinite(value) for step in (first, second, third) for value in step.metrics.values())


def state(trainer: Trainer) -> dict[str, object]:
    content = trainer.state_dict()
    moments = [
        tensor.tolist() for found in content["optimizer"]["state"].values() for tensor in found.values()
    ]
    parameters = [p.tolist() for p in trainer.parameters]
    return {
        "parameters": parameters,
        "moments": moments,
        "algorithm": content["algorithm"],
    }


def test_every_update_of_a_step_is_counted(make_trainer):
    algorithm = {"kind": "grpo", "minibatches": 2, "update_epochs": 2}
    trainer = make_trainer(
        algorithm, steps=2, nonfinite="skip", rewards={"invalid_action": -0.5, "incorrect": 0.0}
    )
    poison(trainer, math.nan)
    first, second = trainer
    learnt = round(4 * (1 - second.metrics["updates_skipped"]))  # the others had nothing to learn from
    assert first.metrics["nonfinite_updates"] == 0
    assert second.metrics["nonfinite_updates"] == learnt > 0


def test_a_loss_that_is_not_a_number_is_never_taken_for_one_without_a_gradient(make_trainer):
    """A group whose advantages are NaN is no group without variance, which would be left out in silence."""
    trainer = make_trainer("grpo", steps=1)
    prepare = trainer.prepare

    def spoilt(groups):
        batch = prepare(groups)
        batch.advantages[batch.groups == 0] = math.nan
        return batch

    trainer.prepare = spoilt
    with pytest.raises(NonFiniteError, match="the loss is nan at step 0"):
        list(trainer)


def test_a_stop_saves_the_trajectories_and_is_not_repeated(configure, monkeypatch):
    monkeypatch.setattr(runs, "Trainer", Poisoned)
    config = configure()
    trajectories = config.run_dir / "trajectories" / "step_000003.jsonl"
    with pytest.raises(TrustError) as stopped:
        train(config)
    told = str(stopped.value)
    assert "\n" not in told
    assert told.startswith(
        "stage 'reinforce': the gradient's norm is nan at step 1: lower optimizer.learning_rate"
    )
    assert told.endswith(f"look at the step's trajectories, which are in {trajectories}")
    assert len(trajectories.read_text().splitlines()) == 8
    assert [line["step"] for line in metrics(config)] == [0, 1, 2]

    monkeypatch.undo()  # what poisoned it is gone, but nobody said so
    with pytest.raises(
        AgentPeftError,
        match=r"step 3 stopped this run .*; add stages\.1\.nonfinite=skip, or start over \(--fresh\)",
    ):
        train(config)
    with pytest.raises(AgentPeftError, match=r"another configuration \(seed differs\)"):
        train(configure("seed=1"))
    monkeypatch.setattr(runs, "Trainer", Poisoned)
    train(configure("stages.1.nonfinite=skip"))
    assert [line["nonfinite_updates"] for line in metrics(config)] == [0, 0, 0, 1, 0]
    assert not (config.run_dir / "stopped.json").exists()


def test_a_stopped_run_starts_over_when_told(configure, monkeypatch):
    config = configure()
    with monkeypatch.context() as patched:
        patched.setattr(runs, "Trainer", Poisoned)
        with pytest.raises(TrustError):
            train(config)
    train(config, fresh=True)
    assert len(metrics(config)) == 5


def test_a_stopped_run_goes_on_with_a_lower_rate(configure, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(runs, "Trainer", Poisoned)
        with pytest.raises(TrustError):
            train(configure())
    lower = configure("stages.1.optimizer.learning_rate=1e-6")
    train(lower, change=True)
    assert [line["learning_rate"] for line in metrics(lower)][2:] == [2e-4, 1e-6, 1e-6]


# -- an evaluation whose world fails -------------------------------------------------------------------------


class Doors(Arithmetic):
    """Some worlds do not open, others break when the answer is wrong."""

    def __init__(self, closed: int, breaks: Callable[[], BaseException] | None) -> None:
        super().__init__(ArithmeticConfig(digits=1, num_tasks=8))
        self.closed, self.breaks = {task.id for task in self.tasks[:closed]}, breaks

    def episode(self, task, seed):
        if task.id in self.closed:
            raise InfrastructureError("closed")
        episode = super().episode(task, seed)
        episode.step = lambda action, step=episode.step: self.refuse(step(action))
        return episode

    def refuse(self, result):
        # a random policy is never right, so what it says in digits stands for what is
        result = replace(result, outcome=Outcome.CORRECT if result.valid else Outcome.INCORRECT)
        if result.outcome is Outcome.INCORRECT and self.breaks:
            raise self.breaks()
        return result


@pytest.mark.parametrize("breaks", [None, lambda: InfrastructureError("gone"), lambda: ValueError("odd")])
def test_an_evaluation_counts_what_was_broken_and_tells_what_is_left_out(make_trainer, breaks, caplog):
    engine = make_trainer().engine
    settings = {
        "environment": {"kind": "arithmetic"},
        "attempts": 4,
        "sampling": {"max_new_tokens": 3, "temperature": 1.0},
    }
    evaluation = EvaluationConfig.model_validate(settings)
    honest = evaluate(engine, Doors(0, None), evaluation, 0)
    assert 0 < honest.success.value < 1
    found = evaluate(engine, Doors(0, breaks), evaluation, 0)
    assert (found.success, found.pass_at, found.outcomes) == (honest.success, honest.pass_at, honest.outcomes)
    assert found.infrastructure_failures == 0

    caplog.clear()
    fewer = evaluate(engine, Doors(2, breaks), evaluation, 0)
    assert (fewer.success.tasks, fewer.attempts, fewer.infrastructure_failures) == (6, 24, 8)
    assert {task: honest.outcomes[task] for task in fewer.outcomes} == fewer.outcomes
    assert fewer.summary.endswith(" on 6 tasks; 8 of 32 episodes are left out: their environment failed")
    assert "8 episodes are left out" in caplog.messages[-1]


# -- a short run ---------------------------------------------------------------------------------------------


def test_steps_on_the_command_line_shorten_every_stage(configure, tmp_path):
    config = configure("steps=1", f"run_dir={tmp_path / 'short'}")
    assert [stage.steps for stage in config.stages] == [1, 1]
    train(config)
    assert [line["stage"] for line in metrics(config)] == ["sft", "reinforce"]


def test_explain_says_where_the_short_run_comes_from(configure, tmp_path):
    configure()
    config, provenance = read_config(tmp_path / "config.yaml", ["steps=1"])
    facts = explain(config, provenance).facts
    assert facts["stage sft"].startswith("1 steps of ")
    assert facts["optimizer updates"] == "2"
    values = dict(effective_values(config))
    for stage in ("stages.0", "stages.1"):
        assert (values[f"{stage}.steps"], provenance.of(f"{stage}.steps")) == (
            1,
            "command line, for all stages",
        )
    config, provenance = read_config(tmp_path / "config.yaml", ["steps=1", "stages.1.steps=7"])
    assert [stage.steps for stage in config.stages] == [1, 7]


# -- names and changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b", "..\\b", "a\0b"])
def test_a_stages_name_must_fit_into_a_files(configure, tmp_path, name):
    stages = [{"algorithm": {"kind": "sft"}, "steps": 1, "name": name}]
    with pytest.raises(AgentPeftError) as raised:
        configure(stages=stages)
    told = str(raised.value)
    assert "\n" not in told
    assert "stages.0.name" in told
    assert "cannot be part of a file's name" in told


def test_stages_of_one_name_have_an_evaluation_each(configure):
    heldout = {"kind": "arithmetic", "digits": 1, "num_tasks": 3, "split": "heldout"}
    stages = [{"algorithm": {"kind": "sft"}, "steps": 1, "name": name} for name in ("my stage", "my_stage")]
    config = configure(
        stages=stages,
        evaluation={"environment": heldout, "at": ["stages"], "sampling": {"max_new_tokens": 3}},
    )
    assert list(train(config)) == ["after my stage", "after my_stage (2)"]
    assert list(load_run(config.run_dir).evaluations) == ["after_my_stage", "after_my_stage_(2)"]


CHANGES = [
    (["stages.1.optimizer.learning_rate=0.5"], r"\(stages\.1\.optimizer\.learning_rate differs\)"),
    (["seed=1", "environment.num_tasks=9"], r"\(environment\.num_tasks, seed differ\)"),
    (
        ["steps=1", "seed=1", "environment.num_tasks=9", "threads=1"],  # threads decide nothing
        r"\(environment\.num_tasks, seed, stages\.0\.steps and 1 more differ\)",
    ),
    (["stages.1.optimizer.betas=[0.8, 0.9]"], r"\(stages\.1\.optimizer\.betas differs\)"),
]


def test_what_differs_from_the_run_that_is_there_is_named_in_full(configure):
    train(configure())
    for overrides, told in CHANGES:
        with pytest.raises(AgentPeftError, match=rf"another configuration {told}; set another run_dir"):
            train(configure(*overrides))


def test_what_may_change_during_a_run_is_no_other_configuration(configure, run_contents):
    config = configure("steps=1")
    train(config)
    before = run_contents(config.run_dir)
    again = configure("steps=1", "ranks.timeout=60", "stages.1.nonfinite=skip")
    train(again)
    after = run_contents(config.run_dir)
    assert [name for name in before if before[name] != after[name]] == ["config.yaml"]
    assert read_config(config.run_dir / "config.yaml")[0] == with_policy(
        again, **recorded_measured(config.run_dir)
    )
