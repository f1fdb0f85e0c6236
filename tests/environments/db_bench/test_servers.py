"""The servers of DB Bench: they end with us, leave nothing behind, and their faults are nobody's reward."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_peft.environments.db_bench import DBBenchConfig
from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.servers import accounts, private
from agent_peft.environments.db_bench.servers.accounts import (
    FOLDER_PREFIX,
    DatabaseServer,
    owned_name,
    server_of,
)
from agent_peft.environments.db_bench.servers.client import Client, ServerAccount, ServerError, parse_address
from agent_peft.environments.db_bench.servers.database import ServerDatabase, statement_refusal
from agent_peft.types import AgentPeftError, InfrastructureError
from tests.conftest import case

from .faults import children, left_on_the_server, wait_until

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
TABLE = Table(
    "t", (DeclaredColumn("a", "INT"), DeclaredColumn("b", "TEXT")), tuple((i, f"x{i}") for i in range(100))
)
GENERATED = {"generate": {"num_tasks": 1}}


def open_database(seconds=2.0, seed=0):
    return ServerDatabase("mariadb", TABLE, seconds=seconds, seed=seed)


def watchdog():
    return server_of("mariadb").private._process.pid


def is_stopped(pid):
    """Whether every thread has stopped."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads} == {"T"}


def folder():
    return Path(server_of("mariadb").address.socket).parent


def administrator():
    return Client(server_of("mariadb").address)


def left():
    """What `left_on_the_server` finds, and the connections of episodes. A server ends the thread of a closed
    connection in its own time, so those have some seconds.
    """
    client = administrator()
    count = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE user LIKE 'ap%'"
    end = time.monotonic() + 10
    while (threads := client.run(count)[0][0]) and time.monotonic() < end:
        time.sleep(0.02)
    client.close()
    return (*left_on_the_server(), threads)


@linux
@pytest.mark.parametrize("as_nobody", [case(False, fast=True), case(True, fast=False)])
def test_nothing_outlives_us_even_if_we_are_killed(mariadb, as_nobody):
    script = """
import os, signal, threading, time
from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.database import ServerDatabase
database = ServerDatabase("mariadb", Table("t", (DeclaredColumn("a", "INT"),), ((1,),)), seconds=60.0, seed=0)
threading.Thread(target=database.execute, args=("SELECT SLEEP(50)",)).start()
time.sleep(0.2)
server = server_of("mariadb")
pid = server.private._process.pid
print(server.address.socket, pid, *open(f"/proc/{pid}/task/{pid}/children").read().split(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    if as_nobody and (os.geteuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("only root can be another user, and by setpriv")
    other = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    other += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # Python may be root's alone
    command = [*(other if as_nobody else ()), sys.executable, "-c", script]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    socket, *pids = run.stdout.split()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    wait_until(lambda: not Path(socket).parent.exists())


def test_it_outlives_the_thread_that_started_it(mariadb):
    accounts.stop_servers()
    thread = threading.Thread(target=lambda: open_database().close())
    thread.start()
    thread.join()
    started = server_of("mariadb")
    time.sleep(0.3)
    assert server_of("mariadb") is started and started.is_running


@pytest.mark.slow
@linux
def test_it_ends_with_its_watchdog_and_another_takes_its_place(mariadb):
    database = open_database()
    old, (server,) = watchdog(), children(watchdog())
    place = folder()
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{server}").exists())
    with pytest.raises(InfrastructureError, match="the database server failed"):
        database.execute("SELECT 1")
    database.close()
    shutil.rmtree(place)  # another process would see ours alive
    other = open_database()
    assert watchdog() != old
    assert other.table() == TABLE.rows
    other.close()


@linux
def test_a_server_that_is_killed_in_a_query_is_replaced(mariadb):
    database, raised = open_database(seconds=30.0), []
    place = folder()

    def ask():
        try:
            database.execute("SELECT SLEEP(20)")
        except InfrastructureError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    for pid in children(watchdog()):
        os.kill(pid, signal.SIGKILL)
    thread.join(10)
    assert len(raised) == 1
    database.close()
    other = open_database()
    assert other.table() == TABLE.rows
    other.close()
    wait_until(lambda: not place.exists())
    assert left() == ([], [], 0)


@linux
@pytest.mark.slow
def test_a_server_that_does_not_answer_is_replaced(mariadb, monkeypatch):
    monkeypatch.setattr(accounts, "_SECONDS", 1.0)
    monkeypatch.setattr(accounts, "_PING_SECONDS", 0.5)
    monkeypatch.setattr("agent_peft.environments.db_bench.servers.database._FILL_SECONDS", 5.0)
    database = open_database(seconds=0.2)
    server_of("mariadb").close_idle()
    old = watchdog()
    (pid,) = children(old)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid))  # a running thread may still answer a query after the signal was sent
    with pytest.raises(InfrastructureError):
        database.execute("SELECT 1")
    other = open_database()
    assert watchdog() != old and not Path(f"/proc/{pid}").exists()
    database.close()
    other.close()


def test_a_connection_that_is_cut_ends_no_other(mariadb):
    database, other = open_database(), open_database()
    client = administrator()
    client.run(f"KILL CONNECTION {database._client.thread}")
    client.close()
    for again in (lambda: database.execute("SELECT 1"), database.table, database.reset):
        with pytest.raises(Exception, match=r"the database server failed|was stopped"):
            again()
    database.close()
    assert other.table() == TABLE.rows
    other.close()
    assert left() == ([], [], 0)


def test_a_statement_that_the_server_does_not_stop_is_killed(mariadb, monkeypatch):
    """MySQL's own limit ends SELECT alone."""
    monkeypatch.setattr(ServerDatabase, "_limit", lambda self, seconds: "SET SESSION max_statement_time = 0")
    database = open_database(seconds=0.3)
    begun = time.monotonic()
    stopped = database.execute("UPDATE t SET b = 'y' WHERE SLEEP(9) = 0")
    assert stopped.error == "the statement was stopped after 0.3 seconds"
    assert time.monotonic() - begun < 8
    assert database.table() == TABLE.rows
    database.close()
    assert left() == ([], [], 0)


HOSTILE = (
    "DROP TABLE t",
    "DROP DATABASE mysql",
    "CREATE DATABASE mine",
    "DROP DATABASE db",
    "USE mysql",
    "SELECT * FROM mysql.user",
    "SET GLOBAL max_connections = 1",
    "SET SESSION max_statement_time = 0",
    "SET STATEMENT max_statement_time = 0 FOR SELECT SLEEP(9)",
    "SET autocommit = 0",
    "SET PASSWORD = PASSWORD('x')",
    "LOCK TABLES t WRITE",
    "FLUSH TABLES WITH READ LOCK",
    "SELECT GET_LOCK('l', 9)",
    "SELECT `get_lock` /* now */ ('l', 9)",
    "/*!50000 SELECT GET_LOCK('l', 9) */",
    "SELECT 1 /*M! + GET_LOCK('l', 9) */",
    "BEGIN",
    "XA START 'x'",
    "SELECT SLEEP(9)",
    "SELECT BENCHMARK(1000000000, MD5('x'))",
    "SELECT 'x' INTO OUTFILE '{folder}/stolen'",
    "SELECT LOAD_FILE('/etc/passwd')",
    "LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE t",
    "CREATE TABLE u (a INT) DATA DIRECTORY = '{folder}'",
    "CREATE TABLE u (a INT) ENGINE = CONNECT",
    "CREATE FUNCTION f() RETURNS INT RETURN 1",
    "CREATE EVENT e ON SCHEDULE EVERY 1 SECOND DO DELETE FROM t",
    "CREATE USER mine",
    "GRANT ALL ON *.* TO CURRENT_USER()",
    "KILL 1",
    "SHUTDOWN",
    "INSTALL SONAME 'ha_connect'",
    "HANDLER t OPEN",
    "PREPARE s FROM 'SELECT 1'",
    "CALL p()",
    "SELECT REPEAT('x', 1000000000)",
    "INSERT INTO t SELECT a.a, REPEAT('x', 60000) FROM t a, t b, t c",
    "CREATE TABLE u AS SELECT REPEAT('x', 60000) AS x FROM t a, t b",
    "SELECT 1; DROP TABLE t",
    "SELECT * FROM information_schema.PROCESSLIST",
)


@pytest.mark.slow
def test_what_an_agent_does_stays_with_it(mariadb, tmp_path):
    honest = open_database()
    files = sorted(os.listdir(folder()))
    for sql in HOSTILE:
        database = open_database(seconds=0.5)
        begun = time.monotonic()
        executed = database.execute(sql.replace("{folder}", str(tmp_path)))
        assert time.monotonic() - begun < 20, sql
        assert server_of("mariadb")._prefix not in repr(executed), sql
        assert honest.execute("SELECT COUNT(*) FROM t").rows == ((100,),)
        database.reset()
        assert database.table() == TABLE.rows, sql
        database.close()
    assert honest.table() == TABLE.rows
    honest.close()
    assert left() == ([], [], 0)
    assert sorted(os.listdir(folder())) == files
    assert list(tmp_path.iterdir()) == []


def test_a_schema_that_could_not_be_dropped_is_dropped_with_the_next(mariadb, monkeypatch):
    def fail(*_):
        raise ServerError(2013, "lost")

    database = open_database()
    with monkeypatch.context() as patch:
        patch.setattr(DatabaseServer, "_drop", fail)
        database.close()
    assert [len(names) for names in left()[:2]] == [1, 1]
    open_database().close()
    assert left() == ([], [], 0)


@pytest.mark.parametrize(
    ("sql", "refusal"),
    [
        ("  -- a\n/* b */ # c\n set x = 1", "SET is not allowed here"),
        ("(SELECT 1) UNION (SELECT 2)", None),
        ("((begin))", "a transaction is not allowed here"),
        ("SELECT 'begin; get_lock(' AS `get_lock`, get_lock FROM t;  -- ;", None),
        ("SELECT 'it''s' \"\\\"; x\", 1;", None),
        ("SELECT Release_All_Locks \n ()", "the function release_all_locks is not allowed here"),
        ("SELECT 1 --\n; SELECT 2", "write one statement at a time"),
        ("SELECT 1--2; SELECT 2", "write one statement at a time"),
        ("SELECT '\\'; SELECT '; DROP TABLE t", "write one statement at a time"),
        ("", None),
        ("'", None),
        ("/*", None),
        ("`" * 9_999, None),
        ("/* */" * 1_999, None),
    ],
)
def test_what_is_not_even_sent(sql, refusal):
    assert statement_refusal(sql) == refusal


def orphan(prefix):
    """A name that a process of this host has left, which has ended."""
    script = f"from {accounts.__name__} import owned_name; print(owned_name({prefix!r}) + '_1')"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_what_dead_processes_left_is_removed(mariadb, tmp_path):
    dead, living = orphan(accounts.PREFIX), owned_name(accounts.PREFIX) + "_kept"
    elsewhere = dead.replace(dead.split("_")[1], "ffffff")
    client = administrator()
    for name in (dead, living, elsewhere):
        client.run(f"CREATE DATABASE `{name}`")
        client.run(f"CREATE USER `{name}`@localhost")
    DatabaseServer(server_of("mariadb").address).close_idle()
    schemas, users, _ = left()
    assert sorted(schemas) == sorted(users) == sorted([living, elsewhere])
    for name in (living, elsewhere):
        client.run(f"DROP DATABASE `{name}`")
        client.run(f"DROP USER `{name}`@localhost")
    client.close()

    for name in (orphan(FOLDER_PREFIX), owned_name(FOLDER_PREFIX) + "_x", "other"):
        (tmp_path / name / "tables").mkdir(parents=True)
    accounts.remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [owned_name(FOLDER_PREFIX) + "_x", "other"]
    )


@linux
def test_a_fork_of_ours_has_a_server_of_its_own(mariadb):
    kept, mine = open_database(), watchdog()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            database = open_database()
            if database.table() == TABLE.rows and watchdog() != mine:
                status = 0
            accounts.stop_servers()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert kept.table() == TABLE.rows and watchdog() == mine
    kept.close()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_server_is_not_root_even_where_we_are(mariadb):
    (pid,) = children(watchdog())
    assert Path(f"/proc/{pid}").stat().st_uid != 0
    assert folder().stat().st_mode & 0o077 == 0


def test_without_a_server_or_its_client_one_line_says_what_to_install(mariadb, monkeypatch):
    monkeypatch.setattr(private, "find_program", lambda *names: None)
    with pytest.raises(AgentPeftError, match=r"mariadb-server") as raised:
        private.PrivateServer("name")
    assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(AgentPeftError, match=r"pip install '\.\[mysql\]'"):
        Client(ServerAccount("root"))


def test_a_server_that_cannot_be_used_is_one_line(mariadb, tmp_path):
    socket = server_of("mariadb").address.socket
    for address in (f"mysql://nobody@localhost?unix_socket={socket}", "mysql://root@127.0.0.1:1"):
        with pytest.raises(AgentPeftError, match=r"^database: the server .* cannot be used as") as raised:
            ServerDatabase(address, TABLE, seconds=1.0, seed=0)
        assert "\n" not in str(raised.value)
    client = administrator()
    client.run("CREATE USER small@localhost")
    with pytest.raises(AgentPeftError, match=r"small may not make schemas .* GRANT it ALL"):
        ServerDatabase(f"mysql://small@localhost?unix_socket={socket}", TABLE, seconds=1.0, seed=0)
    client.run("DROP USER small@localhost")
    client.close()


def test_a_table_that_grows_too_large_is_stopped_before_it_harms_the_server(mariadb):
    database, begun = open_database(seconds=60.0), time.monotonic()
    stopped = database.execute("INSERT INTO t SELECT a.a, REPEAT('x', 60000) FROM t a, t b, t c")
    assert stopped.error == "the statement was stopped: its table is too large"
    assert time.monotonic() - begun < 30
    assert database.table() == TABLE.rows
    database.close()


@pytest.mark.slow
@linux
def test_a_statement_that_takes_the_servers_memory_is_stopped(mariadb):
    attacker, neighbour = open_database(seconds=30.0), open_database(seconds=30.0)
    server = server_of("mariadb")
    before, peak, over = server.private._memory(), [0], threading.Event()

    def measure():
        while not over.wait(0.02):
            peak[0] = max(peak[0], server.private._memory())

    thread = threading.Thread(target=measure)
    thread.start()
    for function in ("JSON_OBJECTAGG(seq, REPEAT('x', 1000000))", "JSON_OBJECTAGG(seq, REPEAT('y', 900000))"):
        # a megabyte in 10 ms, so that a machine that is busy for seconds sees it in time, too
        stopped = attacker.execute(f"SELECT LENGTH({function}) FROM seq_1_to_5000 WHERE SLEEP(0.01) = 0")
        assert stopped.error == "the statement was stopped: out of memory"
        assert neighbour.execute("SELECT COUNT(*) FROM t").rows == ((100,),)
    over.set()
    thread.join()
    assert peak[0] - before < private._MOST_MEMORY
    assert attacker.execute("SELECT MAX(a) FROM t").rows == ((99,),)
    assert attacker.table() == neighbour.table() == TABLE.rows
    wait_until(lambda: server.private._memory() < before + private._EXTRA_MEMORY / 2)
    attacker.close()
    neighbour.close()
    assert server_of("mariadb") is server


def test_a_server_that_takes_all_memory_is_ended_and_another_takes_its_place(mariadb, monkeypatch):
    database, place, old = open_database(), folder(), server_of("mariadb")
    with monkeypatch.context() as patch:
        patch.setattr(private, "_MOST_MEMORY", -1)
        wait_until(lambda: not old.private.running and not place.exists())
    with pytest.raises(InfrastructureError):
        database.execute("SELECT 1")
    database.close()
    other = open_database()
    assert other._server is not old and other.table() == TABLE.rows
    other.close()


def test_why_a_server_does_not_start(mariadb, monkeypatch):
    monkeypatch.setattr(private, "_OPTIONS", private._OPTIONS + "no-such-option")
    with pytest.raises(InfrastructureError, match=r"does not start: .*ERROR"):
        private.PrivateServer(owned_name(FOLDER_PREFIX) + "_")


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE m (a INT) ENGINE = MEMORY",
        "CREATE TABLE m (a INT) ENGINE = MyISAM",
        "CREATE TABLE m ENGINE = Aria SELECT * FROM t",
        "CREATE TABLE m (a INT) PARTITION BY HASH(a) PARTITIONS 150",
        "ALTER TABLE t ENGINE = MEMORY",
        "ALTER TABLE t PARTITION BY HASH(a) PARTITIONS 150",
    ],
)
def test_there_is_one_engine_and_no_partition(mariadb, sql):
    database = open_database()
    assert "cannot execute this statement" in database.execute(sql).error
    assert database.table() == TABLE.rows
    assert database.execute("CREATE TABLE other (a INT) ENGINE = InnoDB").error is None
    database.close()


def test_a_server_that_keeps_memory_ends_with_its_last_episode(mariadb):
    first, second = open_database(), open_database()
    old = server_of("mariadb")
    old.is_retired = True  # as where memory does not return
    third = open_database()
    assert third._server is not old and old.is_running
    first.close()
    assert second.execute("SELECT COUNT(*) FROM t").rows == ((100,),)
    second.close()
    assert not old.is_running
    assert third.execute("SELECT COUNT(*) FROM t").rows == ((100,),)
    third.close()


def test_a_full_disk_is_no_agents_fault(mariadb, monkeypatch):
    """But a table that reaches its own limit is."""
    database = open_database(seconds=20.0)
    fill = "SELECT COUNT(*) FROM (SELECT DISTINCT a.a x, b.a y, REPEAT('z', 9000) FROM t a, t b) q"
    assert database.execute(fill).error == "The table '(temporary)' is full"
    monkeypatch.setattr(private, "_SCHEMA_BYTES", 1 << 62)  # so no disk has room for another table
    with pytest.raises(InfrastructureError):
        database.execute(fill)
    database.close()


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("mysql", "give sqlite, mariadb, or"),
        ("mysql://host", "not an address of a server"),
        ("mysql://me@host:x", "not an address of a server"),
        ("mysql://me@host/orders", "name no database"),
        ("mysql://me@host?ssl=1", "only unix_socket"),
    ],
)
def test_wrong_addresses(database, message):
    with pytest.raises(ValidationError, match=message):
        DBBenchConfig.model_validate({**GENERATED, "database": database})
    with pytest.raises(ValidationError, match="statement_steps has an effect with database: sqlite alone"):
        DBBenchConfig.model_validate({**GENERATED, "database": "mariadb", "statement_steps": 5})


def test_addresses(monkeypatch):
    monkeypatch.setenv("MYSQL_PWD", "secret")
    assert parse_address("mysql://me@db") == ServerAccount("me", "secret", "db", 3306)
    assert parse_address("mysql://me:a%2Fb@[::1]:7") == ServerAccount("me", "a/b", "::1", 7)
    assert parse_address("mysql://me:x@localhost?unix_socket=/run/s").socket == "/run/s"


def test_failures_of_the_server_are_told_apart():
    assert ServerError(2013, "").is_failure and not ServerError(1064, "").is_failure
    assert ServerError(1030, 'Got error 28 "No space left on device"').is_failure
