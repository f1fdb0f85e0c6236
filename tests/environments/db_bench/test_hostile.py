"""Whatever a policy may write, or a task file hold, ends in a result or in one line, within seconds."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, GenerateConfig, load_tasks
from agent_peft.environments.db_bench.episode import DBBenchEpisode
from agent_peft.environments.db_bench.grader import answer_is_correct, tables_are_equal
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.syntax import order_keys, skills_of
from agent_peft.environments.db_bench.tasks import read_entry, task_of
from agent_peft.types import AgentPeftError, Outcome, StopReason, Task

from .hostile_replies import (
    COLUMNS,
    HOSTILE_ANSWERS,
    HOSTILE_EPISODES,
    HOSTILE_REPLIES,
    HOSTILE_SQL,
    ROWS,
    TABLE,
)

RULES = DBBenchConfig(
    generate=GenerateConfig(num_tasks=1), statement_seconds=0.1, statement_steps=1_000_000, max_turns=5
)
COLUMN_TYPES = ("INT", "TEXT", "INT")


def entry(sql, direct=None, **others):
    return {
        "instruction": "Do it.",
        "table_info": {
            "name": TABLE,
            "column_info_list": [
                {"name": name, "type": kind} for name, kind in zip(COLUMNS, COLUMN_TYPES, strict=True)
            ],
            "row_list": [list(row) for row in ROWS],
        },
        "answer_info": {"sql": sql, "direct": direct, "md5": None},
        **others,
    }


CHANGE = read_entry("change", entry(f"UPDATE {TABLE} SET score = 5 WHERE id = 1"))
QUERY = read_entry(
    "query",
    entry(
        f"SELECT name, score FROM {TABLE} WHERE id < 2 ORDER BY score DESC", [["name 1", 10], ["name 0", 0]]
    ),
)


def play(problem, replies, rules=RULES):
    """The results of an episode, which ends as one should."""
    episode = DBBenchEpisode(problem, rules, seed=0)
    results = []
    try:
        episode.start()
        for reply in replies:
            results.append(episode.step(reply))
            if results[-1].done:
                break
    finally:
        episode.close()
    for result in results:
        assert len(result.observation) <= rules.max_observation_chars
        result.observation.encode()  # can be tokenized
        assert result.done == (result.stop_reason is not None) == (result.outcome is not Outcome.UNKNOWN)
    return results


@pytest.mark.parametrize("problem", [CHANGE, QUERY], ids=["change", "query"])
def test_no_hostile_episode_raises_or_is_paid(problem):
    for replies in HOSTILE_EPISODES:
        begun = time.perf_counter()
        results = play(problem, replies)
        assert all(result.outcome is not Outcome.CORRECT for result in results), replies
        assert time.perf_counter() - begun < 10, replies


def test_two_hundred_hostile_replies_with_text_around_them_end_in_results():
    texts = [before + text for before in ("", "Sure!\n\0\ud800") for text in HOSTILE_REPLIES]
    texts += [operation(text) for text in HOSTILE_ANSWERS] + [
        answer(sql) for statements in HOSTILE_SQL for sql in statements
    ]
    fast = [
        text for text in texts if "zeroblob" not in text and "1000000000" not in text and len(text) < 50_000
    ]
    assert len(fast) >= 200
    for text in fast:
        assert play(QUERY, [text])[0].outcome is not Outcome.CORRECT, text


def test_the_grader_takes_any_rows():
    """An empty blob next to another one could not be sorted."""
    cells = [None, b"", b"\1", "", "x", 0, 1, -0.0, 2**63 - 1, 10**400, -(10**400), True]
    cells += map(float, ("inf", "-inf", "nan"))
    tables = [[(cell, other) for other in cells] for cell in cells]
    for table in tables:
        assert all(
            not tables_are_equal(table, other)
            for other in tables
            if other is not table and None in (table[0][0], other[0][0])
        )
    everything = [(cell,) for cell in cells]
    assert tables_are_equal(everything, everything[::-1])
    assert not tables_are_equal([(float("nan"),)], [(float("nan"),)])
    assert tables_are_equal([(b"",), (b"\1",)], [(b"\1",), (b"",)])


@pytest.mark.parametrize(
    "text", [r"'\UFFFFFFFF'", r"'\U00110000'", r"[('\UFFFFFFFF', 1)]", r"['\U0010FFFF', '\UFFFFFFFF']"]
)
def test_a_character_that_does_not_exist_is_a_wrong_answer(text):
    assert not answer_is_correct(text, [("x",)], None)
    assert play(QUERY, [answer(text)])[-1].outcome is Outcome.INCORRECT


_FUNCTIONS = ["printf", "format", "hex", "json", "json_group_array", "replace", "ltrim", "group_concat"]
_FUNCTIONS += ["char", "date", "abs", "sum", "round", "DATE", "BINARY", "STRUCT"]
_LETTERS = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["\ud800", "\0", "'", "''", "\\", r"\UFFFFFFFF", "```", "\u2028", "x" * 9_000]
)
_NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from(
        ["1e999", "-1e999", "9" * 399, "9" * 5_000, "x''", "x'00'", "NULL", "0x7fffffffffffffff", "٣"]
    )
).map(str)
_CELLS = _LETTERS.map(lambda text: f"'{text}'") | _NUMBERS
_EXPRESSIONS = st.recursive(
    _CELLS | st.sampled_from([*COLUMNS, "rowid", "*", "missing", "random()", "zeroblob(9000)"]),
    lambda inner: st.one_of(
        st.tuples(
            inner, st.sampled_from(["+", "||", "/", "LIKE", "GLOB", "IN", "->>", "<", "COLLATE"]), inner
        ).map(" ".join),
        st.tuples(
            st.sampled_from(_FUNCTIONS),
            st.lists(inner, max_size=3),
        ).map(lambda call: f"{call[0]}({', '.join(call[1])})"),
        inner.map(lambda text: f"(SELECT {text})"),
        inner.map(lambda text: f"CASE WHEN {text} THEN 1 END"),
    ),
    max_leaves=12,
)
_STATEMENTS = st.one_of(
    st.tuples(_EXPRESSIONS, _EXPRESSIONS).map(lambda e: f"SELECT {e[0]} FROM {TABLE} ORDER BY {e[1]}"),
    st.tuples(st.sampled_from(COLUMNS), _EXPRESSIONS, _EXPRESSIONS).map(
        lambda e: f"UPDATE {TABLE} SET {e[0]} = {e[1]} WHERE {e[2]}"
    ),
    st.tuples(_EXPRESSIONS, _EXPRESSIONS, _EXPRESSIONS).map(
        lambda e: f"INSERT INTO {TABLE} VALUES ({', '.join(e)})"
    ),
    _EXPRESSIONS.map(lambda e: f"DELETE FROM {TABLE} WHERE {e}"),
    _EXPRESSIONS.map(lambda e: f"ALTER TABLE {TABLE} ADD COLUMN more AS ({e})"),
    _EXPRESSIONS.map(lambda e: f"CREATE TABLE more (a DEFAULT ({e}), b CHECK ({e}))"),
    st.sampled_from(
        [
            "INSERT INTO more (b) VALUES (1)",
            f"ALTER TABLE {TABLE} DROP COLUMN score",
            f"DROP TABLE {TABLE}",
            "BEGIN",
            "ROLLBACK",
        ]
    ),
    _LETTERS,
)
_ANSWERS = st.recursive(
    _CELLS | _LETTERS,
    lambda inner: st.lists(inner, max_size=4).map(
        lambda cells: f"[{', '.join(cells)}]" if len(cells) % 2 else f"({','.join(cells)})"
    ),
)
_REPLIES = st.one_of(
    st.text(st.characters(), max_size=60),
    _STATEMENTS.map(operation),
    _STATEMENTS.map(operation),
    _ANSWERS.map(answer),
)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.sampled_from([CHANGE, QUERY]), st.lists(_REPLIES, min_size=1, max_size=4))
@example(
    CHANGE, [operation(f"UPDATE {TABLE} SET name = CASE WHEN id = 1 THEN x'' ELSE x'01' END"), answer("done")]
)
@example(QUERY, [answer(r"[('\UFFFFFFFF',)]")])
def test_any_replies_end_in_results(problem, replies):
    play(problem, [*replies, answer("done")])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    _ANSWERS,
    st.lists(
        st.tuples(_LETTERS | st.none() | st.integers() | st.floats() | st.binary(max_size=3)), max_size=4
    ),
)
@example(r"'\UFFFFFFFF'", [("x",)])
def test_any_answer_can_be_graded(text, gold):
    answer_is_correct(text, gold, None)
    answer_is_correct(text, gold, (0,))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_STATEMENTS | st.text(st.characters(), max_size=200))
@example("SELECT a ORDER BY " + "9" * 5_000)
@example("SELECT CONNECT BY (SELECT 1")
@example("SELECT DATE_ADD(1)")
def test_any_statement_can_be_looked_at(sql):
    skills_of(sql)
    order_keys(sql, COLUMNS, 2)


OPENINGS = ["STRUCT(", "DATE(", "BINARY(", "DATE(BINARY(", "CHAR(a, ", "BINARY[", "(("]


@pytest.mark.parametrize("name", [*OPENINGS, "CASE WHEN ", "NOT ", "(SELECT "])
@pytest.mark.parametrize("depth", [10, 40, 500])
def test_the_time_to_parse_does_not_double_with_each_bracket(name, depth):
    begun = time.perf_counter()
    sql = (
        "SELECT "
        + name * depth
        + "1"
        + "".join({"(": ")", "[": "]"}.get(letter, "") for letter in reversed(name)) * depth
    )
    skills_of(sql)
    order_keys(sql + " ORDER BY 1", COLUMNS, 1)
    assert time.perf_counter() - begun < 5


def test_sql_that_cannot_be_parsed_has_no_skill():
    for sql in ("ATTACH 'x' AS y", "SELECT STRUCT(" * 30, "x" * 20_000, "SELECT DATE_ADD(1)", ""):
        assert skills_of(sql) == ()
    assert task_of("a", entry("ATTACH 'x' AS y")).skills == ()
    assert task_of("a", entry("ATTACH 'x' AS y", skill_list=[])).skills == ()
    assert task_of("a", entry("ATTACH 'x' AS y", skill_list=["mine", "other"])).skills == ("mine", "other")


HOSTILE_GOLDS = [statements[0] for statements in HOSTILE_SQL[::2] if "\ud800" not in statements[0]]


def test_a_hostile_task_file_is_refused_line_by_line(tmp_path):
    """As golds, all of them within a few seconds each, and none by a traceback."""
    path = tmp_path / "tasks.json"
    good = {"good": entry(f"DELETE FROM {TABLE} WHERE id = 1")}
    entries = {
        f"{i}": entry(sql, [["x"]] if sql.lstrip().upper().startswith(("SELECT", "WITH")) else None)
        for i, sql in enumerate(HOSTILE_GOLDS)
    }
    path.write_text(json.dumps(good | entries))
    environment = DBBench(DBBenchConfig(tasks=path, statement_seconds=0.1, statement_steps=1_000_000))
    causes = {rejection.id: rejection.cause for rejection in environment.rejected}
    assert "good" not in causes
    assert len(causes) > 0.8 * len(entries)  # a few are odd, and yet fit to be tasks
    for cause in causes.values():
        assert cause.isprintable() and len(cause) <= 400
    environment.close()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "t\0t"}, "null character"),
        ({"name": "\ud800"}, "surrogates"),
        ({"row_list": [[1, "x" * 5_000_000, 1]]}, "too large"),
        ({"row_list": [[2**64, None, 1]]}, "too large"),
        ({"row_list": [[1, "\ud800", 1]]}, "surrogates"),
        (
            {"column_info_list": [{"name": f"c{i}", "type": "INT"} for i in range(3_000)], "row_list": []},
            "too many columns",
        ),
        (
            {"column_info_list": [{"name": "a", "type": "INT GENERATED ALWAYS AS (1)"}], "row_list": [[1]]},
            "generated",
        ),
    ],
)
def test_a_hostile_table_is_refused(table, message):
    hostile = entry("DELETE FROM records")
    hostile["table_info"] |= table
    cause = inspect(read_entry("bad", hostile), RULES).cause
    assert message in cause
    assert cause.isprintable() and len(cause) <= 400
    with pytest.raises(AgentPeftError):
        play(read_entry("bad", hostile), [answer("done")])


def test_numbers_of_thousands_of_digits_are_refused():
    hostile = entry("DELETE FROM records")
    hostile["table_info"]["row_list"] = [[10**5_000, "x", 1]]
    with pytest.raises(AgentPeftError, match="does not accept"):
        play(read_entry("bad", hostile), [answer("done")])


def test_a_task_without_skills_can_be_loaded_and_played(tmp_path):
    """Without a list of skills, and with a statement that cannot be parsed."""
    path = tmp_path / "tasks.json"
    path.write_text(
        json.dumps(
            {
                "a": entry("ATTACH 'x' AS y"),
                "b": entry(f"REINDEX {TABLE}"),
                "c": entry(f"DELETE FROM {TABLE}"),
            }
        )
    )
    assert [task.skills for task in load_tasks(path)] == [(), (), ("delete",)]
    environment = DBBench(DBBenchConfig(tasks=path))
    assert [rejection.id for rejection in environment.rejected] == ["a", "b"]
    assert "not allowed" in environment.rejected[0].cause
    environment.close()


def test_a_database_that_had_to_be_ended_ends_the_episode_as_incorrect():
    """In a statement, in the grader's reading of the table, and in a gold of a stranger's task."""
    slow = "format('%.*c', 1000000000, 'x')"
    first = operation(f"CREATE TABLE more (a DEFAULT ({slow}), b)")
    *_, stopped = play(CHANGE, [first, operation("INSERT INTO more (b) VALUES (1)"), answer("done")])
    assert (stopped.outcome, stopped.stop_reason, stopped.observation) == (
        Outcome.INCORRECT,
        StopReason.TIMEOUT,
        "",
    )
    changes = (f"ALTER TABLE {TABLE} DROP COLUMN score", f"ALTER TABLE {TABLE} ADD COLUMN score AS ({slow})")
    *_, finished = play(CHANGE, [*map(operation, changes), answer("done")])
    assert (finished.outcome, finished.stop_reason) == (Outcome.INCORRECT, StopReason.FINISHED)
    gold = read_entry("gold", entry(f"CREATE INDEX i ON {TABLE} ({slow})"))
    assert play(gold, [answer("done")])[-1].outcome is Outcome.INCORRECT


def test_a_strangers_task_object_is_read_anew(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"c": entry(f"DELETE FROM {TABLE}")}))
    environment = DBBench(DBBenchConfig(tasks=path))
    episode = environment.episode(Task("c", content=entry("SELECT " + "STRUCT(" * 500, [["x"]])), seed=0)
    episode.start()
    assert episode.step(answer("x")).outcome is Outcome.CORRECT  # its own gold says so
    episode.close()
    environment.close()
