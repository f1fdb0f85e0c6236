"""The grader, and the faults of LifelongAgentBench's own that ours does not have."""

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_peft.environments.db_bench.grader import (
    answer_is_correct,
    answer_score,
    change_score,
    read_literal,
    tables_are_equal,
)
from agent_peft.environments.db_bench.protocol import FinalAnswer, answer, parse_reply
from agent_peft.environments.db_bench.syntax import order_keys

TWO = [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("[(1, 'a'), (2, 'b')]", TWO),
        ("[(2, 'b'), (1, 'a')]", TWO),  # fault: order counted without an ORDER BY
        ("[('x, y', 1)]", [("x, y", 1)]),  # fault: split at commas
        ("[('1', 'a'), ('2', 'b')]", TWO),  # fault: quoted numbers rejected
        ('[[1, "a"], [2, "b"]]', TWO),  # fault: lists for tuples rejected
        ("((1, 'a'), (2, 'b'))", TWO),
        ("(1, 'a'), (2, 'b')", TWO),
        ("[('$5',)]", [(5,)]),  # fault: dollars rejected
        ("[($5, 'a')]", [(5, "a")]),
        ("[('1,000,000',)]", [(1000000,)]),  # fault: thousands rejected
        ("[('a', 1,000,000)]", [("a", 1000000)]),
        ("1,000,000", [(1000000,)]),
        ("$1,000,000", [(1000000,)]),
        ("[100,200]", [(100,), (200,)]),
        ("[(100,200)]", [(100, 200)]),
        ("5", [(5,)]),
        ("5.0", [(5,)]),
        ("Ann Lee", [("Ann Lee",)]),
        ("'Ann Lee'", [("Ann Lee",)]),
        ("`[(5,)]`", [(5,)]),
        ("[1, 'a']", [(1, "a")]),
        ("(1, 'a')", [(1, "a")]),
        ("Ann Lee, 5", [("Ann Lee", 5)]),  # one row of bare texts
        ("(Ann Lee, $1.50)", [("Ann Lee", 1.5)]),
        ("[(2024-05-01, Ann)]", [("2024-05-01", "Ann")]),
        ("[1, 2, 3]", [(1,), (2,), (3,)]),
        ("[(NULL, None, null)]", [(None, None, None)]),
        ("[(true,)]", [(1,)]),
        ("[(\"O'Brien\",), ('O''Brien',), ('O\\'Brien',)]", [("O'Brien",)] * 3),
        ("[(0.3333333,)]", [(0.33333333,)]),
        ("[(4.1666667,)]", [(4.1667,)]),  # MySQL's AVG keeps four decimals
        ("[]", []),
        ("[(-2.50,)]", [(-2.5,)]),
        ("[(1e3,)]", [(1000,)]),
        ("[(\n1,\n'a'\n),\n]", [(1, "a")]),
        ("[('Zo\u00eb', 1)]", [("Zoe\u0308", 1)]),  # a letter is one however it is composed
        ("Zoe\u0308", [("Zo\u00eb",)]),
    ],
)
def test_right_answers(text, gold):
    assert answer_is_correct(text, gold, None)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("", []),  # nothing written is not an empty result
        (" \n", []),
        ("none", []),
        ("[()]", []),
        ("", TWO),
        ("[]", TWO),
        ("[[]]", TWO),
        ("[(1, 'a')]", TWO),
        ("[(1, 'a'), (2, 'b'), (2, 'b')]", TWO),
        ("[(1, 'a'), (1, 'a')]", TWO),
        ("[(1,), (2,)]", TWO),
        ("[('a', 1), ('b', 2)]", TWO),
        ("[(1, 'a'), (2, 'B')]", TWO),
        ("[1, 'a', 2, 'b']", TWO),
        ("[(1, 'a'), (2, 'b')] is the result", TWO),
        ("[(1, 'a'), (2, 'b')", TWO),
        ("(1, 'a'), (2, 'b'))", TWO),
        ("[(1, 'a') (2, 'b')]", TWO),
        ("[(1, 'a'],)", [(1, "a")]),
        ("10000001", [(10000000,)]),  # whole numbers are equal or not
        ("4.168", [(4.1667,)]),
        ("0.00002", [(0.00001,)]),
        ("7", [("007",)]),
        ("Ann Lee, 6", [("Ann Lee", 5)]),
        ("5, Ann Lee", [("Ann Lee", 5)]),
        ("Ann Lee", [("Ann Lee", 5)]),
        ("It is Ann Lee, 5", [("Ann Lee", 5)]),
        ("Ann Lee, 5", [("Ann Lee", 5)] * 2),
        ("None", [("None of them",)]),
        ("[(None,)]", [("None",)]),
        ("[(0,)]", [(None,)]),
        ("__import__('os').getcwd()", [("x",)]),
        ("[(1 + 1,)]", [(2,)]),
    ],
)
def test_wrong_answers(text, gold):
    assert not answer_is_correct(text, gold, None)


def test_order_counts_where_the_gold_sorts():
    gold = [("b", 2), ("a", 2), ("c", 1)]
    order = order_keys("SELECT name, n FROM t ORDER BY n DESC", ["name", "n"], 2)
    assert answer_is_correct("[('b', 2), ('a', 2), ('c', 1)]", gold, order)
    assert answer_is_correct("[('a', 2), ('b', 2), ('c', 1)]", gold, order)  # a tie may come either way
    assert not answer_is_correct("[('c', 1), ('a', 2), ('b', 2)]", gold, order)


@pytest.mark.parametrize(
    ("sql", "keys"),
    [
        ("SELECT a, b FROM t", None),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a) AS s", None),
        ("SELECT a, b FROM t ORDER BY b", (1,)),
        ("SELECT a, b FROM t ORDER BY 2 DESC, a", (1, 0)),
        ("SELECT a, SUM(b) FROM t GROUP BY a ORDER BY SUM(b)", (1,)),
        ("SELECT x.a, x.b AS total FROM t AS x ORDER BY x.a", (0,)),
        ("SELECT a, b AS total FROM t ORDER BY Total", (1,)),
        ("SELECT * FROM t ORDER BY b", (1,)),
        ("SELECT a FROM t ORDER BY b", (0,)),  # the key is not shown: the order counts as it stands
        ("SELECT a FROM t UNION SELECT b FROM t ORDER BY a", (0,)),
        ("SELECT a, b FROM t AS x ORDER BY x.b", (1,)),
        ("SELECT * FROM t ORDER BY t.b", (1,)),
        ("SELECT x.* FROM t AS x ORDER BY x.b", (1,)),
        ("SELECT x.a, y.a FROM t AS x JOIN t AS y ON x.b = y.b ORDER BY y.a", (1,)),
        ("SELECT *, 1 FROM (SELECT b FROM t) AS s ORDER BY b", (0, 1)),  # other columns than the table's
    ],
)
def test_order_keys(sql, keys):
    width = 1 if sql.startswith("SELECT a FROM") else 2
    assert order_keys(sql, ["a", "b"], width) == keys


def test_tables_are_compared_as_multisets_with_tolerance():
    assert tables_are_equal([(2, 0.1 + 0.2), (1, None)], [(1, None), (2, 0.3)])
    assert tables_are_equal([], [])
    assert not tables_are_equal([(1, "5")], [(1, 5)])  # in a table a text is not a number
    assert not tables_are_equal([(1,), (1,), (2,)], [(1,), (2,), (2,)])
    assert not tables_are_equal([(1, 2)], [(1,)])
    assert not tables_are_equal(None, [])
    assert not tables_are_equal([], None)


CELLS = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
ROWS = st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=4))


@given(ROWS)
def test_rows_written_by_us_are_right(rows):
    reply = parse_reply(answer(rows))
    assert isinstance(reply, FinalAnswer)
    assert answer_is_correct(reply.text, rows, None)


@given(ROWS, CELLS)
def test_a_changed_cell_is_wrong(rows, cell):
    if cell == rows[0][0] or isinstance(cell, float | int) or isinstance(rows[0][0], float | int):
        return
    if str(cell).strip() == str(rows[0][0]).strip():
        return
    changed = [(cell, *rows[0][1:]), *rows[1:]]
    if sorted(map(repr, changed)) != sorted(map(repr, rows)):
        assert not answer_is_correct(repr(changed), rows, None)


@given(st.text(max_size=60) | st.text("[](),'\"\\ 1a$.-enul", max_size=60))
def test_reading_raises_nothing_but_value_error(text):
    for thousands in (False, True):
        with contextlib.suppress(ValueError):
            read_literal(text, thousands=thousands)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        "(" * 50_000 + "1" + ")" * 50_000,
        "9" * 50_000,
        "-" * 50_000 + "1",
        "1+" * 49_000,
        "'" + "\\" * 50_000,
        "," * 90_000,
        "[" + "1," * 49_000 + "]",
        "'" * 99_999,
        "1" + ",000" * 24_000,
        "$" * 90_000,
        " " * 90_000 + "x",
        "e" * 90_000,
        "1e" * 40_000,
        "x" * 10**6,
    ],
)
def test_hostile_answers_are_wrong_and_quickly_so(text):
    begun = time.process_time()
    assert not answer_is_correct(text, TWO, None)
    assert not answer_is_correct(text, [(5,)], None)
    assert time.process_time() - begun < 2


def test_a_number_as_it_is_shown_is_right_and_others_nearby_are_not():
    gold = [(41.65625,), (2 / 3,), (0.00012345,)]
    assert answer_is_correct("[41.6563, 0.6667, 0.00012345]", gold, None)
    assert not answer_is_correct("[41.6562, 0.6667, 0.00012345]", gold, None)
    assert not answer_is_correct("[41.6563, 0.6668, 0.00012345]", gold, None)
    assert not answer_is_correct("[41.6563, 0.6667, 0.0001]", gold, None)
    assert not tables_are_equal([(0.1235,)], [(0.12345,)])  # a table holds what it holds


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("[(1, 'a'), (2, 'b')]", TWO, 1.0),
        ("[(2, 'b'), (1, 'a')]", TWO, 1.0),  # order does not count
        ("[(1, 'a')]", TWO, 2 / 3),
        ("[(1, 'a'), (2, 'c')]", TWO, 0.75),  # half a row
        ("[(1, 'a'), (2, 'b'), (3, 'c')]", TWO, 0.8),
        ("[(1, 'a'), (1, 'a'), (1, 'a'), (2, 'b')]", TWO, 2 / 3),  # a row counts as often as it is there
        ("[('b', 2), ('a', 1)]", TWO, 0.0),
        ("[(1,), (2,)]", TWO, 0.5),  # a column is missing
        ("[]", TWO, 0.0),
        ("[]", [], 1.0),
        ("[(1,)]", [], 0.0),
        ("5", [(5,)], 1.0),
        ("6", [(5,)], 0.0),
        ("", TWO, 0.0),
        ("done", TWO, 0.0),
    ],
)
def test_an_answer_scores_by_its_nearness(text, gold, score):
    assert answer_score(text, gold) == pytest.approx(score)


@pytest.mark.parametrize(
    ("actual", "gold", "score"),
    [
        ([(1, "a"), (2, "b"), (3, "c")], [(1, "a"), (2, "b"), (3, "c")], 1.0),
        ([(1, "a"), (2, "b"), (3, "x")], [(1, "a"), (2, "b"), (3, "c")], 0.5),  # one of two cells
        (TWO, [(1, "a"), (2, "b"), (3, "c")], 0.0),  # nothing done
        ([(1, "x"), (2, "b")], [(1, "y"), (2, "b")], 0.75),  # the right row, a wrong value
        ([(1, "a"), (2, "y")], [(1, "y"), (2, "b")], 0.25),  # the wrong row: one new cell is right
        ([(1, "a")], [(2, "b")], 0.0),  # another row is gone
        ([], [(2, "b")], 2 / 3),  # one row too many is gone
        ([(1, "a"), (2, "b"), (3, "c")], [], 0.0),
    ],
)
def test_a_change_scores_by_its_nearness(actual, gold, score):
    assert change_score(TWO, actual, gold) == pytest.approx(score)


ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=5)


@given(ROWS, ROWS, ROWS)
def test_scores_are_shares_and_only_the_gold_has_1(before, actual, gold):
    scores = (answer_score(repr(actual), gold), change_score(before, actual, gold))
    equal = sorted(actual) == sorted(gold)
    assert all(0 <= score <= 1 and (score == 1) == equal for score in scores)
    if sorted(before) != sorted(gold):
        assert change_score(before, before, gold) == 0


def test_many_rows_are_scored_soon():
    one, other = [(i, f"a{i}") for i in range(20_000)], [(i, f"b{i}") for i in range(20_000)]
    assert change_score([], one, other) == 0  # rows that are only alike are not compared, so many are they
    assert change_score([], one, [*one[:10_000], *other[10_000:]]) == 0.5


@pytest.mark.parametrize("text", ["[(inf, -inf)]", "[[Infinity, -Infinity]]", "(inf, -inf)"])
def test_what_is_printed_of_infinity_is_an_answer(text):
    gold = [(float("inf"), float("-inf"))]
    assert answer_is_correct(text, gold, None)
    assert not answer_is_correct("[(1e300, -inf)]", gold, None)
    assert answer_is_correct("inf", [("inf",)], None)  # a text
