"""What every database of DB Bench must do, whichever engine is underneath."""

import contextlib
import re
import threading
import time

import pytest

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, GenerateConfig
from agent_peft.environments.db_bench.database import DatabaseStopped, DeclaredColumn, Table
from agent_peft.environments.db_bench.episode import DBBenchEpisode
from agent_peft.environments.db_bench.isolated import IsolatedDatabase
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.database import ServerDatabase
from agent_peft.environments.db_bench.tasks import SQLProblem
from agent_peft.types import AgentPeftError, Outcome

TABLE = Table(
    "t", (DeclaredColumn("a", "INT"), DeclaredColumn("b", "TEXT")), tuple((i, f"x{i}") for i in range(100))
)


@pytest.fixture(params=["sqlite", "mariadb", "address"])
def name(request):
    """What ``database:`` may be; the address is that of the private server, used as if it were another's."""
    if request.param == "sqlite":
        return "sqlite"
    request.getfixturevalue("mariadb")
    if request.param == "mariadb":
        return "mariadb"
    return f"mysql://root@localhost?unix_socket={server_of('mariadb').address.socket}"


@pytest.fixture
def opened(name):
    """opened(...): a new database, closed when the test is over."""
    databases = []

    def open_database(table=TABLE, seconds=2.0, seed=0):
        if name == "sqlite":
            databases.append(IsolatedDatabase(table, seconds=seconds, steps=10**9, seed=seed))
        else:
            databases.append(ServerDatabase(name, table, seconds=seconds, seed=seed))
        return databases[-1]

    yield open_database
    for database in databases:
        database.close()
        database.close()


def test_queries_and_changes(opened):
    database = opened()
    assert database.execute("SELECT a, b FROM t WHERE a < 2").rows == ((0, "x0"), (1, "x1"))
    assert database.execute("SELECT a FROM t WHERE a > 1000").rows == ()
    assert database.execute("UPDATE t SET b = 'y' WHERE a < 3;").changed == 3
    assert database.execute("UPDATE t SET b = 'y' WHERE a < 3").changed == 3  # those it matched
    assert database.execute("DELETE FROM t WHERE a >= 5 -- nearly all").changed == 95
    inserted = database.execute("INSERT INTO t VALUES (7, 'z')")
    assert (inserted.rows, inserted.changed, inserted.error, inserted.cut) == (None, 1, None, False)
    assert database.table() == ((0, "y"), (1, "y"), (2, "y"), (3, "x3"), (4, "x4"), (7, "z"))


def test_numbers_are_whole_or_fractions(opened):
    (row,) = opened().execute("SELECT COUNT(*), SUM(a), AVG(a), MAX(b), NULL, 0.5, x'00ff' FROM t").rows
    assert row == (100, 4950, 49.5, "x99", None, 0.5, b"\0\xff")
    assert [type(cell) for cell in row[:3]] == [int, int, float]


def test_odd_names_and_values(opened):
    rows = (
        (1, "O'Brien\\", None),
        (2, 'say "hi"\n', -3),
        (3, "naïve\0x 😀 %s {} ", 2**31 - 1),
        (None, "", 0),
    )
    columns = (
        DeclaredColumn("unit price", "INT"),
        DeclaredColumn("select", "TEXT"),
        DeclaredColumn("né]`", "INT"),
    )
    database = opened(Table('Order "details"; --', columns, rows))
    assert database.table() == rows
    assert (
        database.execute("DELETE FROM `Order \"details\"; --` WHERE `select` = 'O''Brien\\\\'").error is None
    )
    database.reset()
    assert database.table() == rows


def test_many_rows_are_cut(opened):
    database = opened()
    executed = database.execute("SELECT x.a FROM t AS x, t AS y")
    assert executed.cut and len(executed.rows) == 1000
    database.execute("CREATE TABLE u AS SELECT '" + "x" * 5_000 + "' AS long_text FROM t")
    executed = database.execute("SELECT * FROM u")
    assert executed.cut and len(executed.rows) < 50
    assert database.execute("SELECT COUNT(*) FROM t").rows == ((100,),)


@pytest.mark.parametrize(
    "sql", ["ALTER TABLE t RENAME COLUMN b TO c", "ALTER TABLE t ADD COLUMN c INT", "DROP TABLE t"]
)
def test_a_table_that_is_gone_or_another_is_none(opened, sql):
    database = opened()
    assert database.execute(sql).error is None
    assert database.table() is None
    database.reset()
    assert database.table() == TABLE.rows


def test_a_table_that_has_grown_too_much_is_none(opened):
    database = opened(seconds=10.0)
    assert (
        database.execute("INSERT INTO t SELECT x.a, 'x' FROM t x, t y, t z WHERE z.a < 10").changed == 10**5
    )
    assert database.table() is None
    assert database.execute("SELECT COUNT(*) FROM t").rows == ((100_100,),)


def test_a_broken_table_is_told(opened):
    with pytest.raises(AgentPeftError, match=r"(?i)duplicate column name"):
        opened(Table("t", (DeclaredColumn("a", "INT"), DeclaredColumn("A", "INT")), ()))
    for rows in (((2**70,),), ((10**6000,),)):
        with pytest.raises(AgentPeftError, match="does not accept the table 't'"):
            opened(Table("t", (DeclaredColumn("a", "INT"),), rows))
    with pytest.raises(AgentPeftError, match="is too large"):
        opened(Table("t", (DeclaredColumn("a", "TEXT"),), (("x" * 5_000,),) * 1_000))


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELECT missing FROM t", "(?i)no such column|unknown column"),
        ("SELECT * FROM missing", "no such table: missing|Table 'missing' doesn't exist"),
        ("SELECT 1; DROP TABLE t", "one statement at a time"),
        ("BEGIN", "a transaction is not allowed"),
        ("SAVEPOINT s", "a savepoint is not allowed"),
        ("CREATE VIEW v AS SELECT 1", "not allowed|denied"),
        ("CREATE TEMPORARY TABLE u (a INT)", "not allowed|denied"),
        ("SELECT '" + "x" * 20_000 + "'", "too large"),
        ("SELECT '\ud800'", "not valid Unicode"),
    ],
)
def test_refused(opened, sql, error):
    database = opened()
    executed = database.execute(sql)
    assert executed.rows is None
    assert re.search(error, executed.error or ""), executed
    assert database.table() == TABLE.rows


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e",
        "UPDATE t SET b = (SELECT COUNT(*) FROM (SELECT a.a FROM t a, t b, t c, t d, t e) AS s)",
    ],
)
def test_what_is_slow_is_stopped_and_undone(opened, name, sql):
    database = opened(seconds=30.0)
    begun = time.monotonic()
    assert database.execute(sql, seconds=0.3).error == "the statement was stopped after 0.3 seconds"
    assert time.monotonic() - begun < 20
    assert database.table() == TABLE.rows
    if name != "sqlite":  # the limit was that statement's alone
        assert database.execute("SELECT SLEEP(0.4)").error is None


def test_the_limit_of_a_statement_does_not_hold_for_the_table(opened):
    """Which is made before the agent acts, and again before it is graded."""
    rows = tuple((i, "x" * 300) for i in range(5_000))
    database = opened(Table("t", TABLE.columns, rows), seconds=0.001)
    database.reset()
    with contextlib.suppress(DatabaseStopped):  # the statement itself has only that millisecond
        assert database.execute("SELECT COUNT(*) FROM t", seconds=30.0).rows in (((5_000,),), None)


def test_a_reset_database_is_as_it_was(opened, name):
    database = opened()
    random = "SELECT random()" if name == "sqlite" else "SELECT RAND(), RAND()"
    draws = database.execute(random).rows
    assert database.execute("CREATE TABLE u (a INT)").error is None
    assert database.execute("DROP TABLE t").error is None
    database.reset()
    assert database.table() == TABLE.rows
    assert database.execute("SELECT * FROM u").error
    assert database.execute(random).rows == draws
    assert opened(seed=0).execute(random).rows == draws != opened(seed=1).execute(random).rows


def test_databases_do_not_see_each_other(opened):
    one, other = opened(), opened()
    assert one.execute("CREATE TABLE secret (a INT)").error is None
    assert one.execute("DELETE FROM t").changed == 100
    assert other.execute("SELECT * FROM secret").error
    assert other.table() == TABLE.rows


def test_threads_may_take_turns(opened):
    database, found = opened(), []
    thread = threading.Thread(
        target=lambda: found.append(database.execute("DELETE FROM t WHERE a > 0").changed)
    )
    thread.start()
    thread.join()
    assert found == [99]
    assert database.table() == ((0, "x0"),)


def test_generated_tasks_are_valid(name):
    """The golds agree, wrong answers do not, and no answer at all does not."""
    config = DBBenchConfig(generate=GenerateConfig(num_tasks=5, seed=5), database=name)
    environment = DBBench(config)
    assert not environment.rejected
    for task in environment.tasks:
        for replies, outcome in (
            (environment.demonstration(task), Outcome.CORRECT),
            ([operation("SELECT 1"), answer([("nothing of the kind", -1)])], Outcome.INCORRECT),
        ):
            episode = environment.episode(task, 0)
            episode.start()
            assert [episode.step(reply) for reply in replies][-1].outcome is outcome
            episode.close()
    environment.close()


@pytest.mark.parametrize(
    ("sql", "outcome", "score"),
    [
        ("UPDATE t SET b = 'y' WHERE a = 5", Outcome.CORRECT, 1.0),
        ("UPDATE t SET b = 'z' WHERE a = 5", Outcome.INCORRECT, 0.75),
        ("SELECT 1", Outcome.INCORRECT, 0.0),
        ("DROP TABLE t", Outcome.INCORRECT, 0.0),
    ],
)
def test_a_change_that_comes_near_has_a_score(name, sql, outcome, score):
    gold = "UPDATE t SET b = 'y' WHERE a = 5"
    problem = SQLProblem("Set b to y where a is 5.", TABLE, gold, direct=None, md5=None, order=None)
    episode = DBBenchEpisode(problem, DBBenchConfig(generate=GenerateConfig(num_tasks=1), database=name), 0)
    episode.start()
    episode.step(operation(sql))
    result = episode.step(answer("done"))
    assert (result.outcome, result.score) == (outcome, score)


def test_the_prompt_names_the_database(name):
    environment = DBBench(DBBenchConfig(generate=GenerateConfig(num_tasks=1), database=name))
    episode = environment.episode(environment.tasks[0], 0)
    system = episode.start()[0].content
    episode.close()
    assert ("MySQL" in system, "SQLite" in system) == ((False, True) if name == "sqlite" else (True, False))


@pytest.mark.parametrize(
    "sql", ["-- nothing", "/* nothing */", ";", " ;\n; -- end", "-- a;\n/* b */;", "\t", ""]
)
def test_what_holds_no_statement_is_told(opened, sql):
    executed = opened().execute(sql)
    assert executed.error == "no statement was written" and executed.rows is None


@pytest.mark.parametrize(
    "sql", ["SELECT 1 ;;", ";SELECT 1", "SELECT 1; -- one", "/* a */ SELECT 1 /* b */;;", "SELECT 1 -- ;\n;"]
)
def test_empty_statements_around_one_are_left_out(opened, sql):
    assert opened().execute(sql).rows == ((1,),)


def test_two_statements_and_marks_within_texts(opened):
    database = opened()
    assert database.execute("SELECT 1;; SELECT 2").error == "write one statement at a time"
    assert database.execute("SELECT ';; -- x' ;").rows == ((";; -- x",),)
    assert database.execute("SELECT 'it''s; /* y */'").rows == (("it's; /* y */",),)
