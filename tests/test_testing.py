"""The check of a user's environment finds each broken rule, and says where it is and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_peft.environments import load_environment
from agent_peft.testing import ConformanceError, check_environment
from agent_peft.types import AgentPeftError

WORLD = """\
import itertools
from agent_peft.environments import Environment, EnvironmentConfig, Episode
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task

DRAWS = itertools.count()

class Config(EnvironmentConfig):
    size: int = 3

class World(Environment):
    config_class = Config
    @property
    def tasks(self):
        return [Task(f"t{i}", content={"i": i}) for i in range(self.config.size)]
    def episode(self, task, seed):
        return Run()
    def demonstration(self, task):
        return ["up", "2"]
    def close(self):
        pass

class Run(Episode):
    total = 0
    def start(self):
        return [Message("user", "1+1=")]
    def step(self, action):
        if action == "up":
            return StepResult("higher")
        if action == "2":
            return StepResult("", True, Outcome.CORRECT, StopReason.FINISHED, score=1.0)
        return StepResult("", True, Outcome.INCORRECT, StopReason.FINISHED, valid=False)
    def close(self):
        pass
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """world((line, other), ...): a module in which these lines are replaced; its kind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = "checked_" + re.sub(r"\W", "_", tmp_path.name)

    def write(*changes: tuple[str, str]) -> str:
        text = WORLD
        for line, other in changes:
            assert text.count(line) == 1
            text = text.replace(line, other)
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:World"

    return write


def test_an_environment_that_keeps_the_rules_passes(world: Callable[..., str]) -> None:
    kind = world()
    check_environment(kind, size=2)
    check_environment(type(load_environment(kind)), size=2)
    check_environment(load_environment(kind))
    with pytest.raises(AgentPeftError, match=r"environment\.sizes: unknown key; did you mean 'size'"):
        check_environment(kind, sizes=2)


def test_a_mistake_of_a_demonstration_may_be_invalid(world: Callable[..., str]) -> None:
    refused = ('return StepResult("higher")', 'return StepResult("higher", valid=False)')
    shown = ('return ["up", "2"]', 'return [Mistake("up"), "2"]')
    imported = (
        "import Environment, EnvironmentConfig, Episode",
        "import Environment, EnvironmentConfig, Episode, Mistake",
    )
    check_environment(world(refused, shown, imported), size=2)


CORRECT = 'StepResult("", True, Outcome.CORRECT, StopReason.FINISHED, score=1.0)'
FAULTS = {
    "tasks change": (
        'Task(f"t{i}",',
        'Task(f"t{i + next(DRAWS)}",',
        r"^tasks: World\.tasks \(.*make the tasks f",
    ),
    "no JSON": ('content={"i": i}', 'content={"i": (i,)}', "^task 't0': its content is not JSON"),
    "no user": (
        'Message("user", "1+1=")',
        'Message("system", "1+1=")',
        r"^task 't0': Run\.start .*role user",
    ),
    "blank": ('Message("user", "1+1=")', 'Message("user", " ")', r"^task 't0': Run\.start .* ends with Mess"),
    "wrong": (
        'return ["up", "2"]',
        'return ["up", "3"]',
        "^task 't0': its demonstration is graded incorrect",
    ),
    "too long": ('return ["up", "2"]', 'return ["2", "2"]', "demonstration ends after 1 of 2 actions; leave"),
    "too short": ('return ["up", "2"]', 'return ["up"]', "its demonstration does not end the episode"),
    "invalid": (CORRECT, CORRECT[:-1] + ", valid=False)", "an action of its demonstration is invalid"),
    "score": (
        "score=1.0",
        "score=1.5",
        r"a StepResult whose score is 1\.5; give an agent_peft\.types\.StepResult",
    ),
    "truth": ("score=1.0", "score=True", r"a StepResult whose score is True; give an agent_peft"),
    "early score": (
        '"higher")',
        '"higher", score=-0.5)',
        r"a StepResult whose score is -0\.5; give an agent_peft",
    ),
    "raises": (
        'if action == "up":',
        'if len(action) > 9 and int(action): return StepResult("more")\n        if action == "up":',
        r"^task 't0': the action '999.* raises ValueError: .*py:27; answer every text with a StepResult",
    ),
    "anything goes": (
        "Outcome.INCORRECT",
        "Outcome.INCORRECT if action else Outcome.CORRECT",
        "^task 't0': doing nothing passes",
    ),
    "junk": (
        "Outcome.INCORRECT",
        "Outcome.INCORRECT if action != '{}' else Outcome.CORRECT",
        "^task 't0': the action '{}' is correct; grade it as incorrect",
    ),
    "random": (
        '"higher"',
        'f"higher {next(DRAWS)}"',
        "two episodes with the same seed and the same actions dif",
    ),
    "environment": (
        '["up", "2"]\n    def close(self):\n        pass',
        '["up", "2"]\n    def close(self):\n        self.config = self.config.size',
        r"^close: AttributeError: .*py:20",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_rule_is_a_line_that_says_what_to_do(fault: str, world: Callable[..., str]) -> None:
    line, other, message = FAULTS[fault]
    kind = world((line, other))
    with pytest.raises(ConformanceError) as told:
        check_environment(kind)
    assert any(re.search(message, violation) for violation in told.value.violations), told.value.violations
    assert not any("\n" in violation for violation in told.value.violations)


TEXTS = ("Outcome.CORRECT, StopReason.FINISHED, score", '"correct", "finished", score')


def test_texts_are_as_good_as_the_constants(world: Callable[..., str]) -> None:
    check_environment(world(TEXTS))


def test_junk_that_is_correct_is_told_of_texts_too(world: Callable[..., str]) -> None:
    kind = world(TEXTS, ("Outcome.INCORRECT, StopReason.FINISHED, valid=False", '"correct", "finished"'))
    with pytest.raises(ConformanceError) as told:
        check_environment(kind)
    assert any("is correct; grade it as incorrect" in violation for violation in told.value.violations)


def test_an_episode_that_closes_only_once_is_told(world: Callable[..., str]) -> None:
    kind = world(
        (
            "valid=False)\n    def close(self):\n        pass",
            "valid=False)\n    def close(self):\n        del self.open",
        ),
        ("total = 0", "def __init__(self):\n        self.open = True"),
    )
    with pytest.raises(ConformanceError, match=r"task 't0': AttributeError: .*open.*, at checked_\w+\.py:"):
        check_environment(kind)


def test_episodes_that_share_state_are_told(world: Callable[..., str]) -> None:
    kind = world(
        ("import itertools", "import itertools, time"),
        ("    total = 0\n", "    totals = []\n"),
        (
            'return StepResult("higher")',
            "time.sleep(0.02)\n            return StepResult(str(len(self.totals)))",
        ),
        (
            "valid=False)\n    def close(self):\n        pass",
            "valid=False)\n    def close(self):\n        self.totals.clear()",
        ),
        ("def start(self):", "def start(self):\n        self.totals.append(1)"),
    )
    with pytest.raises(
        ConformanceError, match=r"^threads: task .* ends otherwise among other episodes; keep al"
    ):
        check_environment(kind)
