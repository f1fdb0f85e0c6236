"""GSM8K: word problems whose answer is one number (Cobbe et al. 2021). One turn; graded on the number, never
on its spelling.

An entry is ``{"question": …, "answer": …}``; its answer is the reasoning, one step a line, then ``#### 72``.
The agent's reply is graded by what stands last in ``answer_format``. Signs count; thousands commas, a ``$``,
a full stop at the end and ``72.0`` make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from agent_peft.environments.base import TaskFiles
from agent_peft.environments.chat import message_list
from agent_peft.environments.graders import Grade, QuestionEpisode
from agent_peft.environments.quantities import NUMBER, last_quantity, parse_number
from agent_peft.environments.tables import TableConfig, TableEnvironment
from agent_peft.environments.task_files.download import HubSet, download
from agent_peft.environments.templates import fill, with_placeholders
from agent_peft.seeding import generator
from agent_peft.types import AgentPeftError, Message, Task

HUB_SET = HubSet("openai/gsm8k", {"train.jsonl": "main/train*", "test.jsonl": "main/test*"})
GOLD_MARK = "####"  # of the data; what the agent writes is set by answer_format
ANSWER = "{answer}"
INSTRUCTION = """\
Solve the problem step by step, each step on a line of its own. Then write the answer, a number, on a last \
line like this:
{answer_format}"""
MAX_STEPS = 8  # problems with as many steps, or more, share a skill: there are few

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


class GSM8KConfig(TableConfig):
    """The problems, the number of solved ones in the prompt, and the format of the answer."""

    kind: str = "gsm8k"
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
    instruction: Annotated[str, with_placeholders("answer_format")] = Field(
        default=INSTRUCTION,
        description="beginning of the system message; its placeholder is {answer_format}; empty for none",
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
        for key in ("examples_from", "examples_seed"):
            if self.examples == 0 and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with examples: 0; raise examples, or remove it")
        return self


@dataclass(frozen=True)
class WordProblem:
    """The content of an entry. ``number`` is spelled as in the data, with thousands commas; ``reasoning``
    holds one step a line.

    >>> read_question("t", {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 7"})
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


class GSM8K(TableEnvironment):
    config_class = GSM8KConfig
    config: GSM8KConfig
    task_files = TaskFiles(download=partial(download, HUB_SET))

    def __init__(self, config: GSM8KConfig) -> None:
        self.config = config
        problems = self.read(config.tasks, config.split)
        last = len(problems) if config.num_tasks is None else config.offset + config.num_tasks
        self._tasks = problems[config.offset : last]
        if last > len(problems) or not self._tasks:
            count = "" if config.num_tasks is None else f" + num_tasks: {config.num_tasks}"
            raise AgentPeftError(
                f"{config.tasks}: offset: {config.offset}{count} is beyond its {len(problems)} problems; "
                "lower it"
            )
        self._tasks = self._tasks[: config.limit]
        left_out = (*problems[: config.offset], *problems[config.offset + len(self._tasks) :])
        shown = config.answer_format.replace(ANSWER, "<number>")
        examples = (
            f"Problem: {problem.question}\nSolution:\n{self._solution(problem)}"
            for problem in self._examples(left_out)
        )
        self.prompt = "\n\n".join(
            filter(None, (fill(config.instruction, {"answer_format": shown}), *examples))
        )
        self._pattern = answer_pattern(config.answer_format)

    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        problem = read_question(place, row)
        return Task(name, (problem.skill,), {key: row[key] for key in ("question", "answer")})

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        problem = read_question(task.id, task.content)
        system = [Message("system", self.prompt)] if self.prompt else []
        opening = [*system, Message("user", problem.question)]
        return QuestionEpisode(opening, partial(self._grade, problem))

    def demonstration(self, task: Task) -> Sequence[str]:
        return [self._solution(read_question(task.id, task.content))]

    def _grade(self, problem: WordProblem, reply: str) -> Grade:
        answers = [match[1] for match in self._pattern.finditer(reply)]
        if answers:
            return Grade(parse_number(answers[-1]) == problem.value)
        last = None if self.config.strict else last_quantity(reply)
        return Grade(last is not None and last.value == Fraction(problem.value), valid=False)

    def _solution(self, problem: WordProblem) -> str:
        reasoning = problem.reasoning if self.config.annotations else _ANNOTATION.sub("", problem.reasoning)
        return f"{reasoning}\n{self.config.answer_format.replace(ANSWER, problem.number)}".lstrip("\n")

    def _examples(self, left_out: Sequence[Task]) -> list[WordProblem]:
        config = self.config
        if not config.examples:
            return []
        questions = {task.content["question"].strip() for task in self._tasks}
        pool = left_out if config.examples_from is None else self.read(config.examples_from, None)
        # a problem never shows its own solution
        usable = [task for task in pool if task.content["question"].strip() not in questions]
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
        return [read_question(task.id, task.content) for task in examples]


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
    return re.compile(rf"{before or '^'}[ \t]*+({NUMBER})[ \t]*+{end}(?![0-9])", re.MULTILINE)


def read_question(name: str, entry: Mapping[str, Any]) -> WordProblem:
    """The content of an entry, checked. ``name`` is for error messages."""
    if not all(isinstance(entry.get(key), str) for key in ("question", "answer")):
        raise AgentPeftError(f"{name}: must be an object with two texts, question and answer")
    if message_list(name, entry["question"], "question") is not None:
        raise AgentPeftError(
            f"{name}: question holds a list of messages; set kind: questions and grader: number"
        )
    reasoning, _, number = entry["answer"].rpartition(GOLD_MARK)
    problem = WordProblem(entry["question"].strip(), reasoning.strip(), number.strip())
    if not problem.question or GOLD_MARK not in entry["answer"] or parse_number(problem.number) is None:
        raise AgentPeftError(
            f"{name}: needs a question, and an answer that ends with '{GOLD_MARK} ' and a number"
        )
    return problem
