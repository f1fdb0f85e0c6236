"""From the keys of a training to a run, and from a run directory to numbers; and trainers as classes."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

from agent_peft.agents.background import begin
from agent_peft.agents.datasets import Dataset, find_dataset
from agent_peft.agents.keys import TrainingConfig, TrainingKeys
from agent_peft.agents.rewards import as_term, keep, prices_of
from agent_peft.algorithms import ALGORITHMS
from agent_peft.configuration.load import load_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import OUTCOMES
from agent_peft.lookup import nearest
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.start import start_of
from agent_peft.rollout.evaluation import evaluate
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.changes import read_earlier
from agent_peft.runs.checkpoint import checkpoints, latest_checkpoint
from agent_peft.runs.folder import Lock, measured_of_run, recorded_measured, with_policy
from agent_peft.runs.layout import CONFIG
from agent_peft.runs.overview import summarize_run
from agent_peft.runs.reading import load_run
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError

MAX_EVALUATED = 100  # tasks of an evaluation that nobody has sized
PROMPT_ROOM = 1024  # tokens of an episode in addition to one reply


def report_facts(algorithm: str) -> Any:
    """The facts of an algorithm.

    >>> report_facts("ppo").on_policy
    True
    """
    if algorithm not in ALGORITHMS:
        raise AgentPeftError(
            f"algorithm: there is no {algorithm!r:.80}; {nearest(algorithm, ALGORITHMS.keys())}"
        )
    return ALGORITHMS[algorithm].model_validate(_length(algorithm, 1)).facts


def _length(algorithm: str, tokens: int) -> dict[str, int]:
    """The key without a default of an algorithm that divides by a constant length, such as dr_grpo."""
    key = ALGORITHMS[algorithm].model_fields.get("constant_length")
    return {} if key is None or not key.is_required() else {"constant_length": tokens}


def config_from(
    keys: TrainingKeys,
    algorithm: str,
    dataset: Dataset,
    rewards: Mapping[str, Any] | None = None,
    kl_coef: float | None = None,
) -> TrainConfig:
    """A run with one stage. ``rewards``: None takes 1 for a right answer and 0 for a wrong one."""
    facts = report_facts(algorithm)
    preferences = dataset.environment["kind"] == "preferences"
    if bool(facts.preferences) != preferences and (facts.preferences or facts.on_policy):
        raise AgentPeftError(
            f"algorithm: {algorithm} learns from rows with prompt, chosen and rejected (kto: with prompt, "
            f"completion and label), and {dataset.name} has none"
            if facts.preferences
            else f"algorithm: {algorithm} learns from graded attempts, and the preferences of {dataset.name} "
            "grade none; take dpo, orpo, simpo or kto"
        )
    sampling = _sampling(keys)
    stage: dict[str, Any] = {
        "algorithm": {"kind": algorithm}
        | _length(algorithm, keys.max_new_tokens)
        | ({} if kl_coef is None else {"kl_coef": kl_coef}),
        "epochs": keys.num_epochs,
        "tasks_per_step": keys.batch_size,
        "rewards": dict(rewards or {"correct": 1.0, "incorrect": 0.0}),
        "optimizer": {"learning_rate": keys.learning_rate or (2e-4 if keys.use_lora else 2e-5)},
        "sampling": sampling,
    }
    if facts.on_policy:
        stage["group_size"] = keys.num_generations
        sampling["temperature"] = keys.temperature
    evaluation = None
    if keys.eval_samples != 0 and not preferences:
        with closing(load_environment(dataset.environment)) as environment:
            number = keys.eval_samples or min(MAX_EVALUATED, len(environment.tasks))
        evaluation = {"environment": dict(dataset.heldout or dataset.environment), "num_tasks": number}
    return load_config(
        {
            "run_dir": keys.output_dir,
            "seed": keys.seed,
            "policy": _policy(keys),
            "environment": dict(dataset.environment),
            "evaluation": evaluation,
            "stages": [stage],
        }
    )


def _sampling(keys: TrainingKeys) -> dict[str, Any]:
    return {"max_new_tokens": keys.max_new_tokens, "max_tokens": keys.max_new_tokens + PROMPT_ROOM}


def _policy(keys: TrainingKeys) -> dict[str, Any]:
    policy = {
        "kind": "pretrained",
        "model": keys.model_name,
        "activation_checkpointing": keys.gradient_checkpointing,
    }
    lora = {"rank": keys.lora_r, "alpha": keys.lora_alpha}
    given = {key: value for key, value in lora.items() if value is not None}
    if keys.use_lora:
        return policy | ({"lora": given} if given else {})
    if given:
        raise AgentPeftError("lora_r and lora_alpha have no effect with use_lora: false; leave them out")
    return policy | {"lora": None, "merge_adapter": _has_adapter(str(keys.model_name))}


def _has_adapter(model_name: str) -> bool:
    return start_of(PretrainedConfig(model=model_name)).adapter is not None


def carry_out(config: TrainConfig, background: bool = False) -> dict[str, Any]:
    """Train, and return the result of the run; in the background return as soon as it has begun. A run with
    other settings in ``run_dir`` is moved aside.
    """
    moved = make_room(config)
    result: dict[str, Any] = {} if moved is None else {"earlier_training_moved_to": moved}
    if background:
        return result | {"output_dir": str(config.run_dir), **begin(config)}
    train(config)
    return result | training_result(config.run_dir)


def make_room(config: TrainConfig) -> str | None:
    """Move a run with other settings out of ``run_dir``, to the first free name ``run_dir-1``, ``-2``, …
    Return its new place. A run with the same settings stays, and continues.
    """
    folder = config.run_dir
    earlier = read_earlier(folder) if (folder / CONFIG).is_file() else None
    begun = (folder / "metrics.jsonl").is_file() or any((folder / "checkpoints").glob("step_*"))
    if earlier is None or not begun:
        return None
    with closing(load_environment(config.environment)) as environment:
        known = with_policy(config.with_steps(environment.tasks), **measured_of_run(config, fresh=False))
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


def measure_run(keys: TrainingKeys, dataset: Dataset, number: int | None) -> EvaluationReport:
    """Measure a model on the first tasks of a dataset; None takes ``MAX_EVALUATED``. It is greedy, and
    measures the recorded replies of preferences.
    """
    name = str(keys.model_name)
    lora = LoraSettings() if _has_adapter(name) else None
    policy = load_policy({"model": name, "lora": lora, **recorded_measured(Path(name).expanduser())})
    with closing(load_environment(dataset.environment)) as environment:
        number = min(number or MAX_EVALUATED, len(environment.tasks))
        settings: dict[str, Any] = {"num_tasks": number}
        if environment.measures == OUTCOMES:
            settings["sampling"] = _sampling(keys)
        return evaluate(policy, environment, settings, keys.seed)


def progress_of(folder: Path) -> dict[str, Any]:
    """The run's state, as ``state_of`` names it, its steps and its last metrics."""
    record, summary = load_run(folder), summarize_run(folder)
    latest = record.metrics[-1] if record.metrics else {}
    newest = checkpoints(folder / "checkpoints")
    result = {
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
    return {name: value for name, value in result.items() if value is not None}


def training_result(folder: Path) -> dict[str, Any]:
    """``progress_of``, and the accuracies that the run has measured."""
    reports = {name: accuracy_of(one.report) for name, one in load_run(folder).evaluations.items()}
    result = progress_of(folder) | {"evaluations": reports}
    for name, report in reports.items():
        if "accuracy" in report:
            result["accuracy_before" if name == "base" else "accuracy"] = report["accuracy"]
    return result


def report_of(folder: Path, points: int = 20) -> dict[str, Any]:
    """``training_result``, the configuration, and the course of the metrics at about ``points`` steps."""
    record = load_run(folder)
    metrics = record.metrics
    every = max(1, math.ceil(len(metrics) / points))
    shown = [*metrics[:-1:every], *metrics[-1:]]
    names = ("step", "stage", "success", "reward", "loss", "surprisal", "action_tokens", "kl")
    return training_result(folder) | {
        "configuration": record.config,
        "course": [{name: one[name] for name in names if name in one} for one in shown],
    }


def accuracy_of(report: EvaluationReport) -> dict[str, Any]:
    """The share of right answers, its 95 % interval, and the number of tasks; of recorded replies, what was
    measured of them.
    """
    success = report.success
    if success is None:
        return {name: mean.value for name, mean in report.means.items()} | {"tasks": report.headline.tasks}
    return {"accuracy": success.value, "low": success.low, "high": success.high, "tasks": success.tasks}


# -- trainers ------------------------------------------------------------------------------------------------


class SFTTrainerWrapper:
    """Learns from the solutions of a dataset.

    Attributes:
        result: what ``train`` has returned; None before.
    """

    algorithm: ClassVar[str] = "sft"

    def __init__(self, config: TrainingConfig | None = None, dataset: Any = "gsm8k", **keys: Any) -> None:
        """
        Args:
            config: how to train, or instead of it its keys: ``model_name``, ``output_dir``, ``num_epochs`` …
            dataset: of ``create_sft_dataset``; or anything that this function takes as ``dataset``.
        """
        if config is not None and keys:
            raise AgentPeftError(f"{next(iter(keys))}: is a key of config, which is given, too; set it there")
        self.config = config or TrainingConfig(**keys)
        self.dataset = find_dataset(dataset, folder=Path(self.config.output_dir).parent / "datasets")
        self.result: dict[str, Any] | None = None

    def train(self) -> dict[str, Any]:
        """Train to the end, and return what the run directory contains: ``accuracy``, ``metrics``,
        ``checkpoint`` and more. An earlier training of another kind in ``output_dir`` is kept next to it.
        """
        self.result = carry_out(config_from(self.config, self.algorithm, self.dataset, self._rewards()))
        return self.result

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """The folder of what was trained, in PEFT's layout or as a model. With ``output_dir`` it is copied to
        that folder, which must be new or empty.
        """
        folder = latest_checkpoint(Path(self.config.output_dir) / "checkpoints")
        if folder is None:
            raise AgentPeftError(f"{self.config.output_dir}: has no checkpoint yet; call train() first")
        if output_dir is None:
            return folder
        target = Path(output_dir)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise AgentPeftError(f"{target}: exists and is not an empty folder; name another folder")
        return Path(shutil.copytree(folder, target, dirs_exist_ok=True))

    def _rewards(self) -> dict[str, Any] | None:
        return None


class GRPOTrainerWrapper(SFTTrainerWrapper):
    """Learns from groups of graded attempts, with GRPO."""

    algorithm = "grpo"

    def __init__(
        self, config: TrainingConfig | None = None, dataset: Any = "gsm8k", reward_fn: Any = None, **keys: Any
    ) -> None:
        """
        Args:
            reward_fn: None or ``create_accuracy_reward()`` gives 1 for a right answer; or any callable of
                ``completions`` and the columns of the dataset that returns one number for each.
        """
        super().__init__(config, dataset, **keys)
        self.reward_fn = reward_fn
        known = reward_fn is None or prices_of(reward_fn) is not None
        self._term = None if known else as_term(reward_fn, self.dataset)

    def _rewards(self) -> dict[str, Any] | None:
        if self._term is None:
            return prices_of(self.reward_fn)
        return {"correct": 0.0, "incorrect": 0.0, "terms": [{"kind": keep(self.reward_fn, self._term)}]}


class PPOTrainerWrapper(GRPOTrainerWrapper):
    """Learns from graded attempts, with PPO and a critic on the policy's last layer."""

    algorithm = "ppo"
