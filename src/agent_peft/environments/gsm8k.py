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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode, TaskFiles
from agent_peft.environments.task_files.download import HubSet, download, hub_rows
from agent_peft.environments.task_files.reading import MAX_FILE_BYTES
from agent_peft.files import parse_json, read_text
from agent_peft.seeding import generator
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

HUB_SET = HubSet("openai/gsm8k", {"train.jsonl": "main/train*", "test.jsonl": "main/test*"})
GOLD_MARK = "####"  # of the data; what the agent writes is set by answer_format
ANSWER = "{answer}"
INSTRUCTION = """\
Solve the problem step by step, each step on a line of its own. Then write the answer, a number, on a last \
line like this:
{answer_format}"""
MAX_STEPS = 8  # problems with as many steps, or more, share a skill: there are few

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}+|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++)"
_NUMBER = rf"(?:[-+−]\ ?\$?\ ?|\$\ ?[-+−]?)?{_DIGITS}"
_WHOLE = re.compile(_NUMBER)
_ANYWHERE = re.compile(
    rf"(?<![0-9.])(?:(?<![\w)])[-+−]\$?|\$[-+−]?)?{_DIGITS}(?![0-9])", re.ASCII
)  # in 5-3, the minus is no sign


def _file_or_hub_id(source: str | Path) -> str | Path:
    is_hub_id = (
        isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.endswith((".jsonl", ".json"))
    )
    return source if is_hub_id else Path(source)


class GSM8KConfig(EnvironmentConfig):
    """The problems, the number of solved ones in the prompt, and the format of the answer."""

    kind: str = "gsm8k"
    tasks: Annotated[str | Path, AfterValidator(_file_or_hub_id)] = Field(
        description="a .jsonl file, or a hub id such as openai/gsm8k"
    )
    split: Literal["train", "test"] | None = Field(
        default=None, description="train or test; a hub id needs it, a file takes none"
    )
    offset: int = Field(default=0, ge=0, description="number of problems to skip")
    num_tasks: int | None = Field(
        default=None, ge=1, description="number of problems after the offset; null takes all"
    )
    examples: int = Field(
        default=0, ge=0, description="number of solved problems in the prompt, the same ones in every episode"
    )
    examples_from: Path | None = Field(
        default=None,
        description="a .jsonl file to draw the examples from; null draws from the problems left out",
    )
    examples_seed: int = Field(default=0, description="seed that chooses the examples")
    instruction: str = Field(
        default=INSTRUCTION,
        description="beginning of the prompt; {answer_format} is replaced by the format; empty for none",
    )
    answer_format: str = Field(
        default="#### {answer}",
        description="format of the answer in one line, in which {answer} stands for the number",
    )
    annotations: bool = Field(
        default=False, description="whether demonstrations and examples keep the calculator's <<48/2=24>>"
    )
    strict: bool = Field(
        default=True,
        description="whether a reply without the format is incorrect; false grades it on its last number",
    )

    @field_validator("answer_format")
    @classmethod
    def _names_the_answer_once(cls, answer_format: str) -> str:
        if answer_format.count(ANSWER) != 1 or len(answer_format.splitlines()) != 1:
            raise ValueError(
                f"{answer_format!r} must be one line with {ANSWER} in it once, such as '#### {ANSWER}'"
            )
        return answer_format

    @model_validator(mode="after")
    def _effective(self) -> GSM8KConfig:
        if isinstance(self.tasks, Path) and self.split is not None:
            raise ValueError(
                "split has no effect on a file, which is all there is; remove it, or set it to null"
            )
        if isinstance(self.tasks, str) and self.split is None:
            raise ValueError(
                f"split is missing: {self.tasks!r} is taken for a hub id (a file ends in .jsonl); set it "
                "to train or test"
            )
        for key in ("examples_from", "examples_seed"):
            if self.examples == 0 and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with examples: 0; raise examples, or remove it")
        return self


@dataclass(frozen=True)
class WordProblem:
    """The content of an entry. ``number`` is spelled as in the data, with thousands commas; ``reasoning``
    holds one step a line.

    >>> read_entry("t", {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 7"})
    WordProblem(question='3 + 4?', reasoning='3 + 4 = <<3+4=7>>7', number='7')
    """

    question: str
    reasoning: str
    number: str

    @property
    def value(self) -> Decimal:
        number = parse_number(self.number)
        assert number is not None  # read_entry has checked it
        return number

    @property
    def skill(self) -> str:
        """The number of steps, which says most about the difficulty: ``steps_2`` … ``steps_8+``."""
        steps = sum(bool(line.strip()) for line in self.reasoning.splitlines())
        return f"steps_{steps}" if steps < MAX_STEPS else f"steps_{MAX_STEPS}+"


class GSM8K(Environment):
    """The environment. A task's id is its file (or split) and line, such as ``train:17``."""

    config_class = GSM8KConfig
    task_files = TaskFiles(download=partial(download, HUB_SET))

    def __init__(self, config: GSM8KConfig) -> None:
        """
        Raises:
            AgentPeftError: the problems cannot be read, or there are too few for ``offset``, ``num_tasks`` or
                ``examples``.
        """
        self.config: GSM8KConfig = config
        problems = load_tasks(config.tasks, config.split)
        last = len(problems) if config.num_tasks is None else config.offset + config.num_tasks
        self._tasks = problems[config.offset : last]
        if last > len(problems) or not self._tasks:
            count = "" if config.num_tasks is None else f" + num_tasks: {config.num_tasks}"
            raise AgentPeftError(
                f"{config.tasks}: offset: {config.offset}{count} is beyond its {len(problems)} problems; "
                "lower it"
            )
        left_out = (*problems[: config.offset], *problems[last:])
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
        """The number of a reply, if there is one, and whether it is in the format."""
        answers = [match[1] for match in self._pattern.finditer(reply)]
        if answers:
            return parse_number(answers[-1]), True
        return None if self.config.strict else last_number(reply), False

    def _solution(self, problem: WordProblem) -> str:
        reasoning = problem.reasoning if self.config.annotations else _ANNOTATION.sub("", problem.reasoning)
        return f"{reasoning}\n{self.config.answer_format.replace(ANSWER, problem.number)}".lstrip("\n")

    def _instruction(self) -> str:
        return self.config.instruction.replace(
            "{answer_format}", self.config.answer_format.replace(ANSWER, "<number>")
        )

    def _shown(self, problem: WordProblem) -> str:
        return f"Problem: {problem.question}\nSolution:\n{self._solution(problem)}"

    def _examples(self, left_out: Sequence[Task]) -> list[WordProblem]:
        config = self.config
        if not config.examples:
            return []
        questions = {task.content["question"].strip() for task in self._tasks}
        pool = left_out if config.examples_from is None else load_tasks(config.examples_from, None)
        usable = [
            task for task in pool if task.content["question"].strip() not in questions
        ]  # a problem never shows its own solution
        if len(usable) < config.examples:
            place = (
                "are left out by num_tasks and offset"
                if config.examples_from is None
                else f"of {config.examples_from} are not tasks"
            )
            raise AgentPeftError(
                f"examples: {config.examples}, but only {len(usable)} problems {place}; lower it, or set "
                "examples_from"
            )
        examples = generator(config.examples_seed, "gsm8k", "examples").sample(usable, config.examples)
        return [read_entry(task.id, task.content) for task in examples]


class GSM8KEpisode(Episode):
    """One turn. A reply without the answer in its format is an invalid action."""

    def __init__(self, environment: GSM8K, problem: WordProblem) -> None:
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
    """A pattern that finds the answers of a reply; group 1 is the number. If nothing follows {answer} in the
    format, the number must end its line.

    >>> answer_pattern("#### {answer}").findall("#### Sum\\n#### $1,080.\\n#### 3 apples")
    ['$1,080.']
    >>> answer_pattern("\\\\boxed{{answer}}").findall("It is \\\\boxed{72}, so")
    ['72']
    """
    before, after = (re.escape(part.strip()) for part in answer_format.split(ANSWER))
    end = after or r"\.?[ \t\r]*+$"
    return re.compile(rf"{before or '^'}[ \t]*+({_NUMBER})[ \t]*+{end}", re.MULTILINE)


def parse_number(text: str) -> Decimal | None:
    """The exact number that a text spells, or None.

    >>> parse_number("-$1,234.50"), parse_number("72."), parse_number("1,23"), parse_number("7 apples")
    (Decimal('-1234.50'), Decimal('72'), None, None)
    """
    text = text.strip()
    return Decimal(re.sub(r"[+$, ]", "", text).replace("−", "-")) if _WHOLE.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text. A minus is a sign only if no number stands before it.

    >>> last_number("so it is 48/2 = 24 apples."), last_number("that leaves -3")
    (Decimal('24'), Decimal('-3'))
    >>> last_number("5-3"), last_number("none")
    (Decimal('3'), None)
    """
    match = None
    for match in _ANYWHERE.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return parse_number(match[0]) if match is not None else None


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


def read_entry(name: str, entry: Any) -> WordProblem:
    """Check an entry, and return its content.

    Raises:
        AgentPeftError: with the entry's name and what belongs there.
    """
    if not isinstance(entry, Mapping) or not all(
        isinstance(entry.get(key), str) for key in ("question", "answer")
    ):
        raise AgentPeftError(f"{name}: must be an object with two texts, question and answer")
    reasoning, _, number = entry["answer"].rpartition(GOLD_MARK)
    problem = WordProblem(entry["question"].strip(), reasoning.strip(), number.strip())
    if not problem.question or GOLD_MARK not in entry["answer"] or parse_number(problem.number) is None:
        raise AgentPeftError(
            f"{name}: needs a question, and an answer that ends with '{GOLD_MARK} ' and a number"
        )
    return problem


def _lines(path: Path) -> Iterable[tuple[int, Any]]:
    """(line number from 1, entry) of a JSONL file; blank lines are passed over."""
    lines = read_text(path, "a JSONL file", MAX_FILE_BYTES).split(
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
