"""The configuration of OS interaction."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_peft.config import Config
from agent_peft.environments.os_interaction.problems import SKILLS
from agent_peft.environments.os_interaction.protocol import PROMPT_PLACEHOLDERS, ProtocolName
from agent_peft.environments.task_files.selection import TaskSourceConfig, skills_among
from agent_peft.environments.templates import with_placeholders
from agent_peft.sandbox.base import SandboxLimits

SandboxKind = Literal["oci", "docker", "podman", "none"]


class OSGenerateConfig(Config):
    """Which tasks to generate. The splits ``train`` and ``heldout`` share no name of a file, user or group,
    and no phrasing.
    """

    num_tasks: int = Field(gt=0, description="number of tasks")
    seed: int = Field(0, description="another seed gives other tasks")
    skills: Annotated[tuple[str, ...], skills_among(SKILLS)] = Field(
        SKILLS, min_length=1, description="skills of the tasks; the tasks take them in turn"
    )
    split: Literal["train", "heldout"] = Field(
        "train", description="train or heldout, which share no name and no phrasing"
    )
    combined: float = Field(
        0.25, ge=0, le=1, description="share of tasks that ask for two or three things at once"
    )


class OSInteractionConfig(TaskSourceConfig):
    """The tasks (of a file in LifelongAgentBench's or AgentBench's format, or generated), the sandbox and the
    limits of an episode.

    The primary skill of a task is the rarest skill that it needs. By default the tasks of a file are
    replayed when they are loaded, and generated ones, which are tested, are not.
    """

    kind: str = "os_interaction"
    generate: OSGenerateConfig | None = Field(None, description="tasks to generate; set this or tasks")
    skills: Annotated[list[str] | None, skills_among(SKILLS)] = Field(
        None, min_length=1, description="keeps the tasks whose primary skill is in this list; null keeps all"
    )
    sandbox: SandboxKind = Field(
        "oci",
        description="machine of each episode: oci is runc or crun on this computer; none runs the commands "
        "on this computer itself",
    )
    runtime: str = Field(
        "auto", description="path of the program for sandbox: oci; auto looks for runc, then crun"
    )
    limits: SandboxLimits = Field(
        default_factory=SandboxLimits, description="limits of one machine: memory, processes, files, output"
    )
    protocol: ProtocolName = Field(
        "act",
        description="form of the agent's replies: act; or calls of the tools bash, finish and answer, as "
        "JSON that the system message shows (json_tool_calls), or in the form of the model's chat template "
        "(native)",
    )
    system_prompt: Annotated[str, with_placeholders(*PROMPT_PLACEHOLDERS)] | None = Field(
        None,
        description="system message, with the rules for replies; null takes the protocol's text; its "
        "placeholders are {max_turns}, {ways} (two, or three if the task has an answer) and {answer} (how to "
        "answer, if it has one); empty for none",
    )
    prompt: Annotated[str, with_placeholders("instruction", needs="instruction")] = Field(
        "{instruction}", description="user message; its placeholder is {instruction}"
    )
    max_turns: int = Field(
        5, ge=2, description="maximum number of replies, the finish included; the agent reads it"
    )
    max_observation_chars: int = Field(
        800,
        ge=100,
        description="maximum characters of a command's output; the middle of a longer one is cut out",
    )
    command_timeout: float = Field(
        20.0, gt=0, description="time limit of one command of the agent in seconds"
    )
    script_timeout: float = Field(
        30.0, gt=0, description="time limit of a task's initialization, and of its evaluation, in seconds"
    )
    episode_seconds: float | None = Field(
        None,
        gt=0,
        description="time limit of all commands of an episode together, in seconds; it ends with the stop "
        "reason timeout; null sets no limit",
    )
    replay: bool | None = Field(
        None, description="whether each task is tried when it is loaded; null tries those of a file"
    )
    replay_threads: int = Field(4, ge=1, le=64, description="number of tasks that are tried at a time")
