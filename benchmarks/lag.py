"""What ``lag`` saves in a step, and what it costs in learning.

    python benchmarks/lag.py [--rounds 8] [--waits 0 0.02 0.2 1]

The seconds of a step with lag 0 and with lag 1, in turn: GRPO on one-digit sums, 64 episodes of a random
model with replies of up to 24 tokens, the local engine, one thread of torch. In each case an environment
waits so long before it answers. Prints the medians and the median of the ratios of the pairs. With
``--served``, a process of one thread (``agent-peft serve-policy``) samples.

    python benchmarks/lag.py --learn [--lags 0 1 2 4] [--seeds 0 1 2] [--steps 40] [--rate 3e-3]

The share of correct answers in the last eight steps, of a model that has seen six steps of demonstrations
(algorithm_curves.py has the setting). The loss is RLOO's with the ratio to the sampler, of which 2 counts at
most, or without a ratio, which no row offers with a lag. Prints the mean over seeds and its
95 % interval (Student's t). Both parts write benchmarks/results/lag.json.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from algorithm_curves import TASKS, begin, stage
from measuring import alternate, command_line, policy_server, ratio, show, table, write

from agent_peft.algorithms import AlgorithmConfig, PolicyGradient, leave_one_out
from agent_peft.algorithms.surrogates import token_mean, truncated
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.base import Episode
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import ServerEngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.rollout.intervals import t95
from agent_peft.training.trainer import Trainer
from agent_peft.types import Task

LARGER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
TOKEN = "AGENT_PEFT_LAG_TOKEN"


class Corrected(AlgorithmConfig):
    """RLOO's advantage times the ratio, of which no more than ``most`` counts; None leaves it out."""

    kind: str = "lag:Corrected"
    most: float | None = 2.0

    def build(self) -> PolicyGradient:
        surrogate: Any = uncorrected if self.most is None else truncated(self.most - 1)
        return PolicyGradient("lag", leave_one_out, surrogate, token_mean, compares_groups=True)


def uncorrected(logprobs: Any, sampled: Any, advantages: Any, mask: Any) -> Any:
    """REINFORCE's loss, as if the present policy had sampled."""
    return -advantages * logprobs, torch.zeros_like(mask)


class Slow(Arithmetic):
    """Sums whose answers are graded after a wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__(ArithmeticConfig(digits=1, num_tasks=80))
        self.seconds = seconds

    def episode(self, task: Task, seed: int) -> Episode:
        episode = super().episode(task, seed)
        grade = episode.step

        def waiting(action: str) -> Any:
            time.sleep(self.seconds)
            return grade(action)

        episode.step = waiting
        return episode


@contextmanager
def server(folder: Path) -> Iterator[ServerEngineConfig]:
    """A random model, written to ``folder`` and sampled by a process of one thread."""
    policy = load_policy(ScratchConfig(architecture=LARGER, alphabet=ALPHABET, device="cpu"), 0)
    policy.model.to(torch.bfloat16).save_pretrained(folder / "model")  # as models are stored
    policy.chat.tokenizer.save_pretrained(folder / "model")
    os.environ[TOKEN] = secrets.token_hex(16)
    options = ["--adapters", str(folder), "--token", TOKEN, "--dtype", "float32", "--max-tokens", "128"]
    with policy_server(str(folder / "model"), *options, "--rows", "64", threads=1) as url:
        yield ServerEngineConfig(urls=(url.removesuffix("/v1"),), token=TOKEN, folder=folder / "adapters")


def stepping(
    seconds: float, lag: int, steps: int, episodes: int, engine: ServerEngineConfig | None
) -> Callable[[], object]:
    """One step of a trainer at each call."""
    if engine is None:
        policy = load_policy(ScratchConfig(architecture=LARGER, alphabet=ALPHABET, device="cpu"), 0)
    else:
        assert engine.folder is not None
        model = str(engine.folder.parent / "model")
        config = PretrainedConfig(model=model, dtype="float32", lora=LoraSettings(rank=16), device="cpu")
        policy = load_policy(config, 0)
    keys = {
        "algorithm": {"kind": "grpo", "entropy_coef": 1e-6},  # so that each episode has a gradient
        "optimizer": {"learning_rate": 1e-7},  # so that the replies stay as long as they are
        "tasks_per_step": episodes // 8,
        "sampling": {"max_new_tokens": 24, "max_tokens": 64},
        "microbatch_tokens": 4096,
    }
    settings = stage("grpo", steps, lag=lag, rewards={"invalid_action": -0.5}, **keys)
    sampler = None if engine is None else load_sampler(policy, engine)
    trainer = iter(Trainer(policy, Slow(seconds), settings, sampler))
    return lambda: next(trainer)


def measure_steps(
    waits: list[float], rounds: int, episodes: int, engine: ServerEngineConfig | None = None
) -> list[dict[str, Any]]:
    rows = []
    for wait in waits:
        ways = {str(lag): stepping(wait, lag, rounds + 4, episodes, engine) for lag in (0, 1)}
        times = alternate(ways, rounds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        rows.append({"wait": wait, **medians, "ratio": ratio(times["1"], times["0"])})
    return rows


def success(folder: Path, lag: int, most: float | None, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """Of the last eight steps, and the means of what shows how old the episodes are."""
    lora = LoraSettings(rank=16)
    policy = load_policy(PretrainedConfig(model=str(folder), lora=lora, device="cpu"), seed=seed)
    keys = {"tasks_per_step": 12, "sampling": {"max_new_tokens": 3}, "rewards": {"incorrect": 0.0}}
    settings = stage("grpo", steps, lag=lag, **keys)
    settings = settings.model_copy(
        update={
            "algorithm": Corrected(most=most),
            "optimizer": settings.optimizer.model_copy(update={"learning_rate": rate}),
        }
    )
    metrics = [step.metrics for step in Trainer(policy, TASKS, settings, seed=seed)]
    means = {
        name: statistics.mean(m[name] for m in metrics if name in m)
        for name in ("staleness", "effective_sample_size")
        if any(name in m for m in metrics)
    }
    return {"success": statistics.mean(m["success"] for m in metrics[-8:]), **means}


def measure_learning(lags: list[int], seeds: list[int], steps: int, rate: float) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folders = {seed: Path(temporary) / str(seed) for seed in seeds}
        for seed, folder in folders.items():
            begin(folder, seed, 6)
        for lag in lags:
            for most in (2.0, None):
                runs = [success(folders[seed], lag, most, seed, steps, rate) for seed in seeds]
                rows.append({"lag": lag, "corrected": most is not None, "rate": rate, "runs": runs})
    return rows


def of_seeds(values: list[float]) -> str:
    """Mean and 95 % interval."""
    half = 0.0
    if len(values) > 1:
        half = t95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{100 * statistics.mean(values):.1f} ± {100 * half:.1f} %" if half else f"{100 * values[0]:.1f} %"


def print_learning(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        runs = row["runs"]
        means = [
            statistics.mean(values) if (values := [run[name] for run in runs if name in run]) else None
            for name in ("staleness", "effective_sample_size")
        ]
        lines.append(
            (
                row["lag"],
                "ratio, at most 2" if row["corrected"] else "none",
                of_seeds([run["success"] for run in runs]),
                ", ".join(f"{100 * run['success']:.0f}" for run in runs),
                *("" if mean is None else f"{mean:.3f}" for mean in means),
            )
        )
    show(table("lag|correction|success at the end|each seed|staleness|effective sample size", lines))


def main() -> None:
    given = command_line(
        __doc__,
        quick={"rounds": 1, "waits": [0.02], "episodes": 16, "seeds": [0], "steps": 2, "lags": [1]},
        rounds=8,
        waits=[0.0, 0.02, 0.2, 1.0],
        episodes=64,  # of a step
        learn=False,
        served=False,
        lags=[0, 1, 2, 4],
        seeds=[0, 1, 2],
        steps=40,
        rate=3e-3,
    )
    torch.set_num_threads(1)
    file = given.results / "lag.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    if given.learn or given.quick:
        content["learning"] = measure_learning(given.lags, given.seeds, given.steps, given.rate)
        print_learning(content["learning"])
    if given.served:
        with tempfile.TemporaryDirectory() as temporary, server(Path(temporary)) as engine:
            content["served"] = measure_steps(given.waits, given.rounds, given.episodes, engine)
    elif not given.learn:
        content["steps"] = measure_steps(given.waits, given.rounds, given.episodes)
    if given.served or not given.learn:
        lines = [
            (f"{1000 * row['wait']:.0f} ms", *(f"{row[x]:.3f} s" for x in "01"), f"{row['ratio']:.2f}")
            for row in content["served" if given.served else "steps"]
        ]
        show(table("an environment waits|lag 0|lag 1|ratio", lines))
    write(file, content)


if __name__ == "__main__":
    main()
