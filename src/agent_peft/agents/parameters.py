"""The parameters of the training tool: what each action takes, and their checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from agent_peft.agents.datasets import MAX_ROWS, NAMES, Form
from agent_peft.agents.rewards import REWARDS, MathRewardFunction, reward_named
from agent_peft.config import Config, first_error
from agent_peft.environments.task_files.reading import MAX_FILE_BYTES
from agent_peft.files import MEGABYTE, unique_keys
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError

ACTIONS = ("train", "load_dataset", "create_reward", "evaluate", "status", "stop", "report")
_TEXT = 500  # characters of a path or a name


class Parameters(Config):
    """What the tool takes. Which of them an action takes is in ``TAKES``."""

    action: Literal["train", "load_dataset", "create_reward", "evaluate", "status", "stop", "report"] = Field(
        default="train",
        description="train a model; load_dataset shows rows; create_reward shows a reward; evaluate measures "
        "a model; status, stop and report are for the training in output_dir",
    )
    algorithm: str = Field(
        default="sft",
        max_length=_TEXT,
        description="sft learns from solutions; grpo, ppo, rloo, reinforce and others from own graded "
        "attempts; dpo, orpo, simpo and kto from preferences",
    )
    model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=_TEXT,
        description="a hub id, a folder, a bundled name (smollm2-135m, gemma3-270m), or the output_dir of an "
        "earlier training",
    )
    dataset: str = Field(
        default="gsm8k",
        min_length=1,
        max_length=_TEXT,
        description=f"{', '.join(NAMES)}; a file of rows with question and answer (.jsonl, .json, .csv, "
        f".parquet; at most {MAX_FILE_BYTES // MEGABYTE} MB and {MAX_ROWS:,} rows); or a hub id",
    )
    split: str | None = Field(
        default=None,
        max_length=_TEXT,
        description="train, test or a part such as train[:90%]; default: train, and test for evaluate",
    )
    format: Form = Field(default="sft", description="rows to show: sft has solutions, rl right answers")
    max_samples: int | None = Field(
        default=None, ge=1, le=MAX_ROWS, description="the most tasks; null takes all"
    )
    num_epochs: float = Field(default=1.0, gt=0, le=10_000, description="trips through the tasks")
    output_dir: str = Field(
        default="./output",
        min_length=1,
        max_length=_TEXT,
        description="folder of the training, below the allowed one; an earlier training there is kept, as "
        "NAME-1",
    )
    use_lora: bool = Field(default=True, description="train an adapter; false trains every parameter")
    lora_r: int | None = Field(default=None, ge=1, le=4096, description="rank of the adapter; default 16")
    lora_alpha: float | None = Field(default=None, gt=0, description="scale of the adapter; default 32")
    batch_size: int = Field(default=4, ge=1, le=4096, description="tasks of one step")
    learning_rate: float | None = Field(
        default=None, gt=0, le=1, description="default: 2e-4 with LoRA, 2e-5 without"
    )
    gradient_checkpointing: bool = Field(default=False, description="less memory, more time")
    num_generations: int = Field(
        default=8, ge=1, le=1024, description="attempts at each task; of own attempts only"
    )
    temperature: float = Field(default=1.0, gt=0, le=10, description="of the attempts; of own attempts only")
    max_new_tokens: int = Field(default=256, ge=1, le=32_768, description="maximum tokens of a reply")
    kl_coef: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="weight of the KL to the policy at the start; of own attempts only",
    )
    eval_samples: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ROWS,
        description="tasks to measure accuracy on, before and after; 0: none; default: as many as are "
        "trained on, at most 100",
    )
    seed: int = Field(default=0, description="decides the order of tasks and what is drawn")
    reward: str = Field(
        default="accuracy", max_length=_TEXT, description=f"{', '.join(REWARDS)}; of own attempts only"
    )
    penalty_weight: float = Field(
        default=0.1, ge=0, le=1000, description="of reward length_penalty: the largest penalty"
    )
    max_length: int = Field(
        default=128, ge=1, le=1_000_000, description="of reward length_penalty: tokens that cost nothing"
    )
    step_bonus: float = Field(
        default=0.1, ge=0, le=1000, description="of reward step: for a line of reasoning"
    )
    background: bool = Field(
        default=False,
        description="true trains in its own process and returns at once; ask status for it then",
    )


_REWARD = {"reward", "penalty_weight", "max_length", "step_bonus"}
OWN_ATTEMPTS = {"num_generations", "temperature", "kl_coef", *_REWARD}
TAKES: dict[str, set[str]] = {
    "train": set(Parameters.model_fields) - {"format"},
    "load_dataset": {"dataset", "split", "format", "max_samples", "model_name"},
    "create_reward": _REWARD,
    "evaluate": {"model_name", "dataset", "split", "max_samples", "max_new_tokens", "seed"},
    "status": {"output_dir"},
    "stop": {"output_dir"},
    "report": {"output_dir"},
}
_OF_REWARD = {"length_penalty": {"penalty_weight", "max_length"}, "step": {"step_bonus"}}


def content_of(parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    """The parameters as a mapping.

    Raises:
        AgentPeftError: they are none.
    """
    content: Any = parameters
    if isinstance(parameters, str):
        try:
            content = json.loads(parameters or "{}", object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise AgentPeftError(f"the parameters are no JSON ({error!s:.80}); give one object") from error
    if not isinstance(content, Mapping):
        raise AgentPeftError('the parameters are no object; give one such as {"action": "train"}')
    return {str(name): value for name, value in content.items()}


def check(given: Mapping[str, Any]) -> Parameters:
    """
    Raises:
        AgentPeftError: a parameter is unknown, wrong, or of no effect on the action.
    """
    action = given.get("action", "train")
    if action not in ACTIONS:
        raise AgentPeftError(
            f"action: there is no {action!r:.60}; {nearest(action, ACTIONS)} (this tool removes nothing)"
        )
    try:
        parameters = Parameters.model_validate(dict(given))
    except ValidationError as error:
        raise AgentPeftError(first_error(error, "", Parameters)) from error
    if useless := sorted(changed(parameters) - TAKES[action] - {"action"}):
        takes = ", ".join(sorted(TAKES[action]))
        raise AgentPeftError(
            f"{useless[0]}: has no effect with action {action}, which takes {takes}; leave it out"
        )
    return parameters


def changed(given: Parameters) -> set[str]:
    """The parameters that are not as they would be without being given: some clients send all of them."""
    return {name for name in given.model_fields_set if getattr(given, name) != _DEFAULTS[name].default}


_DEFAULTS = Parameters.model_fields


def reward_of(given: Parameters) -> MathRewardFunction:
    """The reward that the parameters name.

    Raises:
        AgentPeftError: there is none, or a number has no effect on it.
    """
    numbers = _OF_REWARD.get(given.reward, set())
    if given.reward in REWARDS and (useless := sorted(changed(given) & _REWARD - {"reward"} - numbers)):
        raise AgentPeftError(f"{useless[0]}: has no effect with reward {given.reward}; leave it out")
    return reward_named(given.reward, **{name: getattr(given, name) for name in numbers})
