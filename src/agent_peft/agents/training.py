"""From a few parameters to the configuration of a run, and from a run directory to numbers. Nothing is
trained here: ``agent_peft.runs.run.train`` does that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from agent_peft.agents.datasets import Dataset
from agent_peft.algorithms import ALGORITHMS
from agent_peft.config import Config
from agent_peft.configuration.load import load_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.lookup import nearest
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.start import start_of
from agent_peft.rollout.evaluation import evaluate
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.changes import read_earlier
from agent_peft.runs.checkpoint import checkpoints
from agent_peft.runs.folder import Lock, dtype_of_run, recorded_dtype, with_dtype
from agent_peft.runs.layout import CONFIG
from agent_peft.runs.overview import summarize_run
from agent_peft.runs.reading import load_run
from agent_peft.types import AgentPeftError

MAX_EVALUATED = 100  # tasks of an evaluation that nobody has sized
PROMPT_ROOM = 1024  # tokens of an episode in addition to one reply
_SHORT = {"num_epochs": "num_train_epochs", "batch_size": "per_device_train_batch_size"}


class TrainingConfig(Config):
    """How a trainer trains. ``num_epochs`` and ``batch_size`` are short names of two keys.

    >>> TrainingConfig(model_name="smollm2-135m", num_epochs=3).num_train_epochs
    3.0
    """

    model_name: str = Field(
        min_length=1,
        max_length=500,
        description="a bundled name (smollm2-135m, gemma3-270m), a hub id, a folder, or the output_dir of an "
        "earlier training, which is then gone on with",
    )
    output_dir: str = Field(default="./output", min_length=1, max_length=500, description="folder of the run")
    num_train_epochs: float = Field(
        default=1.0, gt=0, le=10_000, description="number of trips through the tasks; short: num_epochs"
    )
    per_device_train_batch_size: int = Field(
        default=4, ge=1, le=4096, description="number of tasks of one step; short: batch_size"
    )
    learning_rate: float | None = Field(
        default=None, gt=0, le=1, description="null: 2e-4 with LoRA, 2e-5 for all parameters"
    )
    use_lora: bool = Field(default=True, description="whether an adapter is trained, or every parameter")
    lora_r: int | None = Field(
        default=None, ge=1, le=4096, description="rank; null: that of the adapter it continues with, or 16"
    )
    lora_alpha: float | None = Field(
        default=None, gt=0, description="null: that of the adapter it continues with, or 32"
    )
    gradient_checkpointing: bool = Field(default=False, description="less memory, and more time")
    num_generations: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="replies to each task (not with sft, which learns from solutions)",
    )
    max_new_tokens: int = Field(default=256, ge=1, le=32_768, description="maximum tokens of a reply")
    temperature: float = Field(default=1.0, gt=0, le=10, description="of the replies that are learned from")
    eval_samples: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="number of tasks to measure accuracy on, before and after; 0 measures none; null: as "
        f"many as are trained on, at most {MAX_EVALUATED}",
    )
    seed: int = Field(default=0, description="decides the order of tasks and the tokens that are drawn")

    @model_validator(mode="before")
    @classmethod
    def _long_names(cls, keys: Any) -> Any:
        if not isinstance(keys, Mapping):
            return keys
        twice = [short for short, long in _SHORT.items() if short in keys and long in keys]
        if twice:
            raise ValueError(f"{twice[0]} and {_SHORT[twice[0]]} are one key; give one of them")
        return {_SHORT.get(name, name): value for name, value in keys.items()}


def check_algorithm(name: object) -> str:
    """
    Raises:
        AgentPeftError: it is no row of ``ALGORITHMS``.

    >>> check_algorithm("ppo")
    'ppo'
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise AgentPeftError(f"algorithm: there is no {name!r:.80}; {nearest(name, ALGORITHMS.keys())}")
    return name


def learns_from_attempts(algorithm: str) -> bool:
    """
    Raises:
        AgentPeftError: there is no such algorithm.
    """
    return ALGORITHMS[check_algorithm(algorithm)]().facts.on_policy


def run_configuration(
    settings: TrainingConfig,
    algorithm: str,
    dataset: Dataset,
    rewards: Mapping[str, Any] | None = None,
    algorithm_keys: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """The configuration of a run with one stage.

    Args:
        rewards: keys of ``rewards``; None takes 1 for a right answer and 0 for a wrong one.
        algorithm_keys: keys of the algorithm, such as ``kl_coef``.

    Raises:
        AgentPeftError: a key is wrong, or the model or the tasks are not there.
    """
    facts = ALGORITHMS[check_algorithm(algorithm)]().facts
    preferences = dataset.environment["kind"] == "preferences"
    if bool(facts.preferences) != preferences and (facts.preferences or facts.on_policy):
        raise AgentPeftError(
            f"algorithm: {algorithm} learns from rows with prompt, chosen and rejected (kto: with prompt, "
            f"completion and label), and {dataset.name} has none"
            if facts.preferences
            else f"algorithm: {algorithm} learns from graded attempts, and the preferences of {dataset.name} "
            "grade none; take dpo, orpo, simpo or kto"
        )
    rate = settings.learning_rate or (2e-4 if settings.use_lora else 2e-5)
    sampling: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "max_tokens": settings.max_new_tokens + PROMPT_ROOM,
    }
    stage: dict[str, Any] = {
        "algorithm": {"kind": algorithm, **(algorithm_keys or {})},
        "epochs": settings.num_train_epochs,
        "tasks_per_step": settings.per_device_train_batch_size,
        "rewards": dict(rewards or {"correct": 1.0, "incorrect": 0.0}),
        "optimizer": {"learning_rate": rate},
        "sampling": sampling,
    }
    if facts.on_policy:
        stage["group_size"] = settings.num_generations
        stage["sampling"] = sampling | {"temperature": settings.temperature}
    evaluation = None
    if settings.eval_samples != 0 and not preferences:
        measured = dataset.heldout or dataset.environment
        number = settings.eval_samples or min(MAX_EVALUATED, _count(dataset.environment))
        evaluation = {"environment": dict(measured), "num_tasks": number}
    return load_config(
        {
            "run_dir": settings.output_dir,
            "seed": settings.seed,
            "policy": _policy(settings),
            "environment": dict(dataset.environment),
            "evaluation": evaluation,
            "stages": [stage],
        }
    )


def _policy(settings: TrainingConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "kind": "pretrained",
        "model": settings.model_name,
        "activation_checkpointing": settings.gradient_checkpointing,
    }
    if settings.use_lora:
        lora = {"rank": settings.lora_r, "alpha": settings.lora_alpha}
        if given := {key: value for key, value in lora.items() if value is not None}:
            keys["lora"] = given
        return keys
    if settings.lora_r is not None or settings.lora_alpha is not None:
        raise AgentPeftError("lora_r and lora_alpha have no effect with use_lora: false; leave them out")
    adapted = start_of(PretrainedConfig(model=settings.model_name)).adapter is not None
    return keys | {"lora": None, "merge_adapter": adapted}


def _count(environment: Mapping[str, Any]) -> int:
    with closing(load_environment(environment)) as loaded:
        return len(loaded.tasks)


def make_room(config: TrainConfig) -> str | None:
    """Move a run with other settings out of ``run_dir``, to the first free name ``run_dir-1``, ``-2``, …
    Return its new place. A run with the same settings stays, and continues.

    Raises:
        AgentPeftError: it is running, or it is the model of the new run.
    """
    folder = config.run_dir
    earlier = read_earlier(folder) if (folder / CONFIG).is_file() else None
    begun = (folder / "metrics.jsonl").is_file() or any((folder / "checkpoints").glob("step_*"))
    if earlier is None or not begun:
        return None
    with closing(load_environment(config.environment)) as environment:
        known = with_dtype(config.with_steps(environment.tasks), dtype_of_run(config, fresh=False))
    if all(change.rule == "free" for change in earlier.changes(known, done=summarize_run(folder).step)):
        return None
    start = start_of(known.policy) if isinstance(known.policy, PretrainedConfig) else None
    for place in (start.model, str(start.adapter or "")) if start else ():
        if place and Path(place).absolute().is_relative_to(folder.absolute()):
            raise AgentPeftError(f"output_dir: {folder} is where the model comes from; name another folder")
    number = 1
    while os.path.lexists(place_of := folder.with_name(f"{folder.name}-{number}")):
        number += 1
    with ExitStack() as stack:
        Lock(folder, stack).acquire()
        folder.rename(place_of)
    return str(place_of)


def measure(model_name: str, dataset: Dataset, settings: TrainingConfig) -> EvaluationReport:
    """Measure a model, greedily, on the tasks of a dataset.

    Raises:
        AgentPeftError: the model or the tasks are not there.
    """
    run = Path(model_name).expanduser()
    adapted = start_of(PretrainedConfig(model=model_name)).adapter is not None
    policy = load_policy(
        model_name, dtype=recorded_dtype(run) or "auto", lora=LoraSettings() if adapted else None
    )
    sampling = {
        "max_new_tokens": settings.max_new_tokens,
        "max_tokens": settings.max_new_tokens + PROMPT_ROOM,
    }
    with closing(load_environment(dataset.environment)) as environment:
        number = settings.eval_samples or MAX_EVALUATED
        keys = {"num_tasks": min(number, len(environment.tasks)), "sampling": sampling}
        return evaluate(load_sampler(policy), environment, keys, settings.seed)


def progress_of(folder: Path) -> dict[str, Any]:
    """The state of a run, from its directory: ``running``, ``done``, ``failed``, ``interrupted`` or
    ``killed``.

    Raises:
        AgentPeftError: the folder is no run directory.
    """
    record, summary = load_run(folder), summarize_run(folder)
    latest = record.metrics[-1] if record.metrics else {}
    newest = checkpoints(folder / "checkpoints")
    told = {
        "output_dir": str(folder),
        "state": summary.state,
        "cause": summary.cause,
        "algorithm": record.config["stages"][-1]["algorithm"]["kind"],
        "step": summary.step,
        "steps": summary.steps,
        "seconds_left": summary.seconds_left,
        "checkpoint": str(newest[-1]) if newest else None,
        "metrics": {name: value for name, value in latest.items() if name not in ("step", "stage")},
    }
    return {name: value for name, value in told.items() if value is not None}


def result_of(folder: Path) -> dict[str, Any]:
    """What ``progress_of`` says, and the accuracies that the run has measured.

    Raises:
        AgentPeftError: the folder is no run directory, or it is damaged.
    """
    reports = {name: one.report for name, one in load_run(folder).evaluations.items()}
    told = progress_of(folder) | {"evaluations": {name: accuracy_of(one) for name, one in reports.items()}}
    if "base" in reports:
        told["accuracy_before"] = reports["base"].success.value
    if later := [report for name, report in reports.items() if name != "base"]:
        told["accuracy"] = later[-1].success.value
    return told


def report_of(folder: Path, points: int = 20) -> dict[str, Any]:
    """What ``result_of`` says, the configuration, and the course of the metrics at about ``points`` steps.

    Raises:
        AgentPeftError: as ``result_of``.
    """
    record = load_run(folder)
    metrics = record.metrics
    every = max(1, math.ceil(len(metrics) / points))
    shown = [*metrics[:-1:every], *metrics[-1:]]
    names = ("step", "stage", "success", "reward", "loss", "surprisal", "action_tokens", "kl")
    return result_of(folder) | {
        "configuration": record.config,
        "course": [{name: one[name] for name in names if name in one} for one in shown],
    }


def accuracy_of(report: EvaluationReport) -> dict[str, Any]:
    """The share of right answers, its 95 % interval, and the number of tasks."""
    success = report.success
    return {"accuracy": success.value, "low": success.low, "high": success.high, "tasks": success.tasks}
