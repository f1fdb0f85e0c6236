"""The environment: what is asked, what is answered, and how answers are graded."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from agent_peft.environments.arithmetic.operations import backwards, find_operation
from agent_peft.environments.arithmetic.problems import Problems, Split, count_problems
from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.graders import Grade, QuestionEpisode
from agent_peft.environments.templates import fill, with_placeholders
from agent_peft.lookup import may_import
from agent_peft.types import AgentPeftError, Message, Task

ALPHABET = "0123456789+*-= ^$"  # every character of a prompt or an answer, for a character tokenizer

Form = Literal["plain", "reversed", "worked"]

MAX_DIGITS = 9  # of an operand
RESULT_LIMIT = 10**1000  # Python writes no number of more than 4,300 digits

# the graded number is group 1; the work is not graded, but it may not hold "$", which closes the answer
GRADED: dict[Form, str] = {
    "plain": r"(-?[0-9]+)",
    "reversed": r"([0-9]+-?)",
    "worked": r"(?:[^$]*=)?([0-9]+-?)",
}


class ArithmeticConfig(EnvironmentConfig):
    """Two numbers with exactly ``digits`` digits each (0 has one digit), and the operation on them."""

    kind: str = "arithmetic"
    operation: str = Field(
        default="addition",
        description="addition, multiplication, or your own Operation as package.module:NAME",
    )
    digits: int | tuple[int, int] = Field(
        default=3, description="digits of both operands; [low, high] mixes lengths, with a skill for each"
    )
    answer: Form = Field(
        default="plain", description="plain; reversed: last digit first; worked: reversed, after the work"
    )
    symbols: bool = Field(default=False, description="whether ^ opens the question and $ closes the answer")
    system_prompt: Annotated[str, with_placeholders("operation")] = Field(
        default="", description="system message; its placeholder is {operation}; empty for none"
    )
    prompt: Annotated[str, with_placeholders("question", needs="question")] = Field(
        default="{question}", description="user message; its placeholder is {question}, such as 12+34="
    )
    split: Split = Field(default="train", description="train or heldout, which share no problem")
    num_tasks: int | None = Field(
        default=None, ge=1, description="number of distinct problems; null takes all of the split"
    )
    seed: int = Field(
        default=0, description="chooses the problems and their order; the held-out ones are always the same"
    )

    @field_validator("operation")
    @classmethod
    def _exists(cls, operation: str) -> str:
        if ":" not in operation or may_import(operation):
            find_operation(operation)
        return operation

    @field_validator("digits", mode="before")
    @classmethod
    def _ascending(cls, digits: Any) -> Any:
        numbers = digits if isinstance(digits, list | tuple) and len(digits) == 2 else [digits]
        valid = all(type(number) is int and 1 <= number <= MAX_DIGITS for number in numbers)
        if not valid or sorted(set(numbers)) != list(numbers):
            raise ValueError(
                f"{digits!r:.50} is neither a number from 1 to {MAX_DIGITS} nor two of them, [low, high]"
            )
        # a file has lists only, and types are strict
        return tuple(digits) if isinstance(digits, list) else digits


class Arithmetic(Environment):
    """The environment. Whether a problem is held out depends on its operands alone, so no training run of any
    seed or operation sees it. ``a+b`` and ``b+a`` are in the same split, because one gives the other away.
    """

    config_class = ArithmeticConfig

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config: ArithmeticConfig = config
        self.operation = find_operation(config.operation)
        digits = config.digits if isinstance(config.digits, tuple) else (config.digits, config.digits)
        self.skill = skill = config.operation.rpartition(":")[2]
        count = sum(count_problems(length, config.split) for length in range(digits[0], digits[1] + 1))
        if config.num_tasks is not None and config.num_tasks > count:
            length = "- to ".join(map(str, sorted(set(digits))))
            raise AgentPeftError(
                f"{length}-digit {skill} has only {count} problems in its {config.split} split: "
                f"set num_tasks to at most {count}, or raise digits"
            )
        if config.answer == "worked" and self.operation.worked is None:
            raise AgentPeftError(
                f"answer: worked: {config.operation} has no worked form; give its Operation one, or set "
                "answer: reversed"
            )
        self._tasks = Problems(
            skill, self.operation.symbol, digits, config.split, config.seed, range(config.num_tasks or count)
        )
        self._grammar = re.compile(GRADED[config.answer] + (r"\$" if config.symbols else ""))

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        a, b = read_operands(task)
        question = f"{'^' if self.config.symbols else ''}{a}{self.operation.symbol}{b}="
        system = fill(self.config.system_prompt, {"operation": self.skill})
        user = Message("user", fill(self.config.prompt, {"question": question}))
        opening = [*([Message("system", system)] if system else []), user]
        answer = self._answer(task)

        def grade(reply: str) -> Grade:
            match = self._grammar.fullmatch(reply.strip())
            return Grade(match is not None and match[1] == answer, valid=match is not None)

        return QuestionEpisode(opening, grade)

    def demonstration(self, task: Task) -> Sequence[str]:
        a, b = read_operands(task)
        work = ""
        if self.config.answer == "worked" and self.operation.worked is not None:
            work = self.operation.worked(a, b, max(len(str(a)), len(str(b)))) + "="
        return [work + self._answer(task) + ("$" if self.config.symbols else "")]

    def rejection(self, task: Task) -> Sequence[str]:
        """The demonstration with another last digit, which the operands decide."""
        step = 1 + sum(read_operands(task)) % 9
        (text,) = self.demonstration(task)
        return [re.sub(r"[0-9](?=[^0-9]*$)", lambda digit: str((int(digit[0]) + step) % 10), text)]

    def _answer(self, task: Task) -> str:
        result = self.operation.compute(*read_operands(task))
        if not isinstance(result, int):
            text = reprlib.repr(result)
            raise AgentPeftError(
                f"{self.config.operation} of {task.id:.50} is {text}, no whole number; change the "
                "operation's compute"
            )
        if abs(result) >= RESULT_LIMIT:
            raise AgentPeftError(
                f"{self.config.operation} of {task.id:.50} has more than 1,000 digits; change the "
                "operation's compute"
            )
        return str(result) if self.config.answer == "plain" else backwards(result)


def read_operands(task: Task) -> tuple[int, int]:
    """The two numbers of a task, of at most ``MAX_DIGITS`` digits."""
    a, b = task.content.get("a"), task.content.get("b")
    if type(a) is int and type(b) is int and min(a, b) >= 0 and max(a, b) < 10**MAX_DIGITS:
        return a, b
    raise AgentPeftError(
        f"task {task.id!r:.50}: a and b must be whole numbers of at most {MAX_DIGITS} digits, from 0 on"
    )
