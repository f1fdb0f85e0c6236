"""A policy that breaks the world which is served to it, or the server's own code, reports the success it
has.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.base import Episode
from agent_peft.policies.engine.base import Conversation, EngineStatistics
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collection, Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.statistics import summarize
from agent_peft.types import InfrastructureError, Message, Outcome, StepResult, StopReason, Task
from tests.conftest import case


class Brittle(Arithmetic):
    """``breaks(times, result)`` may raise instead of the result; ``times`` says how often an episode of
    its task and seed was opened.
    """

    def __init__(self, breaks: Callable[[int, StepResult], None]) -> None:
        super().__init__(ArithmeticConfig(digits=1, num_tasks=20))
        self.breaks, self.opened, self.lock = breaks, Counter[tuple[str, int]](), threading.Lock()

    def episode(self, task: Task, seed: int) -> Episode:
        with self.lock:
            self.opened[task.id, seed] += 1
        return BrittleEpisode(self, super().episode(task, seed), self.opened[task.id, seed])


class BrittleEpisode(Episode):
    def __init__(self, environment: Brittle, inner: Episode, times: int) -> None:
        self.environment, self.inner, self.times = environment, inner, times

    def start(self) -> Sequence[Message]:
        return self.inner.start()

    def step(self, action: str) -> StepResult:
        result = self.inner.step(action)
        self.environment.breaks(self.times, result)
        return result

    def close(self) -> None:
        self.inner.close()


class Half:
    """Stands in for an engine: half of the episodes are answered rightly."""

    chat = ChatTokenizer(character_tokenizer(ALPHABET))

    def generate(
        self, conversations: Sequence[Conversation], sampling: SamplingConfig, schedule: object = None
    ) -> EngineStatistics:
        for conversation in conversations:
            task = conversation.task  # type: ignore[attr-defined]
            total = task.content["a"] + task.content["b"] + conversation.seed % 2
            action = self.chat.action_tokens(str(total))
            if conversation.prompt is not None:
                assert conversation.act(action, [-0.5] * len(action), 100) is None
        return EngineStatistics(0, 0, 0, 0)


def never(times: int, result: StepResult) -> None:
    """It answers."""


def crashes(times: int, result: StepResult) -> None:
    if result.outcome is Outcome.INCORRECT:
        raise InfrastructureError("the world is gone")


def raises(times: int, result: StepResult) -> None:
    if result.outcome is Outcome.INCORRECT:
        raise ValueError("a defect of the served environment")


def fails_once(times: int, result: StepResult) -> None:
    if times == 1:
        raise InfrastructureError("the disk is full")


@pytest.mark.parametrize(
    "breaks", [case(crashes, fast=True), case(raises, fast=False), case(fails_once, fast=False)]
)
def test_it_reports_the_success_that_it_has(serving: Any, breaks: Callable[[int, StepResult], None]) -> None:
    def play(breaks: Callable[[int, StepResult], None]) -> Collection:
        host = serving({"train": Brittle(breaks)})
        elsewhere = load_environment({"kind": "remote", "url": host.url, "timeout": 30, "patience": 0.5})
        try:
            collector = Collector(elsewhere, Half())  # type: ignore[arg-type]
            return collector.collect(elsewhere.tasks, 2, SamplingConfig(), RewardConfig(), 0)
        finally:
            elsewhere.close()

    honest, found = play(never), play(breaks)
    expected = summarize(honest.groups)
    assert 0.3 < expected.success.value < 0.7
    assert (summarize(found.groups).success, summarize(found.groups).outcomes) == (
        expected.success,
        expected.outcomes,
    )
    reasons = Counter(
        t.stop_reason for group in found.groups for t in group.trajectories if t.outcome is Outcome.INCORRECT
    )
    assert set(reasons) == {
        {crashes: StopReason.CRASHED, raises: StopReason.DEFECT, fails_once: StopReason.FINISHED}[breaks]
    }
    assert (found.crashed, found.defects) == (reasons[StopReason.CRASHED], reasons[StopReason.DEFECT])
