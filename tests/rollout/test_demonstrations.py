"""Demonstrations that the sampler could never say, or that are not correct, are counted in every step and
told once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.demonstrations import DemonstrationCheck, demonstrate, unsayable_because
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.rollout.sources import Demonstrations
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    Trajectory,
)


class Shown(Environment, Episode):
    """Every task is shown the same actions, and is over after the last of them, with the same outcome."""

    def __init__(self, actions: Any, outcome: Outcome = Outcome.CORRECT) -> None:
        self.actions, self.outcome, self.left = actions, outcome, 0

    @property
    def tasks(self) -> Sequence[Task]:
        return [Task("t0"), Task("t1")]

    def episode(self, task: Task, seed: int) -> Episode:
        self.left = len(self.actions)
        return self

    def demonstration(self, task: Task) -> Any:
        return self.actions

    def start(self) -> Sequence[Message]:
        return [Message("user", "1+1=")]

    def step(self, action: str) -> StepResult:
        self.left -= 1
        return StepResult("", True, self.outcome, StopReason.FINISHED) if not self.left else StepResult("=")

    def close(self) -> None: ...


class Failing(Shown):
    """Fails in one of its methods, so many times."""

    def __init__(self, place: str, times: int) -> None:
        super().__init__(["1", "2"])
        self.place, self.times = place, times

    def fail(self, place: str) -> None:
        if place == self.place and self.times:
            self.times -= 1
            raise InfrastructureError("the disk is full")

    def demonstration(self, task: Task) -> Any:
        self.fail("demonstration")
        return super().demonstration(task)

    def start(self) -> Sequence[Message]:
        self.fail("start")
        return super().start()

    def step(self, action: str) -> StepResult:
        self.fail("step")
        return super().step(action)


@pytest.fixture
def chat(char_tokenizer: PreTrainedTokenizerFast) -> ChatTokenizer:
    return ChatTokenizer(char_tokenizer)


def replayed(environment: Environment, chat: ChatTokenizer) -> list[Trajectory]:
    return [demonstrate(environment, task, chat, RewardConfig(), seed=0) for task in environment.tasks]


@pytest.mark.parametrize(
    ("actions", "limits", "reason"),
    [
        (
            ["12"],
            {"max_new_tokens": 2},
            None,
        ),  # two characters; without room for the end token they say the same
        (["12"], {"max_new_tokens": 1}, "turn 1 has 2 tokens, more than sampling.max_new_tokens: 1"),
        (["1", "23"], {"max_new_tokens": 1}, "turn 2 has 2 tokens, more than sampling.max_new_tokens: 1"),
        (["12"], {"stop": ("2",)}, None),  # it ends there anyway
        (["12"], {"stop": ("+", "1")}, "turn 1 continues after '1', which sampling.stop ends an action at"),
        (
            ["1-2", "1"],
            {"stop": ("1-",)},
            "turn 1 continues after '1-', which sampling.stop ends an action at",
        ),
    ],
)
def test_what_the_sampler_could_not_say(actions, limits, reason, chat):
    (trajectory, _) = replayed(Shown(actions), chat)
    assert unsayable_because(trajectory, chat, SamplingConfig(**limits)) == reason


def test_an_episode_has_a_limit_too(chat):
    (trajectory, _) = replayed(Shown(["12", "3"]), chat)
    length = len(trajectory.tokens) - 1
    assert unsayable_because(trajectory, chat, SamplingConfig(max_tokens=length)) is None
    told = f"all turns have {length} tokens, more than sampling.max_tokens: {length - 1}"
    assert unsayable_because(trajectory, chat, SamplingConfig(max_tokens=length - 1)) == told


def test_faults_are_counted_every_time_and_told_once(chat, caplog):
    groups = [Group(t.task, [t]) for t in replayed(Shown(["12"], Outcome.INCORRECT), chat)]
    check = DemonstrationCheck(chat, SamplingConfig(max_new_tokens=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert check.count(groups) == {"demonstrations_incorrect": 2.0, "demonstrations_unsayable": 2.0}
        assert (
            DemonstrationCheck(chat, SamplingConfig(), warns=False).count(groups)["demonstrations_incorrect"]
            == 2.0
        )
    incorrect, unsayable = caplog.messages
    assert incorrect.startswith("task t0: of its demonstration, it is graded incorrect, not correct;")
    assert unsayable.startswith(
        "task t0: of its demonstration, turn 1 has 2 tokens, more than sampling.max_new_tokens: 1;"
    )


def test_right_demonstrations_are_not_told(chat, caplog):
    groups = [Group(t.task, [t]) for t in replayed(Shown(["12"]), chat)]
    found = DemonstrationCheck(chat, SamplingConfig()).count(groups)
    assert found == {"demonstrations_incorrect": 0.0, "demonstrations_unsayable": 0.0} and not caplog.messages


@pytest.mark.parametrize("actions", ["rome", [1], 5, [["a"]]])
def test_a_demonstration_that_is_no_list_of_texts_is_one_line(actions, chat):
    """A text is a sequence of texts, too: its first letter would be trained on."""
    with pytest.raises(
        AgentPeftError, match=r"task t0: its demonstration must be a list of texts, one for each turn; got"
    ) as raised:
        demonstrate(Shown(actions), Task("t0"), chat, RewardConfig(), seed=0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("place", ["demonstration", "start", "step"])
def test_an_environment_that_fails_is_tried_as_often_as_in_a_rollout(place, chat):
    order = SimpleNamespace(at=lambda step: [Task("t0"), Task("t1")])
    ranks = SimpleNamespace(share=lambda tasks: tasks, world_size=1, rank=0, gather=lambda part: [part])

    def collected(times: int) -> Collection:
        check = DemonstrationCheck(chat, SamplingConfig())
        source = Demonstrations(Failing(place, times), order, chat, RewardConfig(), 0, ranks, check)
        return source.collect(0)

    never, twice = collected(0), collected(2)
    assert twice.groups == never.groups and (never.failures, twice.failures) == (0, 2)
    with pytest.raises(
        InfrastructureError, match=r"task t0: the environment failed 3 times .*the disk is full"
    ):
        collected(3)
