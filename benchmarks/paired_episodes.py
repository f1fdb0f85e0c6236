"""Imports of both sides of ``against_trl.py``: the environments, and the pipe by which the driver lets one
side at a time make a step. It does not import torch.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from agent_peft.environments import AnyEnvironment, Environment, EnvironmentConfig, Episode, load_environment
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task


class PromptsConfig(EnvironmentConfig):
    tasks: Path


class Prompts(Environment):
    """The tasks are a JSON list of conversations. An episode is one reply of any content."""

    config_class = PromptsConfig

    def __init__(self, config: PromptsConfig) -> None:
        opened = json.loads(config.tasks.read_text())
        self._openings = {
            str(number): [Message(**message) for message in messages]
            for number, messages in enumerate(opened)
        }
        self._tasks = [Task(name) for name in self._openings]

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> Episode:
        return _OneReply(self._openings[task.id])


class _OneReply(Episode):
    def __init__(self, opening: Sequence[Message]) -> None:
        self._opening = opening

    def start(self) -> Sequence[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        return StepResult("", done=True, outcome=Outcome.CORRECT, stop_reason=StopReason.FINISHED)

    def close(self) -> None:
        pass


class EverySecondConfig(EnvironmentConfig):
    inner: AnyEnvironment


class EverySecond(Environment):
    """An environment ``inner`` with another verdict: every second episode of a task is correct, in the order
    in which the episodes are made. So every group has a gradient, a step has its full cost, and the policy
    does not drift. (A verdict by the order of their ends would teach it to end early.)
    """

    config_class = EverySecondConfig

    def __init__(self, config: EverySecondConfig) -> None:
        self.inner = load_environment(config.inner)
        self._made: defaultdict[str, Iterator[int]] = defaultdict(count)

    @property
    def tasks(self) -> Sequence[Task]:
        return self.inner.tasks

    def episode(self, task: Task, seed: int) -> Episode:
        return _EverySecond(self.inner.episode(task, seed), next(self._made[task.id]) % 2 == 0)

    def close(self) -> None:
        self.inner.close()


class _EverySecond(Episode):
    def __init__(self, inner: Episode, correct: bool) -> None:
        self._inner, self._outcome = inner, Outcome.CORRECT if correct else Outcome.INCORRECT

    def start(self) -> Sequence[Message]:
        return self._inner.start()

    def step(self, action: str) -> StepResult:
        result = self._inner.step(action)
        return replace(result, outcome=self._outcome) if result.done else result

    def close(self) -> None:
        self._inner.close()


class Turnstile:
    """One side's end of the pipe to the driver. Only the driver reads standard output; libraries print to
    standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._spent: defaultdict[str, float] = defaultdict(float)

    def tell(self, **record: Any) -> None:
        print(json.dumps(record), file=self._out, flush=True)

    def wait(self) -> None:
        """Wait for the driver's signal. The process ends if the driver closes the pipe."""
        if not sys.stdin.readline():
            os._exit(0)
        self._spent.clear()
        self._began = (time.perf_counter(), time.process_time())

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the wall and CPU seconds of the block under the name ``what``."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._spent[f"{what}_wall"] += time.perf_counter() - wall
            self._spent[f"{what}_cpu"] += time.process_time() - cpu

    def stop(self) -> dict[str, float]:
        """Return the seconds since the driver's signal, and the peak resident memory of the process."""
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        return {"wall": wall, "cpu": cpu, **self._spent, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Return the peak of this process alone: on Linux ru_maxrss begins with the parent's value."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
