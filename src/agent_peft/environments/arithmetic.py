"""Arithmetic: one question such as ``12+34=``, one answer, graded by exact match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Literal

from pydantic import Field

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.seeding import derive, generator
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

ALPHABET = "0123456789+*-= "  # every character of a prompt or an answer, for a character tokenizer

HELDOUT = 5  # one problem in so many is held out

SYMBOLS = {"addition": "+", "multiplication": "*"}


class ArithmeticConfig(EnvironmentConfig):
    """Two numbers of exactly ``digits`` digits (0 has one digit), to be added or multiplied."""

    kind: Literal["arithmetic"] = "arithmetic"
    operation: Literal["addition", "multiplication"] = "addition"
    digits: int = Field(default=3, ge=1, le=9, description="of each operand")
    reversed: bool = Field(default=False, description="the answer's digits are written from the last to the first, as carries go")
    split: Literal["train", "heldout"] = "train"
    num_tasks: int = Field(ge=1, description="distinct problems")
    seed: int = Field(default=0, description="chooses the problems and their order; never which are held out")


class Arithmetic(Environment):
    """Which problems are held out depends on their operands alone, so no training run of any seed or operation has seen one.

    ``a+b`` and ``b+a`` are on the same side, since one gives the other away.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        """
        Raises:
            AgentPeftError: the split has fewer than ``num_tasks`` problems.
        """
        self.config = config
        self._tasks = tuple(islice(self._problems(), config.num_tasks))
        if len(self._tasks) < config.num_tasks:
            raise AgentPeftError(
                f"{config.digits}-digit {config.operation} has only {len(self._tasks)} problems in its {config.split} split: "
                f"set num_tasks to at most {len(self._tasks)}, or raise digits"
            )

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def _problems(self) -> Iterator[Task]:
        low = 0 if self.config.digits == 1 else 10 ** (self.config.digits - 1)
        operands = 10**self.config.digits - low
        symbol = SYMBOLS[self.config.operation]
        for number in _shuffled(operands**2, generator(self.config.seed, "arithmetic")):
            a, b = low + number // operands, low + number % operands
            if _is_heldout(a, b) == (self.config.split == "heldout"):
                yield Task(id=f"{a}{symbol}{b}", skills=(self.config.operation,), content={"a": a, "b": b})

    def episode(self, task: Task, seed: int) -> ArithmeticEpisode:
        return ArithmeticEpisode(f"{task.id}=", self._answer(task))

    def demonstration(self, task: Task) -> Sequence[str]:
        return [self._answer(task)]

    def _answer(self, task: Task) -> str:
        a, b = task.content["a"], task.content["b"]
        digits = str(a + b if self.config.operation == "addition" else a * b)
        return digits[::-1] if self.config.reversed else digits


class ArithmeticEpisode(Episode):
    """One turn. Anything but digits is an invalid action, and as wrong as a wrong number."""

    def __init__(self, question: str, answer: str) -> None:
        self._question = question
        self._answer = answer
        self._over = False

    def start(self) -> Sequence[Message]:
        return [Message("user", self._question)]

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        said = action.strip()
        outcome = Outcome.CORRECT if said == self._answer else Outcome.INCORRECT
        return StepResult("", done=True, outcome=outcome, stop_reason=StopReason.FINISHED, valid=said.isascii() and said.isdigit())

    def close(self) -> None:
        self._over = True


def _is_heldout(a: int, b: int) -> bool:
    return derive(0, "arithmetic", "heldout", min(a, b), max(a, b)) % HELDOUT == 0


def _shuffled(size: int, random: Random) -> Iterator[int]:
    """The numbers below ``size`` in random order, each as it is asked for (Fisher and Yates, without the array)."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = random.randrange(i, size)
        yield moved.get(j, j)
        moved[j] = moved.pop(i, i)
