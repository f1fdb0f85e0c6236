"""The memory of a run, here or on a machine that is only named, and what to change so that it fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from agent_peft.configuration.memory import (
    MemoryModel,
    StageMemory,
    evaluation_memory,
    in_words,
    stage_memory,
)
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.hardware import Memory, choose_device, process_memory, total_memory
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine.fused_linear import pays_off
from agent_peft.policies.models.shape import shape_of
from agent_peft.policies.precision import choose_precision
from agent_peft.types import AgentPeftError


@dataclass(frozen=True)
class Target:
    """Devices of a machine: its kind, the bytes of each, and their number."""

    kind: str
    total: int
    devices: int = 1

    @classmethod
    def parse(cls, text: str) -> Target:
        """
        >>> Target.parse("8xcuda:80GB")
        Target(kind='cuda', total=80000000000, devices=8)
        """
        match = re.fullmatch(r"(?:([1-9]\d{0,5})x)?(cuda|cpu):(\d{1,6}(?:\.\d{1,3})?)GB", text)
        if match is None or not float(match[3]):
            raise AgentPeftError(f"--on {text!r:.40}: write cuda:24GB, cpu:16GB or 8xcuda:80GB")
        return cls(match[2], round(float(match[3]) * 1e9), int(match[1] or 1))


def memory(config: TrainConfig, target: Target | None = None) -> dict[str, StageMemory]:
    """The maximum memory of each stage and of an evaluation, by name; empty if the model's shape is unknown
    until it is loaded. ``target``: where the run computes; None is this machine.
    """
    policy = config.policy
    shape = shape_of(policy)
    if shape is None:
        return {}
    device = choose_device(policy.device) if target is None else torch.device(target.kind)
    lora, dtype = policy.lora, _dtype(policy, target)
    model = MemoryModel(
        shape,
        width=dtype.itemsize,
        rank=None if lora is None else lora.rank,
        dropout=lora is not None and lora.dropout > 0,
        checkpoints=policy.activation_checkpointing,
        packed=policy.packing,
        tiled=policy.packing and device.type == "cpu" and shape.plain,
        reordered=pays_off(device, dtype, shape.multiplied),
        process=process_memory(device),
    )
    memories = {}
    for place, stage in enumerate(config.stages):
        named = stage.teacher.model if stage.has_teacher else None
        teacher = None if named is None else shape_of(PretrainedConfig(model=named, lora=None))
        if named is not None and teacher is None:
            return {}
        memories[f"stage {place}: {stage.name}"] = stage_memory(model, stage, config.engine, teacher)
    if config.evaluation is not None and not config.evaluation.of_replies:
        candidates = [
            evaluation_memory(model, config.evaluation.following(stage.sampling), config.engine)
            for stage in config.stages
        ]
        memories["evaluation"] = max(candidates, key=lambda memory: memory.peak)
    return memories


def _dtype(policy: PretrainedConfig | ScratchConfig, target: Target | None) -> torch.dtype:
    """A GPU that is only named is taken to multiply bfloat16, as those since 2020 do."""
    if target is not None and policy.dtype == "auto":
        if target.kind == "cuda":
            return torch.bfloat16
        policy = policy.model_copy(update={"device": "cpu"})
    elif policy.dtype != "auto":
        return torch.float32 if policy.dtype == "float32" else torch.bfloat16
    return choose_precision(policy).dtype


def peak_of(memories: Mapping[str, StageMemory]) -> int | None:
    """The most bytes of any stage; None where they are unknown."""
    return max((needed.peak for needed in memories.values()), default=None)


def room_in_words(config: TrainConfig, peak: int, target: Target | None = None) -> str | None:
    """Whether a peak fits, and if it does not, what to change. None where the room is unknown."""
    if target is None:
        device, room = choose_device(config.policy.device), total_memory()
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            room = Memory(total, total)
        name = str(device)
    else:
        room = Memory(target.total, target.total)
        name = target.kind if target.devices == 1 else f"each of {target.devices} {target.kind}"
    if room is None:
        return None
    words = f"{in_words(peak)} at most, of {in_words(room.total)} ({name})"
    if peak > room.total:
        return f"{words}: this is not enough; {_advice(config, room.total, target)}"
    if peak > room.free:
        return f"{words}, of which only {in_words(room.free)} are free; close other programs"
    return words


def _advice(config: TrainConfig, total: int, target: Target | None) -> str:
    changes, least = changes_to_fit(config, total, target)
    if not changes:
        return "take a smaller model"
    words = f"with {' '.join(changes)} it takes {in_words(least)}"
    return words if least <= total else f"{words}, which is not enough either; take a smaller model"


@dataclass(frozen=True)
class _Change:
    """Another value of a key, and ``text``, as an override writes it. A stage's key changes in all stages."""

    key: str
    value: Any
    text: str

    def apply(self, config: TrainConfig) -> TrainConfig:
        section, _, name = self.key.rpartition(".")
        change = {name: self.value}
        if section:
            return config.model_copy(update={section: getattr(config, section).model_copy(update=change)})
        return config.model_copy(update={"stages": [s.model_copy(update=change) for s in config.stages]})


def changes_to_fit(
    config: TrainConfig, total: int, target: Target | None = None
) -> tuple[tuple[str, ...], int]:
    """Overrides after which a run takes at most ``total`` bytes, and what it takes then. Those that change
    time alone are tried first, and an adapter in place of all weights last, since it changes what is learned.
    Where nothing is enough, the overrides with which it takes the least.
    """

    def peak(changes: Sequence[_Change]) -> int:
        changed = reduce(lambda config, change: change.apply(config), changes, config)
        return peak_of(memory(changed, target)) or 0

    best: Sequence[_Change] = ()
    for changes in _sequences(config):
        if peak(changes) < peak(best):
            best = changes
        if peak(best) <= total:
            break
    most = max(total, peak(best))
    for change in best:
        without = [other for other in best if other is not change]
        best = without if peak(without) <= most else best
    return tuple(f"{change.key}={change.text}" for change in best), peak(best)


def _sequences(config: TrainConfig) -> Iterator[Sequence[_Change]]:
    """Ever more changes, each of which lowers the memory of something."""
    longest = max(stage.sampling.max_tokens for stage in config.stages)
    cheaper = [_Change("policy.activation_checkpointing", True, "true")]
    if any(stage.microbatch_tokens > longest for stage in config.stages):
        cheaper.append(_Change("microbatch_tokens", longest, str(longest)))
    cheaper += [_Change("engine.rows", rows, str(rows)) for rows in (16, 4, 1) if rows < config.engine.rows]
    adapter = _Change("policy.lora", LoraSettings(rank=16), "{rank: 16}")
    for first in ([], [adapter]) if config.policy.lora is None else ([],):
        for number in range(len(cheaper) + 1):
            yield [*first, *cheaper[:number]]
