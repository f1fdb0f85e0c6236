"""Distillation in the loop: its loss and gradient against a computation by hand in float64."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_peft.environments.arithmetic import Arithmetic, ArithmeticConfig
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, Message, Trajectory
from tests.conftest import case

EXACT = {"learning_rate": 1e-3, "max_grad_norm": float("inf")}
HINT = {"prompt": "{solution}={task}"}
TASKS = Arithmetic(ArithmeticConfig(digits=1, num_tasks=10))


@pytest.fixture
def other(tmp_path: Path, policy_config: ScratchConfig) -> dict[str, str]:
    """A teacher of other weights."""
    policy = load_policy(policy_config.model_copy(update={"lora": None}), seed=7)
    policy.save(tmp_path / "teacher")
    return {"model": str(tmp_path / "teacher")}


def by_hand(trainer: Trainer, trajectories: list[Trajectory], beta: float, top_k: int | None) -> Tensor:
    """The mean divergence per sampled token, from probabilities in float64, one trajectory at a time."""
    student = copy.deepcopy(trainer.policy.model).double()
    assert trainer.teacher is not None
    target = copy.deepcopy(trainer.teacher.policy.model).double()
    terms = []
    for trajectory in trajectories:
        ((turn),) = trajectory.turns
        read = list(turn.observation)
        if trainer.stage.teacher.prompt is not None:
            (solution,) = TASKS.demonstration(trajectory.task)
            text = f"{solution}={trajectory.messages[0].content}"
            read = trainer.policy.chat.opening([Message("user", text)])
        for place in range(len(turn.action)):
            so_far = list(turn.action[:place])
            q = student(input_ids=torch.tensor([[*turn.observation, *so_far]])).logits[0, -1].softmax(-1)
            with torch.no_grad():
                p = target(input_ids=torch.tensor([[*read, *so_far]])).logits[0, -1].softmax(-1)
            if top_k is not None:
                top = p.topk(top_k).indices
                p, q = (torch.cat([x[top], (1 - x[top].sum())[None]]) for x in (p, q))
            m = beta * p + (1 - beta) * q
            forward, backward = (p * (p / m).log()).sum(), (q * (q / m).log()).sum()
            terms.append(
                {0.0: (p * (p / q).log()).sum(), 1.0: (q * (q / p).log()).sum()}.get(
                    beta, beta * forward + (1 - beta) * backward
                )
            )
    loss = torch.stack(terms).mean()
    loss.backward()
    gradient = [p.grad.flatten() for p in student.parameters() if p.requires_grad]
    return torch.cat([loss.detach()[None], *gradient])


FORMS = [(True, False), (False, True), (True, True), (False, False)]  # packing, privileged
LOSSES = [
    (1.0, None, {}),
    (0.0, None, {}),
    (0.3, None, {}),
    (1.0, 4, {}),
    (0.3, 4, {"lora": None}),
    (1.0, None, {"dtype": "bfloat16"}),
    (0.3, None, {"dtype": "bfloat16", "lora": None}),
]


@pytest.mark.parametrize(
    ("beta", "top_k", "policy", "packing", "privileged"),
    [
        # each loss with one teacher, packed or padded; the first one with both, both ways
        case(*loss, packing, privileged, fast=number == 0 or (packing, privileged) == FORMS[number % 4])
        for (number, loss), (packing, privileged) in product(enumerate(LOSSES), FORMS)
    ],
)
def test_the_loss_and_its_gradient_are_those_by_hand(
    make_trainer, other, beta, top_k, policy, packing, privileged
):
    trainer = make_trainer(
        {"kind": "distill", "beta": beta, "top_k": top_k},
        teacher=HINT if privileged else other,
        steps=1,
        optimizer=EXACT,
        microbatch_tokens=20,
        policy={"packing": packing, **policy},
    )
    trajectories = [t for group in trainer.source.collect(0).groups for t in group.trajectories]
    expected = by_hand(trainer, trajectories, beta, top_k)
    (step,) = trainer
    assert [t.tokens for t in step.trajectories] == [t.tokens for t in trajectories]
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.parameters]
    found = torch.cat([torch.tensor([step.metrics["loss"]]), *(g.flatten() for g in gradient)]).double()
    assert step.metrics["divergence"] == pytest.approx(step.metrics["loss"], rel=1e-6)
    assert expected[1:].norm() > 0.01 and step.metrics["microbatch_halvings"] == 0
    close = 0.05 if "dtype" in policy else 2e-6
    assert float((found - expected).norm() / expected.norm()) < close
    assert step.metrics["groups_with_signal"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_that_is_the_policy_teaches_nothing(make_trainer, tmp_path, policy_config, dtype):
    load_policy(policy_config.model_copy(update={"lora": None, "dtype": dtype}), 0).save(tmp_path / "same")
    (step,) = make_trainer(
        "distill",
        teacher={"model": str(tmp_path / "same")},
        policy={"lora": None, "dtype": dtype},
        steps=1,
    )
    assert step.metrics["divergence"] < 1e-9 and step.metrics["gradient_norm"] < 1e-5


def test_the_policy_gradient_of_rloo_can_be_added(make_trainer, other):
    """Its share of the gradient is that of rloo, whose weighting is set to the same."""
    found = []
    for algorithm in (
        {"kind": "distill"},
        {"kind": "distill", "advantage_coef": 2.0},
        {"kind": "rloo", "weighting": "token_mean"},
    ):
        keys = {} if algorithm["kind"] == "rloo" else {"teacher": other}
        trainer = make_trainer(algorithm, steps=1, optimizer=EXACT, **keys)
        list(trainer)
        found.append(
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trainer.parameters]
            )
        )
    plain, both, rloo = found
    assert rloo.norm() > 1e-3
    torch.testing.assert_close(both, plain + 2 * rloo, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"teacher": {"prompt": None}},
            r"the teacher would be the stage's reference, and hold the policy there",
        ),
        ({"teacher": {"prompt": "{task}"}}, r"has no \{solution\}"),
        ({"sampling": {"top_p": 0.9}}, r"sampling\.top_p cuts off tokens that the teacher gives"),
        ({"algorithm": {"kind": "distill", "turn_discount": 0.9}}, r"turn_discount has no effect"),
        ({"algorithm": {"kind": "grpo"}, "teacher": HINT}, r"teacher has no effect on grpo, which has no"),
    ],
)
def test_keys_without_an_effect_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        StageConfig.model_validate({"algorithm": "distill", "steps": 1, **keys})


def test_a_teacher_that_cannot_teach_is_one_line(make_trainer, tmp_path, policy_config):
    with pytest.raises(AgentPeftError, match=r"^teacher\.model: there is no run, adapter or model .*$"):
        make_trainer("distill", teacher={"model": str(tmp_path / "nowhere")})
    alphabet = policy_config.alphabet + "!"
    stranger = policy_config.model_copy(update={"alphabet": alphabet, "lora": None})
    load_policy(stranger, 0).save(tmp_path / "stranger")
    with pytest.raises(AgentPeftError, match=r"has another tokenizer than the policy"):
        make_trainer("distill", teacher={"model": str(tmp_path / "stranger")})
    trainer = make_trainer("distill", teacher=HINT, steps=1)
    trainer.environment.demonstration = lambda task: None
    with pytest.raises(AgentPeftError, match=r"there is no demonstration for teacher\.prompt to show"):
        list(trainer)


def test_a_teacher_with_an_adapter_is_merged(make_trainer, other, tmp_path):
    """An adapter in a run or a folder; the frozen model has no parameter with a gradient."""
    policy = load_policy(other["model"], seed=1, device="cpu")
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    policy.save(tmp_path / "adapter")
    teacher: Any = make_trainer("distill", teacher={"model": str(tmp_path / "adapter")}).teacher
    assert not any(p.requires_grad for p in teacher.policy.model.parameters())
    tokens = torch.tensor([[1, 2, 3, 4]])
    found, expected = (one.policy.model if one is teacher else one.model for one in (teacher, policy))
    torch.testing.assert_close(found(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_longer_prompt_of_the_teacher_is_read_once_for_its_group(make_trainer):
    """Siblings share the hinted opening in the trie, whose length differs between tasks."""
    trainer = make_trainer("distill", teacher={"prompt": "{solution}{solution}={task}"}, steps=1)
    groups = trainer.source.collect(0).groups
    batch = trainer.prepare(groups)
    taught = trainer.teacher.read(batch, range(len(batch)))
    openings = trainer.teacher.openings
    sequences = [[*new, *row[old:]] for (old, new), row in zip(openings, batch.sequences, strict=True)]
    assert len(taught.hidden) == trainer.policy.count_nodes(sequences) < sum(map(len, sequences)) / 2
