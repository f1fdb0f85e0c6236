"""Measure the speed of a sandbox, and check whether it leaves anything behind. Prints JSON.

python benchmarks/sandbox.py [--machines 1000] [--at-once 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smoke import no_sandbox, parse, skipped

from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox, missing
from agent_peft.sandbox.runtime import find_runtime

LIMITS = SandboxLimits()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=1000, help="number of machines, one after another")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50, help="of each operation; ten times for a builtin")
    arguments = parse(parser, machines=3, at_once=2, repeats=2)
    if arguments.quick and (lacks := no_sandbox()):
        skipped(f"all of it: {lacks}")
        return
    before_all = time.perf_counter()
    runtime = find_runtime()
    first = time.perf_counter() - before_all
    before = left_behind()
    starts, closes = [], []
    for i in range(arguments.machines):
        began = time.perf_counter()
        with build_sandbox("oci", LIMITS) as sandbox:
            assert sandbox.run(f"sleep 600 & echo {i} >/srv/i; cat /srv/i", 60).output.endswith(f"{i}\n")
            starts.append(time.perf_counter() - began)
            leaving = time.perf_counter()
        closes.append(time.perf_counter() - leaving)
    with build_sandbox("oci", LIMITS) as sandbox:
        trips = [timed(lambda: sandbox.run("cd /tmp", 60)) for _ in range(10 * arguments.repeats)]
        programs = [timed(lambda: sandbox.run("ls /", 60)) for _ in range(4 * arguments.repeats)]
        scripts = [timed(lambda: sandbox.run_fresh("true", 60)) for _ in range(arguments.repeats)]
    gradings = []
    for _ in range(arguments.repeats):
        with build_sandbox("oci", LIMITS) as sandbox:
            sandbox.run("touch /srv/x", 60)
            gradings.append(timed(lambda: sandbox.inspect("test -e /srv/x", 60)))
    began = time.perf_counter()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda _: episode(), range(arguments.at_once * 8)))
    at_once = time.perf_counter() - began
    runtime.finish()
    deadline = time.monotonic() + 20
    while left_behind() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    report = {
        "case": str(runtime.case),
        "missing": missing("oci"),
        "first_of_the_process_ms": round(1000 * first, 1),
        "start_and_first_command": summary(starts),
        "close": summary(closes),
        "builtin": summary(trips),
        "program": summary(programs),
        "script_beside_the_shell": summary(scripts),
        "grading_script": summary(gradings),
        f"episodes_per_second_{arguments.at_once}_at_once": round(arguments.at_once * 8 / at_once, 1),
        "machines_in_a_row": arguments.machines,
        "left_behind": {
            name: after - was
            for (name, was), after in zip(before.items(), left_behind().values(), strict=True)
        },
    }
    print(json.dumps(report, indent=2))


def episode() -> None:
    """Play one episode: start, five commands, an inspection, close."""
    with build_sandbox("oci", LIMITS) as sandbox:
        for i in range(5):
            assert sandbox.run(f"echo {i} >>/srv/log; ls /srv", 120).ok
        assert sandbox.inspect("test $(wc -l </srv/log) = 5", 120).ok


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        name: round(1000 * value, 2)
        for name, value in {
            "median_ms": statistics.median(ordered),
            "p95_ms": ordered[int(len(ordered) * 0.95)],
            "least_ms": ordered[0],
        }.items()
    }


def left_behind() -> dict[str, int]:
    """Count everything that could stay behind: processes below this one, mounts, descriptors, temporary files
    and control groups.
    """
    below, todo = 0, [os.getpid()]
    while todo:
        try:
            found = Path(f"/proc/{(pid := todo.pop())}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        below += len(found)
        todo += [int(child) for child in found]
    mine = Path(tempfile.gettempdir()) / f"agent-peft-machines-{os.getuid()}"
    return {
        "processes": below,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bundles": len(list(mine.glob("*/*/config.json"))),
        "control_groups": len(list(Path("/sys/fs/cgroup").glob("*/agent-peft-*"))),
    }


if __name__ == "__main__":
    main()
