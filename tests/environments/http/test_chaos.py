"""Messages are lost, repeated, cut and delayed, and the server is killed: no step of an episode is done
twice, and no outcome is wrong.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_peft.environments import load_environment
from agent_peft.seeding import derive
from agent_peft.types import InfrastructureError, Outcome
from tests.environments.http.chaos import FAULTS, ChaosProxy
from tests.environments.http.tally import Tally

HERE = Path(__file__).parent
TASKS = 20


class Server:
    """The tally's server, in its own process that can be killed."""

    def __init__(self, log):
        self.log, self.port, self.process = log, 0, None
        self.start()

    def start(self):
        command = [sys.executable, str(HERE / "tally.py"), str(self.port), str(self.log), str(TASKS)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def play(environment, number, lie):
    """One episode, begun again as often as the world fails, as the collector does. Its outcome, and how
    often it was begun.
    """
    task = environment.tasks[number % TASKS]
    for attempt in range(1, 50):
        episode = environment.episode(task, derive(0, "chaos", number, attempt))
        try:
            episode.start()
            for said in task.content["numbers"]:
                heard = episode.step(str(said)).observation
            result = episode.step(str(int(heard) + lie))
            assert result.done
            return result.outcome, attempt
        except InfrastructureError:
            continue
        finally:
            episode.close()
    raise AssertionError("the server never came back")


def storm(tmp_path, episodes, kills, trouble):
    server = Server(tmp_path / "log")
    proxy = ChaosProxy(server.port, trouble, seed=1)
    finished, turn = 0, threading.Condition()

    def one(number):
        nonlocal finished
        found = play(environment, number, lie=number % 2)
        with turn:
            finished += 1
            turn.notify_all()
        return found

    environment = load_environment(
        {"kind": "remote", "url": f"http://127.0.0.1:{proxy.port}", "timeout": 10, "patience": 60}
    )
    try:
        with ThreadPoolExecutor(8) as threads:
            played = [threads.submit(one, number) for number in range(episodes)]
            for kill in range(1, kills + 1):
                with turn:
                    turn.wait_for(lambda kill=kill: finished >= kill * episodes // (kills + 1), timeout=300)
                server.kill()
                server.start()
            outcomes = [each.result() for each in played]
    finally:
        environment.close()
        proxy.close()
        server.kill()

    wrong = [
        number
        for number, (outcome, _) in enumerate(outcomes)
        if outcome is not (Outcome.INCORRECT, Outcome.CORRECT)[number % 2 == 0]
    ]
    assert not wrong
    done = [tuple(line.split()) for line in (tmp_path / "log").read_text().splitlines()]
    steps = Counter((episode, what) for episode, what, _ in done if what != "start")
    starts = Counter(
        (episode, server) for episode, what, server in done if what == "start"
    )  # a killed server's start is lost with it
    assert steps and set(steps.values()) == {1}
    assert set(starts.values()) <= {1, 2}  # a reset that is repeated starts the same episode again
    servers = {server for *_, server in done}
    assert len(servers) == kills + 1
    assert all(proxy.met[fault] for fault in FAULTS)
    assert any(attempts > 1 for _, attempts in outcomes)


@pytest.mark.slow
def test_a_thousand_episodes(tmp_path):
    storm(tmp_path, episodes=1000, kills=4, trouble=0.1)


def test_an_environment_that_counts_steps_sees_a_repeated_one(tmp_path):
    """That the tally would notice: the same episode, one number said twice."""
    environment = Tally({"log": tmp_path / "log", "tasks": 1})
    episode = environment.episode(environment.tasks[0], 0)
    episode.start()
    for said in ("0", "3", "3"):
        heard = episode.step(said).observation
    assert episode.step(heard).outcome is Outcome.INCORRECT
    environment.close()
