"""The processes that run SQL: bounded by the kernel, ended with us, used again, and never in the way of
one another.
"""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_peft.environments.db_bench import DBBenchConfig, GenerateConfig, isolated
from agent_peft.environments.db_bench import worker as worker_module
from agent_peft.environments.db_bench.database import DatabaseStopped, DeclaredColumn, Table
from agent_peft.environments.db_bench.episode import DBBenchEpisode
from agent_peft.environments.db_bench.isolated import IsolatedDatabase
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.environments.db_bench.worker import frame
from agent_peft.types import InfrastructureError, Outcome, StopReason
from tests.conftest import case

from .faults import children, wait_until
from .hostile_replies import COLUMNS, HOSTILE_EPISODES, ROWS
from .hostile_replies import TABLE as NAME

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
CONFIG = DBBenchConfig(generate=GenerateConfig(num_tasks=1))
TABLE = Table(
    "t", (DeclaredColumn("a", "INT"), DeclaredColumn("b", "TEXT")), tuple((i, f"x{i}") for i in range(100))
)
ENDLESS = (
    "CREATE TABLE u (a DEFAULT (format('%.*c', 1000000000, 'x')), b)",
    "INSERT INTO u (b) SELECT a FROM t",
)
PROBLEM = read_entry(
    "p",
    {
        "instruction": "Do it.",
        "table_info": {
            "name": NAME,
            "column_info_list": [
                {"name": name, "type": "INT" if name != "name" else "TEXT"} for name in COLUMNS
            ],
            "row_list": ROWS,
        },
        "answer_info": {"sql": f"UPDATE {NAME} SET score = 5 WHERE id = 1", "direct": None},
    },
)


def open_database(table=TABLE, seconds=2.0, steps=20_000_000, seed=0):
    return IsolatedDatabase(table, seconds=seconds, steps=steps, seed=seed)


def server():
    """The process that forks the workers."""
    open_database().close()
    return isolated._server._process.pid


@pytest.fixture
def alone():
    """A fork server that has no workers yet, and afterwards none any more."""
    isolated.stop_workers()
    pid = server()
    isolated.end_idle()
    wait_until(lambda: not children(pid))
    yield pid
    isolated.stop_workers()


def memory(pid, field):
    """In bytes; 0 for a process that has ended, reaped (no file) or not yet (no such line)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = (line for line in status.splitlines() if line.startswith(field + ":"))
    return int(next(sizes, "- 0 kB").split()[1]) * 1024


@linux
def test_the_memory_of_an_ended_process_is_none():
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert memory(ended.pid, "VmHWM") == 0
    ended.wait()
    assert memory(ended.pid, "VmHWM") == 0
    assert memory(os.getpid(), "VmHWM") > 0


def test_the_worker_has_our_sqlite():
    database = open_database()
    assert database.execute("SELECT sqlite_version()").rows == ((sqlite3.sqlite_version,),)
    database.close()


def test_every_value_comes_as_it_is():
    rows = (
        (1, "a"),
        (-(2**63), "\0\x1b\u2028é😀"),
        (2**63 - 1, ""),
        (None, None),
        (0.1, "'"),
        (float("inf"), '"\\'),
        (5e-324, "x" * 5_000),
    )
    database = open_database(Table("t", TABLE.columns, rows))
    assert database.table() == rows
    assert database.execute("SELECT x'', x'00ff', -0.0, 1e999").rows == (
        (b"", b"\0\xff", -0.0, float("inf")),
    )
    database.close()


@linux
def test_a_call_that_would_not_end_is_ended_by_the_kernel(alone):
    database = open_database(seconds=0.2)
    assert database.execute(ENDLESS[0]).error is None
    begun = time.monotonic()
    with pytest.raises(DatabaseStopped, match="time") as stopped:
        database.execute(ENDLESS[1])
    assert stopped.value.reason is StopReason.TIMEOUT
    assert time.monotonic() - begun < 5
    wait_until(lambda: not children(alone))
    for again in (lambda: database.execute("SELECT 1"), database.table, database.reset):
        with pytest.raises(DatabaseStopped):
            again()
    database.close()
    database.close()
    other = open_database()  # what died is not used again
    assert other.table() == TABLE.rows
    other.close()


@linux
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(json_group_array(hex(zeroblob(4000)))) FROM t a, t b, t c, t d",
        "SELECT json_group_object(random(), hex(zeroblob(4000))) FROM t a, t b, t c, t d",
        "SELECT hex(zeroblob(4000)) FROM t a, t b, t c, t d ORDER BY random()",
        "SELECT DISTINCT hex(randomblob(4000)) FROM t a, t b, t c ORDER BY 1",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO t SELECT i, i FROM n RETURNING hex(zeroblob(2000))",  # noqa: E501
    ],
)
def test_memory_is_bounded_and_the_database_survives(alone, sql):
    ours = memory(os.getpid(), "VmRSS")
    database = open_database()
    (worker,) = children(alone)
    error = database.execute(sql).error
    assert "was stopped" in error or error == "database or disk is full"
    assert 0 < memory(worker, "VmHWM") < 80 << 20
    assert memory(os.getpid(), "VmRSS") - ours < 20 << 20
    assert database.table() == TABLE.rows
    database.close()
    wait_until(
        lambda: not children(alone) or memory(worker, "VmHWM") < 30 << 20
    )  # one that has grown is not used again


@linux
def test_a_worker_can_open_no_file(alone, tmp_path):
    database = open_database()
    (worker,) = children(alone)
    limits = {
        line[:25].strip(): line[26:].split()[:2]
        for line in Path(f"/proc/{worker}/limits").read_text().splitlines()
    }
    assert limits["Max open files"] == limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    assert limits["Max address space"][1].isdigit()
    held = [os.readlink(f"/proc/{worker}/fd/{name}") for name in os.listdir(f"/proc/{worker}/fd")]
    assert sum(name.startswith("socket:") for name in held) == 1 and {
        name for name in held if not name.startswith("socket:")
    } <= {
        "/dev/null",
        os.readlink("/proc/self/fd/2"),
    }
    database.close()


def test_the_grader_reads_no_table_that_has_grown_too_much():
    database = open_database()
    assert (
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 150000) INSERT INTO t SELECT i, i FROM n"  # noqa: E501
        ).error
        is None
    )
    assert database.table() is None
    database.reset()
    assert database.execute("CREATE TABLE u AS SELECT a FROM t").error is None
    for sql in (
        "DROP TABLE t",
        "CREATE TABLE t (a, b AS (hex(zeroblob(4000))))",
        "INSERT INTO t (a) SELECT x.a FROM u x, u y",
    ):
        assert database.execute(sql).error is None
    assert database.table() is None
    database.close()


@linux
def test_workers_are_used_again(alone):
    for _ in range(20):
        database = open_database()
        assert database.execute("CREATE TABLE u (a)").error is None
        database.close()
    assert len(children(alone)) == 1


@linux
def test_what_is_abandoned_half_way_is_not_used_again(alone):
    database = open_database()
    database._worker._owes = True  # as an interrupt leaves it while an answer is awaited
    database.close()
    wait_until(lambda: not children(alone))


@linux
def test_a_fork_server_that_died_is_replaced(alone):
    running = open_database()
    os.kill(alone, signal.SIGKILL)
    isolated.end_idle()
    assert running.table() == TABLE.rows  # the workers do not need it
    others = [open_database() for _ in range(3)]
    assert [database.table() for database in others] == [TABLE.rows] * 3
    assert server() != alone
    for database in (running, *others):
        database.close()


@linux
def test_idle_workers_that_died_are_replaced(alone):
    for database in [open_database() for _ in range(5)]:
        database.close()
    for worker in children(alone):
        os.kill(worker, signal.SIGKILL)
    database = open_database()
    assert database.table() == TABLE.rows
    database.close()


@linux
def test_a_worker_that_is_killed_makes_the_episode_incorrect(alone):
    """What an agent may have caused is never told as a failure of the world."""
    for replies in ([operation("SELECT 1")], [answer("done")]):
        episode = DBBenchEpisode(PROBLEM, CONFIG, seed=0)
        episode.start()
        for worker in children(alone):
            os.kill(worker, signal.SIGKILL)
        (result,) = map(episode.step, replies)
        assert result.outcome is Outcome.INCORRECT
        assert result.stop_reason in (StopReason.CRASHED, StopReason.FINISHED)
        episode.close()


def test_no_process_at_all_is_an_infrastructure_failure(monkeypatch):
    isolated.stop_workers()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InfrastructureError, match="cannot be started"):
        DBBenchEpisode(PROBLEM, CONFIG, seed=0).start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InfrastructureError, match="it ended as it started"):
        DBBenchEpisode(PROBLEM, CONFIG, seed=0).start()
    monkeypatch.undo()
    open_database().close()


def test_an_answer_of_the_worker_that_is_none_ends_the_database(monkeypatch):
    """Whatever comes over the socket: bytes that are no message, a message that is too long, or one that
    is nested too deeply.
    """
    monkeypatch.setattr(worker_module, "_MAX_MESSAGE", 110_000)
    for sent in (
        b"hello\n",
        b"\xff" * 8 + b"\n",
        frame(["x"])[:-1],
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b"[" + b" " * 110_000 + b"]\n",
    ):
        database = open_database()
        near, far = socket.socketpair()
        database._worker.close()
        database._worker = isolated.Worker(far)
        near.sendall(sent)
        near.close()
        with pytest.raises(DatabaseStopped):
            database.execute("SELECT 1")
        database.close()


@linux
@pytest.mark.parametrize("busy", [case(False, fast=False), case(True, fast=True)])
def test_nothing_outlives_us_even_if_we_are_killed(busy):
    script = f"""
import os, signal, threading, time
from agent_peft.environments.db_bench import isolated
from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.isolated import IsolatedDatabase
databases = [IsolatedDatabase(Table("t", (DeclaredColumn("a", "INT"),), ((1,),)), seconds=0.5, steps=10**12, seed=0) for _ in range(3)]
databases[0].close()
for sql in {ENDLESS!r} if {busy} else ():
    threading.Thread(target=databases[1].execute, args=(sql,)).start()
    time.sleep(0.2)
pid = isolated._server._process.pid
print(pid, *open(f"/proc/{{pid}}/task/{{pid}}/children").read().split(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    pids = run.stdout.split()
    assert len(pids) == 4
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@linux
def test_a_fork_of_ours_has_databases_of_its_own(alone):
    """And holds nothing of its parent's, whose processes end with the parent."""
    kept = open_database()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            mine = open_database()
            if mine.table() == TABLE.rows and isolated._server._process.pid != alone:
                status = 0
            mine.close()
            isolated.stop_workers()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert kept.table() == TABLE.rows
    assert server() == alone
    kept.close()


@linux
def test_an_interrupt_at_the_terminal_is_not_for_the_workers(alone):
    database = open_database()
    assert os.getsid(alone) == os.getsid(children(alone)[0]) == alone != os.getsid(0)
    database.close()


def test_a_hostile_episode_does_not_delay_the_others():
    """Sixteen of them on few cores: an honest one continues meanwhile, and all end in time."""

    def attack(_):
        database = open_database(seconds=0.5)
        database.execute(ENDLESS[0])
        with pytest.raises(DatabaseStopped):
            database.execute(ENDLESS[1])
        database.close()

    begun = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        attacks = [pool.submit(attack, i) for i in range(16)]
        honest = open_database(seconds=30.0)
        for _ in range(50):
            assert honest.execute("SELECT COUNT(*) FROM t").rows == ((100,),)
        honest.close()
        for each in attacks:
            each.result()
    assert time.monotonic() - begun < 20


def attack_and_count(alone, count):
    """How many descriptors, threads, bytes, processes and temporary files ``count`` hostile episodes
    leave.
    """
    rules = DBBenchConfig(
        generate=GenerateConfig(num_tasks=1), statement_seconds=0.05, statement_steps=1_000_000
    )
    temporary = sorted(os.listdir("/tmp") + os.listdir("/var/tmp"))
    counts = []
    for start in (0, count // 2):
        for i in range(start, start + count // 2):
            episode = DBBenchEpisode(PROBLEM, rules, seed=i)
            episode.start()
            for reply in HOSTILE_EPISODES[i % len(HOSTILE_EPISODES)]:
                if episode.step(reply).done:
                    break
            episode.close()
        isolated.end_idle()
        wait_until(lambda: not children(alone))
        counts.append(
            (len(os.listdir("/proc/self/fd")), threading.active_count(), memory(os.getpid(), "VmRSS"))
        )
    assert counts[0][:2] == counts[1][:2]
    made = set(os.listdir("/tmp") + os.listdir("/var/tmp")) - set(temporary)
    assert not any("etilqs" in name or name == "agent.db" for name in made)
    return counts[1][2] - counts[0][2], memory(alone, "VmRSS")


@linux
@pytest.mark.slow
def test_a_thousand_hostile_episodes_leave_nothing(alone):
    growth, of_server = attack_and_count(alone, 1_000)
    assert growth < 64 << 20 and of_server < 40 << 20


def test_a_server_that_another_thread_closed_is_replaced(monkeypatch):
    closed = isolated.ForkServer()
    closed.close()
    monkeypatch.setattr(isolated, "_server", closed)
    database = open_database()
    assert database.table() == TABLE.rows
    database.close()
    isolated.stop_workers()


def test_a_worker_that_comes_back_after_the_server_was_closed_is_used_again():
    database = open_database()
    isolated.stop_workers()
    database.close()
    assert len(isolated._idle) == 1
    other = open_database()
    assert other.table() == TABLE.rows and isolated._server is None
    other.close()
    isolated.stop_workers()
    assert not isolated._idle
