"""Our side of ``against_trl.py``: a Trainer from a configuration file that makes a step when the driver asks
for one.

    python benchmarks/our_side.py SETTINGS.json     # the driver writes the file and uses the standard streams
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paired_episodes import Turnstile

from agent_peft.configuration.load import read_config
from agent_peft.configuration.yaml12 import dump
from agent_peft.environments import load_environment
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.forward.trie import build_trie
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.ranks import ALONE
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.sources import Source
from agent_peft.training.source import build_source
from agent_peft.training.trainer import Trainer
from agent_peft.types import Trajectory


@dataclass(frozen=True)
class Timed:
    """A source that counts the time of another one."""

    source: Source
    turnstile: Turnstile

    def collect(self, step: int) -> Collection:
        with self.turnstile.spending("sampling"):
            return self.source.collect(step)


def main() -> None:
    turnstile, settings = Turnstile(), json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    same = {key: settings[key] for key in ("tasks_per_step", "group_size", "steps", "threads", "seed")}
    if settings["equal"]:
        same["microbatch_tokens"] = settings["microbatch_tokens"]
        rows = settings["tasks_per_step"] * settings["group_size"]
        same["engine"] = {"rows": rows, "prefill_tokens": settings["prefill_tokens"]}
    content = {
        **same,
        "run_dir": str(folder / "run"),
        "policy": settings["policy"],
        "environment": {"kind": "paired_episodes:EverySecond", **settings["environment"]},
        "sampling": {"max_new_tokens": settings["new_tokens"], "max_tokens": settings["max_tokens"]},
        "algorithm": "grpo",
        "task_order": "sequential",
        "optimizer": {"learning_rate": settings["learning_rate"]},
    }
    (folder / "config.yaml").write_text(dump(content))
    config, _ = read_config(folder / "config.yaml")
    torch.set_num_threads(settings["threads"])
    policy = load_policy(config.policy, config.seed)
    stage, environment = config.stages[0], load_environment(config.environment)
    engine = load_sampler(policy, config.engine)
    source = Timed(build_source(stage, environment, engine, config.seed, ALONE), turnstile)
    trainer = Trainer(
        policy=policy, environment=environment, stage=stage, engine=engine, seed=config.seed, source=source
    )
    trained = sum(p.numel() for p in policy.trainable_parameters())
    turnstile.tell(trained=trained, precision=str(policy.dtype).removeprefix("torch."))
    turnstile.wait()
    for step in trainer:
        spent = turnstile.stop()
        found = [t for group in step.collection.groups for t in group.trajectories]
        counts = {
            "prompts": sorted({t.turns[0].observation for t in found}),
            "episodes": len(found),
            "tokens": sum(len(t.tokens) for t in found),
            "sampled": sum(t.num_action_tokens for t in found),
            "turns": sum(len(t.turns) for t in found),
            "skipped": step.metrics["updates_skipped"],
        }
        turnstile.tell(**spent, **counts, floor=floor(policy, found))
        turnstile.wait()


def floor(policy: Policy, trajectories: list[Trajectory]) -> dict[str, int]:
    """Return the minimum of work of a step, as the driver's docstring defines it."""
    text, head = policy.base.config.get_text_config(), policy.head.weight
    layers = {name: p for m, name, p in matrices(policy) if m is not policy.head}
    adapter = sum(p.numel() for name, p in layers.items() if "lora_" in name)
    weights = sum(p.numel() for p in layers.values()) - adapter
    trained_weights = sum(p.numel() for name, p in layers.items() if "lora_" not in name and p.requires_grad)
    trie = build_trie([t.tokens for t in trajectories])
    read = {node for path in trie.paths for node in path[:-1]}  # an episode's last token is never read
    predict = {
        path[t - 1]
        for path, x in zip(trie.paths, trajectories, strict=True)
        for t, acted in enumerate(x.action_mask)
        if acted
    }
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attended = (
        sum(trie.positions[node] + 1 for node in read)
        * 2
        * text.num_hidden_layers
        * text.num_attention_heads
        * width
    )
    heads = len(predict) * head.numel()
    passes = max(t.num_action_tokens for t in trajectories)
    sampling = len(read) * weights + heads + attended
    forward = len(read) * (weights + adapter) + heads + attended
    backward = (
        len(read) * (weights + 2 * adapter + trained_weights)
        + heads * (1 + head.requires_grad)
        + 2 * attended
    )
    size = head.element_size()
    return {
        "distinct_tokens": len(trie),
        "multiply_adds": sampling + forward + backward,
        "sampling_multiply_adds": sampling,
        "bytes": size * ((weights + head.numel()) * passes + 2 * (weights + adapter + head.numel())),
        "passes": passes,
    }


def matrices(policy: Policy) -> list[tuple[Any, str, Any]]:
    """List all weights that multiply tokens: (module, name, parameter)."""
    found = [
        (m, f"{name}.{n}", p)
        for name, m in policy.model.named_modules()
        for n, p in m.named_parameters(recurse=False)
        if p.ndim == 2
    ]
    return [(m, name, p) for m, name, p in found if not isinstance(m, torch.nn.Embedding)]


if __name__ == "__main__":
    main()
