"""A run and its directory: what is trained, evaluated, written down, and found again after a kill.

    config.yaml  metrics.jsonl  timing.jsonl  trajectories/step_*.jsonl  checkpoints/step_*/  evaluations/*.json

All but timing.jsonl depends on the configuration alone: a run that is killed and started again writes the same bytes (on a CPU).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.policies.base import PretrainedConfig
from agent_peft.policies.engine import Engine
from agent_peft.policies.language_model import Policy, load_policy
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.evaluation import EvaluationReport, skill_table, summarize, table
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.seeding import derive
from agent_peft.training import yaml12
from agent_peft.training.checkpoint import clean, latest_checkpoint, save_checkpoint, write_atomic
from agent_peft.training.config import EvaluationConfig, TrainConfig, resolved
from agent_peft.training.trackers import JsonlTracker, Progress, write_trajectories
from agent_peft.training.trainer import Step, Trainer
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)


def train(config: TrainConfig, *, fresh: bool = False) -> dict[str, EvaluationReport]:
    """Run the stages, from wherever the run directory says they got to. Returns the evaluations by name, in order."""
    with ExitStack() as stack:
        return _Run(config, fresh, stack).go()


class _Run:
    def __init__(self, config: TrainConfig, fresh: bool, stack: ExitStack) -> None:
        self.config, self.folder = config, config.run_dir
        claim(config, fresh, stack)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.console = Console()
        self.progress = stack.enter_context(Progress(self.console))
        self.policy = load_policy(config.policy, config.seed)
        self.engine = Engine(self.policy, config.engine)
        self.environment = load_environment(config.environment)
        stack.callback(self.environment.close)
        self.heldout: Environment | None = None
        if config.evaluation is not None:
            self.heldout = load_environment(config.evaluation.environment)
            stack.callback(self.heldout.close)
        self.metrics = JsonlTracker(self.folder / "metrics.jsonl")
        self.timing = JsonlTracker(self.folder / "timing.jsonl")
        self.reports: dict[str, EvaluationReport] = {}

    def go(self) -> dict[str, EvaluationReport]:
        clean(self.folder / "checkpoints")
        checkpoint = latest_checkpoint(self.folder / "checkpoints")
        position = json.loads((checkpoint / "position.json").read_text()) if checkpoint else {"stage": 0, "steps": 0}
        if checkpoint:
            self.progress.note(f"resuming after step {position['steps']} of {sum(s.steps for s in self.config.stages)}")
        self.metrics.resume(position["steps"])
        self.timing.resume(position["steps"])
        due = self.moments()
        self.recall(due, position["steps"])
        before = sum(s.steps for s in self.config.stages[: position["stage"]])
        for index, stage in enumerate(self.config.stages):
            if index < position["stage"]:
                continue
            trainer = Trainer(stage, self.policy, self.engine, self.environment, derive(self.config.seed, "stage", index))
            if checkpoint is not None and index == position["stage"]:
                trainer.load(checkpoint)
            self.progress.start_stage(stage.name, stage.steps, trainer.step)
            clock = time.perf_counter()
            for step in trainer:
                clock = self.record(trainer, step, index, before, clock)
                if (done := before + trainer.step) in due:
                    self.evaluate(due[done])
                    clock = time.perf_counter()
            before += stage.steps
        if self.reports:
            self.console.print(table(self.reports), skill_table(self.reports))
        self.progress.note(f"done: the adapter is in {latest_checkpoint(self.folder / 'checkpoints')}")
        return self.reports

    def record(self, trainer: Trainer, step: Step, stage: int, before: int, clock: float) -> float:
        """Write a step down: what it did, then the checkpoint that says it was done."""
        number, config = before + step.number, self.config
        self.metrics.log(number, {"stage": trainer.stage.name, **step.metrics})
        write_trajectories(self.folder / "trajectories", number, step.collection.groups)
        last = trainer.step == trainer.stage.steps
        if last or trainer.step % config.checkpoint.every == 0:

            def write(folder: Path) -> None:
                trainer.save(folder)
                (folder / "position.json").write_text(json.dumps({"stage": stage, "steps": number + 1}))

            save_checkpoint(self.folder / "checkpoints", number + 1, write, config.checkpoint.keep_last, keep=last)
        now = time.perf_counter()
        statistics = step.collection.statistics
        tokens = statistics.prefilled_naive + statistics.sampled
        self.timing.log(number, {"seconds": now - clock, "sampled": statistics.sampled, "prefilled": statistics.prefilled})
        self.progress.advance(step.metrics, tokens / (now - clock))
        return now

    def moments(self) -> dict[int, str]:
        """Steps done -> the name of the evaluation that is due then, in order."""
        evaluation, due, before = self.config.evaluation, dict[int, str](), 0
        if evaluation is None:
            return due
        if "start" in evaluation.at:
            due[0] = "base"
        for index, stage in enumerate(self.config.stages):
            if evaluation.every:
                due |= {before + step: f"step {before + step}" for step in range(evaluation.every, stage.steps, evaluation.every)}
            before += stage.steps
            if "stages" in evaluation.at:
                due[before] = self.name_after(index)
        return due

    def recall(self, due: Mapping[int, str], done: int) -> None:
        """The evaluations that were due in the first ``done`` steps: one that is not there (a kill came between a checkpoint and its
        evaluation) is made with the weights of its moment."""
        for steps, name in due.items():
            checkpoint = self.folder / "checkpoints" / f"step_{steps:06d}"
            if steps > done:
                break
            if steps and not self.report_of(name).is_file():
                if not checkpoint.is_dir():
                    self.progress.note(f"the evaluation {name!r} is gone, and so is its checkpoint: it is left out")
                    continue
                self.policy.load(checkpoint)
            self.evaluate(name)

    def report_of(self, name: str) -> Path:
        return self.folder / "evaluations" / f"{name.replace(' ', '_')}.json"

    def name_after(self, index: int) -> str:
        names = [stage.name for stage in self.config.stages]
        again = names[: index + 1].count(names[index])
        return f"after {names[index]}" + (f" ({again})" if again > 1 else "")

    def evaluate(self, name: str) -> None:
        """Evaluate on the held-out tasks, once: what was written down before is read."""
        assert self.config.evaluation is not None and self.heldout is not None
        path = self.report_of(name)
        if path.is_file():
            self.reports[name] = EvaluationReport.from_json(json.loads(path.read_text()))
            return
        self.progress.evaluating(name, len(self.heldout.tasks[: self.config.evaluation.num_tasks]))
        report = evaluate(self.engine, self.heldout, self.config.evaluation, self.config.seed)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(report.to_json(), indent=1) + "\n")
        self.reports[name] = report
        self.progress.note(f"{name}: {report.summary}")


def claim(config: TrainConfig, fresh: bool, stack: ExitStack) -> None:
    """Make the run directory ours: one process at a time, and one configuration for its whole life."""
    folder, text = config.run_dir, yaml12.dump(resolved(config))
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        stack.enter_context(lock.acquire(timeout=0))
    except Timeout as error:
        raise AgentPeftError(f"{folder}: another process is training there; wait for it, or set another run_dir") from error
    written = folder / "config.yaml"
    if fresh:
        clear(folder)
    elif written.is_file() and written.read_text() != text:
        old = yaml12.plain(yaml12.parse(written.read_text(), written.name))
        changed = next((key for key in resolved(config) if old.get(key) != resolved(config)[key]), "a key")
        raise AgentPeftError(
            f"{folder}: holds a run of another configuration ({changed} differs); set another run_dir, or start over with --fresh"
        )
    write_atomic(written, text)


def clear(folder: Path) -> None:
    """Remove a run, its configuration last: whenever this is killed, what is left is still that run, whole or at its start."""
    for name in ("checkpoints", "evaluations", "trajectories"):
        gone = folder / f".gone-{name}"
        shutil.rmtree(gone, ignore_errors=True)
        if (folder / name).is_dir():
            (folder / name).rename(gone)
            shutil.rmtree(gone)
    for name in ("metrics.jsonl", "timing.jsonl", "config.yaml"):
        (folder / name).unlink(missing_ok=True)


def evaluate(engine: Engine, environment: Environment, evaluation: EvaluationConfig, seed: int) -> EvaluationReport:
    """``attempts`` episodes of each task; episodes whose environment failed are left out."""
    tasks = environment.tasks[: evaluation.num_tasks]
    seed = derive(seed, "evaluation")
    collection = Collector(environment, engine).collect(tasks, evaluation.attempts, evaluation.sampling, RewardConfig(), seed)
    if collection.failures:
        logger.warning("%d episodes failed in their environment and were tried again", collection.failures)
    return summarize(collection.groups)


def load_run(run: Path) -> TrainConfig:
    """The configuration that a run directory was written with."""
    from agent_peft.training.loading import load_config

    if not (run / "config.yaml").is_file():
        raise AgentPeftError(f"{run}: not a run directory (it holds no config.yaml)")
    return load_config(run / "config.yaml", check_files=False)[0]


def open_run(run: Path, checkpoint: str | None, base: bool) -> tuple[TrainConfig, Policy]:
    """A run's configuration, and its policy with the adapter of a checkpoint (the latest, or one by name), or with none."""
    config = load_run(run)
    policy = load_policy(config.policy, config.seed)
    if not base:
        folder = run / "checkpoints" / checkpoint if checkpoint else latest_checkpoint(run / "checkpoints")
        if folder is None or not folder.is_dir():
            have = ", ".join(sorted(p.name for p in (run / "checkpoints").glob("step_*"))) or "none yet"
            raise AgentPeftError(f"{run}: no checkpoint {checkpoint or ''}; there is: {have}")
        policy.load(folder)
    return config, policy


def evaluate_target(
    target: Path,
    evaluation: EvaluationConfig | None,
    *,
    config: TrainConfig | None = None,
    checkpoint: str | None = None,
    base: bool = False,
) -> EvaluationReport:
    """Evaluate a run directory, an adapter in PEFT's layout or a model, on an evaluation of its own or on the run's."""
    if (target / "config.yaml").is_file():
        config, policy = open_run(target, checkpoint, base)
    else:
        if config is None:
            raise AgentPeftError(f"{target}: is no run directory, so the tasks are not known; name a configuration with --config")
        if (target / "adapter_config.json").is_file():
            policy = load_policy(config.policy, config.seed)
            policy.load(target)
        else:
            kept = config.policy.model_dump(include={"dtype", "device", "packing"})
            policy = load_policy(PretrainedConfig(model=str(target), lora=None, **kept), config.seed)
    evaluation = evaluation or config.evaluation
    if evaluation is None:
        raise AgentPeftError(f"{target}: its configuration has no evaluation; name tasks with --tasks, or set evaluation.environment")
    if config.threads:
        torch.set_num_threads(config.threads)
    environment = load_environment(evaluation.environment)
    try:
        return evaluate(Engine(policy, config.engine), environment, evaluation, config.seed)
    finally:
        environment.close()


def merge_run(run: Path, output: Path, checkpoint: str | None = None) -> None:
    """Write the run's policy as a model of its own, which Transformers loads without PEFT."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise AgentPeftError(f"{output}: exists and is no empty folder; name another folder")
    _, policy = open_run(run, checkpoint, base=False)
    policy.save_merged(output)
