"""What a configuration will really do: every effective value and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_peft.environments import load_environment
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.lookup import NotImportedError, may_import
from agent_peft.policies.blocked import pays
from agent_peft.policies.hardware import choose_dtype, choose_threads
from agent_peft.policies.shape import shape_of
from agent_peft.training.config import TrainConfig, resolved
from agent_peft.training.loading import Provenance
from agent_peft.training.memory import Learner, StageMemory, evaluation_memory, in_words, stage_memory

UNKNOWN = "unknown (without --trust)"


def explain(config: TrainConfig, provenance: Provenance) -> RenderableType:
    """The values, and the facts that follow from them. Loads the tasks, to count them.

    Raises:
        AgentPeftError: the environment cannot be built.
    """
    return Group(values_table(config, provenance), facts_table(facts(config)), memory_table(config))


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
        shown.add_row(Text(key), Text(json.dumps(value, ensure_ascii=False)), Text(origin, style="dim" if origin == "default" else ""))
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
        trips = "" if tasks is None else f" ({stage.steps * stage.tasks_per_step / tasks:.3g} trips through the tasks)"
        episodes = "episodes" if stage.build().on_policy else "demonstrations"
        found[f"stage {stage.name}"] = (
            f"{stage.steps} steps of {stage.tasks_per_step} × {stage.group_size} = {stage.episodes_per_step} {episodes}"
            f"{trips}, {stage.updates} optimizer updates"
        )
    found["optimizer updates"] = str(sum(stage.updates for stage in config.stages))
    if config.evaluation is not None:
        measured = number_of_tasks(config.evaluation.environment, config.evaluation.num_tasks)
        found["evaluation"] = f"{UNKNOWN if measured is None else measured} tasks × {config.evaluation.attempts} attempts"
    threads = choose_threads(config.threads)
    found["threads"] = f"{threads.number} ({threads.reason})"
    return found


def number_of_tasks(config: EnvironmentConfig, most: int | None = None) -> int | None:
    """None where only code that nobody trusts could tell: a class of the user's own, or commands without a sandbox."""
    if getattr(config, "sandbox", None) == "none" and not may_import("the commands of its tasks (sandbox: none)"):
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
    """What each stage and an evaluation need at most, by name; empty where the model's shape cannot be known without loading it."""
    policy = config.policy
    shape = shape_of(policy)
    if shape is None:
        return {}
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if policy.device == "auto" else policy.device)
    lora, dtype = policy.lora, choose_dtype(policy.dtype, device)
    learner = Learner(
        shape,
        width=dtype.itemsize,
        rank=None if lora is None else lora.rank,
        dropout=lora is not None and lora.dropout > 0,
        recomputes=policy.activation_checkpointing,
        tiled=policy.packing and device.type == "cpu" and shape.plain,
        blocks=pays(device, dtype, shape.multiplied),
    )
    found = {f"stage {place}: {stage.name}": stage_memory(learner, stage, config.engine) for place, stage in enumerate(config.stages)}
    return found if config.evaluation is None else found | {"evaluation": evaluation_memory(learner, config.evaluation, config.engine)}


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
        "peak", "", in_words(most.peak), Text(f"always + the larger phase: {peaks}" if len(found) > 1 else "always + the larger phase")
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
