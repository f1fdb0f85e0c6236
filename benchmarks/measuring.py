"""Shared parts of the speed benchmarks: fair timing of several ways, and the limits of this machine."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Limits:
    """The speed that this machine reaches with the current number of threads: the floor of every time."""

    flops: float  # fp32 operations a second, a large matrix product
    bytes: float  # bytes a second, a matrix read once by a product with a vector

    @property
    def text(self) -> str:
        return (
            f"{torch.get_num_threads()} threads reach {self.flops / 1e9:.0f} GFLOP/s in fp32 "
            f"and read {self.bytes / 1e9:.1f} GB/s"
        )


def measure_limits() -> Limits:
    """Measure a product of 2048 × 2048 × 2048, and one of a matrix of 512 MiB with a vector (medians)."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    product = statistics.median(seconds(lambda: a @ b) for _ in range(7))
    wide, vector = torch.randn(1 << 15, 1 << 12), torch.randn(1 << 12)
    reading = statistics.median(seconds(lambda: wide @ vector) for _ in range(7))
    return Limits(2 * 2048**3 / product, wide.numel() * wide.element_size() / reading)


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def alternate(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Time each way ``rounds`` times, after a warm-up. The ways alternate in opposite orders, so that noise
    affects all of them. Returns seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1 if warm_up else 0, rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            gc.collect()
            took = seconds(ways[name])
            if turn >= 0:
                found[name].append(took)
    return found


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of ``of[i] / to[i]``. The times of a pair were measured side by side."""
    return statistics.median(x / y for x, y in zip(of, to, strict=True))


@dataclass
class Split:
    """The time of some calls. The time of a nested call counts for the inner call only.

    >>> split = Split()
    >>> with split.part("outer"), split.part("inner"):
    ...     pass
    >>> sorted(split.seconds)
    ['inner', 'outer']
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[float] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._open.pop()
            if self._open:
                self._open[-1] += took

    @contextmanager
    def watch(self, parts: Mapping[str, tuple[object, str]]) -> Iterator[None]:
        """Inside the block, count calls of ``(object, method)`` for a part. An object may be a module or a
        class. Missing methods are skipped.
        """
        parts = {name: (owner, method) for name, (owner, method) in parts.items() if hasattr(owner, method)}
        before = [(owner, method, vars(owner).get(method)) for owner, method in parts.values()]
        for name, (owner, method) in parts.items():
            setattr(owner, method, self._timed(name, getattr(owner, method)))
        try:
            yield
        finally:
            for owner, method, was in before:
                if was is None:
                    delattr(owner, method)
                else:
                    setattr(owner, method, was)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*arguments, **named)

        return timed


def hot_spots(work: Callable[[], object], most: int = 12) -> list[dict[str, Any]]:
    """Return the operators with the most CPU time (without nested ones), in percent of all of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    rows = profile.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    rows = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:most]
    return [
        {"operator": row.key, "percent": round(100 * row.self_cpu_time_total / total, 1), "calls": row.count}
        for row in rows
    ]


def write(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write NAME.json with what the machine is."""
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n")
