"""Questions in a table of the user: one turn each, graded exactly, as a number, by a pattern, or by a
function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from agent_peft.environments.chat import message_list, read_prompt
from agent_peft.environments.graders import (
    CUSTOM,
    QuestionEpisode,
    check_grader,
    check_pattern,
    find_grader,
    spelled,
)
from agent_peft.environments.quantities import last_quantity
from agent_peft.environments.tables import TableConfig, TableEnvironment
from agent_peft.environments.task_files.reading import MAX_ID_CHARS
from agent_peft.environments.templates import fill, placeholders_of
from agent_peft.types import AgentPeftError, Message, Task

QUESTION = "question"  # the placeholder of the question, whatever its column is called


class QuestionsConfig(TableConfig):
    """Questions of one turn, in a table of your own. A row is a task."""

    kind: str = "questions"
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
    def placeholders(self) -> dict[str, str]:
        """The columns that both prompts show, by their placeholders."""
        names = placeholders_of(self.system_prompt) + placeholders_of(self.prompt)
        return {name: self.question if name == QUESTION else name for name in names}

    @property
    def columns(self) -> dict[str, str]:
        shown = {
            name if name == QUESTION else f"{{{name}}}": column for name, column in self.placeholders.items()
        }
        optional = {key: getattr(self, key) for key in ("id", "skills", "demonstration")}
        named = {key: column for key, column in optional.items() if column is not None}
        return {**shown, "answer": self.answer, **named}


class Questions(TableEnvironment):
    """The environment. A task's content is its row, so that a user's own grader may read all of it."""

    config_class = QuestionsConfig
    config: QuestionsConfig

    def __init__(self, config: QuestionsConfig) -> None:
        self._grade = find_grader(config.grader, config.pattern)
        super().__init__(config)

    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        self._opening(place, row)  # it checks the row
        return Task(self._id(name, row, place), self._skills(row, place), dict(row))

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        opening = self._opening(f"task {task.id!r:.50}", task.content)
        answer = task.content[self.config.answer]
        return QuestionEpisode(opening, lambda reply: self._grade(reply, answer, task))

    def demonstration(self, task: Task) -> Sequence[str] | None:
        if self.config.demonstration is not None:
            reply = task.content.get(self.config.demonstration)
            return [reply] if isinstance(reply, str) and reply.strip() else None
        if self.config.grader in ("exact", "number"):
            return [spelled(task.content[self.config.answer])]
        return None

    def reference(self, task: Task) -> str | None:
        answer = task.content.get(self.config.answer)
        return super().reference(task) if answer is None else spelled(answer)

    def _opening(self, place: str, row: Mapping[str, Any]) -> list[Message]:
        """The messages that the policy reads, of a row whose answer and shown columns are checked. Where a
        column holds messages, they come first, and ``prompt`` shows the last of them.
        """
        self._check_answer(place, row.get(self.config.answer))
        before, shown = list[Message](), dict[str, str]()
        for name, column in self.config.placeholders.items():
            value = row.get(column)
            if value is None or (name == QUESTION and (value in ([], {}) or not str(value).strip())):
                raise AgentPeftError(
                    f"{place}: has no {name!r}, which the prompt shows (column {column!r}); give it one"
                )
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
        first = [Message("system", system)] if system else []
        return [*first, *before, Message("user", fill(self.config.prompt, shown))]

    def _check_answer(self, place: str, answer: Any) -> None:
        grader, column = self.config.grader, self.config.answer
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise AgentPeftError(f"{place}: has no answer (column {column!r}); give it one")
        if ":" in grader:
            return
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            fault = "is neither a text nor a number"
        elif grader == "number" and last_quantity(spelled(answer)) is None:
            fault = "holds no number"
        else:
            return
        raise AgentPeftError(f"{place}: the answer {answer!r:.50} {fault}, as grader: {grader} needs")

    def _id(self, name: str, row: Mapping[str, Any], place: str) -> str:
        if self.config.id is None:
            return name
        value = row.get(self.config.id)
        if type(value) in (str, int) and 0 < len(str(value)) <= MAX_ID_CHARS:
            return str(value)
        raise AgentPeftError(
            f"{place}: its id {value!r:.50} is no text of 1 to {MAX_ID_CHARS} characters and no whole number "
            f"(column {self.config.id!r})"
        )

    def _skills(self, row: Mapping[str, Any], place: str) -> tuple[str, ...]:
        value = None if self.config.skills is None else row.get(self.config.skills)
        # CSV writes null as an empty cell
        skills = [] if value in (None, "") else [value] if isinstance(value, str) else value
        if isinstance(skills, list) and all(isinstance(skill, str) for skill in skills):
            return tuple(skills)
        raise AgentPeftError(
            f"{place}: its skills {value!r:.50} are no text and no list of texts (column "
            f"{self.config.skills!r})"
        )
