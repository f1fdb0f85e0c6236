"""Whatever fails under an episode, or whatever an agent does to it, reaches no other one, and pays nobody."""

import os
import threading
from pathlib import Path

import pytest

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, GenerateConfig, isolated
from agent_peft.environments.db_bench.servers import accounts

from .faults import (
    SECONDS,
    cut_the_connection,
    kill_the_fork_server,
    kill_the_server,
    left_on_the_server,
    storm,
)


def environment(database):
    config = DBBenchConfig(
        generate=GenerateConfig(num_tasks=12, seed=3),
        database=database,
        statement_seconds=SECONDS,
        max_turns=6,
    )
    return DBBench(config)


def folders():
    return [path.name for place in ("/dev/shm", "/tmp") for path in Path(place).glob("agent-peft-server_*")]


def weather(database, episodes, every):
    """Play a storm, and check what is left behind it."""
    played = environment(database)
    threads = threading.active_count()
    if database == "sqlite":
        found = storm(played, episodes, {"fork server killed": kill_the_fork_server}, every)
    else:
        world = {"server killed in a query": kill_the_server, "connection cut": cut_the_connection}
        found = storm(played, episodes, world, every)
        assert found.failures["connection cut"] and found.failures["server killed in a query"]
        assert left_on_the_server() == ([], [])
    assert not found.unexpected, found
    assert sum(found.outcomes.values()) == episodes
    played.close()
    accounts.stop_servers()
    isolated.stop_workers()
    assert threading.active_count() <= threads
    assert not [name for name in folders() if f"_{os.getpid():x}_" in name]
    return found


def test_faults_reach_no_other_episode_and_pay_nobody():
    weather("sqlite", 24, 8)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["mariadb", "sqlite"])
def test_five_hundred_episodes_with_faults(database, request):
    if database == "mariadb":
        request.getfixturevalue("mariadb")
    weather(database, 500, 25)
