"""Questions in a table of the user: one turn each, graded exactly, as a number, by a pattern, or by a
function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.chat import message_list, read_prompt
from agent_peft.environments.graders import (
    CUSTOM,
    Grade,
    check_grader,
    check_pattern,
    find_grader,
    spelled,
)
from agent_peft.environments.quantities import last_quantity
from agent_peft.environments.task_files.reading import MAX_ID_CHARS
from agent_peft.environments.task_files.rows import (
    Row,
    TableSource,
    check_columns,
    check_split,
    read_table,
)
from agent_peft.environments.task_files.selection import part_of
from agent_peft.environments.task_files.split import Limit, Split
from agent_peft.environments.templates import check_placeholders, fill, placeholders_of
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

QUESTION = "question"  # the placeholder of the question, whatever its column is called


class QuestionsConfig(EnvironmentConfig):
    """Questions of one turn, in a table of your own. A row is a task."""

    kind: str = "questions"
    tasks: TableSource = Field(
        description="a file of rows (.jsonl, .json, .csv or .parquet), or a hub id such as openai/gsm8k"
    )
    split: Split = None
    limit: Limit = None
    question: str = Field(
        default="question",
        min_length=1,
        description="column of the question, a text or a list of {role, content} that ends with the user's",
    )
    answer: str = Field(default="answer", min_length=1, description="column of the right answer")
    id: str | None = Field(
        default=None, description="column of the task's id; null takes the file's name and the line"
    )
    skills: str | None = Field(
        default=None, description="column of the task's skills, a text or a list of texts; null gives none"
    )
    demonstration: str | None = Field(
        default=None,
        description="column of a reply that solves the task, for supervised stages; null takes the answer "
        "itself with the graders exact and number, and none with others",
    )
    grader: Annotated[str, AfterValidator(check_grader)] = Field(
        default="exact",
        description="exact: the reply is the answer; number: its last number is; regex: what pattern finds "
        f"is; or {CUSTOM}, which is called with (response, answer, task) and returns true, false, or a score "
        "from 0 to 1",
    )
    pattern: Annotated[str | None, AfterValidator(check_pattern)] = Field(
        default=None,
        description="regular expression for grader: regex; the first group of its last match in the reply is "
        "compared with the answer as exact does",
    )
    system_prompt: str = Field(
        default="", description="system message; {question} and the columns are placeholders; empty for none"
    )
    prompt: str = Field(
        default="{question}", description="user message; {question} and the columns are placeholders"
    )

    @model_validator(mode="after")
    def _effective(self) -> QuestionsConfig:
        check_split(self.tasks, self.split)
        if (self.grader == "regex") != (self.pattern is not None):
            raise ValueError(
                "pattern is missing: grader: regex needs a regular expression"
                if self.pattern is None
                else f"pattern has no effect with grader: {self.grader}; set grader: regex, or remove it"
            )
        if not placeholders_of(self.prompt):
            raise ValueError(
                "prompt has no placeholder, so it would be the same for every task; put {question} in it"
            )
        if self.question != QUESTION and QUESTION not in self.placeholders:
            raise ValueError("question has no effect, since prompt has no {question}; remove it")
        return self

    @property
    def placeholders(self) -> list[str]:
        """The placeholders of both prompts."""
        return placeholders_of(self.system_prompt) + placeholders_of(self.prompt)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that the table must have, by their keys."""
        optional = {key: getattr(self, key) for key in ("id", "skills", "demonstration")}
        return {
            **({QUESTION: self.question} if QUESTION in self.placeholders else {}),
            "answer": self.answer,
            **{key: column for key, column in optional.items() if column is not None},
        }


class Questions(Environment):
    """The environment. A task's content is its row, so that a grader of the user's own may read all of it."""

    config_class = QuestionsConfig

    def __init__(self, config: QuestionsConfig) -> None:
        """
        Raises:
            AgentPeftError: the table cannot be read, lacks a column, or a row lacks its question or answer.
        """
        self.config: QuestionsConfig = config
        self._grade = find_grader(config.grader, config.pattern)
        self._tasks = part_of(self._read(), config.split, config.tasks)[: config.limit]

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        opening = self._check(f"task {task.id!r:.50}", task.content)
        answer = task.content[self.config.answer]
        return QuestionEpisode(opening, lambda reply: self._grade(reply, answer, task))

    def demonstration(self, task: Task) -> Sequence[str] | None:
        if self.config.demonstration is not None:
            reply = task.content.get(self.config.demonstration)
            return [reply] if isinstance(reply, str) and reply.strip() else None
        if self.config.grader in ("exact", "number"):
            return [spelled(task.content[self.config.answer])]
        return None

    def _read(self) -> tuple[Task, ...]:
        config = self.config
        name, rows = read_table(config.tasks, config.split)
        if not rows:
            raise AgentPeftError(f"{config.tasks}: holds no question; give a file of rows")
        check_columns(config.tasks, rows, config.columns)
        columns = {column: None for row in rows for column in row.content}
        for key in ("system_prompt", "prompt"):
            try:
                check_placeholders(getattr(config, key), [QUESTION, *columns])
            except ValueError as error:
                raise AgentPeftError(f"{config.tasks}: {key}: {error}") from error
        tasks: dict[str, Task] = {}
        places: dict[str, str] = {}
        for row in rows:
            place = f"{config.tasks}: {row.place}"
            self._check(place, row.content)
            task = Task(self._id(name, row), self._skills(place, row.content), dict(row.content))
            if task.id in tasks:
                raise AgentPeftError(
                    f"{place}: its id {task.id!r:.50} is that of {places[task.id]}, too; give each row an id "
                    "of its own"
                )
            tasks[task.id], places[task.id] = task, row.place
        return tuple(tasks.values())

    def _check(self, place: str, content: Mapping[str, Any]) -> tuple[Message, ...]:
        """Check the values that a task cannot do without, and return its opening.

        Raises:
            AgentPeftError: one is missing, or is of a wrong type.
        """
        config = self.config
        answer = content.get(config.answer)
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise AgentPeftError(f"{place}: has no answer (column {config.answer!r}); give it one")
        if ":" not in config.grader and (
            isinstance(answer, bool) or not isinstance(answer, str | int | float)
        ):
            raise AgentPeftError(
                f"{place}: the answer {answer!r:.50} is neither a text nor a number, as grader: "
                f"{config.grader} needs"
            )
        if config.grader == "number" and last_quantity(spelled(answer)) is None:
            raise AgentPeftError(
                f"{place}: the answer {answer!r:.50} holds no number, as grader: number needs"
            )
        for name in config.placeholders:
            value = content.get(self._column(name))
            if value is None or (name == QUESTION and (value in ([], {}) or not str(value).strip())):
                raise AgentPeftError(
                    f"{place}: has no {name!r}, which the prompt shows (column {self._column(name)!r}); give "
                    "it one"
                )
        return self._opening(place, content)

    def _column(self, placeholder: str) -> str:
        return self.config.question if placeholder == QUESTION else placeholder

    def _opening(self, place: str, content: Mapping[str, Any]) -> tuple[Message, ...]:
        """The messages that the policy reads. Where a column holds messages, they come first, and ``prompt``
        shows the last of them.
        """
        before, shown = list[Message](), dict[str, str]()
        for name in dict.fromkeys(self.config.placeholders):
            column, value = self._column(name), content[self._column(name)]
            if message_list(place, value, column) is None:
                shown[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                continue
            if before or name not in placeholders_of(self.config.prompt):
                raise AgentPeftError(
                    f"{place}: {column} is a list of messages; show one such column, in prompt"
                )
            *before, last = read_prompt(place, value, column)
            shown[name] = last.content
        system = fill(self.config.system_prompt, shown)
        if system and before and before[0].role == "system":
            raise AgentPeftError(
                f"{place}: its messages begin with a system message, and system_prompt is another; remove one"
            )
        opening = (*before, Message("user", fill(self.config.prompt, shown)))
        return (Message("system", system), *opening) if system else opening

    def _id(self, name: str, row: Row) -> str:
        if self.config.id is None:
            return f"{name}:{row.number}"
        value = row.content.get(self.config.id)
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int)
            or not 0 < len(str(value)) <= MAX_ID_CHARS
        ):
            raise AgentPeftError(
                f"{self.config.tasks}: {row.place}: its id {value!r:.50} is no text of 1 to {MAX_ID_CHARS} "
                f"characters and no whole number (column {self.config.id!r})"
            )
        return str(value)

    def _skills(self, place: str, content: Mapping[str, Any]) -> tuple[str, ...]:
        value = None if self.config.skills is None else content.get(self.config.skills)
        skills = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(skills, list) or not all(isinstance(skill, str) for skill in skills):
            raise AgentPeftError(
                f"{place}: its skills {value!r:.50} are no text and no list of texts (column "
                f"{self.config.skills!r})"
            )
        return tuple(skills)


class QuestionEpisode(Episode):
    """One question and one reply."""

    def __init__(self, opening: Sequence[Message], grade: Callable[[str], Grade]) -> None:
        self._opening, self._grade = opening, grade
        self._over = False

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        grade = self._grade(action)
        outcome = Outcome.CORRECT if grade.correct else Outcome.INCORRECT
        return StepResult("", True, outcome, StopReason.FINISHED, grade.valid, grade.score)

    def close(self) -> None:
        self._over = True
