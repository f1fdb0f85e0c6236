"""The effect of a configuration: every effective value, its origin and its meaning, and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_peft.configuration.keys import Key, description_of
from agent_peft.configuration.load import Provenance
from agent_peft.configuration.machine import machine, needs
from agent_peft.configuration.memory import StageMemory, in_words
from agent_peft.configuration.planning import Target, memory, peak_of, room_in_words
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment, EnvironmentConfig
from agent_peft.environments.digests import shared_ids
from agent_peft.hardware import choose_device, choose_threads
from agent_peft.lookup import NotImportedError, may_import
from agent_peft.policies.forward.products import choose_library
from agent_peft.policies.native import template_at_hand
from agent_peft.policies.precision import choose_precision
from agent_peft.policies.sampling import LIMITS
from agent_peft.printable import printable
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig

UNKNOWN = "unknown (without --trust)"
NO_SHAPE = "unknown: a custom module, or no config.json here; hf download MODEL config.json brings it alone"
TOKEN = 4 + 1 + 4 + 4 + 4  # token, mask, two log-probabilities, advantage
TEXT = 5  # bytes of a token's text, as JSON holds it; twice as many or more in scripts that JSON escapes
RECORD = 600  # bytes of a line without its text: seed, outcome, rewards


@dataclass(frozen=True)
class Explanation:
    """The effect of a configuration on this machine. ``rich`` prints it as tables.

    Attributes:
        source: the name of the configuration.
        values: for each key path, the effective value, its origin, and what the key does.
        facts: what follows from the values, in words.
        memory: the maximum memory of each stage and of an evaluation; empty if it is unknown.
        needs: what the run needs of this machine, in words.
        machine: what this machine offers, in words.
    """

    source: str
    values: Mapping[str, tuple[Any, str, str]]
    facts: Mapping[str, str]
    memory: Mapping[str, StageMemory]
    needs: Mapping[str, str]
    machine: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The content as JSON can hold it. Memory is the peak, in bytes."""
        names = ("value", "from", "what it does")
        return {
            "values": {path: dict(zip(names, row, strict=True)) for path, row in self.values.items()},
            "facts": dict(self.facts),
            "memory": {name: needed.peak for name, needed in self.memory.items()},
            "needs": dict(self.needs),
            "machine": dict(self.machine),
        }

    def lines(self) -> Iterator[str]:
        """A line for each value, with tabs between the columns. No line depends on another one."""
        for path, (value, origin, description) in self.values.items():
            yield _line(path, _as_text(value), origin, description)
        yield from rows_lines("", self.facts)
        for name, needed in self.memory.items():
            yield _line(f"memory of {name}", in_words(needed.peak))
        if not self.memory:
            yield _line("memory", NO_SHAPE)
        yield from rows_lines("needs ", self.needs)
        yield from rows_lines("machine ", self.machine)

    def __rich__(self) -> RenderableType:
        """What happens, and what it takes."""
        peaks = {name: in_words(needed.peak) for name, needed in self.memory.items()} or {"": NO_SHAPE}
        return Group(
            rows_table(self.source, self.facts),
            rows_table("memory, at most", peaks),
            rows_table("what the run needs", self.needs),
            f"--all also prints the {len(self.values)} values with their origins, the parts of the memory, "
            "and what this machine offers",
        )

    @property
    def whole(self) -> RenderableType:
        """All of it, as tables."""
        return Group(
            _values_table(self.source, self.values),
            rows_table("what follows", self.facts),
            _memory_table(self.memory),
            rows_table("what the run needs", self.needs),
            rows_table("this machine", self.machine),
        )


def explain(config: TrainConfig, provenance: Provenance, target: Target | None = None) -> Explanation:
    """Explain a configuration; its tasks are counted. ``target``: where the run computes; None is here."""
    if target is not None:  # this machine need not have that device
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"device": "auto"})})
    with _opened(config) as (training, heldout):
        settled = config if training is None else config.with_steps(training.tasks)
        consequences = _facts(config, settled, training, heldout)
    rows = {
        path: (value, provenance.of(path), description_of(config, path))
        for path, value in effective_values(settled)
    }
    for place, stage in enumerate(config.stages):
        if stage.epochs is not None:  # the run itself has steps instead
            steps, epochs = f"stages.{place}.steps", f"stages.{place}.epochs"
            rows[epochs] = (stage.epochs, *rows[epochs][1:])
            if steps in rows:
                rows[steps] = (rows[steps][0], f"epochs: {stage.epochs:g}", rows[steps][2])
    if target is not None:
        for here in ("dtype", "matmul", "threads"):
            del consequences[here]
    memories, needed = memory(settled, target), needs(config)
    if (peak := peak_of(memories)) is not None and (room := room_in_words(settled, peak, target)) is not None:
        needed["memory"] = room
    return Explanation(provenance.source, rows, consequences, memories, needed, machine())


def effective_values(config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """The key path and the value of every key of the resolved configuration."""
    content = resolved(config)
    stages = content.pop("stages")
    yield from _flat(content, "")
    for place, stage in enumerate(stages):
        yield from _flat(stage, f"stages.{place}.")


def _facts(
    config: TrainConfig, settled: TrainConfig, training: Environment | None, heldout: Environment | None
) -> dict[str, str]:
    """``settled`` has the steps of the ``epochs`` in ``config``. An untrusted environment is None."""
    consequences = {"tasks": UNKNOWN if training is None else str(len(training.tasks))}
    updates: int | None = 0
    for given, stage in zip(config.stages, settled.stages, strict=True):
        known = stage.epochs is None
        updates = updates + stage.updates if known and updates is not None else None
        trip = None if training is None else stage.trip(training.tasks)
        length = f"{stage.steps} steps" if known else UNKNOWN + " steps"
        length += f" ({given.epochs:g} epochs)" if given.epochs is not None else ""
        consequences[f"stage {stage.name}"] = (
            f"{length} of {_of_a_step(stage)}{_trips(stage, trip)}, "
            f"{f'up to {1 + stage.refill} times as many with refill, ' if stage.refill else ''}"
            f"{stage.updates if known else UNKNOWN} optimizer updates"
        )
        if formula := stage.algorithm.facts.formula:
            paper = stage.algorithm.facts.paper
            consequences[f"loss of {stage.name}"] = f"{formula} ({paper})" if paper else formula
        if stage.uses_reference:
            consequences[f"reference of {stage.name}"] = reference_in_words(config, stage)
        if stage.lag:
            consequences[f"lag of {stage.name}"] = lag_in_words(config, stage)
        if stage.has_teacher:
            consequences[f"teacher of {stage.name}"] = teacher_in_words(stage)
    consequences["optimizer updates"] = UNKNOWN if updates is None else str(updates)
    consequences["time"] = "unknown before the first steps; train then prints what is left"
    consequences["trajectories"] = UNKNOWN if updates is None else trajectories_in_words(settled)
    if config.evaluation is not None:
        consequences |= _evaluation_facts(config, config.evaluation, training, heldout)
    precision, threads = choose_precision(config.policy), choose_threads(config.threads)
    consequences["dtype"] = f"{precision.name} ({precision.reason})"
    library = choose_library(config.policy.matmul, choose_device(config.policy.device), precision.dtype)
    consequences["matmul"] = f"{library.name} ({library.reason})"
    if (template := template_at_hand(config.policy)) is not None:
        consequences["chat template"] = str(template)
    consequences["threads"] = f"{threads.number} ({threads.reason})"
    return consequences


def _of_a_step(stage: StageConfig) -> str:
    """What a step learns from."""
    form, number = stage.algorithm.facts.preferences, stage.tasks_per_step
    if form is None:
        noun = "episodes" if stage.samples else "demonstrations"
        return f"{number} × {stage.group_size} = {stage.episodes_per_step} {noun}"
    if stage.episodes_of is None:
        return f"{number} pairs" if form == "pairs" else f"the replies to {number} tasks"
    of_run = f" of {stage.episodes_of.run}"
    return f"{number} pairs{of_run}" if form == "pairs" else f"the episodes of {number} groups{of_run}"


def _trips(stage: StageConfig, trip: int | None) -> str:
    """How often a stage goes through its tasks; ``trip`` is the number of tasks of one trip."""
    if trip is None or stage.episodes_of is not None:
        return ""
    trips = f"{stage.steps * stage.tasks_per_step / trip:.3g} trips through the tasks"
    if stage.tasks_per_step > trip:
        trips += f", so a step has each task up to {-(-stage.tasks_per_step // trip)} times"
    return f" ({trips})"


def _evaluation_facts(
    config: TrainConfig,
    evaluation: EvaluationConfig,
    training: Environment | None,
    heldout: Environment | None,
) -> dict[str, str]:
    number = UNKNOWN if heldout is None else len(heldout.tasks[: evaluation.num_tasks])
    of_replies = f"the likelihood of the recorded replies of {number} tasks"
    sampled = f"{number} tasks × {evaluation.attempts} attempts"
    consequences = {"evaluation": of_replies if evaluation.of_replies else sampled}
    known = None if training is None or heldout is None else (training, heldout)
    if known and (shared := shared_ids(*known, evaluation.num_tasks)):
        consequences["evaluation"] += f"; {len(shared)} tasks are tasks of training, too"
    samplings = [evaluation.following(stage.sampling).sampling for stage in config.stages]
    if len(set(samplings)) > 1 and not evaluation.of_replies:
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


def lag_in_words(config: TrainConfig, stage: StageConfig) -> str:
    """Which weights sample a step, and whether that takes place while others are computed."""
    words = (
        f"step n is sampled by the weights before step n - {stage.lag}, and the first {stage.lag + 1} steps "
        "by those at the start"
    )
    if config.engine.kind == "local" and choose_device(config.policy.device).type != "cpu":
        return f"{words}; sampling and learning take turns on a GPU, so the lag saves no time there"
    return f"{words}; sampling takes place while a step's first gradient is computed"


def teacher_in_words(stage: StageConfig) -> str:
    """The policy that a distillation learns from, and what it reads."""
    who = stage.teacher.model or "the reference"
    if stage.teacher.prompt is None:
        return f"{who}, which reads what the policy reads"
    return f"{who}, whose prompt shows the task's demonstration: {json.dumps(stage.teacher.prompt)}"


@contextmanager
def _opened(config: TrainConfig) -> Iterator[tuple[Environment | None, Environment | None]]:
    """The environments of training and of the evaluation; None for one that is not trusted or not there."""
    with ExitStack() as stack:
        training, heldout = _load(config.environment), None
        if training is not None:
            stack.enter_context(closing(training))
        if config.evaluation is not None:
            heldout = _load(config.evaluation.environment)
        if heldout is not None:
            stack.enter_context(closing(heldout))
        yield training, heldout


def _load(config: EnvironmentConfig) -> Environment | None:
    """The environment; None if it needs code that is not trusted, or commands without a sandbox."""
    commands = "the commands of its tasks (sandbox: none)"
    if getattr(config, "sandbox", None) == "none" and not may_import(commands):
        return None
    try:
        return load_environment(config)
    except NotImportedError:
        return None


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def step_bytes(episodes: int, tokens: int) -> int:
    """Bytes of a step's files for episodes of that many tokens: arrays, and text as it is in English.

    >>> step_bytes(64, 400)
    601600
    """
    return episodes * (tokens * (TOKEN + TEXT) + RECORD)


def trajectories_in_words(config: TrainConfig) -> str:
    """The size of a run's trajectories, if every episode has ``sampling.max_tokens``."""
    keep = config.trajectories
    sizes = [
        step_bytes((1 + stage.refill) * stage.episodes_per_step, stage.sampling.max_tokens)
        for stage in config.stages
        for _ in range(stage.steps)
    ]
    kept = sizes[:: keep.every]
    if keep.last is not None:
        kept = sorted(kept)[-keep.last :]
    return (
        f"at most about {in_words(max(sizes))} a step and {in_words(sum(kept))} in all, of {len(kept)} steps "
        f"({TOKEN + TEXT} bytes for each token up to sampling.max_tokens)"
    )


def rows_lines(prefix: str, rows: Mapping[str, str]) -> Iterator[str]:
    """A line for each row: its name behind ``prefix``, a tab, its text."""
    for name, text in rows.items():
        yield _line(f"{prefix}{name}", text)


def rows_table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def _values_table(source: str, values: Mapping[str, tuple[Any, str, str]]) -> Table:
    table = Table(title=source, title_justify="left")
    table.add_column("key", no_wrap=True)
    for heading in ("value", "from", "what it does"):
        table.add_column(heading, overflow="fold")
    section = ""
    for path, (value, origin, description) in values.items():
        stage = ".".join(path.split(".")[:2]) if path.startswith("stages.") else ""
        if stage != section:
            section = stage
            table.add_section()
            table.add_row(Text(stage, style="bold"), "", "", "")
        table.add_row(
            Text(path.removeprefix(f"{stage}.") if stage else path),
            Text(_as_text(value)),
            Text(origin.replace(source, Path(source).name), style="dim" if origin == "default" else ""),
            Text(description),
        )
    return table


def keys_table(keys: Sequence[Key]) -> Table:
    table = Table("key", "of kind", "type", "default", "what it does")
    for key in keys:
        table.add_row(*map(Text, (key.path, key.kind, key.type, key.default, key.description)))
    return table


def _memory_table(memories: Mapping[str, StageMemory]) -> Table:
    """The parts of the stage (or evaluation) with the largest peak, and the numbers that each comes from."""
    table = Table(title="memory, at most", title_justify="left", show_header=False)
    if not memories:
        table.add_row(NO_SHAPE)
        return table
    largest = max(memories.values(), key=lambda memory: memory.peak)
    for phase in ("always", "loading", "sampling", "training"):
        for part in getattr(largest, phase):
            table.add_row(phase, part.name, in_words(part.size), Text(part.source))
        table.add_section()
    peaks = ", ".join(f"{in_words(memory.peak)} in {name}" for name, memory in memories.items())
    reason = "always + the largest phase" + (f": {peaks}" if len(memories) > 1 else "")
    table.add_row("peak", "", in_words(largest.peak), Text(reason))
    return table


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _line(*columns: str) -> str:
    return "\t".join(map(printable, columns))
