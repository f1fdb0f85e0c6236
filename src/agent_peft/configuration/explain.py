"""The effect of a configuration: every effective value, its origin and its meaning, and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_peft.configuration.keys import Key, description_of
from agent_peft.configuration.loading import Provenance
from agent_peft.configuration.memory import (
    MemoryModel,
    StageMemory,
    evaluation_memory,
    in_words,
    stage_memory,
)
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments import load_environment
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.hardware import choose_device, choose_threads
from agent_peft.lookup import NotImportedError, may_import
from agent_peft.policies.engine.onednn_linear import pays_off
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.precision import choose_precision
from agent_peft.policies.sampling import LIMITS
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig

UNKNOWN = "unknown (without --trust)"


def explain(config: TrainConfig, provenance: Provenance) -> RenderableType:
    """Tables of the values, of the facts that follow from them, and of memory. The tasks are loaded to count
    them.

    Raises:
        AgentPeftError: the environment cannot be built.
    """
    return Group(values_table(config, provenance), facts_table(facts(config)), memory_table(config))


def explanation(config: TrainConfig, provenance: Provenance) -> dict[str, Any]:
    """The content of ``explain`` as JSON can hold it. Memory is the peak, in bytes.

    Raises:
        AgentPeftError: as ``explain``.
    """
    values = {
        path: {"value": value, "from": provenance.of(path), "what it does": description_of(config, path)}
        for path, value in effective_values(config)
    }
    return {
        "values": values,
        "facts": facts(config),
        "memory": {name: needed.peak for name, needed in memory(config).items()},
    }


def values_table(config: TrainConfig, provenance: Provenance) -> Table:
    table = Table(title=provenance.source, title_justify="left")
    table.add_column("key", no_wrap=True)
    for heading in ("value", "from", "what it does"):
        table.add_column(heading, overflow="fold")
    section = ""
    for path, value in effective_values(config):
        stage = ".".join(path.split(".")[:2]) if path.startswith("stages.") else ""
        if stage != section:
            section = stage
            table.add_section()
            table.add_row(Text(stage, style="bold"), "", "", "")
        key = path.removeprefix(f"{stage}.") if stage else path
        origin = provenance.of(path).replace(provenance.source, Path(provenance.source).name)
        table.add_row(
            Text(key),
            Text(json.dumps(value, ensure_ascii=False)),
            Text(origin, style="dim" if origin == "default" else ""),
            Text(description_of(config, path)),
        )
    return table


def keys_table(keys: Sequence[Key]) -> Table:
    """Every key with its type, default and description."""
    table = Table("key", "of kind", "type", "default", "what it does")
    for key in keys:
        table.add_row(*map(Text, (key.path, key.kind, key.type, key.default, key.description)))
    return table


def effective_values(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """The key path and the value of every key of the resolved configuration."""
    content = resolved(config)
    stages = content.pop("stages")
    yield from _flat(content, "")
    for place, stage in enumerate(stages):
        yield from _flat(stage, f"stages.{place}.")


def facts(config: TrainConfig) -> dict[str, str]:
    """The consequences of the values, as far as they are known without running code that is not trusted."""
    tasks = number_of_tasks(config.environment)
    consequences = {"tasks": UNKNOWN if tasks is None else str(tasks)}
    for stage in config.stages:
        trips = ""
        if tasks is not None:
            trips = f" ({stage.steps * stage.tasks_per_step / tasks:.3g} trips through the tasks)"
        if tasks and stage.tasks_per_step > tasks:
            trips = f"{trips[:-1]}, so a step has each task up to {-(-stage.tasks_per_step // tasks)} times)"
        episodes = "episodes" if stage.algorithm.facts.on_policy else "demonstrations"
        consequences[f"stage {stage.name}"] = (
            f"{stage.steps} steps of {stage.tasks_per_step} × {stage.group_size} = {stage.episodes_per_step} "
            f"{episodes}{trips}, {stage.updates} optimizer updates"
        )
        if stage.algorithm.facts.needs_reference:
            consequences[f"reference of {stage.name}"] = reference_in_words(config, stage)
    consequences["optimizer updates"] = str(sum(stage.updates for stage in config.stages))
    if config.evaluation is not None:
        consequences |= _evaluation_facts(config, config.evaluation)
    precision, threads = choose_precision(config.policy), choose_threads(config.threads)
    consequences["dtype"] = f"{precision.name} ({precision.reason})"
    consequences["threads"] = f"{threads.number} ({threads.reason})"
    return consequences


def _evaluation_facts(config: TrainConfig, evaluation: EvaluationConfig) -> dict[str, str]:
    tasks = number_of_tasks(evaluation.environment, evaluation.num_tasks)
    number = UNKNOWN if tasks is None else tasks
    consequences = {"evaluation": f"{number} tasks × {evaluation.attempts} attempts"}
    samplings = [evaluation.following(stage.sampling).sampling for stage in config.stages]
    if len(set(samplings)) > 1:
        for stage, sampling in zip(config.stages, samplings, strict=True):
            limits = sampling.model_dump(include=set(LIMITS), mode="json")
            texts = (f"{key} {json.dumps(limits[key], ensure_ascii=False)}" for key in LIMITS)
            at_start = ", also at the start" if stage is config.stages[0] else ""
            consequences[f"evaluation after {stage.name}"] = ", ".join(texts) + at_start
    return consequences


def reference_in_words(config: TrainConfig, stage: StageConfig) -> str:
    """The policy that the KL of a stage is measured to, and the copy that it needs."""
    if stage.reference == "base":
        return "the base model: the policy with its adapter off"
    if config.policy.lora is None:
        return "the policy as the stage began: a frozen copy of all weights, which takes as much memory again"
    if stage is config.stages[0] and getattr(config.policy, "adapter", None) is None:
        return "the policy as the stage began, which is the base model: the adapter is still zero"
    return "the policy as the stage began: a frozen copy of the adapter"


def number_of_tasks(config: EnvironmentConfig, limit: int | None = None) -> int | None:
    """The number of tasks, at most ``limit``. None if only code that is not trusted could tell: a user's own
    class, or commands without a sandbox.
    """
    commands = "the commands of its tasks (sandbox: none)"
    if getattr(config, "sandbox", None) == "none" and not may_import(commands):
        return None
    try:
        environment = load_environment(config)
    except NotImportedError:
        return None
    try:
        return len(environment.tasks[:limit])
    finally:
        environment.close()


def memory(config: TrainConfig) -> dict[str, StageMemory]:
    """The maximum memory of each stage and of an evaluation, by name; empty if the model's shape is unknown
    until it is loaded.
    """
    policy = config.policy
    device, shape = choose_device(policy.device), shape_of(policy)
    if shape is None:
        return {}
    lora, dtype = policy.lora, choose_precision(policy).dtype
    model = MemoryModel(
        shape,
        width=dtype.itemsize,
        rank=None if lora is None else lora.rank,
        dropout=lora is not None and lora.dropout > 0,
        checkpoints=policy.activation_checkpointing,
        packed=policy.packing,
        tiled=policy.packing and device.type == "cpu" and shape.plain,
        reordered=pays_off(device, dtype, shape.multiplied),
    )
    memories = {
        f"stage {place}: {stage.name}": stage_memory(model, stage, config.engine)
        for place, stage in enumerate(config.stages)
    }
    if config.evaluation is not None:
        candidates = [
            evaluation_memory(model, config.evaluation.following(stage.sampling), config.engine)
            for stage in config.stages
        ]
        memories["evaluation"] = max(candidates, key=lambda memory: memory.peak)
    return memories


def memory_table(config: TrainConfig) -> Table:
    """The parts of the stage (or evaluation) with the largest peak, and the numbers that each comes from."""
    table = Table(title="memory, at most", title_justify="left", show_header=False)
    memories = memory(config)
    if not memories:
        table.add_row("unknown", "", "the model is a custom module, or it is not on this machine yet")
        return table
    largest = max(memories.values(), key=lambda memory: memory.peak)
    phases = {"always": largest.always, "sampling": largest.sampling, "training": largest.training}
    for phase, parts in phases.items():
        for part in parts:
            table.add_row(phase, part.name, in_words(part.size), Text(part.source))
        table.add_section()
    peaks = ", ".join(f"{in_words(memory.peak)} in {name}" for name, memory in memories.items())
    reason = "always + the larger phase" + (f": {peaks}" if len(memories) > 1 else "")
    table.add_row("peak", "", in_words(largest.peak), Text(reason))
    return table


def facts_table(consequences: dict[str, str]) -> Table:
    table = Table("what follows", "", show_header=False)
    for name, value in consequences.items():
        table.add_row(Text(name), Text(value))
    return table


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
