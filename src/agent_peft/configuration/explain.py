"""What a configuration will really do: every effective value and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_peft.configuration.loading import Provenance
from agent_peft.configuration.memory import Learner, StageMemory, evaluation_memory, in_words, stage_memory
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments import load_environment
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.hardware import choose_device, choose_threads
from agent_peft.lookup import NotImportedError, may_import
from agent_peft.policies.engine.onednn_linear import pays
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.precision import choose_precision
from agent_peft.policies.sampling import LIMITS
from agent_peft.training.stage import StageConfig

UNKNOWN = "unknown (without --trust)"


def explain(config: TrainConfig, provenance: Provenance) -> RenderableType:
    """The values, and the facts that follow from them. Loads the tasks, to count them.

    Raises:
        AgentPeftError: the environment cannot be built.
    """
    return Group(values_table(config, provenance), facts_table(facts(config)), memory_table(config))


def explanation(config: TrainConfig, provenance: Provenance) -> dict[str, Any]:
    """The same, in what JSON knows. Memory is the peak, in bytes.

    Raises:
        AgentPeftError: as ``explain``.
    """
    values = {path: {"value": value, "from": provenance.of(path)} for path, value in effective_values(config)}
    return {
        "values": values,
        "facts": facts(config),
        "memory": {name: needed.peak for name, needed in memory(config).items()},
    }


def values_table(config: TrainConfig, provenance: Provenance) -> Table:
    shown = Table(title=provenance.source, title_justify="left")
    shown.add_column("key", no_wrap=True)
    shown.add_column("value", overflow="fold")
    shown.add_column("from", overflow="fold")
    section = ""
    for path, value in effective_values(config):
        stage = ".".join(path.split(".")[:2]) if path.startswith("stages.") else ""
        if stage != section:
            section = stage
            shown.add_section()
            shown.add_row(Text(stage, style="bold"), "", "")
        key = path.removeprefix(f"{stage}.") if stage else path
        origin = provenance.of(path).replace(provenance.source, Path(provenance.source).name)
        shown.add_row(
            Text(key),
            Text(json.dumps(value, ensure_ascii=False)),
            Text(origin, style="dim" if origin == "default" else ""),
        )
    return shown


def effective_values(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Key path and value of everything in the resolved configuration."""
    content = resolved(config)
    stages = content.pop("stages")
    yield from _flat(content, "")
    for place, written in enumerate(stages):
        yield from _flat(written, f"stages.{place}.")


def facts(config: TrainConfig) -> dict[str, str]:
    """What the values amount to, as far as it is known without running code that is not trusted."""
    tasks = number_of_tasks(config.environment)
    found = {"tasks": UNKNOWN if tasks is None else str(tasks)}
    for stage in config.stages:
        trips = (
            ""
            if tasks is None
            else f" ({stage.steps * stage.tasks_per_step / tasks:.3g} trips through the tasks)"
        )
        if tasks and stage.tasks_per_step > tasks:
            trips = (
                f"{trips[:-1]}, so a step has each of them up to {-(-stage.tasks_per_step // tasks)} times)"
            )
        episodes = "episodes" if stage.build().on_policy else "demonstrations"
        found[f"stage {stage.name}"] = (
            f"{stage.steps} steps of {stage.tasks_per_step} × {stage.group_size} = {stage.episodes_per_step} {episodes}"
            f"{trips}, {stage.updates} optimizer updates"
        )
        if stage.build().needs_reference:
            found[f"reference of {stage.name}"] = reference_in_words(config, stage)
    found["optimizer updates"] = str(sum(stage.updates for stage in config.stages))
    if config.evaluation is not None:
        measured = number_of_tasks(config.evaluation.environment, config.evaluation.num_tasks)
        found["evaluation"] = (
            f"{UNKNOWN if measured is None else measured} tasks × {config.evaluation.attempts} attempts"
        )
        if len({config.evaluation.following(stage.sampling).sampling for stage in config.stages}) > 1:
            for stage in config.stages:
                limits = config.evaluation.following(stage.sampling).sampling.model_dump(
                    include=set(LIMITS), mode="json"
                )
                shown = ", ".join(f"{key} {json.dumps(limits[key], ensure_ascii=False)}" for key in LIMITS)
                found[f"evaluation after {stage.name}"] = shown + (
                    ", also at the start" if stage is config.stages[0] else ""
                )
    precision, threads = choose_precision(config.policy), choose_threads(config.threads)
    found["dtype"] = f"{precision.name} ({precision.reason})"
    found["threads"] = f"{threads.number} ({threads.reason})"
    return found


def reference_in_words(config: TrainConfig, stage: StageConfig) -> str:
    """What the KL of a stage is measured to, and what is kept for it."""
    if stage.reference == "base":
        return "the base model: the policy with its adapter off"
    if config.policy.lora is None:
        return "the policy as the stage began: a frozen copy of all weights, which takes as much memory again"
    if stage is config.stages[0] and getattr(config.policy, "adapter", None) is None:
        return "the policy as the stage began, which is the base model: the adapter is still zero"
    return "the policy as the stage began: a frozen copy of the adapter"


def number_of_tasks(config: EnvironmentConfig, most: int | None = None) -> int | None:
    """None where only code that nobody trusts could tell: a class of the user's own, or commands without a
    sandbox.
    """
    if getattr(config, "sandbox", None) == "none" and not may_import(
        "the commands of its tasks (sandbox: none)"
    ):
        return None
    try:
        environment = load_environment(config)
    except NotImportedError:
        return None
    try:
        return len(environment.tasks[:most])
    finally:
        environment.close()


def memory(config: TrainConfig) -> dict[str, StageMemory]:
    """What each stage and an evaluation need at most, by name; empty where the model's shape cannot be
    known without loading it.
    """
    policy = config.policy
    device, shape = choose_device(policy.device), shape_of(policy)
    if shape is None:
        return {}
    lora, dtype = policy.lora, choose_precision(policy).dtype
    learner = Learner(
        shape,
        width=dtype.itemsize,
        rank=None if lora is None else lora.rank,
        dropout=lora is not None and lora.dropout > 0,
        recomputes=policy.activation_checkpointing,
        packed=policy.packing,
        tiled=policy.packing and device.type == "cpu" and shape.plain,
        blocks=pays(device, dtype, shape.multiplied),
    )
    found = {
        f"stage {place}: {stage.name}": stage_memory(learner, stage, config.engine)
        for place, stage in enumerate(config.stages)
    }
    if config.evaluation is not None:
        measured = [
            evaluation_memory(learner, config.evaluation.following(stage.sampling), config.engine)
            for stage in config.stages
        ]
        found["evaluation"] = max(measured, key=lambda needed: needed.peak)
    return found


def memory_table(config: TrainConfig) -> Table:
    """Of what needs most: each part, and what it comes from."""
    shown = Table(title="memory, at most", title_justify="left", show_header=False)
    found = memory(config)
    if not found:
        shown.add_row("unknown", "", "a module of your own, or a model that is not here yet")
        return shown
    most = max(found.values(), key=lambda needed: needed.peak)
    phases = {"always": most.held, "sampling": most.sampling, "training": most.training}
    for phase, parts in phases.items():
        for part in parts:
            shown.add_row(phase, part.name, in_words(part.size), Text(part.source))
        shown.add_section()
    peaks = ", ".join(f"{in_words(needed.peak)} in {name}" for name, needed in found.items())
    shown.add_row(
        "peak",
        "",
        in_words(most.peak),
        Text(f"always + the larger phase: {peaks}" if len(found) > 1 else "always + the larger phase"),
    )
    return shown


def facts_table(found: dict[str, str]) -> Table:
    shown = Table("what follows", "", show_header=False)
    for name, value in found.items():
        shown.add_row(Text(name), Text(value))
    return shown


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
