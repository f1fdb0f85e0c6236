"""GSM8K: word problems whose answer is one number (Cobbe et al. 2021). One turn; graded on the number, never
on its spelling.

An entry is ``{"question": …, "answer": …}``; its answer is the reasoning, one step a line, then ``#### 72``.
The agent's reply is graded by what stands last in ``answer_format``. Signs count; thousands commas, a ``$``,
a full stop at the end and ``72.0`` make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.task_files.download import hub_rows
from agent_peft.environments.task_files.reading import LIMIT
from agent_peft.files import parse_json, read_text
from agent_peft.seeding import generator
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

GOLD_MARK = "####"  # of the data; what the agent writes is set by answer_format
ANSWER = "{answer}"
INSTRUCTION = """\
Solve the problem step by step, each step on a line of its own. Then write the answer, a number, on a last line like this:
{answer_format}"""
MOST_STEPS = 8  # problems with as many steps, or more, share a skill: there are few

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}+|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++)"
_NUMBER = rf"(?:[-+−]\ ?\$?\ ?|\$\ ?[-+−]?)?{_DIGITS}"
_WHOLE = re.compile(_NUMBER)
_ANYWHERE = re.compile(
    rf"(?<![0-9.])(?:(?<![\w)])[-+−]\$?|\$[-+−]?)?{_DIGITS}(?![0-9])", re.ASCII
)  # in 5-3, the minus is no sign


def _file_or_hub_id(written: str | Path) -> str | Path:
    is_hub_id = (
        isinstance(written, str) and _HUB_ID.fullmatch(written) and not written.endswith((".jsonl", ".json"))
    )
    return written if is_hub_id else Path(written)


class GSM8KConfig(EnvironmentConfig):
    """The problems, how many solved ones the prompt shows, and how the answer is to be written."""

    kind: Literal["gsm8k"] = "gsm8k"
    tasks: Annotated[str | Path, AfterValidator(_file_or_hub_id)] = Field(
        description="a .jsonl file, or a hub id such as openai/gsm8k"
    )
    split: Literal["train", "test"] | None = Field(default=None, description="of a hub id, which needs one")
    offset: int = Field(default=0, ge=0, description="problems to pass over")
    num_tasks: int | None = Field(default=None, ge=1, description="so many from there; null takes all")
    examples: int = Field(
        default=0, ge=0, description="solved problems that the prompt shows, the same ones in every episode"
    )
    examples_from: Path | None = Field(
        default=None, description="a .jsonl file to draw them from; null draws from the problems left out"
    )
    examples_seed: int = Field(default=0, description="chooses them")
    instruction: str = Field(
        default=INSTRUCTION,
        description="the prompt's beginning; {answer_format} stands for it; empty is none",
    )
    answer_format: str = Field(
        default="#### {answer}", description="one line; {answer} stands for the number"
    )
    annotations: bool = Field(
        default=False, description="keep the calculator's <<48/2=24>> in demonstrations and examples"
    )
    strict: bool = Field(
        default=True,
        description="false grades a reply without the format on its last number (it stays invalid)",
    )

    @field_validator("answer_format")
    @classmethod
    def _names_the_answer_once(cls, written: str) -> str:
        if written.count(ANSWER) != 1 or len(written.splitlines()) != 1:
            raise ValueError(
                f"{written!r} must be one line with {ANSWER} in it once, such as '#### {ANSWER}'"
            )
        return written

    @model_validator(mode="after")
    def _effective(self) -> GSM8KConfig:
        if isinstance(self.tasks, Path) and self.split is not None:
            raise ValueError(
                "split has no effect on a file, which is all there is; remove it, or set it to null"
            )
        if isinstance(self.tasks, str) and self.split is None:
            raise ValueError(
                f"split is missing: {self.tasks!r} is taken for a hub id (a file ends in .jsonl); set it to train or test"
            )
        for key in ("examples_from", "examples_seed"):
            if self.examples == 0 and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with examples: 0; raise examples, or remove it")
        return self


@dataclass(frozen=True)
class Problem:
    """What an entry says. ``number`` is as the data writes it, thousands commas included; ``reasoning`` holds
    one step a line.

    >>> read_entry("t", {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 7"})
    Problem(question='3 + 4?', reasoning='3 + 4 = <<3+4=7>>7', number='7')
    """

    question: str
    reasoning: str
    number: str

    @property
    def value(self) -> Decimal:
        found = parse_number(self.number)
        assert found is not None  # read_entry has checked it
        return found

    @property
    def skill(self) -> str:
        """By the number of steps, which says most of how hard a problem is: ``steps_2`` … ``steps_7``,
        ``steps_8+``.
        """
        steps = sum(bool(line.strip()) for line in self.reasoning.splitlines())
        return f"steps_{steps}" if steps < MOST_STEPS else f"steps_{MOST_STEPS}+"


class GSM8K(Environment):
    """The environment. Tasks are called after their file (or split) and line, ``train:17``."""

    def __init__(self, config: GSM8KConfig) -> None:
        """
        Raises:
            AgentPeftError: the problems cannot be read, or there are too few for ``offset``, ``num_tasks`` or
                ``examples``.
        """
        self.config = config
        found = load_tasks(config.tasks, config.split)
        last = len(found) if config.num_tasks is None else config.offset + config.num_tasks
        self._tasks = found[config.offset : last]
        if last > len(found) or not self._tasks:
            wanted = "" if config.num_tasks is None else f" + num_tasks: {config.num_tasks}"
            raise AgentPeftError(
                f"{config.tasks}: offset: {config.offset}{wanted} is beyond its {len(found)} problems; lower it"
            )
        left_out = (*found[: config.offset], *found[last:])
        self.prompt = "\n\n".join(
            filter(None, (self._instruction(), *map(self._shown, self._examples(left_out))))
        )
        self._pattern = answer_pattern(config.answer_format)

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> GSM8KEpisode:
        return GSM8KEpisode(self, read_entry(task.id, task.content))

    def demonstration(self, task: Task) -> Sequence[str]:
        return [self._solution(read_entry(task.id, task.content))]

    def answer_of(self, reply: str) -> tuple[Decimal | None, bool]:
        """The number that a reply answers, if any, and whether it is in the format."""
        written = [match[1] for match in self._pattern.finditer(reply)]
        if written:
            return parse_number(written[-1]), True
        return None if self.config.strict else last_number(reply), False

    def _solution(self, problem: Problem) -> str:
        reasoning = problem.reasoning if self.config.annotations else _ANNOTATION.sub("", problem.reasoning)
        return f"{reasoning}\n{self.config.answer_format.replace(ANSWER, problem.number)}".lstrip("\n")

    def _instruction(self) -> str:
        return self.config.instruction.replace(
            "{answer_format}", self.config.answer_format.replace(ANSWER, "<number>")
        )

    def _shown(self, problem: Problem) -> str:
        return f"Problem: {problem.question}\nSolution:\n{self._solution(problem)}"

    def _examples(self, left_out: Sequence[Task]) -> list[Problem]:
        config = self.config
        if not config.examples:
            return []
        asked = {task.content["question"].strip() for task in self._tasks}
        pool = left_out if config.examples_from is None else load_tasks(config.examples_from, None)
        usable = [
            task for task in pool if task.content["question"].strip() not in asked
        ]  # a problem never shows its own solution
        if len(usable) < config.examples:
            place = (
                "are left out by num_tasks and offset"
                if config.examples_from is None
                else f"of {config.examples_from} are not tasks"
            )
            raise AgentPeftError(
                f"examples: {config.examples}, but only {len(usable)} problems {place}; lower it, or set examples_from"
            )
        chosen = generator(config.examples_seed, "gsm8k", "examples").sample(usable, config.examples)
        return [read_entry(task.id, task.content) for task in chosen]


class GSM8KEpisode(Episode):
    """One turn. A reply without the answer in its format is an invalid action."""

    def __init__(self, environment: GSM8K, problem: Problem) -> None:
        self._environment, self._problem = environment, problem
        self._over = False

    def start(self) -> Sequence[Message]:
        prompt = self._environment.prompt
        return [*([Message("system", prompt)] if prompt else []), Message("user", self._problem.question)]

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        number, valid = self._environment.answer_of(action)
        outcome = Outcome.CORRECT if number == self._problem.value else Outcome.INCORRECT
        return StepResult("", done=True, outcome=outcome, stop_reason=StopReason.FINISHED, valid=valid)

    def close(self) -> None:
        self._over = True


def answer_pattern(answer_format: str) -> re.Pattern[str]:
    """Finds the answers in a reply, their numbers as group 1. Where nothing follows {answer}, the number must
    end its line.

    >>> answer_pattern("#### {answer}").findall("#### Sum\\n#### $1,080.\\n#### 3 apples")
    ['$1,080.']
    >>> answer_pattern("\\\\boxed{{answer}}").findall("It is \\\\boxed{72}, so")
    ['72']
    """
    before, after = (re.escape(part.strip()) for part in answer_format.split(ANSWER))
    end = after or r"\.?[ \t\r]*+$"
    return re.compile(rf"{before or '^'}[ \t]*+({_NUMBER})[ \t]*+{end}", re.MULTILINE)


def parse_number(text: str) -> Decimal | None:
    """The number that a text is, exactly; None for anything else.

    >>> parse_number("-$1,234.50"), parse_number("72."), parse_number("1,23"), parse_number("7 apples")
    (Decimal('-1234.50'), Decimal('72'), None, None)
    """
    text = text.strip()
    return Decimal(re.sub(r"[+$, ]", "", text).replace("−", "-")) if _WHOLE.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text. A minus is a sign only where it does not follow what it could be subtracted
    from.

    >>> last_number("so it is 48/2 = 24 apples."), last_number("that leaves -3"), last_number("5-3"), last_number("none")
    (Decimal('24'), Decimal('-3'), Decimal('3'), None)
    """
    found = None
    for found in _ANYWHERE.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return parse_number(found[0]) if found is not None else None


def load_tasks(source: Path | str, split: str | None) -> tuple[Task, ...]:
    """All problems of a JSONL file, or of a split of a hub id.

    Raises:
        AgentPeftError: it cannot be read, or an entry is not as it should be (its line is named).
    """
    rows = _lines(source) if isinstance(source, Path) else enumerate(hub_rows(source, str(split)), 1)
    name = source.stem if isinstance(source, Path) else str(split)
    tasks = []
    for line, entry in rows:
        try:
            problem = read_entry(f"line {line}", entry)
        except AgentPeftError as error:
            raise AgentPeftError(f"{source}: {error}") from error
        tasks.append(
            Task(
                f"{name}:{line}", (problem.skill,), {"question": entry["question"], "answer": entry["answer"]}
            )
        )
    if not tasks:
        raise AgentPeftError(f"{source}: holds no problem; give a JSONL file of GSM8K entries")
    return tuple(tasks)


def read_entry(name: str, entry: Any) -> Problem:
    """Check an entry and say what it means.

    Raises:
        AgentPeftError: with the entry's name and what belongs there.
    """
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(key), str) for key in ("question", "answer")
    ):
        raise AgentPeftError(f"{name}: must be an object with two texts, question and answer")
    reasoning, _, number = entry["answer"].rpartition(GOLD_MARK)
    problem = Problem(entry["question"].strip(), reasoning.strip(), number.strip())
    if not problem.question or GOLD_MARK not in entry["answer"] or parse_number(problem.number) is None:
        raise AgentPeftError(
            f"{name}: needs a question, and an answer that ends with '{GOLD_MARK} ' and a number"
        )
    return problem


def _lines(path: Path) -> Iterable[tuple[int, Any]]:
    """(line number from 1, entry) of a JSONL file; blank lines are passed over."""
    lines = read_text(path, "a JSONL file", LIMIT).split(
        "\n"
    )  # splitlines would cut at U+2028 inside a text, too
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise AgentPeftError(
                    f"{path}: line {number}: is not JSON ({error}); a JSONL file holds one entry a line"
                ) from error
