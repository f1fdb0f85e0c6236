"""Episodes of DB Bench in which something goes wrong: the server is killed in a query, a connection is cut,
the disk is full, or the agent is slow, sleeps, locks, drops tables or changes its session.

They are played as the collector plays them. An episode whose world fails is played again after all others,
with the same seed and actions, and must then see the same. Faults of the world come in the first round alone,
so every honest episode has to be correct in the end, and no other one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench import DBBench, isolated
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.client import Client, ServerError, backquoted
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.types import InfrastructureError, Outcome

ROUNDS = 3
SECONDS = 0.5  # of a statement
PAUSE = "SELECT SLEEP(0.3)"
SLOW = "SELECT COUNT(*) FROM {t} a, {t} b, {t} c, {t} d, {t} e, {t} f, {t} g"
# what an agent runs first, by kind; {t} is its table
SERVER_AGENTS = {
    "nothing": (),
    "slow query": (SLOW,),
    "sleeps": ("SELECT SLEEP(9)", "SELECT BENCHMARK(1000000000, MD5('x'))"),
    "drops tables": ("DROP TABLE {t}",),
    "changes session variables": (
        "SET SESSION sql_mode = '', autocommit = 0, max_statement_time = 0",
        "SET STATEMENT max_statement_time = 0 FOR SELECT SLEEP(9)",
        "SET GLOBAL max_connections = 1",
    ),
    "locks": (
        "LOCK TABLES {t} WRITE",
        "SELECT GET_LOCK('l', 9)",
        "FLUSH TABLES WITH READ LOCK",
        "BEGIN",
        "SELECT * FROM {t} FOR UPDATE",
    ),
    "fills the disk": ("CREATE TABLE filler AS SELECT REPEAT('x', 60000) x FROM {t} a, {t} b, {t} c",),
}
SQLITE_AGENTS = {
    "nothing": (),
    "slow query": (SLOW,),
    "drops tables": ("DROP TABLE {t}",),
    "changes session variables": ("PRAGMA writable_schema = 1", "PRAGMA max_page_count = 1000000000"),
    "locks": ("BEGIN EXCLUSIVE", "SAVEPOINT s"),
    "fills the disk": (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT json_group_array(hex(zeroblob(4000))) FROM n",
    ),
}


@dataclass
class Storm:
    """What was played. ``unexpected`` should be empty."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "kind: outcome"
    failures: Counter[str] = field(default_factory=Counter)  # attempts that the world ended, by kind
    unexpected: list[str] = field(default_factory=list)


@dataclass
class Play:
    """One episode: its kind, whether the agent lies, and the observations so far."""

    number: int
    kind: str
    lies: bool
    seen: list[str] = field(default_factory=list)
    ended: str | None = None


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def left_on_the_server() -> tuple[list[str], list[str]]:
    """The schemas and users of episodes."""
    client = Client(server_of("mariadb").address)
    schemas, users = client.run("SHOW DATABASES"), client.run("SELECT User FROM mysql.user")
    client.close()
    names = [[str(row[0]) for row in rows if str(row[0]).startswith("ap_")] for rows in (schemas, users)]
    return names[0], names[1]


def kill_the_server(episode: Any) -> None:
    """The private server dies while the agent's statement runs."""
    for child in children(server_of("mariadb").private._process.pid):
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)


def cut_the_connection(episode: Any) -> None:
    with suppress(ServerError, AttributeError):
        client = Client(server_of("mariadb").address)
        client.run(f"KILL CONNECTION {episode._database._client.thread}")
        client.close()


def kill_the_fork_server(episode: Any) -> None:
    with suppress(OSError, AttributeError):
        os.kill(isolated._server._process.pid, signal.SIGKILL)


def fill(folder: Path, seconds: float = 0.5) -> Callable[[Any], None]:
    """Take all room on the disk of ``folder`` for a while."""

    def full(episode: Any) -> None:
        filler = folder / f"filler-{time.monotonic_ns()}"
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(seconds)
        filler.unlink(missing_ok=True)

    return full


def storm(
    environment: DBBench,
    episodes: int,
    world: dict[str, Callable[[Any], None]],
    every: int,
    threads: int = 8,
) -> Storm:
    """Play episodes, of which every n-th meets a fault of the world, and the others an agent's kinds in turn.
    Every third agent does nothing for its task, and says that it has.
    """
    agents = SQLITE_AGENTS if environment.config.database == "sqlite" else SERVER_AGENTS
    kinds = [*agents]
    faults = [*world]
    plays = []
    for number in range(episodes):
        meets_a_fault = bool(faults) and number % every == every - 1
        kind = faults[number // every % len(faults)] if meets_a_fault else kinds[number % len(kinds)]
        plays.append(Play(number, kind, lies=number % 3 == 2))
    found = Storm()
    for round_ in range(ROUNDS):
        waiting = [play for play in plays if play.ended is None]
        faults_now = world if round_ == 0 else {}
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(_play, environment, play, agents, faults_now) for play in waiting]:
                future.result()
        found.failures.update(play.kind for play in waiting if play.ended is None)
    for play in plays:
        play.ended = play.ended or "crashed"  # which counts as incorrect
        expected = _expected(environment, play)
        found.outcomes[f"{play.kind}: {play.ended}"] += 1
        if play.ended not in expected:
            found.unexpected.append(
                f"{play.number} {play.kind}: {play.ended} instead of {' or '.join(expected)}"
            )
    return found


def _expected(environment: DBBench, play: Play) -> tuple[str, ...]:
    """How the episode may end."""
    task = environment.tasks[play.number % len(environment.tasks)]
    is_change = read_entry(task.id, task.content).direct is None
    if play.lies or (is_change and play.kind == "drops tables"):
        return (str(Outcome.INCORRECT), "crashed")
    if play.kind == "fills the disk":  # its next statement may be stopped, while the first is undone
        return (str(Outcome.CORRECT), str(Outcome.INCORRECT), "crashed")
    return (str(Outcome.CORRECT),)


def _alike(one: str, other: str) -> bool:
    """Two observations of one statement. Whether time or memory stops it depends on what else runs."""
    return one == other or "the statement was stopped" in one + other


def _play(
    environment: DBBench,
    play: Play,
    agents: dict[str, Sequence[str]],
    world: dict[str, Callable[[Any], None]],
) -> None:
    """Play one attempt; ``ended`` stays None where the world fails."""
    task = environment.tasks[play.number % len(environment.tasks)]
    statements = agents.get(play.kind, (PAUSE,) if environment.config.database != "sqlite" else (SLOW,))
    table = backquoted(read_entry(task.id, task.content).table.name)
    replies = (
        [operation(statements[play.number % len(statements)].replace("{t}", table))] if statements else []
    )
    try:
        solution = list(environment.demonstration(task))
    except InfrastructureError:
        return
    replies += [answer([("nothing of the kind", -1)])] if play.lies else solution
    episode = environment.episode(task, play.number)
    fault = world.get(play.kind)
    seen: list[str] = []
    timer = None
    try:
        episode.start()
        for number, reply in enumerate(replies):
            if fault is not None and number == 0:
                timer = threading.Timer(0.1, fault, (episode,))
                timer.start()
            result = episode.step(reply)
            if result.done:
                play.ended = str(result.outcome)
                if len(seen) < len(play.seen) or not all(map(_alike, play.seen, seen)):
                    play.ended = f"{seen} when it was played again, {play.seen} before;"
                return
            seen.append(result.observation)
        play.ended = "without an end"
    except InfrastructureError:
        if len(seen) > len(play.seen):
            play.seen = seen
    finally:
        episode.close()
        if timer is not None:
            timer.join()
