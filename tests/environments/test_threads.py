"""Episodes of many threads at once, and episodes that are closed by another thread while they step."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.types import InfrastructureError

THREADS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "os_interaction": {"generate": {"num_tasks": 2, "seed": 3, "skills": ["mkdir"]}, "max_turns": 10_000},
    "db_bench": {"generate": {"num_tasks": 4}, "max_turns": 10_000},
}
# says a mark after a while; another episode's mark would be seen
ACTIONS: dict[str, str] = {
    "os_interaction": "Act: bash\n\n```bash\nsleep 0.05; echo {mark} >>/tmp/marks; cat /tmp/marks\n```",
    "db_bench": "Action: Operation\n```sql\nWITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 50000) "  # noqa: E501
    "SELECT '{mark}', COUNT(*) FROM c\n```",
}


@pytest.fixture(params=[(kind, where) for kind in SETTINGS for where in ("here", "over HTTP")], ids=" ".join)
def played(request: Any, serving: Any) -> tuple[Environment, str]:
    """An environment, and an action of it."""
    kind, where = request.param
    if kind == "os_interaction":
        request.getfixturevalue("sandboxed")
    environment = load_environment({"kind": kind, **SETTINGS[kind]})
    if where == "over HTTP":
        environment = load_environment({"kind": "remote", "url": serving({"train": environment}).url})
    request.addfinalizer(environment.close)
    return environment, ACTIONS[kind]


def play(
    environment: Environment,
    action: str,
    number: int,
    closing: Callable[[Callable[[], None]], threading.Timer] | None,
) -> Counter[str]:
    """Three steps, or as many as there are until it is closed. What came of them."""
    found = Counter[str]()
    episode = environment.episode(environment.tasks[number % len(environment.tasks)], number)
    episode.start()
    timer = closing(episode.close) if closing else None
    try:
        for turn in itertools.count() if closing else range(3):
            mark = f"episode{number}-{turn}"
            said = episode.step(action.format(mark=mark)).observation
            others = said.replace(f"episode{number}-", "")
            found["right" if mark in said and "episode" not in others else f"wrong: {said}"] += 1
    except (RuntimeError, InfrastructureError) as error:
        found["closed" if " is over" in str(error) or "closed" in str(error) else f"wrong: {error}"] += 1
    finally:
        episode.close()
        if timer is not None:
            timer.join()
    return found


def test_many_episodes_at_once_do_not_meet(played: tuple[Environment, str]) -> None:
    environment, action = played
    with ThreadPoolExecutor(THREADS) as threads:
        found = sum(
            threads.map(lambda number: play(environment, action, number, None), range(THREADS)), Counter()
        )
    assert found == {"right": 3 * THREADS}


def test_an_episode_may_be_closed_while_it_steps(played: tuple[Environment, str]) -> None:
    """Its machine or its worker is not taken away under it, nor are its descriptors given to another's."""
    environment, action = played
    play(environment, action, 0, None)  # what is started once, is
    draw = random.Random(0)

    def closing(close: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(draw.random() * 0.1, close)
        timer.start()
        return timer

    with ThreadPoolExecutor(THREADS) as threads:
        found = sum(
            threads.map(lambda number: play(environment, action, number, closing), range(1, 2 * THREADS)),
            Counter(),
        )
    assert set(found) <= {"right", "closed"} and found["closed"] == 2 * THREADS - 1


def test_nothing_of_a_machine_is_left(sandboxed: None, warm_process: Any, tmp_path: Path) -> None:
    """In a process without other tests: what they left may open a file meanwhile."""
    done = warm_process.run(__file__, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def play_in_many_machines() -> None:
    environment = load_environment({"kind": "os_interaction", **SETTINGS["os_interaction"]})
    play(environment, ACTIONS["os_interaction"], 0, None)
    before = descriptors()
    with ThreadPoolExecutor(THREADS) as threads:
        list(
            threads.map(
                lambda number: play(environment, ACTIONS["os_interaction"], number, None), range(THREADS)
            )
        )
    deadline = time.monotonic() + 20  # the runtime's own processes end a moment later
    while len(descriptors()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    after = descriptors()
    assert len(after) <= len(before), [after[number] for number in after.keys() - before.keys()]
    environment.close()


def descriptors() -> dict[str, str]:
    """What each descriptor of this process is."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


if __name__ == "__main__":
    play_in_many_machines()
