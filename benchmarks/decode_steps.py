"""Measure a decode step of the sampler: milliseconds at 1 to 64 rows, in fp32 and bfloat16, beside the floor,
and against another version of the package.

    python benchmarks/decode_steps.py [--before SRC] [--rows 1 8 32] [--dtypes float32 bfloat16] [--rounds 3]

SRC is the folder `src` of a checkout. Each version decodes in a process of its own, with one thread; the
processes of a round follow one another, and the versions take turns to be first. Eight rows share a prompt of
256 random tokens, and the adapter is not zero. A step is the CPU time of 34 new tokens minus that of 2,
divided by 32.

The floor is the longer of two times: to read each weight once, and to multiply each row by each weight, at
the speeds that this machine reaches. Prints a table, and writes benchmarks/results/decode_steps.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch
from measuring import (
    ROOT,
    OneTurn,
    command_line,
    in_turn,
    linear_weights,
    measure_limits,
    show,
    table,
    tiny_model,
    write,
)

from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.seeding import derive, generator

SIBLINGS, PROMPT, FEW, MANY = 8, 256, 2, 34


def trained(model: str, dtype: str) -> Policy:
    policy = load_policy(PretrainedConfig(model=model, dtype=dtype, device="cpu"), 0)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=1e-3, generator=draw)
    policy.chat.end_of_turn = frozenset()
    return policy


def decode(engine: Sampler, rows: int, new: int, vocabulary: int) -> float:
    draw, prompts = generator(0, "prompts"), []
    for row in range(rows):
        if row % SIBLINGS == 0:
            prompts.append([draw.randrange(3, vocabulary) for _ in range(PROMPT)])
    talks = [OneTurn(prompts[row // SIBLINGS], derive(0, row)) for row in range(rows)]
    begin = time.process_time()
    engine.generate(talks, SamplingConfig(max_new_tokens=new, max_tokens=PROMPT + new))
    return time.process_time() - begin


def steps(model: str, dtype: str, rows: list[int]) -> list[float]:
    """Milliseconds of a step at each number of rows, the best of three."""
    policy = trained(model, dtype)
    engine, found = load_sampler(policy, EngineConfig(rows=max(rows))), []
    for count in rows:
        decode(engine, count, FEW, policy.head.weight.shape[0])
        times = {
            new: min(decode(engine, count, new, policy.head.weight.shape[0]) for _ in range(3))
            for new in (FEW, MANY)
        }
        found.append(1000 * (times[MANY] - times[FEW]) / (MANY - FEW))
    return found


def main() -> None:
    given = command_line(
        __doc__,
        quick={
            "rows": [1, 2],
            "dtypes": ["float32"],
            "rounds": 1,
            "model": tiny_model,
            "before": ROOT / "src",
        },
        before=str,
        rows=[1, 2, 4, 8, 16, 32, 64],
        dtypes=["float32", "bfloat16"],
        rounds=3,
        model="smollm2-135m",
        child=str,
    )
    torch.set_num_threads(1)
    if given.child:
        print(json.dumps(steps(given.model, given.child, given.rows)))
        return
    sources = {"now": str(ROOT / "src")} | ({"before": str(given.before)} if given.before else {})
    content, shown = {}, []
    for dtype in given.dtypes:
        kind = getattr(torch, dtype)
        limits, plain = measure_limits(kind), load_policy(PretrainedConfig(model=given.model, lora=None), 0)
        weights = linear_weights(plain) + plain.head.weight.numel()
        del plain
        found: dict[str, list[list[float]]] = {name: [] for name in sources}
        for _, name in in_turn(sources, given.rounds, warm_up=False):
            command = [sys.executable, __file__, "--child", dtype, "--model", str(given.model), "--rows"]
            child = subprocess.run(
                [*command, *map(str, given.rows)],
                env=os.environ | {"PYTHONPATH": sources[name], "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if child.returncode:
                sys.exit(f"{name}: {child.stderr.strip().splitlines()[-1]}")
            found[name].append(json.loads(child.stdout.splitlines()[-1]))
        content[dtype] = {"limits": vars(limits), "weights": weights, "milliseconds": found}
        for place, rows in enumerate(given.rows):
            floor = 1000 * max(kind.itemsize * weights / limits.bytes, 2 * weights * rows / limits.flops)
            best = {name: min(run[place] for run in runs) for name, runs in found.items()}
            pairs = zip(found["now"], found.get("before", []), strict=False)
            ratios = [now[place] / before[place] for now, before in pairs]
            share = statistics.median(ratios) if ratios else None
            shown.append((dtype, rows, best["now"], floor, best["now"] / floor, best.get("before"), share))
    columns = "dtype|rows|ms a step|floor|times the floor|ms before|now / before (median of pairs)"
    show(table(columns, shown, "a decode step, one thread, CPU time"))
    write(given.results / "decode_steps.json", {"rows": given.rows, **content})


if __name__ == "__main__":
    main()
