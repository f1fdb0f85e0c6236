"""Our sampler against Transformers' generate, its generate_batch and vLLM, in fp32 on a CPU.

    python benchmarks/sampling.py [--vllm-python VENV/bin/python] [--prompts 64 256] [--ways ours generate]
    python benchmarks/sampling.py --turns 10
    python benchmarks/sampling.py --lookup RUN [--threads 1]

Without --turns, 32 rows (4 prompts × 8) sample 64 new tokens at temperature 1 from the whole vocabulary; no
token ends a row. Each round has new prompts of random tokens, which are the same for all. The ways alternate;
ways without a target run once; each has a short warm-up. Only ours also records log-probabilities. generate
gets all 32 rows at once. generate_batch and vLLM (by default, with n=8) share blocks of prompts;
benchmarks/vllm_peer.py says how to make vLLM's environment. vLLM's process is stopped while others run. Our
targets are twice the tokens per second of generate, and those of vLLM. "Times as fast" is the median of the
pairs, not the quotient of two medians. A last table has 32 different prompts, from a 32nd of the last length
to all of it; generate would pad them, and is left out.

With --turns, 8 conversations (4 × 2) play so many turns of 32 observed and 32 sampled tokens, in three ways:
ours, one call with conversations of ten turns; ours without a cache across turns, a new conversation for
every turn with the whole history as its prompt; and generate in the same manner. Observations are random
tokens. Times are CPU seconds of the process. With the cache, tokens read and seconds should grow with the new
tokens, not with turns × length.

With --lookup, the policy of a run directory plays tasks of its evaluation (without one, of its training) at
temperature 0, with 1 to 4 rows, with and without prompt lookup in turn, in the run's dtype. Times are CPU
seconds of decode steps in which all rows decode.

The floor is that of our way: each weight is read once per decode step, and each weight and token takes 2
operations, with prompts read once; the longer of both counts. Prints tables, and writes
benchmarks/results/sampling.json, turns.json or lookup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import (
    Limits,
    OneTurn,
    command_line,
    generation,
    in_turn,
    linear_weights,
    measure_limits,
    ratio,
    seconds,
    show,
    skipped,
    table,
    tiny_model,
    tiny_run,
    write,
)
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from agent_peft.environments import load_environment
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine import decoding, load_sampler, local
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.bundled import resolve_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.targets import open_run, run_config
from agent_peft.seeding import derive, generator

TARGETS = {"generate": 2.0, "vLLM": 1.0}  # ours is to be so many times as fast
OBSERVED, SAMPLED = 32, 32  # tokens of a turn


def step_floor(policy: Policy, limits: Limits, rows: int) -> tuple[int, float]:
    """The weights that a prompt's token is multiplied by, and the least seconds of a decode step."""
    trunk = linear_weights(policy)
    weights = trunk + policy.head.weight.numel()
    return trunk, max(2 * weights * rows / limits.flops, 4 * weights / limits.bytes)


# -- one turn ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The prompts of a round. All ways get the same ones."""

    number: int
    groups: int
    prompt: int
    new: int
    vocabulary: int
    siblings: int = 8
    distinct: bool = False  # whether prompts have different lengths, up to ``prompt``

    @property
    def lengths(self) -> list[int]:
        shares = [i + 1 if self.distinct else self.groups for i in range(self.groups)]
        return [self.prompt * share // self.groups for share in shares]

    @property
    def prompts(self) -> list[list[int]]:
        draw = generator(0, "prompts", self.prompt, self.number)
        return [[draw.randrange(100, self.vocabulary) for _ in range(length)] for length in self.lengths]

    @property
    def rows(self) -> list[list[int]]:
        return [prompt for prompt in self.prompts for _ in range(self.siblings)]

    @property
    def tokens(self) -> int:
        return self.groups * self.siblings * self.new


def ours(engine: Sampler, job: Job) -> int:
    conversations = [OneTurn(prompt, derive(0, row)) for row, prompt in enumerate(job.rows)]
    engine.generate(conversations, SamplingConfig(max_new_tokens=job.new, max_tokens=job.prompt + job.new))
    return sum(len(conversation.action) for conversation in conversations)


def generate(policy: Policy, job: Job, cache: str | None = None) -> int:
    rows = torch.tensor(job.rows)  # all of one length: no padding on the left
    how = generation(job.new, cache_implementation=cache)
    with torch.no_grad():
        out = policy.base.generate(rows, attention_mask=torch.ones_like(rows), generation_config=how)
    return int(out[:, job.prompt :].numel())


def generate_batch(policy: Policy, job: Job) -> int:
    """Use pages of 32 tokens: with the default of 256, siblings would not share shorter prompts. Allocate
    only the necessary memory.
    """
    page, rows = 32, job.rows
    blocks = len(rows) * ((job.prompt + job.new) // page + 2)
    pages = ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=max(512, len(rows)))
    replies = policy.base.generate_batch(
        rows, generation_config=generation(job.new), continuous_batching_config=pages
    )
    return sum(len(one.generated_tokens) for one in replies.values())


@contextmanager
def vllm(given: argparse.Namespace) -> Iterator[dict[str, Callable[[Job], int]]]:
    """Run vLLM in a separate process, which is stopped except during its jobs."""
    peer = str(Path(__file__).with_name("vllm_peer.py"))
    command = [given.vllm_python, peer, resolve_model(given.model), str(given.groups * 8), str(given.threads)]
    own = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with open(os.environ.get("VLLM_PEER_LOG", os.devnull), "w") as log:
        process = subprocess.Popen(command, stderr=log, text=True, env=own, **pipes)
    assert process.stdin is not None and process.stdout is not None

    def answer() -> list[list[int]]:
        line = process.stdout.readline()
        if not line:
            sys.exit("vLLM has died: set VLLM_PEER_LOG=FILE and read its log there")
        return json.loads(line)

    def work(job: Job) -> int:
        os.killpg(process.pid, signal.SIGCONT)
        request = {"prompts": job.prompts, "siblings": job.siblings, "new": job.new}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        tokens = sum(map(len, answer()))
        os.killpg(process.pid, signal.SIGSTOP)
        return tokens

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that vLLM ends, too
    try:
        answer()
        os.killpg(process.pid, signal.SIGSTOP)
        yield {"vLLM": work}
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it may be stopped
        process.wait()


def measure(ways: dict[str, Callable[[Job], int]], job: Job, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round. Ways without a target run in the first round only."""

    def one(name: str, job: Job) -> None:
        if (sampled := ways[name](job)) != job.tokens:
            sys.exit(f"{name} sampled {sampled} tokens, not {job.tokens}")

    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, name in in_turn(ways, rounds):
        if number < 0:
            one(name, replace(job, new=4))
        elif number == 0 or name == "ours" or name in TARGETS:
            times[name].append(seconds(partial(one, name, replace(job, number=number + 1))))
    return times


def single_turns(
    given: argparse.Namespace, policy: Policy, plain: Policy, engine: Sampler, limits: Limits
) -> None:
    ways: dict[str, Callable[[Job], int]] = {
        "ours": partial(ours, engine),
        "generate": partial(generate, plain),
        "generate, static cache": partial(generate, plain, cache="static"),
        "generate_batch": partial(generate_batch, plain),
    }
    if given.vllm_python is None:
        skipped("vLLM: --vllm-python names no environment that has it")
    rows: list[dict[str, Any]] = []
    with vllm(given) if given.vllm_python else nullcontext({}) as more:
        ways = {name: way for name, way in (ways | more).items() if not given.ways or name in given.ways}
        for prompt, distinct in [*((prompt, False) for prompt in given.prompts), (given.prompts[-1], True)]:
            if distinct or prompt != given.prompts[0]:  # ways without a target run once
                ways = {name: way for name, way in ways.items() if name == "ours" or name in TARGETS}
            job = Job(0, given.groups, prompt, given.new, policy.base.config.vocab_size)
            if distinct:
                ways.pop("generate", None)
                job = replace(job, groups=job.groups * job.siblings, siblings=1, distinct=True)
            times = measure(ways, job, given.rounds)
            trunk, step = step_floor(policy, limits, job.groups * job.siblings)
            weights, read = trunk + policy.head.weight.numel(), 2 * trunk * sum(job.lengths)
            least = {
                "operations": read + 2 * weights * job.tokens,
                "bytes": 4.0 * weights * job.new,
                "seconds": read / limits.flops + step * job.new,
            }
            shown = []
            for name, own in times.items():
                median, faster = statistics.median(own), ratio(own, times["ours"][: len(own)])
                target = TARGETS.get(name)
                row = {"way": name, "prompt": prompt, "distinct": distinct, "floor": least, "bound": target}
                speed = {"tokens_per_second": job.tokens / median, "seconds": own, "ours_is_faster": faster}
                rows.append(row | speed)
                met = "" if target is None else f"{target}: {'met' if faster >= target else 'MISSED'}"
                times_of = f"{job.tokens / median:.0f}", median, min(own), max(own)
                shown.append((name, *times_of, faster, met, f"{100 * least['seconds'] / median:.0f}"))
            prompts = f"prompts up to {prompt}" if distinct else f"prompt {prompt}"
            title = f"{job.groups} x {job.siblings} rows, {prompts}, {job.new} new: "
            title += f"{least['operations'] / 1e9:.0f} GFLOP, {least['bytes'] / 1e9:.0f} GB of weights, "
            title += f"floor {least['seconds']:.1f} s = {job.tokens / least['seconds']:.0f} tokens/s"
            columns = "|tokens/s|s|fastest|slowest|ours is times as fast (median of pairs)|target"
            show(table(columns + "|of the floor, %", shown, title))
    write(given.results / "sampling.json", {"limits": vars(limits), "rows": rows})


# -- several turns -------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """The CPU seconds until the last conversation has ended each turn."""

    begin: float = field(default_factory=time.process_time)
    ends: dict[int, float] = field(default_factory=dict)

    def tick(self, turn: int) -> None:
        self.ends[turn] = time.process_time() - self.begin

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
    history: list[int] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.seed, self.prompt = derive(0, self.row), self.observation()
        self.history += self.prompt

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


def cached(engine: Sampler, sampling: SamplingConfig, talks: list[Talk]) -> Measured:
    clock = Clock()
    for talk in talks:
        talk.clock = clock
    read = engine.generate(talks, sampling).prefilled
    first = len({tuple(talk.history[:OBSERVED]) for talk in talks}) * OBSERVED
    # from the second turn on: the new tokens, and the last token of the action before, which was sampled but
    # not read; checked against the sum
    by_turn = [first] + [len(talks) * (OBSERVED + 1)] * (len(clock.turns) - 1)
    if sum(by_turn) != read:
        sys.exit(f"the sampler read {read} tokens, not {sum(by_turn)}: this table is out of date")
    return clock.turns, by_turn


def again(engine: Sampler, sampling: SamplingConfig, talks: list[Talk]) -> Measured:
    clock, read = Clock(), []
    for turn in range(talks[0].turns):
        fresh = [Again(talk, list(talk.history), derive(talk.seed, turn)) for talk in talks]
        read.append(engine.generate(fresh, sampling).prefilled)
        clock.tick(turn)
    return clock.turns, read


def transformers(policy: Policy, talks: list[Talk]) -> Measured:
    clock, read, how = Clock(), [], generation(SAMPLED)
    for turn in range(talks[0].turns):
        rows = torch.tensor([talk.history for talk in talks])
        with torch.no_grad():
            out = policy.base.generate(rows, attention_mask=torch.ones_like(rows), generation_config=how)
        read.append(rows.numel())
        for talk, row in zip(talks, out[:, rows.shape[1] :].tolist(), strict=True):
            talk.take(row)
        clock.tick(turn)
    return clock.turns, read


def several_turns(
    given: argparse.Namespace, policy: Policy, plain: Policy, engine: Sampler, limits: Limits
) -> None:
    sampling = SamplingConfig(max_new_tokens=SAMPLED, max_tokens=given.turns * (OBSERVED + SAMPLED))
    ways: dict[str, Callable[[list[Talk]], Measured]] = {
        "kept": partial(cached, engine, sampling),
        "ours, read again": partial(again, engine, sampling),
        "generate, read again": partial(transformers, plain),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    for number, name in in_turn(ways, given.rounds):
        turns = 2 if number < 0 else given.turns  # the warm-up is short
        measured = ways[name]([Talk(row, turns, policy.base.config.vocab_size) for row in range(8)])
        if number >= 0:
            runs[name].append(measured)
    cores = torch.get_num_threads()
    trunk, step = step_floor(plain, limits, 8)
    cpu = {
        name: [statistics.median(run[0][turn] for run in own) for turn in range(given.turns)]
        for name, own in runs.items()
    }
    read = {name: own[0][1] for name, own in runs.items()}
    floors = [cores * (2 * trunk * tokens / limits.flops + SAMPLED * step) for tokens in read["kept"]]
    rows: list[list[object]] = []
    for turn in range(given.turns):
        cells = [x for name in ways for x in (sum(read[name][: turn + 1]), cpu[name][turn])]
        rows.append([turn + 1, *cells, floors[turn]])
    rows.append(["all", *(x for name in ways for x in (sum(read[name]), sum(cpu[name]))), sum(floors)])
    columns = "|".join(f"{name}: {what}" for name in ways for what in ("read", "CPU s"))
    title = "cumulative tokens read, and CPU seconds of the turn"
    growth = {name: times[-1] / times[1] for name, times in cpu.items()}
    lines = [f"{name}: the last turn costs {times:.2f} times the second" for name, times in growth.items()]
    show(table(f"turn|{columns}|floor of kept, CPU s", rows, title), *lines)
    content = {"turns": given.turns, "conversations": 8, "cpu_seconds": cpu, "tokens_read": read}
    content |= {"floor": floors, "last_to_second": growth, "limits": vars(limits)}
    content["runs"] = {name: [run[0] for run in own] for name, own in runs.items()}
    write(given.results / "turns.json", content)


# -- prompt lookup -------------------------------------------------------------------------------------------


class Steps(decoding.Decoding):
    """Counts the CPU seconds, the tokens, and the number of decode steps in which ``rows`` rows decode."""

    rows_at_once, seconds, tokens, steps = 0, 0.0, 0, 0

    def _decode(self) -> None:
        rows, begin, tokens = self.decoding, time.process_time(), self.sampled
        super()._decode()
        if rows == Steps.rows_at_once:
            Steps.seconds += time.process_time() - begin
            Steps.tokens += self.sampled - tokens
            Steps.steps += 1


def prompt_lookup(given: argparse.Namespace) -> None:
    config = run_config(given.lookup)
    policy = open_run(Path(given.lookup), config=config)[1]
    limits = config.stages[-1].sampling
    environment = load_environment(
        config.environment if config.evaluation is None else config.evaluation.environment
    )
    sampling, places = limits.model_copy(update={"temperature": 0.0}), decoding.PLACES
    local.Decoding, rows, shown = Steps, [], []  # type: ignore[misc]
    for count in (1, 2, 3, 4):
        measured: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        collector = Collector(environment, load_sampler(policy, EngineConfig(rows=count)))
        for number, name in in_turn(measured, given.rounds):
            decoding.PLACES = places if name == "with" else 0
            Steps.rows_at_once, Steps.seconds, Steps.tokens, Steps.steps = count, 0.0, 0, 0
            first, every = max(number, 0) * 3 * count, environment.tasks  # the warm-up is short
            last = first + (count if number < 0 else 3 * count)
            tasks = [every[i % len(every)] for i in range(first, last)]
            collector.collect(tasks, 1, sampling, RewardConfig(), seed=0)
            if number >= 0:
                per_token = 1000 * Steps.seconds / Steps.tokens
                measured[name].append((per_token, Steps.tokens / Steps.steps / count))
        decoding.PLACES = places
        times = {name: [milliseconds for milliseconds, _ in own] for name, own in measured.items()}
        faster, drawn = (
            ratio(times["without"], times["with"]),
            statistics.median(x for _, x in measured["with"]),
        )
        medians = {name: statistics.median(own) for name, own in times.items()}
        rows.append({"rows": count, "milliseconds": times, "tokens_a_forward": drawn, "faster": faster})
        shown.append((count, medians["without"], medians["with"], drawn, faster))
    columns = "rows|CPU ms a token without|with|tokens of a row in a forward|times as fast (median of pairs)"
    show(table(columns, shown, f"prompt lookup, greedy, {policy.dtype}"))
    write(given.results / "lookup.json", {"dtype": str(policy.dtype), "rows": rows})


def main() -> None:
    given = command_line(
        __doc__,
        quick={
            "prompts": [16],
            "groups": 2,
            "new": 4,
            "rounds": 1,
            "threads": 1,
            "model": tiny_model,
            "lookup": tiny_run,
        },
        turns=0,
        lookup=str,
        prompts=[64, 256],
        groups=4,
        new=64,
        rounds=3,
        threads=2,
        model="smollm2-135m",
        ways={"nargs": "+", "help": "run only these ways"},
        vllm_python=str,
    )
    logging.set_verbosity_error()
    torch.set_num_threads(given.threads)
    if given.lookup:
        prompt_lookup(given)
        if not given.quick:
            return
    limits = measure_limits()
    policy = load_policy(PretrainedConfig(model=given.model, dtype="float32"), 0)
    plain = load_policy(PretrainedConfig(model=given.model, dtype="float32", lora=None), 0)  # the others'
    for each in (policy, plain):
        each.base.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    policy.chat.end_of_turn = frozenset()
    parts = [several_turns] if given.turns else [single_turns]
    if given.quick:
        given.turns, parts = 3, [single_turns, several_turns]
    for part in parts:
        engine = load_sampler(policy, EngineConfig(rows=8 if part is several_turns else given.groups * 8))
        part(given, policy, plain, engine, limits)
    show(limits.text)


if __name__ == "__main__":
    main()
