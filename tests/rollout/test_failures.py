"""No policy gains by breaking its world or its environment's code, and none of it ends a collection.

A policy is compared with itself in a world that cannot be broken: the same seeds, so the same tokens and the
same outcomes.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import ATTEMPTS, Collection, Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import paired_test, summarize
from agent_peft.training.trainer import describe
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    Trajectory,
)

SAMPLING = SamplingConfig(max_new_tokens=3, max_tokens=100)
REWARDS = RewardConfig(correct=1.0, incorrect=-0.1)
PLAIN: list[Collection] = []  # of the engine in worlds that nobody can break; it is the same for each test


class Panic(BaseException):
    """As a library in Rust raises."""


class Worlds(Environment):
    """Three turns; the last is right if its text is. ``trouble(world, action)`` is called at each action,
    before the world answers, and may raise, or give what the step gives instead.
    """

    def __init__(
        self,
        trouble: Callable[[World, str], Any] = lambda world, action: None,
        tasks: int = 6,
        turns: int = 3,
    ) -> None:
        self._tasks = [Task(f"t{i}", (f"skill {i % 2}",)) for i in range(tasks)]
        self.trouble, self.turns, self.lock = trouble, turns, threading.RLock()
        self.open: Counter[int] = Counter()
        self.begun: Counter[tuple[str, int]] = Counter()
        self.broken: set[str] = set()  # tasks whose worlds do not start any more

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> World:
        with self.lock:
            self.begun[task.id, seed] += 1
            return World(self, task, seed, self.begun[task.id, seed])


class World(Episode):
    def __init__(self, environment: Worlds, task: Task, seed: int, number: int) -> None:
        self.environment, self.task, self.number = environment, task, number
        self.coin, self.turn, self.over = random.Random(seed), 0, False
        with environment.lock:
            environment.open[id(self)] += 1

    def start(self) -> Sequence[Message]:
        if self.task.id in self.environment.broken:
            raise InfrastructureError("the world does not start any more")
        return [Message("user", re.sub(r"\D", "", self.task.id) + "=")]

    def step(self, action: str) -> StepResult:
        if self.over:
            raise RuntimeError("the episode is done or closed")
        self.turn += 1
        instead = self.environment.trouble(self, action)
        if instead is not None:
            self.over = getattr(instead, "done", True)
            return instead
        if self.turn < self.environment.turns:
            return StepResult(f"{self.turn}+{self.coin.randrange(10)}=")
        self.over = True
        return StepResult(
            "", True, Outcome.CORRECT if right(action) else Outcome.INCORRECT, StopReason.FINISHED
        )

    def close(self) -> None:
        self.over = True
        with self.environment.lock:
            self.environment.open.pop(id(self), None)

    @property
    def last(self) -> bool:
        return self.turn == self.environment.turns


def right(action: str) -> bool:
    return sum(map(ord, action)) % 2 == 0


@pytest.fixture
def engine(tiny_policy: Policy) -> Sampler:
    return load_sampler(tiny_policy, EngineConfig(rows=24))


def collect(engine: Sampler, environment: Environment, rewards: RewardConfig = REWARDS) -> Collection:
    found = Collector(environment, engine).collect(environment.tasks, 4, SAMPLING, rewards, 0)
    if isinstance(environment, Worlds):
        assert not environment.open, "every episode is closed"
    return found


def trajectories(collection: Collection) -> list[Trajectory]:
    return [t for group in collection.groups for t in group.trajectories]


# -- who breaks the world when about to fail -----------------------------------------------------------------


def crash(world: World, action: str) -> None:
    if world.last and not right(action):
        raise InfrastructureError("gone")


def crash_by_the_worlds_coin(world: World, action: str) -> None:
    if world.last and not right(action) and world.coin.random() < 0.5:
        raise InfrastructureError("gone")


def crash_by_a_coin_of_its_own() -> Callable[[World, str], None]:
    """It never shows again: another one falls in each replay."""
    coin, lock = random.Random(0), threading.Lock()

    def trouble(world: World, action: str) -> None:
        with lock:
            heads = coin.random() < 0.5
        if world.last and not right(action) and heads:
            raise InfrastructureError("gone")

    return trouble


def crash_once_and_again_elsewhere(world: World, action: str) -> None:
    """At the last action first, then at the first action of the replay, then at the second."""
    if (world.last and not right(action) and world.number == 1) or (
        world.number > 1 and world.turn == world.number - 1
    ):
        raise InfrastructureError("gone")


def end_otherwise_in_the_replay(world: World, action: str) -> StepResult | None:
    """A replay that says it is correct before it has come to where the first world failed."""
    if world.last and not right(action) and world.number == 1:
        raise InfrastructureError("gone")
    return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED) if world.number > 1 else None


def show_another_world_in_the_replay(world: World, action: str) -> StepResult | None:
    """Worlds that no seed decides: what was bad in the first is good in the next."""
    if world.last:
        if world.number == 1 and not right(action):
            raise InfrastructureError("gone")
        return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED) if world.number > 1 else None
    return StepResult(f"{world.turn}+{world.number}=") if world.number > 1 else None


def say_that_the_environment_failed(world: World, action: str) -> StepResult | None:
    failed = StepResult("", True, Outcome.UNKNOWN, StopReason.INFRASTRUCTURE)
    return failed if world.last and not right(action) else None


def lose(error: BaseException) -> Callable[[World, str], None]:
    def trouble(world: World, action: str) -> None:
        if world.last and not right(action):
            raise error

    return trouble


def lose_half_of_the_time(world: World, action: str) -> None:
    if world.last and not right(action) and world.coin.random() < 0.5:
        raise ValueError("a defect")


def answer(instead: Any) -> Callable[[World, str], Any]:
    return lambda world, action: instead if world.last and not right(action) else None


CRASHES = {
    "by text": crash,
    "by the world's coin": crash_by_the_worlds_coin,
    "by its own coin": crash_by_a_coin_of_its_own(),
    "elsewhere each time": crash_once_and_again_elsewhere,
    "another end": end_otherwise_in_the_replay,
    "another world": show_another_world_in_the_replay,
    "by a result": say_that_the_environment_failed,
}
DEFECTS = {
    "TypeError": lose(TypeError("'<' not supported between bytes and str")),
    "OverflowError": lose(OverflowError()),
    "RecursionError": lose(RecursionError("maximum recursion depth exceeded")),
    "MemoryError": lose(MemoryError()),
    "AgentPeftError": lose(AgentPeftError("refused")),
    "a panic": lose(Panic("called `Result::unwrap()` on an `Err` value")),
    "half of the time": lose_half_of_the_time,
    "no result": answer("nothing that a step may give"),
    "no text": answer(StepResult(None)),  # type: ignore[arg-type]
    "no outcome": answer(StepResult("", True, "won", StopReason.FINISHED)),  # type: ignore[arg-type]
    "no reason": answer(StepResult("", True, Outcome.CORRECT, "because")),  # type: ignore[arg-type]
    "not in the alphabet": answer(StepResult("\ud800 and \x1b")),
}


@pytest.mark.parametrize("trouble", [*CRASHES.values(), *DEFECTS.values()], ids=[*CRASHES, *DEFECTS])
def test_a_policy_that_breaks_its_world_or_its_environment_reports_the_success_it_has(trouble, engine):
    if not PLAIN:
        PLAIN.append(collect(engine, Worlds()))
    (plain,), broken = PLAIN, collect(engine, Worlds(trouble))
    successes = [t.outcome is Outcome.CORRECT for t in trajectories(plain)]
    assert 0 < sum(successes) < len(successes)
    assert [t.outcome is Outcome.CORRECT for t in trajectories(broken)] == successes
    assert [t.turns for t in trajectories(broken)] == [t.turns for t in trajectories(plain)], (
        "and nothing was drawn again"
    )
    assert [t.rewards for t in trajectories(broken)] == [t.rewards for t in trajectories(plain)]
    assert (broken.defects > 0, broken.failures > 0) == (
        trouble in DEFECTS.values(),
        trouble in CRASHES.values(),
    )
    ours, theirs = (describe(found.groups, found) for found in (broken, plain))
    assert {**ours, "infrastructure_failures": 0, "crashed": 0, "defects": 0} == theirs
    reported, honest = summarize(broken.groups), summarize(plain.groups)
    assert replace(reported, stop_reasons=honest.stop_reasons) == honest
    assert paired_test(honest, reported).difference == 0.0


def test_worlds_that_do_not_start_again_are_the_agents_doing(engine):
    """The attempt that came to an action decides, not the ones that came to none."""
    plain = collect(engine, Worlds())

    def trouble(world: World, action: str) -> None:
        if world.last and not right(action):
            world.environment.broken.add(world.task.id)
            raise InfrastructureError("gone")

    broken = collect(engine, Worlds(trouble))
    assert [t.outcome for t in trajectories(broken)] == [t.outcome for t in trajectories(plain)]
    assert broken.crashed == sum(t.outcome is Outcome.INCORRECT for t in trajectories(plain)) > 0


def test_a_defect_in_the_replay_is_counted_and_the_crash_stays_the_agents(engine):
    def trouble(world: World, action: str) -> None:
        if world.last and not right(action) and world.number == 1:
            raise InfrastructureError("gone")
        if world.number > 1:
            raise AgentPeftError("the server speaks another version")

    plain, broken = collect(engine, Worlds()), collect(engine, Worlds(trouble))
    assert [t.outcome for t in trajectories(broken)] == [t.outcome for t in trajectories(plain)]
    assert broken.defects == (ATTEMPTS - 1) * broken.crashed > 0


def test_a_crash_is_no_way_out_of_a_price(engine):
    """Where running out of turns costs more than being wrong, the agent that crashes instead pays that."""
    rewards = RewardConfig(incorrect=-0.1, turn_limit=-0.7, timeout=-0.2)
    for trouble in (crash, lose(TypeError())):
        found = trajectories(collect(engine, Worlds(trouble), rewards))
        assert {t.reward for t in found if t.outcome is Outcome.INCORRECT} == {-0.7}


@pytest.mark.parametrize(
    "body", ["return float('nan')", "raise KeyError(trajectory.messages[-1].content)", "return 1j"]
)
def test_a_reward_term_that_fails_at_a_reply_is_a_defect_and_worth_nothing(
    body, engine, tmp_path, monkeypatch
):
    module = f"odd_terms_{tmp_path.name.replace('-', '_')}"
    condition = "sum(map(ord, trajectory.messages[-1].content)) % 2 == 0"
    (tmp_path / f"{module}.py").write_text(
        f"def term(trajectory):\n    if {condition}:\n        {body}\n    return 0.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = RewardConfig.model_validate({"terms": [{"kind": f"{module}:term"}]})
    found = collect(engine, Worlds(), rewards)
    odd = [t for t in trajectories(found) if t.stop_reason is StopReason.DEFECT]
    assert found.defects == len(odd) > 0
    assert {(t.outcome, t.reward) for t in odd} == {(Outcome.INCORRECT, -0.1)}
    assert {t.reward for t in trajectories(found) if t not in odd} == {-0.1 + 0.5}


def test_warnings_are_few_and_printable(engine, caplog):
    def trouble(world: World, action: str) -> None:
        raise InfrastructureError("gone\nforged line" + "x" * 10_000)

    environment = Worlds(trouble, tasks=30)
    environment._tasks = [Task(f"{task.id}\x1b]") for task in environment.tasks]
    assert collect(engine, environment).crashed == 30 * 4
    assert len(caplog.messages) == 6
    assert all(line.isprintable() and len(line) < 500 for line in caplog.messages)
    assert caplog.messages[-1].startswith("25 more tasks: the environment failed after the agent's action")


# -- a failure that is the world's ---------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_failure_that_passes_changes_nothing_in_what_the_policy_draws(turn, engine):
    def trouble(world: World, action: str) -> None:
        if world.number == 1 and world.turn == turn and world.task.id != "t1":
            raise InfrastructureError("the network is down")

    environment = Worlds(trouble)
    plain, failed = collect(engine, Worlds()), collect(engine, environment)
    assert failed.failures == 5 * 4 and failed.crashed == failed.defects == 0
    assert sorted(environment.begun.values()) == [1] * 4 + [2] * 5 * 4, "the same seed again"
    for ours, theirs in zip(trajectories(failed), trajectories(plain), strict=True):
        assert ours.tokens == theirs.tokens and ours.action_mask == theirs.action_mask
        assert replace(ours, turns=()) == replace(theirs, turns=())
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_failures_at_one_turn_after_the_other_are_followed(engine):
    def trouble(world: World, action: str) -> None:
        if world.turn == world.number and world.number < ATTEMPTS:
            raise InfrastructureError("the network is down again")

    plain, failed = collect(engine, Worlds()), collect(engine, Worlds(trouble))
    assert [t.tokens for t in trajectories(failed)] == [t.tokens for t in trajectories(plain)]
    assert failed.crashed == 0 and failed.failures == (ATTEMPTS - 1) * 6 * 4


def test_what_was_answered_is_kept_where_a_later_action_is_not(engine):
    """The record is that of the attempt that came farthest: the second turn, which only the second world
    answered, and the third.
    """

    def trouble(world: World, action: str) -> None:
        if (world.number, world.turn) in {(1, 2), (2, 3), (3, 1)}:
            raise InfrastructureError("gone")

    plain, failed = collect(engine, Worlds()), collect(engine, Worlds(trouble))
    assert failed.crashed == 6 * 4
    assert [t.tokens for t in trajectories(failed)] == [t.tokens for t in trajectories(plain)]
    assert {(t.outcome, t.stop_reason, t.rewards) for t in trajectories(failed)} == {
        (Outcome.INCORRECT, StopReason.CRASHED, (0.0, 0.0, -0.1))
    }


def test_a_replay_keeps_to_the_room_that_there_was(engine):
    """Where the first world's answer would not have fitted, neither does the replayed one."""

    def talks(world: World, action: str) -> StepResult | None:
        return StepResult("1" * 200) if world.turn == 2 else None

    def fails(world: World, action: str) -> StepResult | None:
        if world.turn == 2 and world.number == 1:
            raise InfrastructureError("gone")
        return talks(world, action)

    plain, failed = collect(engine, Worlds(talks)), collect(engine, Worlds(fails))
    assert {t.stop_reason for t in trajectories(plain)} == {StopReason.TOKEN_LIMIT}
    assert trajectories(failed) == trajectories(plain)


def test_a_world_that_cannot_be_closed_is_told_and_counted(engine, caplog):
    class Clinging(Worlds):
        def episode(self, task: Task, seed: int) -> World:
            return ClingingWorld(self, task, seed, 1)

    class ClingingWorld(World):
        def close(self) -> None:
            super().close()
            if self.task.id == "t1":
                raise InfrastructureError("a container was not removed\x1b[2J\nforged line")

    plain, found = collect(engine, Worlds()), collect(engine, Clinging())
    assert trajectories(found) == trajectories(plain)
    assert (found.defects, found.crashed, found.failures) == (4, 0, 0)
    assert "a container was not removed" in caplog.text
    assert all(line.isprintable() for line in caplog.messages)
    assert not any(line.startswith("forged") for line in caplog.messages)


def test_a_defect_is_told_once_however_often_it_is_met_and_never_at_length(engine, caplog):
    def trouble(world: World, action: str) -> None:
        def deeper(left: int) -> None:
            if left:
                deeper(left - 1)
            raise ValueError(("\x1b]0;owned\x07" + "x" * 100 + "\n") * 10_000)

        if world.task.id != "t0":
            deeper(300)

    environment = Worlds(trouble)
    collector = Collector(environment, engine)
    for seed in range(3):
        assert collector.collect(environment.tasks, 4, SAMPLING, REWARDS, seed).defects == 20
    assert len(caplog.messages) < 100 and max(map(len, caplog.messages)) < 400
    assert all(line.isprintable() for line in caplog.messages)


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


@pytest.mark.parametrize("kind", [Speechless, type("Gone", (Speechless, InfrastructureError), {})])
def test_an_error_that_cannot_say_what_it_is(kind, engine):
    assert {t.outcome for t in trajectories(collect(engine, Worlds(lose(kind()))))} == {
        Outcome.CORRECT,
        Outcome.INCORRECT,
    }


# -- whatever happens ----------------------------------------------------------------------------------------

HAPPENS: dict[str, Callable[[], Any]] = {
    "answers": lambda: None,
    "fails": lambda: InfrastructureError("gone"),
    "raises": lambda: ValueError("a defect"),
    "panics": lambda: Panic("panicked"),
    "refuses": lambda: AgentPeftError("no"),
    "gives nothing": lambda: "nothing that a step may give",
    "says it failed": lambda: StepResult("", True, Outcome.CORRECT, StopReason.INFRASTRUCTURE),
    "talks": lambda: StepResult("1" * 150),
    "surprises": lambda: StepResult("\ud83d"),
    "ends": lambda: StepResult("", True, Outcome.UNKNOWN, StopReason.TIMEOUT),
}


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(happens=st.lists(st.sampled_from(sorted(HAPPENS)), min_size=1, max_size=30), dies=st.booleans())
def test_whatever_a_world_does_every_episode_that_acted_has_one_outcome(engine, happens, dies):
    calls = itertools.cycle(happens)

    def trouble(world: World, action: str) -> Any:
        if dies:
            world.environment.broken.add(world.task.id)
        with world.environment.lock:
            found = HAPPENS[next(calls)]()
        if isinstance(found, BaseException):
            raise found
        return found

    collector = Collector(Worlds(tasks=1), engine)
    collect_again = partial(collector.collect, group_size=4, sampling=SAMPLING, rewards=REWARDS, seed=0)
    # where every episode of the first step ends by a defect, the run does, too
    collect_again(collector.environment.tasks)
    collector.environment = Worlds(trouble, tasks=2)
    found = collect_again(collector.environment.tasks)
    assert not collector.environment.open, "every episode is closed"
    assert [len(group.trajectories) for group in found.groups] == [4, 4], "they all acted, so they all count"
    for t in trajectories(found):
        assert t.turns and len(t.rewards) == len(t.turns)
        assert t.stop_reason is not StopReason.INFRASTRUCTURE
        if t.stop_reason in (StopReason.CRASHED, StopReason.DEFECT):
            assert t.outcome is Outcome.INCORRECT and t.reward == -0.1
    summarize(found.groups)
