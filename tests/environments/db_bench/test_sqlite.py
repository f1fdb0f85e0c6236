"""A statement ends soon, touches nothing else, and never raises."""

import resource
import time

import pytest

from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.isolated import IsolatedDatabase
from agent_peft.environments.db_bench.sqlite import SQLiteDatabase, expansions

TABLE = Table(
    "t", (DeclaredColumn("a", "INT"), DeclaredColumn("b", "TEXT")), tuple((i, f"x{i}") for i in range(100))
)


def open_database(table=TABLE, seconds=1.0, steps=20_000_000, seed=0, kind=IsolatedDatabase):
    return kind(table, seconds=seconds, steps=steps, seed=seed)


@pytest.fixture(params=[SQLiteDatabase, IsolatedDatabase], ids=["in process", "isolated"])
def database(request):
    database = open_database(kind=request.param)
    yield database
    database.close()


def test_expressions_of_sqlite_alone(database):
    change = "WITH few AS (SELECT 5 AS k) DELETE FROM t WHERE a >= (SELECT k FROM few)"
    assert database.execute(change).changed == 95
    assert database.execute("PRAGMA table_info(t)").rows[1][1] == "b"


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELECT", "incomplete input"),
        ("SELECT missing FROM t", "no such column"),
        ("SELECT 1; DROP TABLE t", "one statement at a time"),
        ("ATTACH '{folder}/stolen.db' AS s", "not allowed"),
        ("VACUUM INTO '{folder}/stolen.db'", "not allowed"),
        ("VACUUM", "not allowed"),
        ("DETACH main", "not allowed"),
        ("PRAGMA max_page_count = 1000000", "not allowed"),
        ("PRAGMA temp_store_directory = '{folder}'", "not allowed"),
        ("PRAGMA writable_schema = 1", "not allowed"),
        ("PRAGMA hard_heap_limit = 1", "not allowed"),
        ("SELECT * FROM pragma_hard_heap_limit(1)", "too many arguments"),
        ("SELECT load_extension('evil')", "not allowed|not authorized"),
        ("SELECT fts3_tokenizer('simple')", "not allowed"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT writefile('{folder}/x', 'x')", "no such function"),
        ("CREATE VIRTUAL TABLE v USING fts5(a)", "not allowed"),
        ("CREATE TEMP TABLE t (a)", "not allowed"),
        ("CREATE VIEW v AS SELECT 1", "not allowed"),
        ("CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END", "not allowed"),
        ("BEGIN", "not allowed"),
        ("SAVEPOINT s", "not allowed"),
        ("INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)", "may not be modified"),
        ("SELECT printf('%.*c', 1000000000, 'x')", "not allowed"),
        ("SELECT format('%1000000000d', 1)", "not allowed"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELECT hex(zeroblob(8000))", "too big"),
        ("SELECT group_concat(x.b || y.b) FROM t AS x, t AS y", "too big"),
        ("SELECT '" + "x" * 20_000 + "'", "too large"),
        ("SELECT \0", "null character"),
        ("SELECT '\ud800'", "not valid Unicode"),
        ("SELECT " + "(" * 500 + "1" + ")" * 500, "parser stack overflow|Expression tree is too large|depth"),
        ("SELECT " + ", ".join(["1"] * 500), "too many columns"),
        ("SELECT 1" + " UNION ALL SELECT 1" * 400, "too many terms"),
        ("SELECT * FROM " + ", ".join(f"t AS t{i}" for i in range(80)), "at most 64 tables|too many columns"),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c",
            "was stopped",
        ),
        ("WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c) SELECT COUNT(*) FROM c", "was stopped"),
        (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c, t) SELECT x FROM c ORDER BY x",
            "was stopped",
        ),
        ("SELECT COUNT(*) FROM t a, t b, t c, t d, t e", "was stopped"),
        ("SELECT hex(zeroblob(4000)) FROM t a, t b, t c, t d ORDER BY random()", "was stopped"),
        ("SELECT COUNT(DISTINCT hex(randomblob(4000))) FROM t a, t b, t c, t d", "was stopped"),
        ("INSERT INTO t SELECT a.a, hex(zeroblob(2000)) FROM t a, t b, t c", "disk is full|was stopped"),
        ("UPDATE t SET b = hex(zeroblob(4000)) || (SELECT COUNT(*) FROM t a, t b, t c, t d)", "was stopped"),
        ("CREATE TABLE u AS SELECT hex(zeroblob(2000)) AS h FROM t a, t b", "disk is full|was stopped"),
        (
            "WITH h(h, n) AS MATERIALIZED (SELECT replace(hex(zeroblob(1900)), '0', 'a'), replace(hex(zeroblob(900)), '0', 'a') || 'b') "  # noqa: E501
            "SELECT SUM(" + " + ".join(["instr(h, n)"] * 90) + ") FROM h, t a, t b, t c",
            "was stopped",
        ),
        (
            "SELECT MAX(hex(zeroblob(3000)) || a.a LIKE '%" + "0_" * 1500 + "b') FROM t a, t b, t c",
            "too complex",
        ),
        (
            "SELECT MAX(hex(zeroblob(3000)) || a.a LIKE '%" + "0_" * 40 + "b') FROM t a, t b, t c, t d",
            "was stopped",
        ),
        (
            "SELECT MAX(hex(zeroblob(3000)) || a.a GLOB '*" + "0*?" * 30 + "b') FROM t a, t b, t c, t d",
            "was stopped",
        ),
        (
            "WITH a0(x) AS (SELECT 1), "
            + ", ".join(f"a{i}(x) AS (SELECT 1 FROM a{i - 1} p, a{i - 1} q)" for i in range(1, 40))
            + " SELECT COUNT(*) FROM a39",
            "too often",
        ),
        (
            "WITH/**/a0 AS(SELECT 1),"
            + ",".join(
                f'"a{i}"/*x*/AS/*(*/NOT MATERIALIZED(SELECT 1 FROM[a{i - 1}]p,`a{i - 1}`q)'
                for i in range(1, 40)
            )
            + "SELECT 1 FROM a39",
            "too often",
        ),
    ],
)
def test_refused_or_stopped(sql, error, tmp_path):
    database = open_database(seconds=0.5)
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = database.execute(sql.replace("{folder}", str(tmp_path)))
    assert time.perf_counter() - begun < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert any(part in (found.error or "") for part in error.split("|")), found
    assert database.table() == TABLE.rows  # what was stopped was undone
    assert list(tmp_path.iterdir()) == []
    database.close()


def test_the_clock_stops_what_steps_do_not_see():
    database = open_database(seconds=0.2, steps=10**12)
    begun = time.perf_counter()
    error = database.execute(
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"
    ).error
    assert error == "the statement was stopped after 0.2 seconds"
    assert 0.2 <= time.perf_counter() - begun < 2
    database.close()


def test_odd_values_come_back(database):
    assert database.execute("SELECT CAST(x'ff41' AS TEXT), x'ff', char(0)").rows == (
        ("\ufffdA", b"\xff", "\0"),
    )


def test_random_comes_from_the_seed():
    def draws(seed):
        database = open_database(seed=seed)
        rows = database.execute("SELECT random(), a FROM t ORDER BY random() LIMIT 5").rows
        database.close()
        return rows

    assert draws(1) == draws(1) != draws(2)


@pytest.mark.parametrize(
    ("sql", "most"),
    [
        ("SELECT * FROM t", 0),
        ("WITH a AS (SELECT 1) SELECT * FROM a", 1),
        ("WITH a(x, y) AS (SELECT 1, 2), b AS (SELECT 1 FROM a p, a q) SELECT * FROM b", 2),
        ("WITH a AS (SELECT 'as ( a a a a' AS s) SELECT * FROM a -- a a a a", 1),
    ],
)
def test_expansions_are_bounded(sql, most):
    assert expansions(sql) == most
