"""The targets of ``evaluate`` and ``merge``: a run directory, an adapter, a checkpoint of all parameters, or
a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from agent_peft.configuration.load import EFFECTIVE, load_for_evaluation, read_config, refuse_ineffective
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.hardware import explain_oom, set_threads
from agent_peft.policies.config import LoraSettings, PolicyConfig, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.custom_module import is_custom_module
from agent_peft.policies.models.start import START, base_of, from_start, names_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import reference_of
from agent_peft.rollout.evaluation import evaluate
from agent_peft.rollout.replays import FILE as REPLAYS
from agent_peft.rollout.replays import Replay, ReplayWindow, read_replays
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.best import read_best
from agent_peft.runs.checkpoint import checkpoint_step, checkpoints, latest_checkpoint
from agent_peft.runs.folder import recorded_measured, with_policy
from agent_peft.runs.layout import CONFIG, check_run_files
from agent_peft.runs.progress import Progress
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

Kind = Literal["run", "adapter", "weights", "model"]
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


def target_kind(target: Path) -> Kind:
    """Return what a target is.

    ``run`` is a run directory, ``adapter`` a folder in the layout of PEFT. ``weights`` is a checkpoint that
    only a configuration can load: of a module of the user's own, or without a tokenizer. ``model`` is a
    folder with both, or a name without a path here: that of a bundled model or of one on the hub.
    """
    if (target / CONFIG).is_file():
        check_run_files(target)
        return "run"
    if (target / "adapter_config.json").is_file():
        return "adapter"
    if not target.exists() and (
        target.is_absolute() or len(target.parts) > 2
    ):  # a name on the hub has at most two
        raise _nothing_at(target)
    if not target.exists() and re.search(r":step_\d+$", target.name):
        raise AgentPeftError(f"{target}: name the run, and the checkpoint with --checkpoint step_000012")
    if not target.exists() or target.suffix == ".gguf":
        return "model"
    if not (target / "config.json").is_file():
        raise AgentPeftError(
            f"{target}: is no run directory (with a {CONFIG}), no adapter (adapter_config.json) and no "
            "model (config.json); name one"
        )
    if is_custom_module(target):
        return "weights"
    return "model" if any(any(target.glob(pattern)) for pattern in _TOKENIZERS) else "weights"


def _nothing_at(target: Path) -> AgentPeftError:
    return AgentPeftError(
        f"{target}: there is no run directory, adapter or model of this name (seen from {Path.cwd()})"
    )


def run_config(run: str | Path) -> TrainConfig:
    """Load the configuration that a run directory was written with."""
    return read_config(_config_of(Path(run)), check_files=False)[0]


def _config_of(run: Path) -> Path:
    if not run.is_dir():
        raise AgentPeftError(f"{run}: there is no such run directory (seen from {Path.cwd()})")
    if not (run / CONFIG).is_file():
        raise AgentPeftError(f"{run}: not a run directory (it holds no {CONFIG})")
    check_run_files(run)
    return run / CONFIG


def open_run(
    run: str | Path, checkpoint: str | None = None, base: bool = False, config: TrainConfig | None = None
) -> tuple[TrainConfig, Policy]:
    """Load a run's configuration, and its policy with the weights of a checkpoint. ``checkpoint``: its name,
    such as ``step_000012``, or ``best``; None takes the newest. ``base``: take the policy as it was before
    training.
    """
    run = Path(run)
    config = config or run_config(run)
    folder = None if base else _checkpoint(run, checkpoint)
    start = _start(run, config)
    policy = load_policy(start, config.seed)
    if folder is not None:
        policy.load(folder)
    return config, policy


def _start(run: Path, config: TrainConfig) -> PolicyConfig:
    """The policy that a run started from: its own copy, where it has one. ``config`` may name the model of an
    adapter there by another name than the run's configuration does.
    """
    policy = config.policy
    if not isinstance(policy, PretrainedConfig):
        return policy
    recorded = run_config(run).policy
    renamed = isinstance(recorded, PretrainedConfig) and policy.model != recorded.model
    if renamed and (run / START / "adapter_config.json").is_file():
        return policy.model_copy(update={"adapter": run / START})
    return from_start(policy, run)


def _effective(command: str, run: Path) -> tuple[str, ...]:
    """The keys that have an effect on a command with a run. A run with its own model takes no other."""
    own = (run / START / "config.json").is_file()
    return tuple(key for key in EFFECTIVE[command] if not (own and key == "policy.model"))


def _checkpoint(run: Path, name: str | None) -> Path:
    if name == "best":
        best = read_best(run / "checkpoints")
        if best is None:
            raise AgentPeftError(
                f"{run}: names no best checkpoint; set checkpoint.keep_best before it trains, or name one"
            )
        name = best.checkpoint
    folder = run / "checkpoints" / name if name else latest_checkpoint(run / "checkpoints")
    if folder is None:
        raise AgentPeftError(
            f"{run}: has no checkpoint yet; train it first, or measure the model before training with --base"
        )
    if not folder.is_dir():
        existing = ", ".join(path.name for path in checkpoints(run / "checkpoints")) or "none yet"
        raise AgentPeftError(f"{run}: no checkpoint {name}; there is: {existing}")
    return folder


def load_target_config(
    target: Path, file: Path | None, overrides: Sequence[str], tasks: Path | None, attempts: int | None
) -> TrainConfig:
    """Load the configuration to measure a target with: that of the run, or ``file`` if the target is not a
    run, with the changes of the command line.
    """
    kind, effective = target_kind(target), _effective("evaluate", target)
    if kind == "run":
        if file is not None:
            raise AgentPeftError(
                f"{target}: is a run directory, which has a {CONFIG} of its own; leave --config out, or "
                "evaluate one of its checkpoints"
            )
        return load_for_evaluation(target / CONFIG, overrides, tasks, attempts, effective)
    if file is None:
        if not target.exists():
            raise _nothing_at(target)
        raise AgentPeftError(
            f"{target}: is not a run directory, so the tasks are unknown; name a configuration with --config"
        )
    if kind == "model":
        effective = tuple(key for key in effective if key != "policy.model")  # it is the target
    return load_for_evaluation(file, overrides, tasks, attempts, effective)


def evaluate_target(
    target: str | Path,
    config: TrainConfig | None = None,
    *,
    checkpoint: str | None = None,
    base: bool = False,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Evaluate a target (see ``target_kind``) on the ``evaluation`` of a configuration.

    Args:
        config: None takes that of the run directory; other targets need one.
        checkpoint: the name of a run's checkpoint, or ``best``; None takes the newest.
        base: measure the policy as it was before training.
        progress: shows the episodes that are done.
    """
    target = Path(target)
    kind = target_kind(target)
    if base and checkpoint is not None:
        raise AgentPeftError(
            "--base is the policy before training, which is in no checkpoint; leave --base or --checkpoint "
            "out"
        )
    if kind != "run" and checkpoint is not None:
        raise AgentPeftError(
            f"{target}: is not a run directory, so it has no checkpoint {checkpoint}; leave --checkpoint out"
        )
    if kind == "model" and base:
        raise AgentPeftError(
            f"{target}: is a model, and --base is what an adapter or a run was trained from; leave --base out"
        )
    config = config or load_target_config(target, None, (), None, None)
    if config.evaluation is None:
        raise AgentPeftError(
            f"{target}: its configuration has no evaluation; name tasks with --tasks, or set "
            "evaluation.environment"
        )
    if config.evaluation.environment == config.environment:
        logger.warning(
            "%s: measured on the tasks of training; --tasks or evaluation.environment gives held-out ones",
            target,
        )
    set_threads(config.threads)
    folder = _checkpoint(target, checkpoint) if kind == "run" and not base else None
    step = checkpoint_step(folder) if folder else 0 if kind == "run" else None
    policy = open_run(target, None, True, config)[1] if kind == "run" else _load(target, kind, config, base)
    reference = None  # of a run, the policy before training; else the policy with its adapter off
    if kind == "run" and config.evaluation.of_replies:
        reference = reference_of(policy.model)
    if folder is not None:
        policy.load(folder)
    stage = config.stages[-1] if step is None else config.stage_at(step)
    replays = () if base else _replays(folder or target, stage)
    with closing(load_environment(config.evaluation.environment)) as environment, ExitStack() as stack:
        sampler = stack.enter_context(closing(load_sampler(policy, config.engine)))
        on_episode = None
        if progress is not None:
            tasks = len(environment.tasks[: config.evaluation.num_tasks])
            bar = progress.evaluation(str(target), tasks, tasks * config.evaluation.attempts)
            on_episode = stack.enter_context(bar)
        report = evaluate(
            policy if config.evaluation.of_replies else sampler,
            environment,
            config.evaluation,
            config.seed,
            rewards=stage.rewards,
            on_episode=on_episode,
            replays=ReplayWindow(replays, stage.replay_in_prompt),
            pairs=config.pairs,
            reference=reference,
        )
    return replace(report, run=str(target), checkpoint=folder.name if folder else None, step=step)


def _replays(folder: Path, stage: StageConfig) -> tuple[Replay, ...]:
    """The episodes of a checkpoint that its stage showed to the policy."""
    if not stage.replay_in_prompt:
        return ()
    replays = read_replays(folder)
    if not replays:
        logger.warning(
            "%s: holds no successful episodes (%s), so replay_in_prompt: %d shows none here",
            folder,
            REPLAYS,
            stage.replay_in_prompt,
        )
    return replays


def _load(target: Path, kind: Kind, config: TrainConfig, base: bool) -> Policy:
    """Load a target other than a run. Weights go into the policy that ``config`` describes, and an adapter
    onto its model; if ``policy.model`` there is a run or an adapter, onto the model that it was trained on.
    """
    if kind == "model":
        machine = config.policy.model_dump(include={"dtype", "device", "packing"})
        return load_policy(PretrainedConfig(model=str(target), lora=None, **machine), config.seed)
    if base:
        return load_policy(config.policy, config.seed)
    described = config.policy
    if kind == "adapter" and isinstance(described, PretrainedConfig):
        model = described.model if names_model(described) else base_of(target)
        changes = {"model": model, "adapter": target, "merge_adapter": False, "lora": LoraSettings()}
        return load_policy(described.model_copy(update=changes), config.seed)
    if kind == "weights":
        described = described.model_copy(update={"lora": None})
    if isinstance(described, PretrainedConfig):
        described = described.model_copy(update={"adapter": None})
    policy = load_policy(described, config.seed)
    policy.load(target)
    return policy


def load_for_merging(run: Path, overrides: Sequence[str], measured: bool) -> TrainConfig:
    """Load the configuration to merge a run with and, if it is ``measured``, to evaluate it with."""
    file = _config_of(run)
    if measured:
        return load_for_evaluation(file, overrides, None, None, _effective("evaluate", run))
    refuse_ineffective("merge", overrides, _effective("merge", run))
    return read_config(file, overrides, check_files=False)[0]


def check_empty(output: Path) -> None:
    """Check that a folder may be written to."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise AgentPeftError(f"{output}: exists and is not an empty folder; name another folder")


def merge_run(
    run: str | Path, output: str | Path, checkpoint: str | None = None, config: TrainConfig | None = None
) -> None:
    """Write the run's policy as one model, which Transformers loads without PEFT. The weights are read, and
    so written, in the dtype of the run, not in that of ``config``.
    """
    run, output = Path(run), Path(output)
    check_empty(output)
    config = config or run_config(run)
    config = with_policy(config, **recorded_measured(run))
    _, policy = open_run(run, checkpoint, config=config)
    with explain_oom(
        "as the adapter was merged, in float32",
        "close other programs, or merge on a machine with more memory",
    ):
        policy.save_merged(output)
