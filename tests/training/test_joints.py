"""What one stage hands to the next: the reference of its KL, and nothing that the next one takes for its
own.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.runs.run import Recording, train
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError
from tests.conftest import case, copy_policy

MakeTrainer = Callable[..., Trainer]
PRICES = {"correct": 1.0, "incorrect": 0.0, "invalid_action": -0.5}
LORA = LoraSettings(rank=4, alpha=8)
TAUGHT: dict[str, Policy] = {}


def metrics(trainer: Trainer) -> list[dict[str, float]]:
    return [step.metrics for step in trainer]


@pytest.fixture
def taught(make_trainer: MakeTrainer) -> Callable[..., Trainer]:
    """``taught(algorithm, lora, **stage)``: a trainer whose policy has been through demonstrations, as in
    ``[sft, algorithm]``.
    """

    def teach(algorithm: Any, lora: LoraSettings | None = LORA, steps: int = 30, **stage: Any) -> Trainer:
        if str(lora) not in TAUGHT:
            sft = make_trainer(
                "sft",
                steps=40,
                tasks_per_step=10,
                policy={"lora": lora},
                optimizer={"learning_rate": 1e-2 if lora else 1e-3},
            )
            metrics(sft)
            TAUGHT[str(lora)] = sft.policy
        policy = copy_policy(TAUGHT[str(lora)])
        more = {"steps": steps, "tasks_per_step": 10, "rewards": PRICES, "policy": {"lora": lora}, **stage}
        rl = make_trainer(algorithm, **more)
        return Trainer(policy, rl.environment, rl.stage, load_sampler(policy), seed=1)

    return teach


# -- the reference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lora", [case(LORA, fast=True, name="adapter"), case(None, fast=False, name="all weights")]
)
def test_the_kl_of_a_stage_begins_at_zero(taught, lora):
    found = metrics(
        taught({"kind": "rloo", "kl_coef": 0.05}, lora, steps=3, optimizer={"learning_rate": 1e-3})
    )
    assert found[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert found[-1]["kl"] > 1e-7, "and the reference does not follow the policy"


def test_to_the_base_the_kl_of_a_taught_policy_begins_far_from_zero(taught):
    trainer = taught({"kind": "rloo", "kl_coef": 0.05}, steps=1, reference="base")
    assert metrics(trainer)[0]["kl"] > 1


def test_a_fresh_adapter_makes_both_references_the_same(make_trainer):
    found = [
        metrics(make_trainer({"kind": "grpo", "kl_coef": 0.1}, steps=3, reference=kind))
        for kind in ("stage_start", "base")
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_penalty_holds_what_demonstrations_taught(taught):
    """To the base it would unteach them: success then falls from 0.8 to 0.1 in these 30 steps."""
    found = metrics(taught({"kind": "rloo", "kl_coef": 0.5}, optimizer={"learning_rate": 3e-3}))
    first, last = (sum(m["success"] for m in part) / 5 for part in (found[:5], found[-5:]))
    assert first > 0.6
    assert last > first - 0.05


def test_base_without_an_adapter_is_refused(make_trainer):
    with pytest.raises(AgentPeftError, match=r"reference: base .*set policy\.lora"):
        make_trainer({"kind": "rloo", "kl_coef": 0.1}, policy={"lora": None}, reference="base")


# -- the reference after a kill ------------------------------------------------------------------------------


@pytest.fixture
def config(policy_config: ScratchConfig, tmp_path: Path) -> TrainConfig:
    arithmetic = {"kind": "arithmetic", "digits": 1, "num_tasks": 10}
    rl = {
        "steps": 3,
        "tasks_per_step": 3,
        "group_size": 3,
        "rewards": PRICES,
        "sampling": {"max_new_tokens": 3},
        "optimizer": {"learning_rate": 0.01},
        "algorithm": {"kind": "rloo", "kl_coef": 0.1},
    }
    stages = [
        {**rl, "name": "first"},
        {"algorithm": {"kind": "sft"}, "steps": 2, "optimizer": {"learning_rate": 0.01}},
        {**rl, "name": "last"},
    ]
    evaluation = {"environment": {**arithmetic, "split": "heldout", "num_tasks": 3}, "every": 1}
    checkpoint = {"keep_last": 9}
    content = {
        "run_dir": tmp_path / "whole",
        "policy": policy_config,
        "environment": arithmetic,
        "evaluation": evaluation,
    }
    return TrainConfig.model_validate({**content, "checkpoint": checkpoint, "stages": stages})


class Killed(BaseException):
    pass


def kill_after(config: TrainConfig, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and die when so many steps are written down."""
    record, calls = Recording.write_step, []

    def dies(self, *arguments):
        calls.append(None)
        if len(calls) > steps:
            raise Killed
        return record(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "write_step", dies)
        with pytest.raises(Killed):
            train(config)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "all weights"])
def test_a_killed_run_is_measured_to_the_same_reference(config, tmp_path, monkeypatch, run_contents, lora):
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"lora": lora})})
    train(config)
    whole = run_contents(config.run_dir)
    for steps in (2, 7):  # in the middle of the first stage, and of the last
        killed = config.model_copy(update={"run_dir": tmp_path / f"killed_{steps}"})
        kill_after(killed, steps, monkeypatch)
        # also where an evaluation is made again, with the weights of its moment, before the stage continues
        (killed.run_dir / "evaluations" / "step_000001.json").unlink()
        train(killed)
        again = run_contents(killed.run_dir)
        assert whole.keys() == again.keys()
        assert [name for name in whole if whole[name] != again[name]] == ["config.yaml"]


def test_a_reference_that_is_gone_is_one_line(config, monkeypatch):
    kill_after(config, 7, monkeypatch)
    shutil.rmtree(config.run_dir / "checkpoints" / "step_000005")
    with pytest.raises(
        AgentPeftError,
        match=r"step_000005: the reference of stage 'last' is this checkpoint, and it cannot be read",
    ):
        train(config)


# -- dropout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        case({"kind": "grpo", "kl_coef": 0.1}, fast=False, name="one update"),
        case(
            {"kind": "grpo", "update_epochs": 2, "minibatches": 2, "kl_coef": 0.1},
            fast=True,
            name="four updates",
        ),
        case({"kind": "ppo"}, fast=False, name="ppo"),
    ],
)
def test_dropout_alone_moves_neither_ratio_nor_kl(taught, algorithm):
    trainer = taught(
        algorithm, LORA.model_copy(update={"dropout": 0.3}), steps=2, optimizer={"learning_rate": 1e-12}
    )
    if trainer.algorithm.critic is not None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1e-12
    found = [m for m in metrics(trainer) if not m["updates_skipped"]]
    assert found
    for step in found:
        assert step["clip_fraction"] == 0
        assert step["approx_kl"] == pytest.approx(0, abs=1e-9)
        assert step["ratio"] == pytest.approx(1, abs=1e-5)
        assert step.get("kl", 0.0) == pytest.approx(0, abs=1e-9)
        assert step["gradient_norm"] > 0


def test_under_dropout_the_ratio_still_tells_of_changed_weights(taught):
    trainer = taught({"kind": "grpo", "update_epochs": 2}, LORA.model_copy(update={"dropout": 0.3}), steps=2)
    found = [m for m in metrics(trainer) if not m["updates_skipped"]]
    assert found and all(m["approx_kl"] > 1e-5 for m in found)


# -- demonstrations are scored by the whole distribution -----------------------------------------------------


def test_the_loss_of_demonstrations_is_their_cross_entropy(make_trainer, tmp_path):
    from agent_peft.configuration.load import read_config

    path = tmp_path / "x.yaml"
    path.write_text(
        "run_dir: r\npolicy: {kind: pretrained, model: m}\nenvironment: "
        "{kind: arithmetic, num_tasks: 10}\nsteps: 1\nsampling: "
        "{temperature: 0.7, top_p: 0.9, max_new_tokens: 3}\nstages: [sft, {algorithm: rloo}]\n"
    )
    supervised, rl = read_config(path, check_files=False)[0].stages
    assert supervised.sampling == SamplingConfig(max_new_tokens=3) and rl.sampling.top_p == 0.9
    trainer = make_trainer("sft")
    trainer = Trainer(trainer.policy, trainer.environment, supervised, trainer.engine, seed=0)
    batch = trainer.prepare(list(trainer.source.collect(0).groups))
    logits = trainer.policy.model(input_ids=batch.tokens).logits[:, :-1].log_softmax(-1)
    expected = -logits.gather(-1, batch.tokens[:, 1:, None])[..., 0][batch.action_mask[:, 1:]].mean().item()
    (step,) = trainer
    assert step.metrics["loss"] == step.metrics["surprisal"] == pytest.approx(expected, abs=1e-5)


# -- what is measured ----------------------------------------------------------------------------------------


def test_an_evaluation_keeps_the_limits_of_the_stage_that_it_follows(config, monkeypatch):
    from agent_peft.runs import evaluations

    seen: list[tuple[int, float]] = []
    evaluate = evaluations.evaluate

    def watching(engine, environment, evaluation, *rest):
        seen.append((evaluation.sampling.max_new_tokens, evaluation.sampling.temperature))
        return evaluate(engine, environment, evaluation, *rest)

    monkeypatch.setattr(evaluations, "evaluate", watching)
    stages = tuple(
        stage.model_copy(update={"steps": 1, "sampling": SamplingConfig(max_new_tokens=limit)})
        for stage, limit in zip(config.stages, (2, 3, 4), strict=True)
    )
    content = {
        **dict(config),
        "stages": stages,
        "evaluation": {**config.evaluation.model_dump(), "sampling": {}, "every": 0},
    }
    train(TrainConfig.model_validate(content))
    assert seen == [(2, 0), (2, 0), (3, 0), (4, 0)]
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(math.isfinite(line["learning_rate"]) for line in lines)


def test_evaluations_in_between_count_the_steps_of_the_run(config):
    content = {**dict(config), "evaluation": {**config.evaluation.model_dump(), "sampling": {}, "every": 2}}
    reports = train(TrainConfig.model_validate(content))
    assert list(reports) == ["base", "step 2", "after first", "step 4", "after sft", "step 6", "after last"]
