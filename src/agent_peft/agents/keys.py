"""The keys of a training, stated once: for the trainers, the tool and MCP. Also the tool's actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from agent_peft.agents.datasets import NAMES, Form
from agent_peft.agents.rewards import REWARDS, MathRewardFunction
from agent_peft.config import Config, PublicConfig, first_error
from agent_peft.environments.task_files.download import MAX_ROWS
from agent_peft.environments.task_files.reading import MAX_FILE_BYTES
from agent_peft.files import MEGABYTE, unique_keys
from agent_peft.lookup import nearest
from agent_peft.types import AgentPeftError

MAX_CHARS = 500  # of a path or a name
_BOOK = {"num_train_epochs": "num_epochs", "per_device_train_batch_size": "batch_size"}


class TrainingKeys(Config):
    """How a model is trained. ``training.config_from`` makes the configuration of a run from it."""

    model_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CHARS,
        description="a hub id, a folder, a bundled name (smollm2-135m, gemma3-270m), or the output_dir of an "
        "earlier training",
    )
    num_epochs: float = Field(default=1.0, gt=0, le=10_000, description="trips through the tasks")
    output_dir: str = Field(
        default="./output",
        min_length=1,
        max_length=MAX_CHARS,
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
    eval_samples: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ROWS,
        description="tasks to measure accuracy on, before and after; 0: none; default: as many as are "
        "trained on, at most 100",
    )
    seed: int = Field(default=0, description="decides the order of tasks and what is drawn")


class TrainingConfig(PublicConfig, TrainingKeys):
    """How a trainer trains. HelloAgents' names ``num_train_epochs`` and ``per_device_train_batch_size`` are
    those of ``num_epochs`` and ``batch_size``.

    >>> TrainingConfig(model_name="smollm2-135m", num_train_epochs=3).num_epochs
    3.0
    """

    model_name: str = Field(min_length=1, max_length=MAX_CHARS)

    @model_validator(mode="before")
    @classmethod
    def _from_the_book(cls, keys: Any) -> Any:
        if not isinstance(keys, Mapping):
            return keys
        if twice := [name for name, key in _BOOK.items() if name in keys and key in keys]:
            raise ValueError(f"{twice[0]} and {_BOOK[twice[0]]} are one key; give one of them")
        return {_BOOK.get(name, name): value for name, value in keys.items()}


class Parameters(TrainingKeys):
    """What the tool takes. Which of them an action takes is in ``TAKES``."""

    action: Literal["train", "load_dataset", "create_reward", "evaluate", "status", "stop", "report"] = Field(
        default="train",
        description="train a model; load_dataset shows rows; create_reward shows a reward; evaluate measures "
        "a model; status, stop and report are for the training in output_dir",
    )
    algorithm: str = Field(
        default="sft",
        max_length=MAX_CHARS,
        description="sft learns from solutions; grpo, ppo, rloo, reinforce and others from own graded "
        "attempts; dpo, orpo, simpo and kto from preferences",
    )
    dataset: str = Field(
        default="gsm8k",
        min_length=1,
        max_length=MAX_CHARS,
        description=f"{', '.join(NAMES)}; a file of rows with question and answer (.jsonl, .json, .csv, "
        f".parquet; at most {MAX_FILE_BYTES // MEGABYTE} MB and {MAX_ROWS:,} rows); or a hub id",
    )
    split: str | None = Field(
        default=None,
        max_length=MAX_CHARS,
        description="train, test or a part such as train[:90%]; default: train, and test for evaluate",
    )
    format: Form = Field(default="sft", description="rows to show: sft has solutions, rl right answers")
    max_samples: int | None = Field(
        default=None, ge=1, le=MAX_ROWS, description="the most tasks; null takes all"
    )
    kl_coef: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="weight of the KL to the policy at the start; of own attempts only",
    )
    reward: str = Field(
        default="accuracy", max_length=MAX_CHARS, description=f"{', '.join(REWARDS)}; of own attempts only"
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


_ORDER = """\
action algorithm model_name dataset split format max_samples num_epochs output_dir use_lora lora_r lora_alpha
batch_size learning_rate gradient_checkpointing num_generations temperature max_new_tokens kl_coef
eval_samples seed reward penalty_weight max_length step_bonus background"""  # of the keys in the schema
_REWARD = {"reward", "penalty_weight", "max_length", "step_bonus"}
_OF_REWARD = {"length_penalty": {"penalty_weight", "max_length"}, "step": {"step_bonus"}}
OWN_ATTEMPTS = {"num_generations", "temperature", "kl_coef", *_REWARD}
TAKES: dict[str, set[str]] = {  # action -> its keys
    "train": set(Parameters.model_fields) - {"format"},
    "load_dataset": {"dataset", "split", "format", "max_samples", "model_name"},
    "create_reward": _REWARD,
    "evaluate": {"model_name", "dataset", "split", "max_samples", "max_new_tokens", "seed"},
    "status": {"output_dir"},
    "stop": {"output_dir"},
    "report": {"output_dir"},
}


def schema() -> dict[str, Any]:
    """The JSON schema of ``Parameters``."""
    properties = Parameters.model_json_schema()["properties"]
    ordered = {name: properties[name] for name in _ORDER.split()}
    return {"type": "object", "properties": ordered, "additionalProperties": False}


def content_of(parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    """The parameters of a call as a mapping. They may be JSON."""
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
    """The parameters of a call. One that is unknown, or without effect on the action, is an error."""
    action = given.get("action", "train")
    if not isinstance(action, str) or action not in TAKES:
        raise AgentPeftError(
            f"action: there is no {action!r:.60}; {nearest(action, list(TAKES))} (this tool removes nothing)"
        )
    try:
        parameters = Parameters.model_validate(dict(given))
    except ValidationError as error:
        raise AgentPeftError(first_error(error, "", Parameters)) from error
    place = f"action {action}, which takes {', '.join(sorted(TAKES[action]))}"
    refuse(parameters, parameters.model_fields_set - TAKES[action] - {"action"}, place)
    return parameters


def refuse(given: Parameters, keys: set[str], where: str) -> None:
    """Raise for a key of ``keys`` that differs from its default: some clients send every default."""
    fields = Parameters.model_fields
    for name in sorted(keys & given.model_fields_set):
        if getattr(given, name) != fields[name].default:
            raise AgentPeftError(f"{name}: has no effect with {where}; leave it out")


def named_reward(given: Parameters) -> MathRewardFunction:
    """The reward that the parameters name. No other text is ever taken for code."""
    if given.reward not in REWARDS:
        raise AgentPeftError(
            f"reward: there is no {given.reward!r:.80}; {nearest(given.reward, list(REWARDS))} (a reward "
            "here is one of these names, and never code; in Python, GRPOTrainerWrapper takes any function as "
            "reward_fn)"
        )
    numbers = _OF_REWARD.get(given.reward, set())
    refuse(given, _REWARD - {"reward"} - numbers, f"reward {given.reward}")
    return REWARDS[given.reward](**{name: getattr(given, name) for name in numbers})
