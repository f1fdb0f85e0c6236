"""Preferences in a table of the user: pairs of replies to one prompt, of which one is chosen and the other
rejected, or single replies with a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from agent_peft.environments.chat import (
    MESSAGES,
    as_json,
    check_turns,
    read_conversation,
    read_messages,
    same_words,
)
from agent_peft.environments.graders import Grade, QuestionEpisode
from agent_peft.environments.tables import TableConfig, TableEnvironment
from agent_peft.types import AgentPeftError, Message, Task

SIDES = ("chosen", "rejected")


class PreferencesConfig(TableConfig):
    """Preferences, in a table of your own. A row is a task: a chosen and a rejected reply, or with ``label``
    one reply that is good or bad. A supervised stage learns the good replies.
    """

    kind: str = "preferences"
    prompt: str | None = Field(
        default="prompt",
        min_length=1,
        description="column of the prompt, a text or a list of messages; null where the replies are whole "
        "conversations that begin with it",
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
    label: str | None = Field(
        default=None,
        min_length=1,
        description="column that is true where the row's one reply is good, and false where it is bad, for "
        "kto; null for rows with a chosen and a rejected reply",
    )
    completion: str | None = Field(
        default=None,
        min_length=1,
        description="column of the reply that is labelled, a text or a list of messages, which may repeat "
        "the prompt; default: completion, or messages where prompt is null",
    )

    @model_validator(mode="after")
    def _effective(self) -> PreferencesConfig:
        if self.label is None and self.completion is not None:
            raise ValueError("completion has no effect without label; set label, or remove it")
        for side in SIDES if self.label is not None else ():
            if getattr(self, side) != side:
                raise ValueError(f"{side} has no effect with label, which rows of one reply have; remove it")
        return self

    @property
    def replies(self) -> dict[str, str]:
        """The columns of the replies, by their keys."""
        if self.label is None:
            return {side: getattr(self, side) for side in SIDES}
        return {"completion": self.completion or ("completion" if self.prompt else MESSAGES)}

    @property
    def columns(self) -> dict[str, str]:
        columns = {"prompt": self.prompt, **self.replies, "label": self.label}
        return {key: column for key, column in columns.items() if column}


class Preferences(TableEnvironment):
    """The environment. A task's content is ``{"prompt": [{"role", "content"}, …], "chosen": text, "rejected":
    text}``, without one of the two where the row has a label. A reply is correct if it is the chosen one,
    incorrect if it is the rejected one, and unknown otherwise.
    """

    config_class = PreferencesConfig
    measures = ("loss", "accuracy", "margin")
    config: PreferencesConfig

    def task(self, name: str, row: Mapping[str, Any], place: str) -> Task:
        config, columns = self.config, self.config.replies
        if config.prompt is None:
            prompt = _shared_prompt(place, {column: row.get(column) for column in columns.values()})
        else:
            prompt = read_messages(place, row.get(config.prompt), config.prompt, "user")
        replies = {side: _reply(place, prompt, row.get(column), column) for side, column in columns.items()}
        if config.label is not None:
            side = SIDES[0] if _is_good(place, row.get(config.label), config.label) else SIDES[1]
            replies = {side: replies["completion"]}
        elif same_words(replies["chosen"], replies["rejected"]):
            raise AgentPeftError(f"{place}: {' and '.join(columns.values())} are the same; leave the row out")
        return Task(name, content={"prompt": as_json(prompt), **replies})

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        place = f"task {task.id!r:.50}"
        prompt = read_messages(place, task.content.get("prompt"), "prompt", "user")
        replies = {
            side: _reply(place, prompt, task.content[side], side) for side in SIDES if side in task.content
        }
        if not replies:
            raise AgentPeftError(f"{place}: has neither a chosen nor a rejected reply; give one")

        def grade(action: str) -> Grade:
            side = next((side for side, reply in replies.items() if same_words(action, reply)), None)
            return Grade(None if side is None else side == "chosen")

        return QuestionEpisode(prompt, grade)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return [task.content["chosen"]] if "chosen" in task.content else None

    def rejection(self, task: Task) -> Sequence[str] | None:
        return [task.content["rejected"]] if "rejected" in task.content else None


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


def _shared_prompt(place: str, columns: Mapping[str, Any]) -> list[Message]:
    """The messages before the reply in conversations that differ in their last message alone."""
    prompts = [read_conversation(place, value, column)[:-1] for column, value in columns.items()]
    if any(prompt != prompts[0] for prompt in prompts):
        raise AgentPeftError(
            f"{place}: {' and '.join(columns)} differ before their last message; give one prompt to both"
        )
    return prompts[0]


def _is_good(place: str, value: Any, column: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).strip().lower()  # a table of CSV has texts
    if text not in known:
        raise AgentPeftError(f"{place}: {column} is {value!r:.50}; a label is true or false")
    return known[text]
