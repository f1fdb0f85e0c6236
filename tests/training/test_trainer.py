"""What the loop promises: the same update however it is cut, nothing computed in vain, and one line where
it cannot continue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.config import LoraSettings
from agent_peft.training.step_metrics import NO_SIGNAL_STEPS
from agent_peft.training.trainer import Trainer
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
)
from tests.conftest import case

from .conftest import assert_close

# Adam divides small gradients by themselves, noise and all
SMOOTH = {
    "learning_rate": 1e-2,
    "epsilon": 1e-2,
    "max_grad_norm": float("inf"),
}
ALGORITHMS = [
    {"kind": "reinforce"},
    {"kind": "rloo", "entropy_coef": 0.1},
    {"kind": "grpo", "kl_coef": 0.1},
    {"kind": "grpo", "weighting": "token_mean", "update_epochs": 2, "minibatches": 2},
    {"kind": "dr_grpo", "constant_length": 3},
    {"kind": "sft"},
]


def run(trainer: Trainer) -> list[dict[str, float]]:
    return [step.metrics for step in trainer]


def but_for_rounding(metrics: dict[str, float]) -> dict[str, float]:
    """Without the largest difference between sampler and trainer, which is nothing but rounding."""
    return {name: value for name, value in metrics.items() if name != "mismatch_max"}


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    """Of the last update."""
    return [p.grad for p in trainer.parameters if p.grad is not None]


def count_forwards(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward that trains; filled as the trainer runs."""
    rows, forward = [], trainer.policy.forward

    def counting(batch, sampling, **options):
        if torch.is_grad_enabled():
            rows.append(len(batch))
        return forward(batch, sampling, **options)

    monkeypatch.setattr(trainer.policy, "forward", counting)
    return rows


# -- the same update however it is cut ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [case(algorithm, fast=number % 2 == 1) for number, algorithm in enumerate(ALGORITHMS)],
    ids=lambda a: f"{a['kind']}{len(a)}",
)
def test_microbatches_never_change_the_result(make_trainer, monkeypatch, algorithm):
    whole = make_trainer(algorithm, microbatch_tokens=10**6, optimizer=SMOOTH)
    forwards = count_forwards(whole, monkeypatch)
    expected = run(whole)
    assert sum(m["gradient_norm"] for m in expected) > 0.01
    for tokens in (1, 12, 40):
        cut = make_trainer(algorithm, microbatch_tokens=tokens, optimizer=SMOOTH)
        pieces = count_forwards(cut, monkeypatch)
        found = run(cut)
        assert sum(pieces) == sum(forwards)
        if tokens == 1:
            assert set(pieces) == {1}
            assert len(pieces) > len(forwards)
        assert_close(gradients(cut), gradients(whole))
        assert_close(cut.parameters, whole.parameters)
        for ours, theirs in zip(found, expected, strict=True):
            assert but_for_rounding(ours) == pytest.approx(but_for_rounding(theirs), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_padding_never_changes_the_result(make_trainer, algorithm):
    packed = make_trainer(algorithm, optimizer=SMOOTH)
    padded = make_trainer(algorithm, optimizer=SMOOTH, policy={"packing": False})
    expected, found = run(packed), run(padded)
    assert packed.policy.packing
    assert_close(gradients(padded), gradients(packed))
    assert_close(padded.parameters, packed.parameters)
    for ours, theirs in zip(found, expected, strict=True):
        assert but_for_rounding(ours) == pytest.approx(but_for_rounding(theirs), rel=1e-5, abs=1e-6)


def test_the_gradient_is_that_of_a_loss_written_out(make_trainer):
    """One REINFORCE step by hand: -(1/B) Σ_i (R_i - b) Σ_t log π(y_t), rows one by one, plain forwards."""
    trainer = make_trainer({"kind": "reinforce", "baseline_start": 0.3}, steps=1, optimizer=SMOOTH)
    step = next(iter(trainer))
    by_hand = make_trainer({"kind": "reinforce", "baseline_start": 0.3}, steps=1, optimizer=SMOOTH)
    trajectories = [t for group in step.collection.groups for t in group.trajectories]
    total = torch.zeros(())
    for t in trajectories:
        tokens = torch.tensor([t.tokens])
        logp = by_hand.policy.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        chosen = logp.gather(-1, tokens[0, 1:, None])[:, 0]
        total = total - (t.reward - 0.3) * (chosen * torch.tensor(t.action_mask[1:])).sum() / len(
            trajectories
        )
    total.backward()
    assert_close(gradients(trainer), gradients(by_hand))
    assert step.metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-5)


# -- groups without variance -------------------------------------------------------------------------------


def test_groups_without_variance_get_no_forward_and_change_nothing(make_trainer, monkeypatch):
    trainer = make_trainer("grpo", steps=1, optimizer=SMOOTH, tasks_per_step=8, seed=1)
    rows = count_forwards(trainer, monkeypatch)
    (step,) = trainer
    live = [g for g in step.collection.groups if len({t.reward for t in g.trajectories}) > 1]
    assert 0 < len(live) < 8, "the task must leave some groups with variance and some without"
    assert step.metrics["zero_variance_groups"] == 1 - len(live) / 8
    assert sum(rows) <= 4 * len(live)

    full = make_trainer("grpo", steps=1, optimizer=SMOOTH, tasks_per_step=8, seed=1)
    # the algorithm is frozen, so its class is told: every row gets a forward
    monkeypatch.setattr(type(full.algorithm), "learns_at_zero_advantage", property(lambda self: True))
    rows = count_forwards(full, monkeypatch)
    (again,) = full
    assert sum(rows) == 32
    assert_close(gradients(full), gradients(trainer))
    assert_close(full.parameters, trainer.parameters)
    assert again.metrics["loss"] == pytest.approx(step.metrics["loss"], abs=1e-6)


def test_a_penalty_learns_from_groups_without_variance(make_trainer, monkeypatch):
    trainer = make_trainer({"kind": "grpo", "kl_coef": 0.1}, steps=1, rewards={"incorrect": 0.0})
    rows = count_forwards(trainer, monkeypatch)
    (step,) = trainer
    assert step.metrics["zero_variance_groups"] == 1
    assert sum(rows) == 16


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", {"kind": "dr_grpo", "constant_length": 3}], ids=str)
def test_a_step_without_variance_updates_nothing(make_trainer, algorithm):
    trainer = make_trainer(algorithm, rewards={"incorrect": 0.0})
    before = [p.detach().clone() for p in trainer.parameters]
    found = run(trainer)
    assert [m["zero_variance_groups"] for m in found] == [1, 1]
    assert [m["updates_skipped"] for m in found] == [1, 1]
    assert trainer.step == 2
    assert trainer.updates == 0
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


# -- the order of things -----------------------------------------------------------------------------------


def test_updates_are_epochs_times_minibatches(make_trainer):
    trainer = make_trainer({"kind": "grpo", "kl_coef": 0.1, "update_epochs": 3, "minibatches": 2})
    found = run(trainer)
    assert trainer.updates == trainer.stage.updates == 2 * 3 * 2
    # later updates of a batch are off policy, and say so; the mean over the step shows it
    assert all(m["approx_kl"] > 1e-5 for m in found)


def test_minibatches_are_whole_groups_and_every_group_once(make_trainer):
    trainer = make_trainer({"kind": "grpo", "minibatches": 3, "update_epochs": 2}, tasks_per_step=7, steps=1)
    seen = []
    update = trainer.update

    def watching(minibatch, on_policy):
        seen.append((minibatch.groups.tolist(), on_policy))
        return update(minibatch, on_policy)

    trainer.update = watching
    run(trainer)
    assert [flag for _, flag in seen] == [True, *[False] * 5]
    for epoch in (seen[:3], seen[3:]):
        assert Counter(group for groups, _ in epoch for group in groups) == {group: 4 for group in range(7)}
        assert sorted(len(groups) for groups, _ in epoch) == [8, 8, 12]
    assert [sorted(set(groups)) for groups, _ in seen[:3]] != [
        sorted(set(groups)) for groups, _ in seen[3:]
    ], "shuffled again"


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_tasks_come_in_trips(make_trainer, order):
    trainer = make_trainer("sft", task_order=order, tasks_per_step=4, steps=5)
    every = [task.id for task in trainer.environment.tasks]
    drawn = [task.id for step in range(5) for task in trainer.source.order.at(step)]
    trips = [drawn[:10], drawn[10:]]
    assert all(sorted(trip) == sorted(every) for trip in trips)
    if order == "sequential":
        assert trips == [every, every]
    else:
        assert every not in trips
        assert trips[0] != trips[1]
        other = make_trainer("sft", task_order=order, tasks_per_step=4, steps=5, seed=1)
        assert [task.id for step in range(5) for task in other.source.order.at(step)] != drawn


def test_a_batch_larger_than_the_tasks_repeats_them(make_trainer):
    trainer = make_trainer("sft", tasks_per_step=25)
    assert set(Counter(task.id for task in trainer.source.order.at(0)).values()) == {2, 3}


def test_the_seed_alone_decides(make_trainer):
    first, again, other = run(make_trainer()), run(make_trainer()), run(make_trainer(seed=1))
    assert first == again
    assert first != other


# -- stages, references, checkpoints -----------------------------------------------------------------------


def test_a_stage_goes_on_with_the_policy_of_the_one_before(make_trainer):
    sft = make_trainer("sft", steps=5)
    run(sft)
    taught = [p.detach().clone() for p in sft.parameters]
    rl = make_trainer("grpo", rewards={"invalid_action": -0.5})
    rl = Trainer(sft.policy, sft.environment, rl.stage, sft.engine, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(rl.parameters, taught, strict=True))
    found = run(rl)
    assert found[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert not all(torch.equal(p, q) for p, q in zip(rl.parameters, taught, strict=True))
    assert rl.updates == 2


def test_a_penalty_holds_the_policy_at_its_reference(make_trainer):
    def distance(kl_coef: float) -> list[float]:
        trainer = make_trainer({"kind": "rloo", "kl_coef": kl_coef}, steps=6)
        return [m["kl"] for m in run(trainer)]

    free, held = distance(1e-9), distance(5.0)
    assert free[0] == held[0] == pytest.approx(0, abs=1e-6), "the adapter starts at zero"
    assert free[-1] > 0.02
    assert held[-1] < free[-1] / 2


def test_every_parameter_trains_without_an_adapter(make_trainer):
    trainer = make_trainer("sft", policy={"lora": None}, tasks_per_step=10)
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    run(trainer)
    assert all(not torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters())


PPO = {"kind": "ppo", "minibatches": 2, "update_epochs": 3, "value_learning_rate": 0.1}


@pytest.mark.parametrize(
    "algorithm",
    [
        case("reinforce", fast=True),
        case({"kind": "grpo", "update_epochs": 2, "minibatches": 2}, fast=True),
        case("sft", fast=False),
        case(PPO, fast=False),
        case({**PPO, "target_kl": 1e-3, "value_trunk_gradient": False}, fast=True),
    ],
    ids=str,
)
def test_a_loaded_trainer_goes_on_as_if_it_had_never_stopped(make_trainer, tmp_path, algorithm):
    more = {"steps": 4, "optimizer": {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2}}
    straight = make_trainer(algorithm, **more)
    expected = run(straight)
    stopped = make_trainer(algorithm, **more)
    steps = iter(stopped)
    begun = [next(steps).metrics, next(steps).metrics]
    stopped.save(tmp_path / "checkpoint")
    resumed = make_trainer(algorithm, **more)
    resumed.load(tmp_path / "checkpoint")
    assert begun + run(resumed) == expected
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters, straight.parameters, strict=True))


# -- a run that does not learn -----------------------------------------------------------------------------


def test_every_record_has_a_learning_rate_and_says_where_the_signal_was(make_trainer):
    settings = {"learning_rate": 1e-2, "schedule": "linear"}
    found = run(make_trainer("grpo", steps=3, optimizer=settings, rewards={"incorrect": 0.0}))
    rates = [1e-2, 1e-2 * 2 / 3, 1e-2 / 3]
    assert [m["learning_rate"] for m in found] == pytest.approx(rates), "the schedule ends with the stage"
    assert [m["groups_with_signal"] for m in found] == [0] * 3
    for step in run(make_trainer("grpo", steps=3, tasks_per_step=8)):
        assert step["groups_with_signal"] == 1 - step["zero_variance_groups"]
        assert "learning_rate" in step


@pytest.mark.parametrize(("steps", "warnings"), [(NO_SIGNAL_STEPS - 1, 0), (2 * NO_SIGNAL_STEPS, 1)])
def test_steps_without_a_signal_are_warned_of_once(make_trainer, caplog, steps, warnings):
    run(
        make_trainer("rloo", steps=steps, tasks_per_step=1, rewards={"incorrect": 0.0, "invalid_action": 0.0})
    )
    assert sum("in a row without a signal" in line for line in caplog.messages) == warnings


def test_a_step_with_a_signal_counts_anew(make_trainer, caplog):
    trainer = make_trainer("rloo", steps=NO_SIGNAL_STEPS + 1, tasks_per_step=8)
    trainer.signal.barren = NO_SIGNAL_STEPS - 1
    steps = iter(trainer)
    assert next(steps).metrics["groups_with_signal"] > 0
    assert trainer.signal.barren == 0 and not caplog.messages


def test_demonstrations_that_are_wrong_are_counted_and_learnt_from(make_trainer, caplog):
    trainer = make_trainer("sft", steps=2, sampling={"max_new_tokens": 1}, tasks_per_step=10)
    for step in trainer:
        # an end token each
        long = sum(t.num_action_tokens > 2 for group in step.collection.groups for t in group.trajectories)
        assert (
            0 < long == step.metrics["demonstrations_unsayable"]
            and step.metrics["demonstrations_incorrect"] == 0
        )
        assert step.metrics["gradient_norm"] > 0
    assert sum("more than sampling.max_new_tokens: 1" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(("algorithm", "groups"), [("reinforce", 4), ("ppo", 4), ("rloo", 0), ("grpo", 0)])
def test_groups_left_with_one_episode_count_where_none_is_compared(make_trainer, algorithm, groups):
    trainer = make_trainer(algorithm, steps=1)
    collect = trainer.source.collect

    def losing(step):
        found = collect(step)
        # the environment failed in the others
        found.groups[:] = [Group(group.task, group.trajectories[:1]) for group in found.groups]
        return found

    trainer.source = SimpleNamespace(collect=losing)
    if groups:
        (step,) = trainer
        assert step.metrics["episodes"] == groups
    else:
        with pytest.raises(AgentPeftError, match="no group of this step has 2 episodes left"):
            list(trainer)


def test_a_prompt_without_room_for_an_action_is_one_line(make_trainer):
    trainer = make_trainer("grpo", sampling={"max_tokens": 4})
    with pytest.raises(
        AgentPeftError,
        match=r"^task .*: its opening has \d+ tokens, so there is no room .* sampling\.max_tokens: 4; raise",
    ):
        run(trainer)


# -- where it cannot continue ------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_in_one_line(make_trainer):
    trainer = make_trainer("sft")
    with torch.no_grad():
        trainer.policy.head.weight[:, 0] = float("nan")
    with pytest.raises(
        AgentPeftError, match=r"the loss is nan at step 0: lower optimizer\.learning_rate"
    ) as raised:
        run(trainer)
    assert "\n" not in str(raised.value)


def test_a_gradient_that_is_not_finite_stops_before_it_spoils_the_weights(make_trainer):
    trainer = make_trainer("sft")
    before = [p.detach().clone() for p in trainer.parameters]
    trainer.parameters[-1].register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(AgentPeftError, match="gradient"):
        run(trainer)
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_more_minibatches_than_groups_is_one_line(make_trainer):
    trainer = make_trainer({"kind": "rloo", "minibatches": 4})
    collect = trainer.source.collect

    def losing(step):
        found = collect(step)
        del found.groups[1:]  # as if the environment had failed in them
        return found

    trainer.source = SimpleNamespace(collect=losing)
    with pytest.raises(AgentPeftError, match="minibatches: 4 is more than the 1 groups"):
        run(trainer)


def test_dropout_acts_in_training_and_never_in_scoring(make_trainer):
    def trained(dropout: float, seed: int = 0) -> list[torch.Tensor]:
        trainer = make_trainer(policy={"lora": LoraSettings(rank=2, dropout=dropout)}, seed=seed)
        assert bool(trainer.policy.dropouts) == (dropout > 0)
        list(trainer)  # the on-policy check compares with a sampler that drops nothing
        assert not any(module.training for module in trainer.policy.model.modules())
        return [p.detach().clone() for p in trainer.parameters]

    none, half, again = trained(0.0), trained(0.5), trained(0.5)
    assert any(not torch.equal(a, b) for a, b in zip(none, half, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(half, again, strict=True))


@pytest.mark.parametrize(
    "algorithm",
    [
        case("sft", fast=False),
        case("grpo", fast=False),
        case({"kind": "grpo", "kl_coef": 0.1, "update_epochs": 2}, fast=True),
    ],
    ids=str,
)
def test_under_dropout_neither_microbatches_nor_packing_change_the_result(make_trainer, algorithm):
    def losses(packing: bool = True, **stage) -> list[float]:
        policy = {"lora": LoraSettings(rank=4, dropout=0.3), "packing": packing}
        return [m["loss"] for m in run(make_trainer(algorithm, policy=policy, steps=3, **stage))]

    whole = losses()
    assert losses(microbatch_tokens=12) == pytest.approx(whole, rel=1e-5, abs=1e-7)
    assert losses(packing=False, microbatch_tokens=40) == pytest.approx(whole, rel=1e-5, abs=1e-7)


# -- a world that fails ------------------------------------------------------------------------------------


class Fragile(Environment):
    """Two turns, the last of which is right if it begins with an even digit; ``breaks(episode, action)``
    may raise before the answer.
    """

    tasks = tuple(Task(f"t{i}") for i in range(10))

    def __init__(self, breaks: Callable[[FragileEpisode, str], None] = lambda episode, action: None) -> None:
        self.breaks, self.lock = breaks, threading.Lock()
        self.begun = Counter[tuple[str, int]]()

    def episode(self, task: Task, seed: int) -> FragileEpisode:
        with self.lock:
            self.begun[task.id, seed] += 1
            return FragileEpisode(self, task, self.begun[task.id, seed])


class FragileEpisode(Episode):
    def __init__(self, environment: Fragile, task: Task, number: int) -> None:
        self.environment, self.task, self.number, self.turn = environment, task, number, 0

    def start(self) -> Sequence[Message]:
        return [Message("user", f"{self.task.id[1:]}+1=")]

    def step(self, action: str) -> StepResult:
        self.turn += 1
        self.environment.breaks(self, action)
        if self.turn == 1:
            return StepResult("2*2=")
        return StepResult(
            "", True, Outcome.CORRECT if is_right(action) else Outcome.INCORRECT, StopReason.FINISHED
        )

    def close(self) -> None:
        pass


def is_right(action: str) -> bool:
    return action[:1] in set("02468+*")


def train_on(make_trainer, environment: Fragile) -> tuple[Trainer, list[dict[str, float]]]:
    made = make_trainer("rloo", steps=3, rewards={}, optimizer=SMOOTH)
    trainer = Trainer(made.policy, environment, made.stage, made.engine)
    return trainer, run(trainer)


def fails_at_the_first_try(episode: FragileEpisode, action: str) -> None:
    if episode.number == 1 and episode.turn == (1 if episode.task.id in ("t1", "t2") else 2):
        raise InfrastructureError("the network is down")


def crashes_instead_of_failing(episode: FragileEpisode, action: str) -> None:
    if episode.turn == 2 and not is_right(action):
        raise InfrastructureError("gone")


def raises_instead_of_failing(episode: FragileEpisode, action: str) -> None:
    if episode.turn == 2 and not is_right(action):
        raise TypeError("'<' not supported")


@pytest.mark.parametrize(
    "breaks", [fails_at_the_first_try, crashes_instead_of_failing, raises_instead_of_failing]
)
def test_a_failing_world_changes_neither_what_is_learnt_nor_what_is_reported(make_trainer, breaks):
    """The same tokens, outcomes and updates; the check that the first minibatch is on policy holds for
    what was replayed, too.
    """
    plain, expected = train_on(make_trainer, Fragile())
    broken, found = train_on(make_trainer, Fragile(breaks))
    assert any(0 < metrics["success"] < 1 for metrics in expected)
    counts = [
        {name: metrics.pop(name) for name in ("infrastructure_failures", "crashed", "defects")}
        for metrics in found
    ]
    assert all(
        metrics.pop(name) == 0
        for metrics in expected
        for name in ("infrastructure_failures", "crashed", "defects")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_close(broken.parameters, plain.parameters)
    wrong = [16 * (1 - metrics["success"]) for metrics in expected]
    assert [count["crashed"] for count in counts] == (
        [*wrong] if breaks is crashes_instead_of_failing else [0, 0, 0]
    )
    assert [count["defects"] for count in counts] == (
        [*wrong] if breaks is raises_instead_of_failing else [0, 0, 0]
    )
    assert all(count["infrastructure_failures"] for count in counts) == (
        breaks is not raises_instead_of_failing
    )


def test_a_world_that_never_starts_is_one_line(make_trainer, caplog):
    class Down(Fragile):
        def episode(self, task: Task, seed: int) -> FragileEpisode:
            raise InfrastructureError("no route to host")

    with pytest.raises(
        AgentPeftError,
        match="no group of this step has 2 episodes left: in the others the environment failed before",
    ):
        train_on(make_trainer, Down())
    assert "the episode is left out (InfrastructureError: no route to host)" in caplog.text
