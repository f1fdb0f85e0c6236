"""Sampling ahead: which version sampled what, equal bytes with and without overlap, resuming, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine import local
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.ranks import checksum
from agent_peft.training import lag as lag_module
from agent_peft.training.stage import Stage
from agent_peft.training.step_metrics import Step
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, TrustError

GRPO = {"kind": "grpo", "kl_coef": 0.1}


def watch(trainer: Trainer) -> list[tuple[int, int, bool]]:
    """(step, number of the weights that sample it, whether another thread does); filled as it runs."""
    seen: list[tuple[int, int, bool]] = []
    source = trainer.source if trainer.lagged is None else trainer.lagged.source
    collect, main, versions = source.collect, threading.current_thread(), [checksum(trainer.parameters)]

    def watched(step: int) -> Any:
        if (now := checksum(trainer.parameters)) != versions[-1]:
            versions.append(now)
        seen.append((step, len(versions) - 1, threading.current_thread() is not main))
        collection = collect(step)
        assert checksum(trainer.parameters) == now, "the weights changed while they were sampled from"
        return collection

    object.__setattr__(source, "collect", watched)
    return seen


def result(steps: list[Step], trainer: Trainer) -> tuple[Any, ...]:
    return [(step.metrics, step.trajectories) for step in steps], checksum(trainer.parameters)


@pytest.mark.parametrize(("lag", "lora"), [(1, True), (2, True), (2, False)])
def test_overlapped_equals_sequential(make_trainer, monkeypatch, lag, lora):
    keys = {"steps": 4, "lag": lag, "policy": {} if lora else {"lora": None}, "algorithm": GRPO}
    overlapped, sequential = make_trainer(**keys), make_trainer(**keys)
    seen, alone = watch(overlapped), watch(sequential)
    steps = list(overlapped)
    monkeypatch.setattr(LocalEngine, "hold", lambda engine: None)
    assert result(steps, overlapped) == result(list(sequential), sequential)
    assert [(step, version) for step, version, _ in seen] == [(n, max(0, n - lag)) for n in range(4)]
    assert [step.collection.lag for step in steps] == [min(n, lag) for n in range(4)]
    assert [other for *_, other in seen] == [False, True, True, True]
    assert not any(other for *_, other in alone)
    assert all(step.metrics["mismatch_max"] < 1e-4 for step in steps)
    assert steps[0].metrics["staleness"] < 1e-5 < 1e-3 < steps[3].metrics["staleness"]


def test_without_a_lag_nothing_is_stale(make_trainer):
    (step,) = make_trainer(steps=1)
    assert "staleness" not in step.metrics and step.collection.lag == 0


def stale_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler is given the weights of the call before."""
    own, copies = local.lean_copy, list[Any]()

    def stale(policy: Any) -> Any:
        copies.append(own(policy))
        return copies[max(0, len(copies) - 2)]

    monkeypatch.setattr(local, "lean_copy", stale)


def late_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights change before what is being sampled has arrived."""
    wait, calls = lag_module.LaggedSource.wait, list[None]()

    def late(lagged: Any) -> None:
        calls.append(None)
        if len(calls) % 2 == 0:  # the end of the step, not the update
            wait(lagged)

    monkeypatch.setattr(lag_module.LaggedSource, "wait", late)


@pytest.mark.parametrize("fault", [stale_copies, late_arrival])
def test_a_wrong_version_stops_the_run(make_trainer, monkeypatch, fault: Callable[..., None]):
    fault(monkeypatch)
    with pytest.raises(TrustError, match="freshly sampled tokens differ from the sampler's"):
        list(make_trainer("cispo", steps=4, lag=1, sampling={"max_new_tokens": 12}))


def test_resumed_equals_whole(make_trainer, tmp_path):
    keys = {"steps": 5, "lag": 2, "algorithm": GRPO, "refill": 1}
    whole, killed, resumed = (make_trainer(**keys) for _ in range(3))
    expected = list(whole)
    for step in killed:
        if step.number == 1:
            killed.save(tmp_path)
            break
    resumed.load(tmp_path)
    seen = watch(resumed)
    assert result(list(resumed), resumed) == result(expected[2:], whole)
    assert [step for step, *_ in seen] == [4], "steps 2 and 3 were sampled before"
    for name, other in {
        "sampling": make_trainer(**keys, sampling={"max_new_tokens": 4}),
        "seed": make_trainer(**keys, seed=1),
    }.items():
        with pytest.raises(AgentPeftError, match=f"pending.jsonl was sampled with another {name}; put it"):
            other.load(tmp_path)
    text = (tmp_path / "pending.jsonl").read_text().replace('"adapter": ', '"adapter": 1')
    (tmp_path / "pending.jsonl").write_text(text)
    with pytest.raises(AgentPeftError, match="another adapter"):
        resumed.load(tmp_path)


def test_a_failing_environment_ends_the_run_in_one_place(make_trainer):
    trainer = make_trainer(steps=3, lag=1)

    def broken(step: int) -> Any:
        raise AgentPeftError("no environment")

    steps = iter(trainer)
    next(steps)
    object.__setattr__(trainer.lagged.source, "collect", broken)
    with pytest.raises(AgentPeftError, match="no environment"):
        next(steps)
    assert not any(thread.name.startswith("sampling") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("reinforce", "does not bound the weight of a token"),
        ("rloo", "take grpo, ppo, cispo, or policy_gradient with surrogate clipped"),
        ({"kind": "policy_gradient", "surrogate": "score_function"}, "or set lag: 0"),
        ({"kind": "policy_gradient", "surrogate": "ratio"}, "or set lag: 0"),
        ({"kind": "ppo", "reward_kl_coef": 0.1}, "set kl_coef if it has that key"),
        ("sft", "lag has no effect on sft"),
    ],
)
def test_what_needs_the_present_version_is_refused(algorithm, message):
    with pytest.raises(AgentPeftError, match=message):
        Stage(algorithm=algorithm, steps=2, lag=1)


@pytest.mark.parametrize(
    "algorithm",
    ["grpo", "dapo", "gspo", "cispo", "ppo", {"kind": "policy_gradient", "surrogate": "band"}],
)
def test_what_bounds_the_ratio_is_not(algorithm):
    assert "staleness" in Stage(algorithm=algorithm, steps=2, lag=1).metrics


def test_dropout_is_refused(make_trainer):
    with pytest.raises(AgentPeftError, match="ratio under dropout"):
        make_trainer("grpo", lag=1, policy={"lora": LoraSettings(rank=4, dropout=0.1)})
