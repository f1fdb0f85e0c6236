"""Measure the cost of a step over HTTP: the same episodes in this process, and through a server in another
process over loopback.

    python benchmarks/remote_environment.py [--episodes 300]
    [--output benchmarks/results/remote_environment.json]

It prints a table. Times are milliseconds of wall clock; CPU times are those of this process alone. It needs
``pip install 'agent-peft[server]'``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment

ENVIRONMENTS: dict[str, Mapping[str, Any]] = {
    "arithmetic": {"kind": "arithmetic", "digits": 3, "num_tasks": 100},
    "db_bench": {"kind": "db_bench", "generate": {"num_tasks": 100}},
}
SERVER = """
import asyncio, json, sys
from agent_peft.environments import load_environment
from agent_peft.environments.http.limits import Limits
from agent_peft.environments.http.server import Address, Host
host = Host({"train": load_environment(json.loads(sys.argv[1]))}, Address("127.0.0.1", 0), Limits())
asyncio.run(host.run(lambda: print(host.url, flush=True)))
"""


@contextmanager
def server(settings: Mapping[str, Any]) -> Iterator[str]:
    """Start a server in a separate process and yield its URL."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def play(environment: Environment, number: int) -> dict[str, list[float]]:
    """Play one solved episode. Return the time of each call in ms."""
    task = environment.tasks[number % len(environment.tasks)]
    actions = environment.demonstration(task)
    assert actions is not None
    times: dict[str, list[float]] = {"start": [], "step": [], "close": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        found = call()
        times[name].append(1e3 * (time.perf_counter() - begun))
        return found

    episode = environment.episode(task, number)
    timed("start", episode.start)
    for action in actions:
        result = timed("step", lambda action=action: episode.step(action))
    assert result.outcome == "correct"
    timed("close", episode.close)
    return times


def measure(environment: Environment, episodes: int, threads: int) -> dict[str, Any]:
    """Play ``episodes`` episodes on ``threads`` threads. Return medians and 95th percentiles of all calls,
    and the throughput.
    """
    for number in range(20):
        play(environment, number)
    begun, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        played = list(pool.map(lambda number: play(environment, number), range(episodes)))
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    found: dict[str, Any] = {
        "threads": threads,
        "episodes": episodes,
        "episodes_per_second": episodes / wall,
        "cpu_ms": 1e3 * cpu / episodes,
    }
    for name in ("start", "step"):
        times = sorted(ms for each in played for ms in each[name])
        found[name] = {"median_ms": statistics.median(times), "p95_ms": times[int(0.95 * len(times))]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "remote_environment.json"
    )
    arguments = parser.parse_args()
    rows = []
    for name, settings in ENVIRONMENTS.items():
        with server(settings) as url:
            for where in ("in process", "over HTTP"):
                environment = load_environment(
                    settings if where == "in process" else {"kind": "remote", "url": url}
                )
                for threads in (1, 8):
                    rows.append(
                        {
                            "environment": name,
                            "where": where,
                            **measure(environment, arguments.episodes, threads),
                        }
                    )
                environment.close()
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    table = Table(
        "environment",
        "where",
        "threads",
        "start, ms",
        "step, ms",
        "p95",
        "episodes/s",
        "client's CPU, ms/episode",
    )
    for row in rows:
        steps = row["step"]
        shown = (row["start"]["median_ms"], steps["median_ms"], steps["p95_ms"])
        cells = [f"{ms:.2f}" for ms in shown] + [f"{row['episodes_per_second']:.0f}", f"{row['cpu_ms']:.2f}"]
        table.add_row(row["environment"], row["where"], str(row["threads"]), *cells)
    Console(width=130).print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
