"""A stage that ends when a metric has arrived."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from agent_peft.algorithms import ALGORITHMS
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.config import ScratchConfig
from agent_peft.runs.run import train
from agent_peft.training.stage import Stage, StageConfig
from agent_peft.training.step_metrics import metrics_of
from agent_peft.training.until import UntilConfig
from agent_peft.types import AgentPeftError, Group


@pytest.mark.parametrize(
    ("until", "value", "reached"),
    [
        ({"above": 0.5}, 0.6, True),
        ({"above": 0.5}, 0.5, False),
        ({"below": 0.5}, 0.4, True),
        ({"below": 0.5}, math.nan, False),
        ({"below": 0.0}, -0.1, True),
    ],
)
def test_a_side_is_reached(until, value, reached):
    assert UntilConfig(metric="reward", **until).is_reached(value) is reached


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "needs above or below"),
        ({"above": 1.0, "below": 0.0}, "above or below, and not both"),
        ({"patience": 3}, r"patience counts evaluations; give one of evaluation\.success"),
        ({"metric": "evaluation.success", "patience": 3, "over": 2}, "over has no effect"),
    ],
)
def test_what_ends_a_stage_is_needed_and_has_an_effect(keys, told):
    with pytest.raises(ValidationError, match=told):
        UntilConfig(**{"metric": "reward", **keys})


def test_the_mean_is_over_four_steps_or_one_evaluation():
    assert UntilConfig(metric="reward", above=0.5).over == 4
    assert UntilConfig(metric="evaluation.reward", above=0.5).over == 1


def test_a_trainer_alone_makes_no_evaluations():
    with pytest.raises(AgentPeftError, match="a Trainer makes none"):
        Stage(algorithm="rloo", steps=3, until={"metric": "evaluation.success", "above": 0.5})


def test_the_mean_over_the_last_steps_ends_a_stage(make_trainer):
    trainer = make_trainer("sft", steps=9, until={"metric": "surprisal", "below": 100.0, "over": 3})
    steps = [step.number for step in trainer]
    assert steps == [0, 1, 2]
    assert trainer.step == 9, "the numbers of its steps jump to the stage's end"


def test_one_that_is_never_reached_changes_nothing(make_trainer):
    plain = [step.metrics for step in make_trainer("sft", steps=3)]
    assert [
        step.metrics for step in make_trainer("sft", steps=3, until={"metric": "surprisal", "below": -1.0})
    ] == plain


def test_a_step_without_the_metric_neither_counts_nor_ends_anything(make_trainer):
    """Groups without variance make no update, and what an update reports is then not there."""
    trainer = make_trainer("grpo", steps=4, until={"metric": "loss", "below": 100.0, "over": 2})
    collect, alike = trainer.source.collect, {0, 2}

    def collecting(step):
        found = collect(step)
        if step not in alike:
            return found
        groups = [
            Group(g.task, [replace(t, rewards=(0.0,) * len(t.turns)) for t in g.trajectories])
            for g in found.groups
        ]
        return replace(found, groups=groups)

    trainer.source = SimpleNamespace(collect=collecting)
    steps = [(step.number, "loss" in step.metrics) for step in trainer]
    assert steps == [(0, False), (1, True), (2, False), (3, True)], "the mean is over steps 1 and 3"
    assert trainer.recent and len(trainer.recent) == 2


def test_one_that_never_comes_ends_nothing(make_trainer):
    trainer = make_trainer(
        "grpo", steps=3, rewards={"incorrect": 0.0}, until={"metric": "loss", "below": 100.0, "over": 1}
    )
    assert [step.number for step in trainer] == [0, 1, 2]


def test_surprisal_is_of_all_sampled_tokens_with_or_without_a_signal(make_trainer):
    """Also of the groups that have no forward, which are the certain ones as a policy collapses."""
    trainer = make_trainer("grpo", steps=1, tasks_per_step=4)
    collect = trainer.source.collect

    def collecting(step):
        first, *others = collect(step).groups
        alike = [
            replace(g, trajectories=[replace(t, rewards=(0.0,) * len(t.turns)) for t in g.trajectories])
            for g in others
        ]
        rewards = [replace(t, rewards=(float(n),)) for n, t in enumerate(first.trajectories)]
        return replace(collect(step), groups=[replace(first, trajectories=rewards), *alike])

    trainer.source = SimpleNamespace(collect=collecting)
    (step,) = trainer
    logprobs = [p for t in step.trajectories for turn in t.turns for p in turn.logprobs]
    assert step.metrics["groups_with_signal"] == 0.25
    assert step.metrics["surprisal"] == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-6)
    ended = make_trainer(
        "grpo", steps=3, rewards={"incorrect": 0.0}, until={"metric": "surprisal", "below": 100.0, "over": 2}
    )
    assert [step.number for step in ended] == [0, 1], "no step has a signal"


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("accuracy", r"'accuracy' is not a metric of this stage; give one of score, reward, success,"),
        ("surprisals", r"'surprisals' is not a metric of this stage; did you mean 'surprisal'\?"),
        ("kl", r"'kl' is not a metric of this stage"),  # without kl_coef there is none
        (
            "evaluation.succes",
            r"evaluations do not measure 'evaluation.succes'; did you mean 'evaluation.suc",
        ),
    ],
)
def test_an_unknown_metric_is_told_before_anything_runs(metric, told):
    with pytest.raises(ValidationError, match=rf"until\.metric: {told}"):
        StageConfig.model_validate(
            {"algorithm": {"kind": "grpo"}, "steps": 1, "until": {"metric": metric, "above": 0.5}}
        )


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "reinforce"},
        {"kind": "rloo", "kl_coef": 0.1},
        {"kind": "grpo", "kl_coef": 0.1, "entropy_coef": 0.1},
        {"kind": "dr_grpo", "constant_length": 3, "entropy_coef": 0.1},
        {"kind": "ppo"},
        {"kind": "ppo", "reward_kl_coef": 0.1},
        {"kind": "reinforce_plus_plus", "reward_kl_coef": 0.1},
        {"kind": "sft"},
    ],
    ids=lambda algorithm: "-".join(str(part) for part in algorithm.values()),
)
def test_the_metrics_that_are_known_are_those_that_come(make_trainer, algorithm):
    assert algorithm["kind"] in ALGORITHMS
    found = {name for step in make_trainer(algorithm, steps=2, tasks_per_step=8) for name in step.metrics}
    known = metrics_of(ALGORITHMS[algorithm["kind"]](**algorithm).facts)
    assert len(known) == len(set(known))
    assert found == set(known) - {"score"}, "arithmetic has no scores"
    assert ("reward" in found) == (algorithm["kind"] != "sft"), "what demonstrations earn is not the policy's"


@pytest.fixture
def config(policy_config: ScratchConfig, tmp_path: Path) -> TrainConfig:
    """Two stages, of which the first ends after two steps of five."""
    arithmetic = {"kind": "arithmetic", "digits": 1, "num_tasks": 12}
    stages = [
        {
            "algorithm": {"kind": "sft"},
            "steps": 5,
            "tasks_per_step": 2,
            "until": {"metric": "surprisal", "below": 100.0, "over": 2},
        },
        {
            "algorithm": {"kind": "rloo"},
            "steps": 2,
            "tasks_per_step": 2,
            "group_size": 2,
            "sampling": {"max_new_tokens": 3},
        },
    ]
    evaluation = {
        "environment": {**arithmetic, "split": "heldout", "num_tasks": 3},
        "sampling": {"max_new_tokens": 3},
    }
    return TrainConfig.model_validate(
        {
            "run_dir": tmp_path / "whole",
            "policy": policy_config,
            "environment": arithmetic,
            "evaluation": evaluation,
            "stages": stages,
        }
    )


def test_the_next_stage_and_the_evaluations_follow(config):
    reports = train(config)
    assert list(reports) == ["base", "after sft", "after rloo"]
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines] == [
        (0, "sft"),
        (1, "sft"),
        (5, "rloo"),
        (6, "rloo"),
    ]
    assert {path.name for path in (config.run_dir / "checkpoints").iterdir()} == {
        "step_000005",
        "step_000006",
        "step_000007",
    }


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_that_stopped_on_the_way_goes_on_to_the_same_end(
    config, tmp_path, monkeypatch, run_contents, steps
):
    train(config)
    stopped = config.model_copy(update={"run_dir": tmp_path / "stopped"})
    from agent_peft.runs import run

    record, calls = run.Recording.write_step, []

    def dies(self, *arguments):
        calls.append(None)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return record(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run.Recording, "write_step", dies)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    train(stopped)
    whole, again = run_contents(config.run_dir), run_contents(stopped.run_dir)
    assert whole.keys() == again.keys()
    assert [name for name in whole if whole[name] != again[name]] == ["config.yaml"]
