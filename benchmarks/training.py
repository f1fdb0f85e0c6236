"""Compare training on the token trie with padding: forward, loss and backward over the adapter for one
group, while groups, prompts and turns grow.

    python benchmarks/training.py [--short] [--rounds 3] [--threads 2] [--microbatch-tokens 8192]
    [--model smollm2-135m]
    python benchmarks/training.py --products [--rounds 3] [--threads 1] [--model smollm2-135m]

The model has SmolLM2-135M's shapes and random weights, but 3 of its 30 layers and a tenth of its vocabulary,
so that every part keeps its share of the time and the table takes minutes. One point is repeated with the
whole --model. The padded way is the same Policy without packing: right-padded rows of one length (no padding
is wasted), the model's causal attention, the same chunks of logits, and the same budget of positions of a
microbatch. A group that exceeds the budget is halved, as in the trainer. The ways alternate; results are
medians of paired ratios.

Our target is 85 % of the ratio of tokens if that ratio is 2 or more, and never more than 3 % slower than
padded rows. The floor is the minimum of operations of both ways (attention only to visible tokens) at the
rate of this machine's matrix products. --short has 7 of the 17 points, without the whole model; groups of
more than 8,000 padded tokens have one round fewer. The program prints tables and writes
benchmarks/results/training.json.

--products compares the libraries of matrix products (`policy.matmul`) instead: the whole --model trains on a
group of 1,024 nodes, in fp32 by torch's own products and by oneDNN's in turn, with an adapter and with all
its parameters, and in bfloat16, where torch's own are oneDNN's. It prints the best CPU seconds as tokens a
CPU-second, the distance of the gradients, and what `auto` chooses here, and writes
benchmarks/results/training_products.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measuring import (
    Limits,
    alternate,
    command_line,
    in_turn,
    linear_weights,
    measure_limits,
    ratio,
    show,
    table,
    tiny_model,
    write,
)
from transformers import AutoConfig, AutoModelForCausalLM

from agent_peft.batch import Batch, collate
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.forward.products import PRODUCTS, choose_library
from agent_peft.policies.forward.trie import build_trie
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.bundled import resolve_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import generator
from agent_peft.types import Task, Trajectory, Turn

TENTH = 10
BOUND, REACH, SLOWER = 0.85, 2.0, 1.03


@dataclass(frozen=True)
class Point:
    """A group of ``size`` trajectories of ``turns`` turns. They share their first ``shared`` tokens.

    >>> Point("group", 8, size=8, turns=1, observed=256, sampled=64, shared=256).nodes
    768
    """

    sweep: str
    value: int
    size: int
    turns: int
    observed: int  # tokens of an observation
    sampled: int  # tokens of an action
    shared: int

    @property
    def length(self) -> int:
        return self.turns * (self.observed + self.sampled)

    @property
    def padded(self) -> int:
        return self.size * self.length

    @property
    def nodes(self) -> int:
        return self.shared + self.size * (self.length - self.shared)

    @property
    def ideal(self) -> float:
        return self.padded / self.nodes

    def batch(self, vocabulary: int) -> Batch:
        draw = generator(0, self.sweep, self.value)
        beginning = [draw.randrange(vocabulary) for _ in range(self.shared)]
        group = []
        for member in range(self.size):
            # each first unshared token is unique, so that the trie has exactly ``nodes`` nodes
            own = [draw.randrange(vocabulary) for _ in range(self.length - self.shared)]
            tokens = [*beginning, (own[0] // self.size * self.size + member) % vocabulary, *own[1:]]
            turns = []
            for start in range(0, self.length, self.observed + self.sampled):
                middle, end = start + self.observed, start + self.observed + self.sampled
                turns.append(
                    Turn(tuple(tokens[start:middle]), tuple(tokens[middle:end]), (0.0,) * self.sampled)
                )
            group.append(Trajectory(Task("t"), tuple(turns), rewards=(0.0,) * self.turns))
        return collate(group, [0] * self.size)


def points(short: bool) -> Iterator[Point]:
    for size in (1, 8, 32) if short else (1, 2, 4, 8, 16, 32):
        yield Point("group", size, size=size, turns=1, observed=256, sampled=64, shared=256)
    for prompt in (64, 512) if short else (64, 128, 256, 512, 1024, 2048):
        yield Point("prompt", prompt, size=8, turns=1, observed=prompt, sampled=64, shared=prompt)
    for turns in (2, 10) if short else (1, 2, 5, 10, 20):
        # half of the turns and their observations are the same for all
        yield Point("turns", turns, size=8, turns=turns, observed=32, sampled=32, shared=turns // 2 * 64 + 32)


def tenth(model: str) -> Policy:
    """Make a model with random weights, an adapter, and a tenth of the layers and of the vocabulary."""
    config = AutoConfig.from_pretrained(resolve_model(model))
    config.num_hidden_layers //= TENTH
    config.layer_types = None
    config.vocab_size //= TENTH
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chat = load_policy(PretrainedConfig(model=model, dtype="float32", lora=None), 0).chat
    words = chat.opening
    chat.opening = lambda messages: [
        token % config.vocab_size for token in words(messages)
    ]  # a policy reads one when it is made
    return Policy(adapters.attach(plain, LoraSettings(), 0), chat)


def pieces(policy: Policy, batch: Batch, rows: list[int], budget: int) -> Iterator[Batch]:
    """Halve a group until each part fits, as the trainer does."""
    sequences = [batch.tokens[row, : int(batch.lengths[row])].tolist() for row in rows]
    if len(rows) > 1 and policy.count_nodes(sequences) > budget:
        yield from pieces(policy, batch, rows[: len(rows) // 2], budget)
        yield from pieces(policy, batch, rows[len(rows) // 2 :], budget)
    else:
        yield batch.select(rows)


def train(policy: Policy, batch: Batch, budget: int) -> torch.Tensor:
    """Run forward, loss and backward. Return the gradient."""
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    for piece in pieces(policy, batch, list(range(len(batch))), budget):
        (-policy.forward(piece, SamplingConfig()).logprobs).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None])


def operations(policy: Policy, batch: Batch, packed: bool) -> float:
    """Return the minimum of operations: 2 per weight forward and 2 backward (frozen), 6 per weight of the
    adapter, the same for the output layer at sampled tokens only, and attention's two products forward and
    five backward over the visible pairs.
    """
    lora = sum(p.numel() for p in policy.trainable_parameters())
    frozen = linear_weights(policy) - lora
    shape = policy.base.config
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    sequences = [batch.tokens[row, : int(batch.lengths[row])].tolist() for row in range(len(batch))]
    padded = [depth for sequence in sequences for depth in range(len(sequence))]
    depths = build_trie(sequences).positions if packed else padded
    pairs = sum(depth + 1 for depth in depths)
    attention = 14 * shape.num_hidden_layers * shape.num_attention_heads * width * pairs
    head = 4 * shape.hidden_size * shape.vocab_size * int(batch.action_mask.sum())
    return float(len(depths) * (4 * frozen + 6 * lora) + attention + head)


def compare_products(model: str, rounds: int) -> list[dict[str, Any]]:
    """Train with each library in turn. Return a row for each, with its CPU seconds."""
    point = Point("products", 512, size=8, turns=1, observed=512, sampled=64, shared=512)
    rows: list[dict[str, Any]] = []
    for dtype, lora in (("float32", LoraSettings()), ("float32", None), ("bfloat16", LoraSettings())):
        keys = {"model": model, "dtype": dtype, "device": "cpu", "lora": lora}
        libraries = list(PRODUCTS) if dtype == "float32" else ["torch"]
        policies = {library: load_policy({**keys, "matmul": library}) for library in libraries}
        for policy in policies.values():
            torch.manual_seed(0)
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:  # which starts at zero, so that A has no gradient
                    torch.nn.init.normal_(parameter, std=0.01)
        batch = point.batch(policies["torch"].base.config.vocab_size)
        gradients: dict[str, torch.Tensor] = {}
        seconds: dict[str, list[float]] = {library: [] for library in libraries}
        for number, library in in_turn(policies, rounds):
            begin = time.process_time()
            gradients[library] = train(policies[library], batch, point.nodes).float()
            if number >= 0:
                seconds[library].append(time.process_time() - begin)
        exact = gradients["torch"]
        rows += [
            {
                "dtype": dtype,
                "trained": "all" if lora is None else "adapter",
                "library": library,
                "tokens_a_cpu_second": point.nodes / min(seconds[library]),
                "gradients_apart": float((gradients[library] - exact).norm() / exact.norm()),
                "cpu_seconds": seconds[library],
            }
            for library in libraries
        ]
    return rows


def show_products(rows: list[dict[str, Any]]) -> None:
    keys = ("dtype", "trained", "library", "tokens_a_cpu_second")
    cells = [[*(row[key] for key in keys), f"{row['gradients_apart']:.0e}"] for row in rows]
    choice = choose_library("auto", torch.device("cpu"), torch.float32)
    show(
        table("dtype|trained|library|tokens a CPU-second|gradients apart", cells, "products"),
        f"policy.matmul: auto is {choice.name} here ({choice.reason})",
    )


def measure(policy: Policy, point: Point, rounds: int, budget: int, limits: Limits) -> dict[str, Any]:
    batch = point.batch(policy.base.config.vocab_size)
    padding = Policy(policy.model, policy.chat, packing=False)
    ours, plain = (train(way, batch, budget) for way in (policy, padding))
    ways = {"packed": lambda: train(policy, batch, budget), "padded": lambda: train(padding, batch, budget)}
    times = alternate(ways, rounds, warm_up=False)
    found = ratio(times["padded"], times["packed"])
    needed = {name: operations(policy, batch, name == "packed") for name in times}
    return {
        **vars(point),
        "padded_tokens": point.padded,
        "nodes": point.nodes,
        "ideal": point.ideal,
        "ideal_operations": needed["padded"] / needed["packed"],
        "measured": found,
        "of_ideal": found / point.ideal,
        "seconds": times,
        "floor": {name: work / limits.flops for name, work in needed.items()},
        "operations": needed,
        "gradients_apart": float((ours - plain).norm() / plain.norm()),
        "holds": found >= 1 / SLOWER and (point.ideal < REACH or found >= BOUND * point.ideal),
    }


def table_of(title: str, rows: list[dict[str, Any]]) -> object:
    cells = []
    for row in rows:
        ratios = (row[name] for name in ("ideal", "ideal_operations", "measured", "of_ideal"))
        times = [(statistics.median(row["seconds"][way]), row["floor"][way]) for way in ("packed", "padded")]
        target = "met" if row["holds"] else "MISSED"
        sizes = row["value"], row["padded_tokens"], row["nodes"]
        cells.append([*sizes, *ratios, target, *times[0], *times[1], f"{row['gradients_apart']:.0e}"])
    columns = f"{rows[0]['sweep']}|padded tokens|nodes|ideal|by operations|measured|of ideal|target"
    return table(columns + "|packed, s|floor|padded, s|floor|gradients apart", cells, title)


def main() -> None:
    given = command_line(
        __doc__,
        quick={"short": True, "rounds": 1, "threads": 1},
        short=False,
        products=False,
        rounds=3,
        threads=2,
        microbatch_tokens=8192,
        model="smollm2-135m",
    )
    torch.set_num_threads(given.threads)
    if given.products or given.quick:
        model = given.model if given.products else tiny_model(given.results)
        compared = compare_products(model, given.rounds)
        show_products(compared)
        write(given.results / "training_products.json", {"model": model, "rows": compared})
    if given.products:
        return
    limits, policy, budget = measure_limits(), tenth(given.model), given.microbatch_tokens
    warm_up = Point("warm-up", 0, 2, 1, 32, 32, 32)
    train(policy, warm_up.batch(policy.base.config.vocab_size), budget)
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for point in points(given.short):
        if not given.quick or point.padded <= 1600:
            rounds = max(1, given.rounds - (point.padded > 8000))
            row = measure(policy, point, rounds, budget, limits)
            sweeps.setdefault(point.sweep, []).append(row)
    content: dict[str, object] = {"limits": vars(limits), "microbatch_tokens": budget}
    for name, rows in sweeps.items():
        show(table_of(f"{name} (a tenth of {given.model})", rows))
    if not given.short:
        whole = load_policy(PretrainedConfig(model=given.model, dtype="float32"), 0)
        common = Point("group", 8, size=8, turns=1, observed=256, sampled=64, shared=256)
        content["whole"] = measure(whole, common, given.rounds, budget, limits)
        show(table_of(f"the whole of {given.model}", [content["whole"]]))
    content["rows"] = [row for rows in sweeps.values() for row in rows]
    missed = [f"{row['sweep']} {row['value']}" for row in content["rows"] if not row["holds"]]
    show(limits.text, f"target: {'met everywhere' if not missed else 'MISSED at ' + ', '.join(missed)}")
    write(given.results / "training.json", content)


if __name__ == "__main__":
    main()
