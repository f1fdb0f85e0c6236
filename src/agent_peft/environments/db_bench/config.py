"""The configuration of DB Bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.config import Config
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.environments.db_bench.generator import COMBINED, GENERATED_SKILLS
from agent_peft.environments.db_bench.syntax import SKILLS
from agent_peft.environments.task_files.reading import check_one_source, check_skills
from agent_peft.environments.task_files.split import Limit, Split, check_split_of_file
from agent_peft.environments.templates import with_placeholders

# Short on purpose: the agent reads both in every episode.
SYSTEM_PROMPT = """\
You work on one SQLite table. Reply in one of two ways.
To run one SQL statement and see its result:
Action: Operation
```sql
SELECT a FROM t;
```
To finish:
Action: Answer
Final Answer: [(1, 'x'), (2, 'y')]
The final answer holds the rows asked for, as a list of tuples; after a change write done.
You have {max_turns} turns, the answer included."""
USER_PROMPT = "{instruction}\nThe name of this table is {table}, and the headers of this table are {headers}."


class GenerateConfig(Config):
    """Which tasks to generate. The splits ``words``, ``phrasing`` and ``composition`` each hold out one thing
    that ``train`` never shows. ``heldout`` holds out words and phrasing, and has all combinations of clauses.
    """

    num_tasks: int = Field(gt=0, description="number of tasks")
    seed: int = Field(0, description="another seed gives other tasks")
    skills: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="primary skills of the tasks, which take them in turn; null draws skills as often as "
        "people need them",
    )
    split: Literal["train", "words", "phrasing", "composition", "heldout"] = Field(
        "train",
        description="train; words, phrasing or composition, which hold out one thing; or heldout, which "
        "holds out words and phrasing",
    )
    combined: float = Field(
        COMBINED, ge=0, le=1, description="share of tasks that may show more skills than their own"
    )

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: tuple[str, ...] | None) -> tuple[str, ...] | None:
        check_skills(skills, GENERATED_SKILLS)
        return skills

    @model_validator(mode="after")
    def _combined_has_an_effect(self) -> GenerateConfig:
        if self.combined != COMBINED and (self.skills is None or self.split == "composition"):
            condition = "without skills" if self.skills is None else "with split: composition"
            raise ValueError(f"combined has no effect {condition}; leave it out")
        return self


class DBBenchConfig(EnvironmentConfig):
    """The tasks (of a file in LifelongAgentBench's format, or generated) and the limits of an episode."""

    kind: str = "db_bench"
    tasks: Path | None = Field(None, description="file of tasks; set this or generate")
    generate: GenerateConfig | None = Field(None, description="tasks to generate; set this or tasks")
    database: Literal["sqlite"] = Field("sqlite", description="database that runs the SQL")
    skills: list[str] | None = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is in this list; null keeps all"
    )
    split: Split = None
    limit: Limit = None
    system_prompt: Annotated[str, with_placeholders("max_turns")] = Field(
        SYSTEM_PROMPT,
        description="system message, which tells the agent how to reply; its placeholder is {max_turns}; "
        "empty for none",
    )
    prompt: Annotated[str, with_placeholders("instruction", "table", "headers", needs="instruction")] = Field(
        USER_PROMPT,
        description="user message; its placeholders are {instruction}, {table} (its name) and {headers}",
    )
    max_turns: int = Field(
        3, ge=2, description="maximum number of replies, the answer included; the agent is told"
    )
    max_observation_chars: int = Field(
        400, ge=40, description="maximum characters of a statement's result; the rest is cut"
    )
    statement_seconds: float = Field(2.0, gt=0, description="time limit of one statement in seconds")
    statement_steps: int = Field(
        20_000_000,
        gt=0,
        description="limit of one statement in steps of SQLite's virtual machine, equal on every machine",
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="time limit of all statements of an episode together, in seconds; it ends with the stop "
        "reason timeout; null sets no limit",
    )

    @field_validator("skills")
    @classmethod
    def _skills_are_known(cls, skills: list[str] | None) -> list[str] | None:
        check_skills(skills, SKILLS)
        return skills

    @model_validator(mode="after")
    def _one_source(self) -> DBBenchConfig:
        check_one_source(self.tasks, self.generate)
        check_split_of_file(self.split, is_file=self.tasks is not None)
        return self
