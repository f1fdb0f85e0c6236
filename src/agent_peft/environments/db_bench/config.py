"""The configuration of DB Bench."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from agent_peft.config import Config
from agent_peft.environments.db_bench.protocol import PROTOCOLS, ProtocolName
from agent_peft.environments.db_bench.servers.client import parse_address
from agent_peft.environments.db_bench.syntax import SKILLS
from agent_peft.environments.task_files.selection import TaskSourceConfig, skills_among
from agent_peft.environments.templates import with_placeholders

COMBINED = 0.75  # the share of tasks that show more than their skill needs
SplitName = Literal["train", "words", "phrasing", "composition", "heldout"]

STATEMENT_STEPS = 20_000_000
USER_PROMPT = "{instruction}\nThe name of this table is {table}, and the headers of this table are {headers}."


class GenerateConfig(Config):
    """Which tasks to generate. The splits ``words``, ``phrasing`` and ``composition`` each hold out one thing
    that ``train`` never shows. ``heldout`` holds out words and phrasing, and has all combinations of clauses.
    """

    num_tasks: int = Field(gt=0, description="number of tasks")
    seed: int = Field(0, description="another seed gives other tasks")
    skills: Annotated[tuple[str, ...] | None, skills_among(SKILLS)] = Field(
        None,
        min_length=1,
        description="primary skills of the tasks, which take them in turn; null draws skills as often as "
        "people need them",
    )
    split: SplitName = Field(
        "train",
        description="train; words, phrasing or composition, which hold out one thing; or heldout, which "
        "holds out words and phrasing",
    )
    combined: float = Field(
        COMBINED, ge=0, le=1, description="share of tasks that may show more skills than their own"
    )
    max_answer_chars: int = Field(
        400, ge=40, description="maximum characters of the rows that answer a question"
    )
    plain: bool = Field(
        False,
        description="whether tasks are short and alike: tables of at most four columns, columns called by "
        "their names, conditions that compare with a value, changes of one value or one row, and each part "
        "worded in its commonest way",
    )

    @model_validator(mode="after")
    def _combined_has_an_effect(self) -> GenerateConfig:
        if self.combined != COMBINED and (self.skills is None or self.split == "composition"):
            condition = "without skills" if self.skills is None else "with split: composition"
            raise ValueError(f"combined has no effect {condition}; leave it out")
        return self


class DBBenchConfig(TaskSourceConfig):
    """The tasks (of a file in LifelongAgentBench's or AgentBench's format, or generated) and the limits of an
    episode.
    """

    kind: str = "db_bench"
    generate: GenerateConfig | None = Field(None, description="tasks to generate; set this or tasks")
    variations: int = Field(
        0,
        ge=0,
        description="number of tasks that are made from those of the file, and come after them: their "
        "questions keep the wording, and have other columns, tables, values, directions and functions",
    )
    database: str = Field(
        "sqlite",
        description="database that runs the SQL: sqlite; mariadb, a private server that is started with the "
        "first episode; or the address of a server, mysql://user:password@host:port",
    )
    skills: Annotated[list[str] | None, skills_among(SKILLS)] = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is in this list; null keeps all"
    )
    protocol: ProtocolName = Field(
        "action",
        description="form of the agent's replies: action; or calls of the tools execute_sql and "
        "commit_final_answer, as JSON that the system message shows (json_tool_calls), or in the form of the "
        "model's chat template (native)",
    )
    system_prompt: Annotated[str, with_placeholders("max_turns")] = Field(
        default_factory=lambda values: PROTOCOLS[values["protocol"]].system_prompt,
        description="system message, with the rules for replies, by default in the protocol's words; "
        "its placeholder is {max_turns}; empty for none",
    )
    prompt: Annotated[str, with_placeholders("instruction", "table", "headers", needs="instruction")] = Field(
        USER_PROMPT,
        description="user message; its placeholders are {instruction}, {table} (its name) and {headers}",
    )
    max_turns: int = Field(
        3, ge=2, description="maximum number of replies, the answer included; the agent reads it"
    )
    max_observation_chars: int = Field(
        1500, ge=40, description="maximum characters of a statement's result; the rest is cut"
    )
    statement_seconds: float = Field(2.0, gt=0, description="time limit of one statement in seconds")
    statement_steps: int = Field(
        STATEMENT_STEPS,
        gt=0,
        description="limit of one statement in steps of SQLite's virtual machine, equal on every machine; "
        "for sqlite only",
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="time limit of all statements of an episode together, in seconds; it ends with the stop "
        "reason timeout; null sets no limit",
    )

    @field_validator("database")
    @classmethod
    def _database_is_known(cls, database: str) -> str:
        if database.startswith("mysql://"):
            parse_address(database)
        elif database not in ("sqlite", "mariadb"):
            raise ValueError(
                "give sqlite, mariadb, or the address of a server, mysql://user:password@host:port"
            )
        return database

    @model_validator(mode="after")
    def _effective(self) -> DBBenchConfig:
        if self.variations and self.tasks is None:
            raise ValueError("variations are made of a file's tasks; set tasks, or leave variations out")
        if self.database != "sqlite" and self.statement_steps != STATEMENT_STEPS:
            raise ValueError(
                "statement_steps has an effect with database: sqlite alone; set statement_seconds"
            )
        # a run's own configuration holds the text of its protocol
        others = {name: other.system_prompt for name, other in PROTOCOLS.items() if name != self.protocol}
        for name, text in others.items():
            if self.system_prompt == text:
                raise ValueError(
                    f"system_prompt is the text of protocol: {name}, and protocol is {self.protocol}; write "
                    "another system_prompt, or leave it out"
                )
        return self


def system_prompt_of(config: DBBenchConfig) -> str:
    """The system message before it is filled. Ours names the database that is used."""
    text = config.system_prompt
    if config.database != "sqlite" and text == PROTOCOLS[config.protocol].system_prompt:
        return text.replace("SQLite", "MySQL")
    return text
