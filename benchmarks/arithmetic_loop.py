"""Compare a step of the arithmetic model's loop with a loop written by hand for this one case: 64 tasks × 8
rollouts, REINFORCE.

    python benchmarks/arithmetic_loop.py [--steps 8] [--threads 1] [--profile] [key=value ...]

Both loops start from one supervised snapshot (the configuration's first stage, about a minute) and alternate
step by step. The hand-written loop is plain PyTorch on the same Transformers model: 512 rows that share
nothing, a KV cache, multinomial draws until every row has ended, answers graded by string comparison, one
padded forward, backward, clipping, AdamW. It checks nothing and records nothing. A second hand-written loop
reads each prompt once. Our target is at most 1.3 times the first. The program prints tables and writes
benchmarks/results/arithmetic_loop.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import Split, alternate, hot_spots, measure_limits, ratio, write
from rich.console import Console
from rich.table import Table
from smoke import parse
from transformers import DynamicCache, PreTrainedModel

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.training import checks
from agent_peft.training import trainer as training
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Step, Trainer

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "adder_reinforce.yaml"
BOUND = 1.3


class HandWritten:
    """REINFORCE with a moving-average baseline, for sums of three digits only."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        environment: Environment,
        stage: StageConfig,
        read_once: bool,
    ) -> None:
        self.model, self.stage, self.read_once = model, stage, read_once
        rate, o = stage.optimizer.learning_rate, stage.optimizer
        matrices, vectors = (
            [p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=o.betas, eps=o.epsilon)
        self.end = min(policy.chat.end_of_turn)
        self.characters = [policy.chat.decode_action([token]) for token in range(len(policy.chat.tokenizer))]
        self.prompts, self.answers = [], []
        for task in list(environment.tasks[: 64 * stage.tasks_per_step]):
            self.prompts.append(policy.chat.opening(list(environment.episode(task, 0).start())))
            (answer,) = environment.demonstration(task) or ()
            self.answers.append(answer)
        self.baseline, self.turn, self.tokens, self.success = 0.0, 0, 0, 0.0

    def step(self) -> None:
        tasks = range(self.turn * self.stage.tasks_per_step, (self.turn + 1) * self.stage.tasks_per_step)
        tasks = [task % len(self.prompts) for task in tasks]
        self.turn += 1
        siblings = self.stage.group_size
        prompts = torch.tensor([self.prompts[task] for task in tasks])
        tokens = self.sample(prompts, siblings)
        prompt = prompts.shape[1]
        written = [
            "".join(self.characters[t] for t in row if t != self.end)
            for row in self.actions(tokens[:, prompt:])
        ]
        answers = [self.answers[task] for task in tasks for _ in range(siblings)]
        rewards = torch.tensor([float(text == answer) for text, answer in zip(written, answers, strict=True)])
        self.success = float(rewards.mean())
        self.baseline = 0.9 * self.baseline + 0.1 * self.success
        ended = (tokens[:, prompt:] == self.end).cumsum(1)
        mask = (ended - (tokens[:, prompt:] == self.end).long()) == 0  # up to and including the end token
        logits = self.model(tokens[:, :-1], use_cache=False, logits_to_keep=tokens.shape[1] - prompt).logits
        logp = logits.log_softmax(-1).gather(-1, tokens[:, prompt:, None])[..., 0]
        loss = -((rewards - self.baseline)[:, None] * logp * mask).sum() / len(tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.stage.optimizer.max_grad_norm)
        self.optimizer.step()
        self.tokens = int(mask.sum()) + prompts.numel() * siblings

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, siblings: int) -> torch.Tensor:
        """Return (tasks × siblings, T): prompts and sampled tokens; end tokens fill the rest of a row."""
        rows = prompts.repeat_interleave(siblings, 0)
        cache = DynamicCache(config=self.model.config)
        logits = self.model(
            prompts if self.read_once else rows, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        if self.read_once:
            cache.batch_repeat_interleave(siblings)
            logits = logits.repeat_interleave(siblings, 0)
        drawn: list[torch.Tensor] = []
        ended = torch.zeros(len(rows), dtype=torch.bool)
        while True:
            token = torch.multinomial(logits.softmax(-1), 1)
            token[ended] = self.end
            drawn.append(token)
            ended |= token[:, 0] == self.end
            if len(drawn) == self.stage.sampling.max_new_tokens or bool(ended.all()):
                return torch.cat([rows, *drawn], 1)
            logits = self.model(token, past_key_values=cache).logits[:, -1]

    def actions(self, drawn: torch.Tensor) -> list[list[int]]:
        return [row[: row.index(self.end)] if self.end in row else row for row in drawn.tolist()]


def build_trainer(config: TrainConfig, stage: int, policy: Policy, environment: Environment) -> Trainer:
    return Trainer(
        policy, environment, config.stages[stage], load_sampler(policy, config.engine), config.seed
    )


def warm_up(config: TrainConfig, policy: Policy, environment: Environment) -> float:
    """Run the configuration's first stage to its end."""
    for step in build_trainer(config, 0, policy, environment):
        surprisal = step.metrics["surprisal"]
    return surprisal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each loop")
    parser.add_argument("--threads", type=int, default=1, help="the configuration has 1")
    parser.add_argument(
        "--snapshot",
        type=Path,
        help="folder of the supervised snapshot, which is made if it does not exist",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print the operators on which our step spends its time"
    )
    parser.add_argument("overrides", nargs="*")
    small = ["stages.0.steps=2", "stages.1.tasks_per_step=4"]
    arguments = parse(parser, steps=1, profile=True, overrides=small)
    torch.set_num_threads(arguments.threads)
    console = Console(width=150)
    limits = measure_limits()
    config, _ = read_config(CONFIG, arguments.overrides)
    environment = load_environment(config.environment)
    policy = load_policy(config.policy, config.seed)
    if arguments.snapshot is not None and arguments.snapshot.is_dir():
        policy.load(arguments.snapshot)
    else:
        console.print(
            f"supervised snapshot: surprisal {warm_up(config, policy, environment):.3f} nats a token"
        )
        if arguments.snapshot is not None:
            policy.save(arguments.snapshot)
    stage = config.stages[1]
    models = {name: copy.deepcopy(policy.base) for name in ("by hand", "by hand, prompts read once")}
    hands = {
        name: HandWritten(model, policy, environment, stage, "once" in name) for name, model in models.items()
    }
    trainer = build_trainer(config, 1, policy, environment)
    steps = iter(trainer)
    last: list[Step] = []

    def our_step() -> None:
        last[:] = [next(steps)]

    ways: dict[str, Callable[[], object]] = {
        "ours": our_step,
        **{name: hand.step for name, hand in hands.items()},
    }
    found = alternate(ways, arguments.steps)
    step, hand = last[0], hands["by hand"]
    sequences = [list(t.tokens) for group in step.collection.groups for t in group.trajectories]
    nodes, tokens = policy.count_nodes(sequences), sum(map(len, sequences))

    # operations per weight and token, including the output layer: 2 if it is read or sampled, 6 if trained
    weights = sum(
        p.numel()
        for m in policy.base.modules()
        if not isinstance(m, torch.nn.Embedding)
        for p in m.parameters(recurse=False)
    )
    read = {
        "ours": step.collection.statistics.prefilled + step.collection.statistics.sampled,
        "by hand": hand.tokens,
        "by hand, prompts read once": hand.tokens
        - len(sequences) * len(hand.prompts[0]) * (stage.group_size - 1) // stage.group_size,
    }
    trained = {"ours": nodes, "by hand": hand.tokens, "by hand, prompts read once": hand.tokens}
    table = Table(
        "",
        "s a step",
        "fastest",
        "slowest",
        "times by hand",
        "tokens read",
        "trained on",
        "GFLOP",
        "floor, s",
        "success, %",
    )
    rows = []
    for name, times in found.items():
        work = weights * (2 * read[name] + 6 * trained[name])
        success = step.metrics["success"] if name == "ours" else hands[name].success
        row = {
            "way": name,
            "median": statistics.median(times),
            "seconds": times,
            "times_by_hand": ratio(times, found["by hand"]),
            "tokens_read": read[name],
            "tokens_trained": trained[name],
            "flops": work,
            "floor": work / limits.flops,
            "success": success,
        }
        rows.append(row)
        shown = [
            f"{row['median']:.3f}",
            f"{min(times):.3f}",
            f"{max(times):.3f}",
            f"{row['times_by_hand']:.2f}",
            str(read[name]),
        ]
        table.add_row(
            name,
            *shown,
            str(trained[name]),
            f"{work / 1e9:.1f}",
            f"{row['floor']:.3f}",
            f"{100 * success:.0f}",
        )
    console.print(table)
    console.print(
        f"{tokens} tokens of {len(sequences)} trajectories are {nodes} nodes of the trie; {limits.text}"
    )

    split = Split()
    parts = {
        "sampling (Sampler.generate)": (trainer.engine, "generate"),
        "environments and chat tokens around it": (trainer.source.collector, "collect"),
        "collating": (training, "collate_groups"),
        "advantages": (trainer, "prepare"),
        "counting nodes to cut microbatches": (policy, "count_nodes"),
        "forward (Policy.forward)": (policy, "forward"),
        "loss and metrics": (trainer.algorithm.__class__, "loss"),
        "backward": (torch.Tensor, "backward"),
        "clipping": (torch.nn.utils, "clip_grad_norm_"),
        "optimizer": (trainer.optimizer, "step"),
        "check: on policy": (checks, "assert_on_policy"),
        "check: same policy": (checks.Canary, "after_update"),
        "describing": (training, "describe"),
    }
    with split.watch(parts):
        for _ in range(3):
            with split.part("the rest"):
                our_step()
    total = sum(split.seconds.values())
    table = Table("where our step's time goes", "ms", "percent")
    for name, took in sorted(split.seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{1000 * took / 3:.1f}", f"{100 * took / total:.1f}")
    console.print(table)
    content = {
        "limits": vars(limits),
        "rows": rows,
        "tokens": tokens,
        "nodes": nodes,
        "overrides": arguments.overrides,
    }
    content |= {"split_ms": {name: 1000 * took / 3 for name, took in split.seconds.items()}}
    if arguments.profile:
        content["hot_spots"] = hot_spots(our_step)
        console.print(
            *(
                f"{spot['percent']:5.1f} %  {spot['calls']:6d} x  {spot['operator']}"
                for spot in content["hot_spots"]
            ),
            sep="\n",
        )
    ours_ratio = rows[0]["times_by_hand"]
    console.print(
        f"target: at most {BOUND} times the hand-written loop: {ours_ratio:.2f}, "
        f"{'met' if ours_ratio <= BOUND else 'MISSED'}"
    )
    write(arguments.results, "arithmetic_loop", content)


if __name__ == "__main__":
    main()
