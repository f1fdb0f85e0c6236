"""Play ten turns with 32 observed and 32 sampled tokens in 8 conversations (4 × 2): with keys and values
kept, and with everything read again in each turn.

    python benchmarks/turns.py [--turns 10] [--rounds 2] [--threads 2] [--model smollm2-135m]

There are three ways: ours, one call with conversations of ten turns; ours without a cache across turns, a
new conversation for every turn with the whole history as its prompt; and Transformers' generate in the same
manner, 8 rows at once. Observations are random tokens, and no token ends a turn. Times are CPU seconds of
the process. With the cache, tokens read and seconds should grow with the new tokens, not with turns ×
length. The floor of a turn on all cores is 2 operations per weight and token at the rate of this machine's
matrix products, or each weight read once per decode step, whichever takes longer. The program prints tables
and writes benchmarks/results/turns.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from measuring import measure_limits, write
from rich.console import Console
from rich.table import Table
from smoke import parse, temporary_folder, tiny_model
from transformers import GenerationConfig
from transformers.utils import logging

from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import derive, generator

OBSERVED, SAMPLED = 32, 32


@dataclass
class Clock:
    """The CPU seconds and the tokens read until the last conversation has ended each turn."""

    begun: float = field(default_factory=time.process_time)
    ends: dict[int, float] = field(default_factory=dict)

    def tick(self, turn: int) -> None:
        self.ends[turn] = time.process_time() - self.begun

    @property
    def turns(self) -> list[float]:
        ends = [0.0, *(self.ends[turn] for turn in sorted(self.ends))]
        return [after - before for before, after in pairwise(ends)]


@dataclass
class Talk:
    """A conversation of ``turns`` turns. Its environment answers with random tokens."""

    row: int
    turns: int
    vocabulary: int
    clock: Clock | None = None
    prompt: Sequence[int] = ()
    history: list[int] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.observation()
        self.history += self.prompt

    @property
    def seed(self) -> int:
        return derive(0, self.row)

    def observation(self) -> list[int]:
        """Return the tokens of an observation. Two conversations share the first one, which is the task's."""
        draw = generator(0, self.turn, self.row // 2 if self.turn == 0 else self.row)
        return [draw.randrange(100, self.vocabulary) for _ in range(OBSERVED)]

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        if self.clock is not None:
            self.clock.tick(self.turn)
        return self.take(action)

    def take(self, action: Sequence[int]) -> Sequence[int] | None:
        assert len(action) == SAMPLED
        self.turn += 1
        if self.turn == self.turns:
            return None
        new = self.observation()
        self.history += [*action, *new]
        return new


@dataclass
class Again:
    """One turn of a conversation, as a new conversation with the whole history as its prompt."""

    talk: Talk
    prompt: Sequence[int]
    seed: int

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self.talk.take(action)


Measured = tuple[list[float], list[int]]  # for each turn: CPU seconds, tokens read


def kept(engine: Sampler, talks: list[Talk], sampling: SamplingConfig) -> Measured:
    clock = Clock()
    for talk in talks:
        talk.clock = clock
    statistics_ = engine.generate(talks, sampling)
    first = len({tuple(talk.history[:OBSERVED]) for talk in talks}) * OBSERVED
    # from the second turn on: the new tokens, and the last token of the action before, which was sampled but
    # not read; checked against the sum
    later = len(talks) * (OBSERVED + 1)
    read = [first] + [later] * (len(clock.turns) - 1)
    if sum(read) != statistics_.prefilled:
        raise SystemExit(
            f"the sampler read {statistics_.prefilled} tokens, not {sum(read)}: this table is out of date"
        )
    return clock.turns, read


def again(engine: Sampler, talks: list[Talk], sampling: SamplingConfig) -> Measured:
    clock, read = Clock(), []
    for turn in range(talks[0].turns):
        fresh = [Again(talk, list(talk.history), derive(talk.seed, turn)) for talk in talks]
        read.append(engine.generate(fresh, sampling).prefilled)
        clock.tick(turn)
    return clock.turns, read


def transformers(policy: Policy, talks: list[Talk]) -> Measured:
    clock, read = Clock(), []
    how = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=SAMPLED,
        eos_token_id=None,
        pad_token_id=0,
    )
    for turn in range(talks[0].turns):
        rows = torch.tensor([talk.history for talk in talks])
        with torch.no_grad():
            out = policy.base.generate(rows, attention_mask=torch.ones_like(rows), generation_config=how)
        read.append(rows.numel())
        for talk, row in zip(talks, out[:, rows.shape[1] :].tolist(), strict=True):
            talk.take(row)
        clock.tick(turn)
    return clock.turns, read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parse(parser, turns=3, rounds=1, threads=1)
    if arguments.quick:
        arguments.model = str(tiny_model(temporary_folder()))
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    console, limits = Console(width=150), measure_limits()
    policy = load_policy(PretrainedConfig(model=arguments.model, dtype="float32"), 0)
    plain = load_policy(PretrainedConfig(model=arguments.model, dtype="float32", lora=None), 0)
    plain.base.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    engine = load_sampler(policy, EngineConfig(rows=8))
    policy.chat.end_of_turn = frozenset()
    sampling = SamplingConfig(max_new_tokens=SAMPLED, max_tokens=arguments.turns * (OBSERVED + SAMPLED))

    ways: dict[str, Callable[[list[Talk]], Measured]] = {
        "kept": lambda talks: kept(engine, talks, sampling),
        "ours, read again": lambda talks: again(engine, talks, sampling),
        "generate, read again": lambda talks: transformers(plain, talks),
    }
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for turn in range(-1, arguments.rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            turns = 2 if turn < 0 else arguments.turns  # the first round is a short warm-up
            measured = ways[name]([Talk(row, turns, policy.base.config.vocab_size) for row in range(8)])
            if turn >= 0:
                found[name].append(measured)

    trunk = sum(
        p.numel() for m in plain.decoder.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()
    )
    weights = trunk + plain.head.weight.numel()
    cores = torch.get_num_threads()
    step = cores * max(2 * weights * 8 / limits.flops, 4 * weights / limits.bytes)
    table = Table("turn", title="cumulative tokens read, and CPU seconds of the turn")
    for name in ways:
        for what in ("read", "CPU s"):
            table.add_column(f"{name}: {what}")
    table.add_column("floor of kept, CPU s")
    cpu = {
        name: [statistics.median(run[0][turn] for run in runs) for turn in range(arguments.turns)]
        for name, runs in found.items()
    }
    read = {name: runs[0][1] for name, runs in found.items()}
    floors = [cores * 2 * trunk * tokens / limits.flops + SAMPLED * step for tokens in read["kept"]]
    for turn in range(arguments.turns):
        cells = [
            cell for name in ways for cell in (str(sum(read[name][: turn + 1])), f"{cpu[name][turn]:.2f}")
        ]
        table.add_row(str(turn + 1), *cells, f"{floors[turn]:.2f}")
    cells = [cell for name in ways for cell in (str(sum(read[name])), f"{sum(cpu[name]):.2f}")]
    table.add_row("all", *cells, f"{sum(floors):.2f}")
    console.print(table)
    growth = {name: times[-1] / times[1] for name, times in cpu.items()}
    console.print(
        ", ".join(
            f"{name}: the last turn costs {times:.2f} times the second" for name, times in growth.items()
        )
    )
    console.print(limits.text)
    content = {
        "limits": vars(limits),
        "turns": arguments.turns,
        "conversations": 8,
        "cpu_seconds": cpu,
        "tokens_read": read,
    }
    write(
        arguments.results,
        "turns",
        {
            **content,
            "floor": floors,
            "last_to_second": growth,
            "runs": {name: [run[0] for run in runs] for name, runs in found.items()},
        },
    )


if __name__ == "__main__":
    main()
