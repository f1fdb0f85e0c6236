"""A learning curve of every algorithm on one-digit addition, from the same start.

    python benchmarks/algorithm_curves.py [--seeds 0 1 2] [--steps 40] [--kinds rloo grpo …]

A model of one layer, trained from scratch on one thread, first sees six steps of demonstrations, so that it
is right about one time in five. Each algorithm then trains a LoRA adapter of rank 16 on it, with its default
keys. The curve is the share of correct answers among the 96 sampled answers of a step (temperature 1).
Rows that learn from demonstrations or preferences have their policy sampled before every fourth step.

dpo and simpo learn from the policy's own answers, in four rounds. Each round first samples 96 answers for
each of its steps, as the other rows do in these steps, and then learns from the first right and the first
wrong one of each group. The preferences of kto and orpo are the environment's: the right answer, and a wrong
one. The teacher of distill has seen 60 steps of demonstrations.

Prints a table, and writes benchmarks/results/algorithm_curves.json and docs/pictures/algorithm_curves.svg.

    python benchmarks/algorithm_curves.py --refill [--seeds 0 1 2] [--steps 20]

What collecting others in place of constant groups costs, and what it gives: after eight steps of
demonstrations GRPO trains a model on 12 groups of 4 answers a step, without a refill and with one and three
rounds. Prints the groups of a step that have a signal, the tokens that are sampled, and the share of correct
answers in the last five steps, over all answers that were sampled.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from figures import PICTURES, algorithm_curves, mean_of
from measuring import command_line, show, table

from agent_peft.algorithms import ALGORITHMS
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.ranks import ALONE
from agent_peft.rollout.pairs import EpisodePairs
from agent_peft.seeding import derive
from agent_peft.training.source import build_source
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import Step
from agent_peft.training.trainer import Trainer

TASKS = Arithmetic(ArithmeticConfig(digits=1, num_tasks=24))
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
REQUIRED = {"dr_grpo": {"constant_length": 3}}  # keys without a default
EVERY = 4  # steps, between two looks at a policy that samples nothing
OWN_PAIRS = ("dpo", "simpo")  # a single wrong answer for each task says nothing of the other wrong ones
ROUNDS = 4  # in which they sample again
REFILLS = {"neither": {}, "refill: 1": {"refill": 1}, "refill: 3": {"refill": 3}}


def stage(kind: str, steps: int, **keys: Any) -> StageConfig:
    algorithm = {"kind": kind, **REQUIRED.get(kind, {})}
    settings = {"algorithm": algorithm, "steps": steps, "optimizer": {"learning_rate": 3e-3}, **keys}
    return StageConfig.model_validate(settings)


def acting(kind: str, steps: int, **keys: Any) -> StageConfig:
    groups = {"tasks_per_step": 96, "group_size": 1} if kind == "ppo" else {"tasks_per_step": 12}
    return stage(kind, steps, **groups, sampling={"max_new_tokens": 3}, rewards={"incorrect": 0.0}, **keys)


def small_policy(seed: int) -> Policy:
    return load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu"), seed)


def begin(folder: Path, seed: int, steps: int) -> None:
    """Write a model that has seen so many steps of demonstrations."""
    policy = small_policy(seed)
    for _ in Trainer(policy, TASKS, stage("sft", steps, tasks_per_step=24), seed=seed):
        pass
    policy.save_merged(folder)


def steps_of(kind: str, policy: Policy, sampler: Sampler, steps: int, seed: int) -> Iterator[Step]:
    """The steps of a row that does not sample, in rounds where the policy's own answers are its pairs."""
    if kind not in OWN_PAIRS:
        yield from Trainer(policy, TASKS, stage(kind, steps, tasks_per_step=24), sampler, seed)
        return
    for number in range(ROUNDS):
        part, round_seed = steps // ROUNDS, derive(seed, "round", number)
        answers = build_source(acting("rloo", part), TASKS, sampler, round_seed, ALONE)
        groups = (group for step in range(part) for group in answers.collect(step).groups)
        pairs = EpisodePairs(groups, 24, round_seed, "pairs", "the answers of a round")
        settings = stage(kind, part, tasks_per_step=24)
        yield from Trainer(policy, TASKS, settings, sampler, round_seed, source=pairs)


def curve(kind: str, folder: Path, steps: int, seed: int) -> list[tuple[int, float]]:
    """Steps done -> share of correct answers."""
    policy = load_policy(
        PretrainedConfig(model=str(folder), lora=LoraSettings(rank=16), device="cpu"), seed=seed
    )
    if ALGORITHMS[kind](**REQUIRED.get(kind, {})).facts.on_policy:
        keys = {}
        if kind == "distill":
            begin(folder / "teacher", seed, 60)
            keys = {"teacher": {"model": str(folder / "teacher")}}
        trainer = Trainer(policy, TASKS, acting(kind, steps, **keys), seed=seed)
        return [(step.number, step.metrics["success"]) for step in trainer]
    sampler = load_sampler(policy)
    episodes = build_source(acting("rloo", steps), TASKS, sampler, seed, ALONE)
    trained, points = steps_of(kind, policy, sampler, steps, seed), []
    for done in range(steps + 1):
        if done % EVERY == 0:
            answers = [t for group in episodes.collect(done).groups for t in group.trajectories]
            points.append((done, sum(t.outcome == "correct" for t in answers) / len(answers)))
        next(trained, None)
    return points


def refill(seed: int, steps: int, keys: dict[str, Any]) -> list[Step]:
    tasks, policy = Arithmetic(ArithmeticConfig(digits=1, num_tasks=48)), small_policy(seed)
    general = {"tasks_per_step": 12, "sampling": {"max_new_tokens": 3}}
    list(Trainer(policy, tasks, stage("sft", 8, **general), seed=seed))
    return list(Trainer(policy, tasks, stage("grpo", steps, group_size=4, **general, **keys), seed=seed))


def compare_refills(seeds: list[int], steps: int) -> None:
    rows = []
    for name, keys in REFILLS.items():
        runs = [refill(seed, steps, keys) for seed in seeds]
        every = [step for run in runs for step in run]
        signal = mean(step.metrics["groups_with_signal"] * len(step.collection.kept) for step in every)
        tokens = mean(step.collection.statistics.sampled for step in every)
        ends = [mean(step.metrics["success"] for step in run[-5:]) for run in runs]
        end = f"{mean(ends):.0%} ({', '.join(f'{end:.0%}' for end in ends)})"
        rows.append((name, f"{signal:.1f}", f"{tokens:.0f}", f"{tokens / signal:.0f}", end))
    show(table("|groups with a signal, of 12|tokens a step|tokens per such group|success at the end", rows))


def compare_algorithms(seeds: list[int], steps: int, kinds: list[str], results: Path) -> None:
    begin_at, curves, rows = time.process_time(), dict[str, list[list[tuple[int, float]]]](), []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {seed: Path(temporary) / str(seed) for seed in seeds}
        for seed, folder in folders.items():
            begin(folder, seed, 6)
        for kind in kinds:
            start = time.process_time()
            runs = curves[kind] = [curve(kind, folder, steps, seed) for seed, folder in folders.items()]
            ends = [[share for _, share in part] for part in (mean_of(runs)[:4], mean_of(runs)[-4:])]
            each = ", ".join(f"{100 * mean(share for _, share in run[-4:]):.0f}" for run in runs)
            shown = (f"{100 * mean(end):.0f} %" for end in ends)
            rows.append((kind, *shown, each, f"{time.process_time() - start:.0f}"))
    file = results / "algorithm_curves.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    spent = round(time.process_time() - begin_at)
    if before.get("seeds") == seeds and len(curves) < len(ALGORITHMS):
        every = {**before["curves"], **curves}  # those of other kinds stay
        curves = {kind: every[kind] for kind in ALGORITHMS if kind in every}
        spent += before["cpu_seconds"]
    content = {"seeds": seeds, "cpu_seconds": spent, "curves": curves}
    file.write_text(json.dumps(content) + "\n")
    picture = algorithm_curves(content)
    if results.parent == PICTURES.parents[1] / "benchmarks":
        (PICTURES / "algorithm_curves.svg").write_text(picture)
    show(table("algorithm|first 4 points|last 4 points|last 4 points of each seed|CPU s", rows))


def main() -> None:
    every = list(ALGORITHMS)
    given = command_line(
        __doc__,
        quick={"seeds": [0], "steps": 4},
        seeds=[0, 1, 2],
        steps=int,  # of each curve; 40, and 20 with --refill
        kinds={"nargs": "+", "choices": every, "default": every},
        refill=False,
    )
    torch.set_num_threads(1)
    if given.refill or given.quick:
        compare_refills(given.seeds, given.steps or 20)
    if not given.refill:
        compare_algorithms(given.seeds, given.steps or 40, given.kinds, given.results)


if __name__ == "__main__":
    main()
