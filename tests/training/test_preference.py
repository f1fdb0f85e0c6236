"""Stages that learn from preferences: exact from the first update on, whatever the forward."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from agent_peft.batch import collate_groups
from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.policies.config import LoraSettings
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

KINDS = ["dpo", {"kind": "dpo", "loss": "ipo"}, "kto", "orpo", "simpo"]
REFERENCES = [{"kind": "dpo"}, {"kind": "dpo", "loss": "ipo"}, {"kind": "kto"}]
AT_START = {"sigmoid": math.log(2), "ipo": 25.0, "kto": 0.5}


def keys(algorithm):
    kind = {"kind": algorithm} if isinstance(algorithm, str) else algorithm
    return {"algorithm": kind, "group_size": 1, "sampling": {}, "rewards": {}}


@pytest.mark.parametrize(
    ("lora", "dtype", "kind"),
    [
        *((lora, dtype, REFERENCES[0]) for lora in (True, False) for dtype in ("float32", "bfloat16")),
        (True, "bfloat16", REFERENCES[1]),
        (True, "bfloat16", REFERENCES[2]),
    ],
)
def test_before_the_first_update_the_policy_is_its_reference(make_trainer, kind, dtype, lora):
    """In bfloat16, too: what is compared was computed by the same forward on the same microbatch."""
    changes = {"dtype": dtype, **({} if lora else {"lora": None})}
    trainer = make_trainer(**keys(kind), policy=changes, steps=2, microbatch_tokens=24)
    first, second = [step.metrics for step in trainer]
    assert first["loss"] == pytest.approx(AT_START[kind.get("loss", kind["kind"].replace("dpo", "sigmoid"))])
    assert (first["margin"], first["reward_chosen"], first["accuracy"]) == (0.0, 0.0, 0.5)
    assert first.get("z0", 0.0) == 0.0
    assert second["margin"] != 0.0


@pytest.mark.parametrize("kind", REFERENCES, ids=str)
def test_the_reference_is_the_policy_at_the_stage_s_start(make_trainer, kind):
    """Of an adapter that has learned before, and not the base model."""
    trained = make_trainer("sft", steps=3)
    list(trained)
    trainer = make_trainer(**keys(kind))
    trainer.policy.model.load_state_dict(trained.policy.model.state_dict())
    stage = trainer.stage
    again = type(trainer)(trainer.policy, trainer.environment, stage)
    first = next(iter(again)).metrics
    assert (first["margin"], first["reward_chosen"]) == (0.0, 0.0)


@pytest.mark.parametrize("kind", REFERENCES, ids=str)
def test_with_dropout_the_reference_drops_the_same_units(make_trainer, kind):
    lora = {"rank": 4, "alpha": 8, "dropout": 0.3}
    trainer = make_trainer(**keys(kind), policy={"lora": LoraSettings(**lora)})
    first = next(iter(trainer)).metrics
    assert (first["margin"], first["reward_chosen"]) == (0.0, 0.0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gradient_is_that_of_a_forward_without_packing_reply_by_reply(make_trainer, kind):
    """Packed and padded, in one microbatch and one for each pair, against the loss of the model in float64,
    which reads each reply alone.
    """
    expected, found = None, {}
    for packing in (True, False):
        for tokens in (1000, 1):
            trainer = make_trainer(**keys(kind), policy={"packing": packing}, microbatch_tokens=tokens)
            algorithm = trainer.algorithm
            before = list(trainer)[-1].metrics  # two steps, so that the policy is not its reference
            assert math.isfinite(before["loss"])
            groups = trainer.source.collect(5).groups
            batch = trainer.prepare(groups)
            (minibatch,) = trainer.minibatches(batch, len(groups), 0)
            weighed, denominator = algorithm.weigh(minibatch)
            weighed = type(weighed)(**{**vars(weighed), "weights": weighed.weights / denominator})
            sums, _ = trainer.gradients.compute(weighed, False, trainer.dropout_seed)
            gradient = torch.cat([p.grad.flatten() for p in trainer.parameters])
            found[packing, tokens] = (float(sums["loss"]), gradient)
            if expected is None:
                expected = in_float64(trainer, weighed, groups)
    value, gradient = expected
    scale = max(1.0, float(gradient.abs().max()))
    for loss, shown in found.values():
        assert loss == pytest.approx(value, rel=2e-6, abs=2e-6)
        torch.testing.assert_close(shown.double() / scale, gradient / scale, atol=2e-6, rtol=1e-5)


def in_float64(trainer, weighed, groups):
    """The loss and its gradient, from the papers' equations."""
    policy, algorithm = trainer.policy, trainer.algorithm
    batch = collate_groups(dict(enumerate(groups)))
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    kept = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    model = policy.model.double()
    frozen = trainer.gradients.reference

    def logps(row: int) -> torch.Tensor:
        length = int(batch.lengths[row])
        tokens = batch.tokens[row : row + 1, :length]
        found = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        found = found.gather(-1, tokens[0, 1:, None])[:, 0]
        return found[batch.action_mask[row, 1:length]]

    def of_reference(row: int) -> float:
        with torch.no_grad(), model.disable_adapter():
            return float(logps(row).sum())

    assert frozen is None or frozen.weights is None  # so the adapter off is the reference
    rows = [row for row in range(len(batch)) if batch.groups[row] >= 0]
    policy_logps = [logps(row) for row in rows]
    refs = [of_reference(row) if frozen else 0.0 for row in rows]
    kind, config, losses = algorithm.kind, trainer.stage.algorithm, []
    if kind == "kto":
        others = [row for row in range(len(batch)) if batch.groups[row] < 0]
        gaps = [float(logps(row).sum().detach()) - of_reference(row) for row in others]
        z0 = max(0.0, sum(gaps) / len(gaps))
        for place, _ in enumerate(rows):
            r = policy_logps[place].sum() - refs[place]
            side = 1.0 if float(batch.returns[rows[place]]) > 0.5 else -1.0
            losses.append(1 - torch.sigmoid(config.beta * side * (r - z0)))
    for good, bad in [] if kind == "kto" else zip(rows[::2], rows[1::2], strict=True):
        w, l_ = policy_logps[good], policy_logps[bad]
        if kind == "dpo":
            h = (w.sum() - refs[good]) - (l_.sum() - refs[bad])
            sigmoid = -torch.log(torch.sigmoid(config.beta * h))
            losses.append(sigmoid if config.loss == "sigmoid" else (h - 1 / (2 * config.beta)) ** 2)
        elif kind == "orpo":
            p = [torch.exp(x.mean()) for x in (w, l_)]
            odds = [x / (1 - x) for x in p]
            losses.append(
                -p[0].log() - config.odds_coef * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
            )
        else:
            margin = config.beta * (w.mean() - l_.mean()) - config.gamma
            losses.append(-torch.log(torch.sigmoid(margin)))
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, parameters)
    model.float()
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(kept[name])
    return float(loss.detach()), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_metrics_of_a_step_are_those_that_are_announced(make_trainer, kind):
    trainer = make_trainer(**keys(kind))
    step = list(trainer)[-1]
    assert set(step.metrics) == set(trainer.stage.metrics)
    assert step.metrics["episodes"] == 8.0, "what is only measured is not an episode of the step"
    signs = [set(values.tolist()) - {0.0} for values in step.token_values.advantages.split(lengths(step))]
    assert signs == [{1.0}, {-1.0}] * 4


def lengths(step):
    return [len(trajectory.tokens) for trajectory in step.trajectories]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ({"algorithm": "sft", "episodes_of": {"run": "r"}}, "episodes_of has no effect on sft"),
        ({"algorithm": "dpo", "learn_from": "successes"}, "learn_from: successes leaves dpo nothing to comp"),
        ({"algorithm": "kto", "learn_from": "successes"}, "learn_from: successes leaves kto nothing to comp"),
        (
            {"algorithm": "dpo", "episodes_of": {"run": "r"}, "task_order": "sequential"},
            "task_order has no effect with episodes_of",
        ),
        ({"algorithm": "orpo", "reference": "base"}, "reference has no effect on orpo"),
        ({"algorithm": "dpo", "group_size": 2}, "group_size has no effect on dpo"),
        ({"algorithm": "dpo", "refill": 2}, "refill has no effect on dpo"),
        (
            {"algorithm": "dpo", "until": {"metric": "surprisal", "below": 1}},
            "'surprisal' is not a metric of this",
        ),
    ],
)
def test_keys_without_an_effect_are_refused(stage, told):
    with pytest.raises(ValidationError, match=told):
        StageConfig.model_validate({"steps": 2, **stage})
    with pytest.raises(ValidationError, match="epochs counts the environment's tasks"):
        StageConfig.model_validate({"algorithm": "dpo", "epochs": 2, "episodes_of": {"run": "r"}})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_accuracy_rises(make_trainer, kind):
    """On sums: the policy learns to tell the right answer from a wrong one, from nothing (a random model)."""
    settings = {**keys(kind), "tasks_per_step": 16, "optimizer": {"learning_rate": 5e-3}}
    policy = {"lora": None}
    trainer = make_trainer(**settings, policy=policy, steps=60)
    trainer = type(trainer)(trainer.policy, Arithmetic(ArithmeticConfig(digits=1)), trainer.stage)
    curve = [step.metrics["accuracy"] for step in trainer]
    before, after = sum(curve[:4]) / 4, sum(curve[-8:]) / 8
    assert before < 0.7 and after > 0.75, curve


def test_a_step_with_one_group_alone_measures_no_kl(make_trainer):
    trainer = make_trainer(**keys("kto"), tasks_per_step=1)
    assert [step.metrics["z0"] for step in trainer] == [0.0, 0.0]


def test_an_environment_without_pairs_ends_in_one_line(make_trainer, monkeypatch):
    trainer = make_trainer(**keys("dpo"))
    monkeypatch.setattr(Arithmetic, "rejection", lambda self, task: None)
    with pytest.raises(AgentPeftError, match="the environment has no rejection, so it is not a pair"):
        next(iter(trainer))
