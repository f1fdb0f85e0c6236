"""An environment that notices when anything is done twice; ``python tally.py PORT LOG TASKS`` serves it
from its own process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_peft.environments.base import Environment, Episode
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task

TURNS = 3


class Tally(Environment):
    """Say the numbers one after the other, each once, then their total as it was told. Every step is
    written to a log, for good.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.log = os.open(settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._tasks = tuple(
            Task(str(number), (), {"numbers": [number, number + 3, 7]}) for number in range(settings["tasks"])
        )

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def episode(self, task: Task, seed: int) -> TallyEpisode:
        return TallyEpisode(self.log, task, seed)

    def close(self) -> None:
        if self.log >= 0:
            os.close(self.log)
        self.log = -1


class TallyEpisode(Episode):
    def __init__(self, log: int, task: Task, seed: int) -> None:
        self.log, self.task, self.seed, self.total, self.turn, self.over = log, task, seed, 0, 0, False

    def start(self) -> Sequence[Message]:
        self.note("start")
        return [Message("user", f"say {self.task.content['numbers']}")]

    def step(self, action: str) -> StepResult:
        if self.over:
            raise RuntimeError("the episode is over")
        self.note(str(self.turn))
        self.turn += 1
        if self.turn > TURNS:
            self.over = True
            right = int(action) == self.total == sum(self.task.content["numbers"])
            return StepResult("", True, Outcome.CORRECT if right else Outcome.INCORRECT, StopReason.FINISHED)
        self.total += int(action)
        return StepResult(str(self.total))

    def close(self) -> None:
        self.over = True

    def note(self, what: str) -> None:
        os.write(self.log, f"{self.seed} {what} {os.getpid()}\n".encode())


def main(port: str, log: str, tasks: str) -> None:
    from agent_peft.environments.http.guard import Limits
    from agent_peft.environments.http.server import Host
    from agent_peft.environments.http.transport import Address

    host = Host(
        {"train": Tally({"log": Path(log), "tasks": int(tasks)})}, Address("127.0.0.1", int(port)), Limits()
    )
    asyncio.run(host.run(lambda: print(host.url, flush=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
