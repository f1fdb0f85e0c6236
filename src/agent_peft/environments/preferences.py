"""Pairs of replies to one prompt, of which one is chosen and the other rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.chat import TABLE, as_json, check_turns, read_messages, same_words
from agent_peft.environments.task_files.rows import TableSource, check_columns, check_split, read_table
from agent_peft.environments.task_files.selection import part_of
from agent_peft.environments.task_files.split import Limit, Split
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

SIDES = ("chosen", "rejected")


class PreferencesConfig(EnvironmentConfig):
    """Pairs of a chosen and a rejected reply, in a table of your own. A row is a task. A supervised stage
    learns the chosen replies.
    """

    kind: str = "preferences"
    tasks: TableSource = Field(description=TABLE)
    split: Split = None
    limit: Limit = None
    prompt: str = Field(
        default="prompt", min_length=1, description="column of the prompt, a text or a list of messages"
    )
    chosen: str = Field(
        default="chosen",
        min_length=1,
        description="column of the better reply, a text or a list of messages, which may repeat the prompt",
    )
    rejected: str = Field(
        default="rejected",
        min_length=1,
        description="column of the worse reply, a text or a list of messages, which may repeat the prompt",
    )

    @model_validator(mode="after")
    def _effective(self) -> PreferencesConfig:
        check_split(self.tasks, self.split)
        return self


class Preferences(Environment):
    """The environment. A task's content is ``{"prompt": [{"role", "content"}, …], "chosen": text, "rejected":
    text}``.
    """

    config_class = PreferencesConfig
    graded = False

    def __init__(self, config: PreferencesConfig) -> None:
        """
        Raises:
            AgentPeftError: the table cannot be read, lacks a column, or a row is no pair.
        """
        self.config: PreferencesConfig = config
        name, rows = read_table(config.tasks, config.split)
        if not rows:
            raise AgentPeftError(f"{config.tasks}: holds no pair; give a file of rows")
        check_columns(config.tasks, rows, {key: getattr(config, key) for key in ("prompt", *SIDES)})
        tasks = [
            Task(f"{name}:{row.number}", content=self._content(f"{config.tasks}: {row.place}", row.content))
            for row in rows
        ]
        self._tasks = tuple(part_of(tasks, config.split, config.tasks)[: config.limit])

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> PreferenceEpisode:
        place = f"task {task.id!r:.50}"
        prompt = read_messages(place, task.content.get("prompt"), "prompt", "user")
        chosen, rejected = (_reply(place, prompt, task.content.get(side), side) for side in SIDES)
        return PreferenceEpisode(prompt, chosen, rejected)

    def demonstration(self, task: Task) -> Sequence[str]:
        return [task.content["chosen"]]

    def rejection(self, task: Task) -> Sequence[str]:
        """The actions of the rejected side, as ``demonstration`` gives those of the chosen one."""
        return [task.content["rejected"]]

    def _content(self, place: str, row: Mapping[str, Any]) -> dict[str, Any]:
        config = self.config
        prompt = read_messages(place, row.get(config.prompt), config.prompt, "user")
        columns = {side: getattr(config, side) for side in SIDES}
        replies = {side: _reply(place, prompt, row.get(column), column) for side, column in columns.items()}
        if same_words(replies["chosen"], replies["rejected"]):
            raise AgentPeftError(f"{place}: {' and '.join(columns.values())} are the same; leave the row out")
        return {"prompt": as_json(prompt), **replies}


class PreferenceEpisode(Episode):
    """One prompt and one reply: correct if it is the chosen one, incorrect if it is the rejected one, and
    unknown otherwise.
    """

    def __init__(self, prompt: Sequence[Message], chosen: str, rejected: str) -> None:
        self._prompt, self._chosen, self._rejected = prompt, chosen, rejected
        self._over = False

    def start(self) -> Sequence[Message]:
        return self._prompt

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("the episode is over")
        self._over = True
        outcome = Outcome.UNKNOWN
        if same_words(action, self._chosen):
            outcome = Outcome.CORRECT
        elif same_words(action, self._rejected):
            outcome = Outcome.INCORRECT
        return StepResult("", True, outcome, StopReason.FINISHED)

    def close(self) -> None:
        self._over = True


def _reply(place: str, prompt: Sequence[Message], value: Any, column: str) -> str:
    """The one assistant message of a side, without the prompt that it may repeat."""
    messages = read_messages(place, value, column, "assistant")
    if len(messages) > 1 and messages[: len(prompt)] == list(prompt):
        messages = messages[len(prompt) :]
    if len(messages) != 1:
        raise AgentPeftError(
            f"{place}: {column} holds {len(messages)} messages that are not the prompt's; give one reply, "
            "and put the messages before it into the prompt"
        )
    check_turns(place, [*prompt, *messages], column)
    return messages[0].content
