"""Compare a step of the arithmetic model's loop with a loop written by hand for this one case: 64 tasks × 8
rollouts, REINFORCE.

    python benchmarks/arithmetic_loop.py [--steps 8] [--threads 1] [--snapshot FOLDER] [key=value ...]

Both loops start from one supervised snapshot (the configuration's first stage, about a minute) and alternate
step by step. The hand-written loop is plain PyTorch on the same Transformers model: 512 rows that share
nothing, a KV cache, multinomial draws until every row has ended, answers graded by string comparison, one
padded forward, backward, clipping, AdamW. It checks nothing and records nothing. A second hand-written loop
reads each prompt once. Our target is at most 1.3 times the first. --snapshot names a folder that keeps the
supervised snapshot. The program prints a table and writes benchmarks/results/arithmetic_loop.json.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import ROOT, alternate, command_line, measure_limits, ratio, show, table, write
from transformers import DynamicCache, PreTrainedModel

from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.step_metrics import Step
from agent_peft.training.trainer import Trainer

CONFIG = ROOT / "configs" / "adder_reinforce.yaml"
TARGET = 1.3


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
    given = command_line(
        __doc__,
        {"overrides": []},
        quick={"steps": 1, "overrides": ["stages.0.steps=2", "stages.1.tasks_per_step=4"]},
        steps=8,  # timed steps of each loop
        threads=1,  # as in the configuration
        snapshot=Path,
    )
    torch.set_num_threads(given.threads)
    limits = measure_limits()
    config, _ = read_config(CONFIG, given.overrides)
    environment, policy = load_environment(config.environment), load_policy(config.policy, config.seed)
    if given.snapshot is not None and given.snapshot.is_dir():
        policy.load(given.snapshot)
    else:
        show(f"supervised snapshot: surprisal {warm_up(config, policy, environment):.3f} nats a token")
        if given.snapshot is not None:
            policy.save(given.snapshot)
    stage, once = config.stages[1], "by hand, prompts read once"
    hands = {
        name: HandWritten(copy.deepcopy(policy.base), policy, environment, stage, name == once)
        for name in ("by hand", once)
    }
    steps = iter(build_trainer(config, 1, policy, environment))
    last: list[Step] = []

    def our_step() -> None:
        last[:] = [next(steps)]

    ways: dict[str, Callable[[], object]] = {"ours": our_step}
    ways |= {name: hand.step for name, hand in hands.items()}
    times = alternate(ways, given.steps)
    step, hand = last[0], hands["by hand"]
    sequences = [list(t.tokens) for group in step.collection.groups for t in group.trajectories]
    nodes, tokens = policy.count_nodes(sequences), sum(map(len, sequences))
    siblings = len(sequences) * (stage.group_size - 1) // stage.group_size  # whose prompts are not read again
    read = {
        "ours": step.collection.statistics.prefilled + step.collection.statistics.sampled,
        "by hand": hand.tokens,
        once: hand.tokens - siblings * len(hand.prompts[0]),
    }
    # operations per weight and token, including the output layer: 2 if it is read or sampled, 6 if trained
    embedded = {m for m in policy.base.modules() if isinstance(m, torch.nn.Embedding)}
    modules = (m for m in policy.base.modules() if m not in embedded)
    weights = sum(p.numel() for module in modules for p in module.parameters(recurse=False))
    rows, shown = [], []
    for name, own in times.items():
        trained = nodes if name == "ours" else hand.tokens
        work = weights * (2 * read[name] + 6 * trained)
        row = {
            "way": name,
            "median": statistics.median(own),
            "seconds": own,
            "times_by_hand": ratio(own, times["by hand"]),
            "tokens_read": read[name],
            "tokens_trained": trained,
            "flops": work,
            "floor": work / limits.flops,
            "success": step.metrics["success"] if name == "ours" else hands[name].success,
        }
        rows.append(row)
        sizes = read[name], trained, f"{work / 1e9:.1f}"
        spread = row["median"], min(own), max(own), row["times_by_hand"]
        shown.append((name, *spread, *sizes, f"{row['floor']:.3f}", f"{100 * row['success']:.0f}"))
    columns = "|s a step|fastest|slowest|times by hand|tokens read|trained on|GFLOP|floor, s|success, %"
    times_by_hand = rows[0]["times_by_hand"]
    show(
        table(columns, shown),
        f"{tokens} tokens of {len(sequences)} trajectories are {nodes} nodes of the trie; {limits.text}",
        f"target: at most {TARGET} times the hand-written loop: {times_by_hand:.2f}, "
        f"{'met' if times_by_hand <= TARGET else 'MISSED'}",
    )
    content = {"rows": rows, "tokens": tokens, "nodes": nodes, "overrides": given.overrides}
    write(given.results / "arithmetic_loop.json", {"limits": vars(limits), **content})


if __name__ == "__main__":
    main()
