"""Measure the speed of a sandbox, and check whether it leaves anything behind. Prints JSON.

python benchmarks/sandbox.py [--machines 1000] [--at-once 16]
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import command_line, no_sandbox, seconds, skipped

from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox, missing
from agent_peft.sandbox.runtime import find_runtime

LIMITS = SandboxLimits()


def main() -> None:
    arguments = command_line(
        __doc__,
        quick={"machines": 3, "at_once": 2, "repeats": 2},
        machines=1000,  # one after another
        at_once=16,
        repeats=50,  # of each operation; ten times for a builtin
    )
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
        trips = [seconds(lambda: sandbox.run("cd /tmp", 60)) for _ in range(10 * arguments.repeats)]
        programs = [seconds(lambda: sandbox.run("ls /", 60)) for _ in range(4 * arguments.repeats)]
        scripts = [seconds(lambda: sandbox.run_fresh("true", 60)) for _ in range(arguments.repeats)]
    gradings = []
    for _ in range(arguments.repeats):
        with build_sandbox("oci", LIMITS) as sandbox:
            sandbox.run("touch /srv/x", 60)
            gradings.append(seconds(lambda: sandbox.inspect("test -e /srv/x", 60)))
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


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        name: round(1000 * value, 2)
        for name, value in {
            "median_ms": statistics.median(ordered),
            "p95_ms": ordered[int(len(ordered) * 0.95)],
            "least_ms": ordered[0],
        }.items()
    }


def left_behind() -> dict[str, int]:
    """Count everything that could stay behind, of processes only those below this one."""
    below, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                children = file.read_text().split()
            except OSError:
                continue
            below += len(children)
            todo += map(int, children)
    temporary, shared = Path(tempfile.gettempdir()), Path("/proc/sysvipc")
    objects = (len((shared / name).read_text().splitlines()) - 1 for name in ("shm", "sem", "msg"))
    return {
        "processes": below,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bundles": len(list(temporary.glob("agent-peft-machines-*/*/*/config.json"))),
        "control_groups": len(list(Path("/sys/fs/cgroup").glob("*/agent-peft-*"))),
        "ipc": sum(objects),
        "threads": threading.active_count(),
    }


if __name__ == "__main__":
    main()
