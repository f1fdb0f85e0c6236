"""Out of memory, and the same gradient all the same. The tests raise what CUDA raises, in the midst of a
real forward or backward.
"""

from __future__ import annotations

import logging
import math
import weakref
from itertools import product
from typing import Any

import pytest
import torch

from agent_peft.batch import collate
from agent_peft.policies.forward.microbatching import Microbatching
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn
from tests.conftest import case

SMOOTH = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": float("inf")}
ALGORITHMS = [
    {"kind": "rloo", "entropy_coef": 0.1},
    {"kind": "grpo", "kl_coef": 0.1, "update_epochs": 2, "minibatches": 2},
    {"kind": "ppo", "update_epochs": 2},
    {"kind": "sft"},
]


def limit(trainer: Trainer, positions: int, where: str, scoring: float = math.inf) -> None:
    """A model whose memory holds so many positions of a forward that trains, or of its backward;
    ``scoring`` of one without gradient.
    """

    def check(states: torch.Tensor, allowed: float) -> None:
        if states.shape[0] * states.shape[1] > allowed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def forward(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if where == "backward" and torch.is_grad_enabled():
            states = output[0] if isinstance(output, tuple) else output
            # by then the output layer has its gradient
            states.register_hook(lambda gradient: check(gradient, positions))
        else:
            check(arguments[0], positions if torch.is_grad_enabled() else scoring)

    next(
        module for module in trainer.policy.model.modules() if type(module).__name__ == "LlamaDecoderLayer"
    ).register_forward_hook(forward)


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [p.grad for p in trainer.parameters if p.grad is not None]


@pytest.mark.parametrize(
    ("algorithm", "whole", "where"),
    [
        case(algorithm, whole, where, fast=(number % 2 == whole) == (where == "forward"))
        for (number, algorithm), whole in product(enumerate(ALGORITHMS), (False, True))
        for where in ("forward", "backward")
    ],
    ids=str,
)
def test_half_the_budget_and_the_same_gradient(make_trainer, caplog, algorithm, whole, where):
    policy = {"lora": None} if whole else {}
    if whole and "kl_coef" in algorithm:
        algorithm = {**algorithm, "kl_coef": 0.0}
    settings = {
        "optimizer": SMOOTH,
        "policy": policy,
        "microbatch_tokens": 1000,
        "sampling": {"max_new_tokens": 5},
        "tasks_per_step": 8,
    }
    roomy, tight = make_trainer(algorithm, **settings), make_trainer(algorithm, **settings)
    limit(tight, 30, where, scoring=60)
    expected, found = [step.metrics for step in roomy], [step.metrics for step in tight]
    assert len(gradients(roomy)) == len(gradients(tight)) > 0
    for ours, theirs in zip(
        [*gradients(tight), *tight.parameters], [*gradients(roomy), *roomy.parameters], strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    halvings = [metrics.pop("microbatch_halvings") for metrics in found]
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.pop("microbatch_halvings") == 0
        assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-6)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == sum(halvings) > 0
    assert all(w.startswith("out of memory in a microbatch of ") and "\n" not in w for w in warnings)
    assert warnings[-1].endswith(f"microbatch_tokens={tight.gradients.microbatching.tokens}")


def test_what_one_step_has_found_out_the_next_one_knows(make_trainer, caplog):
    trainer = make_trainer({"kind": "grpo"}, optimizer=SMOOTH, microbatch_tokens=1000)
    limit(trainer, 30, "backward")
    found = [step.metrics["microbatch_halvings"] for step in trainer]
    assert found == [len(caplog.records), 0]
    assert found[0] >= 1


def test_the_error_and_what_it_held_are_gone_before_it_goes_on(make_trainer):
    """The frames of the error hold the activations of the microbatch that did not fit: they must not stay."""
    trainer = make_trainer({"kind": "grpo"}, optimizer=SMOOTH, microbatch_tokens=1000, steps=1)
    alive: list[Any] = []

    def forward(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            assert not any(mark() is not None for mark in alive), (
                "a tensor of the failed forward is still there"
            )
            if arguments[0].shape[0] * arguments[0].shape[1] > 30:
                activation = torch.zeros(3)
                alive.append(weakref.ref(activation))
                raise torch.OutOfMemoryError("CUDA out of memory.")

    next(
        module for module in trainer.policy.model.modules() if type(module).__name__ == "LlamaDecoderLayer"
    ).register_forward_hook(forward)
    list(trainer)
    assert alive


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_trajectory_that_does_not_fit_is_one_line(make_trainer, where):
    trainer = make_trainer({"kind": "grpo"}, optimizer=SMOOTH)
    limit(trainer, 3, where)
    before = [p.detach().clone() for p in trainer.parameters]
    with pytest.raises(
        AgentPeftError,
        match=r"one trajectory of \d+ tokens does not fit; set policy\.activation_checkpointing=true",
    ) as told:
        list(trainer)
    assert "\n" not in str(told.value)
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_other_errors_are_no_lack_of_memory(make_trainer):
    trainer = make_trainer({"kind": "grpo"})

    def broken(module: torch.nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("a bug")

    trainer.policy.decoder.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(trainer)


def test_a_group_that_is_kept_whole_is_never_cut():
    """Three groups of two rows each. A group of which one row needs a forward goes in whole."""
    turn = Turn((1, 2, 3), (4, 5), (-0.5, -0.5))
    batch = collate([Trajectory(Task("t"), (turn,))] * 6, [0, 0, 3, 3, 5, 5])
    live = torch.tensor([True, False, False, False, True, True])
    count = lambda sequences: sum(len(tokens) for tokens in sequences)  # noqa: E731
    for tokens, whole, split in ((1, [[0, 1], [4, 5]], [[0], [4], [5]]), (20, [[0, 1, 4, 5]], [[0, 4, 5]])):
        assert list(Microbatching(tokens, count, keeps_groups_whole=True).cut(batch, live)) == whole
        assert list(Microbatching(tokens, count).cut(batch, live)) == split


def test_a_whole_group_that_does_not_fit_is_one_line():
    turn = Turn((1, 2, 3), (4, 5), (-0.5, -0.5))
    batch = collate([Trajectory(Task("t"), (turn,))] * 4, [0, 0, 1, 1])
    microbatching = Microbatching(100, lambda sequences: 10 * len(sequences), keeps_groups_whole=True)
    tried = []

    def work():
        for rows in microbatching.cut(batch, torch.ones(4, dtype=torch.bool)):
            tried.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(AgentPeftError, match="one group of 20 tokens does not fit"):
        microbatching.within_memory(work)
    assert tried == [[0, 1, 2, 3], [0, 1]]


def test_gradients_in_16_bits_of_a_backward_that_failed_are_forgotten(make_trainer):
    """They are not yet in the fp32 copies when memory runs out, and must not be added to the next ones."""
    settings = {
        "policy": {"dtype": "bfloat16", "lora": None},
        "steps": 1,
        "microbatch_tokens": 1000,
        "optimizer": SMOOTH,
        "group_size": 1,
        "tasks_per_step": 8,
    }
    roomy, tight = make_trainer("sft", **settings), make_trainer("sft", **settings)
    limit(tight, 30, "backward")
    (expected,), (found,) = list(roomy), list(tight)
    assert found.metrics["microbatch_halvings"] > 0
    assert found.metrics["gradient_norm"] == pytest.approx(expected.metrics["gradient_norm"], rel=0.05)
