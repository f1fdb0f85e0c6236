"""Count false alarms of the checks in bfloat16, and the steps until a planted fault is found.

    python benchmarks/alarms.py [--parts tiny smollm2 memorise] [--output alarms]

tiny: random models of three families over sums of one digit, on policy, for each sampling, alpha / rank and
learning rate. smollm2: the same with SmolLM2-135M. memorise: supervised steps of SmolLM2 on 64 tasks with a
rate that falls to 0. Each part then plants the faults: a sampler with the adapter of one update ago, one
that lacks a tenth of it, a temperature 1.1 times as high, and a mask shifted by one. It prints a table and
writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import command_line, show, table, write

import agent_peft as ap
from agent_peft.hardware import has_bf16
from agent_peft.policies.engine import decoding, local
from agent_peft.training import trainer as trainer_module
from agent_peft.types import TrustError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
SAMPLINGS = ({"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 0.1}, {"top_p": 0.5})
RANK = 8


@dataclass(frozen=True)
class Run:
    """A setting and its result: the steps made, and the alarm that ended it."""

    part: str
    setting: str
    fault: str  # "" without one
    steps: int
    alarm: str
    mismatch: float  # the largest mean of a step, nats
    surprisal: float  # of the last step, nats
    seconds: float


# -- faults --------------------------------------------------------------------------------------------------


@contextmanager
def sampler_acts_with(adapter: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    """Inside, the sampler computes with ``adapter(B)`` for the trainer's matrices B."""
    weights = local.sampling_weights

    @contextmanager
    def sampling_weights(policy: Any, *how: Any) -> Iterator[None]:
        own = [p.data for name, p in policy.model.named_parameters() if "lora_B" in name]
        now = [b.clone() for b in own]
        for b, value in zip(own, adapter(now), strict=True):
            b.copy_(value)
        try:
            with weights(policy, *how):
                yield
        finally:
            for b, value in zip(own, now, strict=True):
                b.copy_(value)

    with patch.object(local, "sampling_weights", sampling_weights):
        yield


@contextmanager
def old_adapter() -> Iterator[None]:
    history: list[list[torch.Tensor]] = []

    def before(now: list[torch.Tensor]) -> list[torch.Tensor]:
        if not history or any(not torch.equal(a, b) for a, b in zip(now, history[-1], strict=True)):
            history.append(now)
        return history[max(0, len(history) - 2)]

    with sampler_acts_with(before):
        yield


@contextmanager
def tenth_missing() -> Iterator[None]:
    with sampler_acts_with(lambda now: [0.9 * b for b in now]):
        yield


@contextmanager
def other_temperature() -> Iterator[None]:
    draw = decoding.draw
    with patch.object(decoding, "draw", lambda logits, *rest: draw(logits / 1.1, *rest)):
        yield


@contextmanager
def shifted_mask() -> Iterator[None]:
    collate = trainer_module.collate_groups

    def shifted(*given: Any) -> Any:
        batch = collate(*given)
        mask = batch.action_mask.roll(-1, dims=1) & (torch.arange(batch.tokens.shape[1]) > 0)
        return replace(batch, action_mask=mask)

    with patch.object(trainer_module, "collate_groups", shifted):
        yield


FAULTS = (old_adapter, tenth_missing, other_temperature, shifted_mask)


# -- runs ----------------------------------------------------------------------------------------------------


def run(
    part: str,
    setting: str,
    policy: Any,
    tasks: Any,
    stage: dict[str, Any],
    seed: int,
    fault: Callable[[], Any] | None = None,
) -> Run:
    steps, mismatches, surprisal, alarm, begin = 0, [0.0], 0.0, "", time.perf_counter()
    with ExitStack() as stack:
        try:
            trainer = ap.Trainer(policy, tasks, ap.Stage(**stage), seed=seed)
            if fault is not None:
                stack.enter_context(fault())
            for step in trainer:
                steps += 1
                mismatches.append(step.metrics.get("mismatch", 0.0))
                surprisal = step.metrics.get("surprisal", surprisal)
        except TrustError as error:
            alarm = str(error)
    name = "" if fault is None else fault.__name__
    took = time.perf_counter() - begin
    found = Run(part, setting, name, steps, alarm, max(mismatches), surprisal, took)
    print(f"{part:9} {setting:44} {name:18} {steps:4} steps {found.seconds:6.1f} s  {alarm[:90]}", flush=True)
    return found


def episodes(steps: int, tasks: int, group: int, sampling: dict[str, Any], rate: float) -> dict[str, Any]:
    """A stage on policy. A random policy is never right, but is fined for what is no number."""
    return {
        "algorithm": {"kind": "reinforce", "baseline_momentum": 0.5},
        "steps": steps,
        "tasks_per_step": tasks,
        "group_size": group,
        "optimizer": {"learning_rate": rate},
        "sampling": sampling,
        "rewards": {"invalid_action": -0.3},
    }


def named(sampling: dict[str, Any]) -> str:
    return " ".join(f"{key.replace('temperature', 'T')} {value}" for key, value in sampling.items())


def tiny(given: argparse.Namespace) -> Iterator[Run]:
    tasks = ap.load_environment("arithmetic", digits=1, num_tasks=64)
    samplings = SAMPLINGS[2:3] if given.quick else SAMPLINGS
    runs = product(given.families, samplings, (2, 32), given.rates)
    for seed, (family, sampling, ratio, rate) in enumerate(runs):

        def made(dtype: str, family: str = family, ratio: int = ratio, seed: int = seed) -> Any:
            keys = {"kind": "scratch", "alphabet": "0123456789+-*= ^$", "device": "cpu"}
            lora = {"rank": RANK, "alpha": RANK * ratio}
            architecture = {"model_type": family, **SIZES}
            return ap.load_policy({**keys, "lora": lora, "architecture": architecture, "dtype": dtype}, seed)

        stage = episodes(given.steps, 16, 3, {"max_new_tokens": 6, **sampling}, rate)
        setting = f"{family} {named(sampling)} alpha/rank {ratio} rate {rate:g}"
        yield run("tiny", setting, made("bfloat16"), tasks, stage, seed)
        if rate == given.rates[-1]:
            few = {**stage, "steps": 10, "group_size": 6}
            for fault, dtype in product(FAULTS, ("bfloat16", "float32")):
                yield run("tiny", f"{setting} {dtype}", made(dtype), tasks, few, seed, fault)


def smollm2(ratio: int = 2, rank: int = RANK) -> Any:
    lora = {"rank": rank, "alpha": rank * ratio}
    return ap.load_policy({"model": "smollm2-135m", "device": "cpu", "dtype": "bfloat16", "lora": lora}, 0)


def real(given: argparse.Namespace) -> Iterator[Run]:
    tasks = ap.load_environment("arithmetic", digits=2, num_tasks=64)
    for sampling, ratio in product(SAMPLINGS[:3], (2, 32)):
        policy = smollm2(ratio)
        stage = episodes(given.real_steps, 4, 2, {"max_new_tokens": 24, **sampling}, 3e-4)
        setting = f"SmolLM2 {named(sampling)} alpha/rank {ratio} rate 3e-4"
        # from what the run without a fault has learned, as most faults would begin
        yield run("smollm2", setting, policy, tasks, stage, 1)
        learned = {name: value.clone() for name, value in adapter_of(policy).items()}
        for fault in FAULTS:
            for name, value in adapter_of(policy).items():
                value.copy_(learned[name])
            few = episodes(4, 8, 2, {"max_new_tokens": 24, **sampling}, 3e-4)
            yield run("smollm2", setting, policy, tasks, few, 2, fault)


def memorise(given: argparse.Namespace) -> Iterator[Run]:
    tasks = ap.load_environment("arithmetic", digits=3, num_tasks=64)
    optimizer = {"learning_rate": 5e-4, "schedule": "linear"}
    stage = {"algorithm": "sft", "steps": given.memorised, "tasks_per_step": 8, "optimizer": optimizer}
    policy = smollm2(2, 32)
    start = {name: value.clone() for name, value in adapter_of(policy).items()}
    yield run("memorise", "SmolLM2 sft rank 32 rate 5e-4 to 0", policy, tasks, stage, 0)
    learned = {name: value.clone() for name, value in adapter_of(policy).items()}
    for fault in FAULTS[:2]:  # the others do not concern demonstrations
        for when, values in {"at the start": start, "when memorised": learned}.items():
            for name, value in adapter_of(policy).items():
                value.copy_(values[name])
            few = {**stage, "steps": 5}
            yield run("memorise", f"SmolLM2 sft {when}", policy, tasks, few, 1, fault)


def adapter_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in policy.model.named_parameters() if "lora_" in name}


PARTS = {"tiny": tiny, "smollm2": real, "memorise": memorise}


def main() -> None:
    given = command_line(
        __doc__,
        quick={"parts": ["tiny"], "families": ["llama"], "rates": [1e-2], "steps": 4},
        parts={"nargs": "+", "choices": list(PARTS), "default": list(PARTS)},
        families=["llama", "qwen3", "gemma3_text"],
        rates=[3e-3, 1e-2],
        steps=200,  # of a run of a tiny model
        real_steps=60,
        memorised=300,  # supervised steps
        output="alarms",  # name of the file in results/
    )
    torch.set_num_threads(1)
    runs = [one for part in given.parts for one in PARTS[part](given)]
    groups: dict[tuple[str, str, bool], list[Run]] = {}
    for one in runs:
        groups.setdefault((one.part, one.fault, "float32" in one.setting), []).append(one)
    rows = []
    for (part, fault, exact), same in groups.items():
        stopped = [one.steps for one in same if one.alarm]
        steps, took = sum(one.steps for one in same), sum(one.seconds for one in same)
        after = f"{min(stopped)} to {max(stopped)}" if stopped else "-"
        name = (fault or "none") + (" (float32)" if exact else "")
        rows.append((part, name, len(same), steps, len(stopped), after, f"{took:.0f}"))
    show(table("part|fault|runs|steps|stopped|after steps|seconds", rows, "bfloat16"))
    content = {"native bfloat16": has_bf16(torch.device("cpu")), "runs": [asdict(one) for one in runs]}
    write(given.results / f"{Path(given.output).name}.json", content)


if __name__ == "__main__":
    main()
