"""Demonstrations that make a mistake and repair it."""

from __future__ import annotations

import random

import pytest

from agent_peft.environments import Mistake, load_environment
from agent_peft.environments.db_bench import generate
from agent_peft.environments.db_bench.demonstrations import wrong_statements
from agent_peft.environments.db_bench.tasks import read_entry, task_of
from agent_peft.environments.task_files.replay import replay
from agent_peft.types import AgentPeftError, Outcome

HEADERS = ("order_id", "unit_price", "status")


def problem(sql: str, table: str = "shop_orders"):
    return read_entry(
        "own",
        {
            "instruction": "?",
            "table_info": {
                "name": table,
                "column_info_list": [{"name": name, "type": "TEXT"} for name in HEADERS],
                "row_list": [[1, 2, "open"]],
            },
            "answer_info": {"sql": sql, "direct": [], "md5": None},
        },
    )


@pytest.fixture
def load():
    """load(**keys): an environment of generated tasks, closed after the test."""
    opened = []

    def made(**keys):
        opened.append(load_environment("db_bench", **keys))
        return opened[-1]

    yield made
    for environment in opened:
        environment.close()


def played(environment, task, replies):
    return replay(environment.episode(task, seed=0), replies).results


def test_mistakes_are_those_that_models_make():
    gold = "SELECT SUM(unit_price) AS revenue FROM shop_orders WHERE status <> 'status';"
    made = {wrong for seed in range(40) for wrong in wrong_statements(problem(gold), random.Random(seed))}
    assert made == {
        "SELECT revenue FROM shop_orders WHERE status <> 'status';",
        "SELECT SUM(unit_price) AS revenue FROM shop_orders WHERE statuses <> 'status';",
        "SELECT SUM(unit_prices) AS revenue FROM shop_orders WHERE status <> 'status';",
        "SELECT SUM(price) AS revenue FROM shop_orders WHERE status <> 'status';",
        "SELECT SUM(unit_price) AS revenue FROM orders WHERE status <> 'status';",
    }


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        (
            "SELECT status, COUNT(*) AS num FROM shop_orders GROUP BY status;",
            "SELECT status, SUM(orders) AS num FROM shop_orders GROUP BY status;",
        ),
        (
            "SELECT status FROM shop_orders GROUP BY status HAVING MAX(so.id) - MIN(so.id) > 3;",
            "SELECT status FROM shop_orders GROUP BY status HAVING id_range > 3;",
        ),
        (
            "SELECT MAX(id) - MIN(id) AS diff FROM shop_orders ORDER BY MAX(id) - MIN(id);",
            "SELECT diff FROM shop_orders ORDER BY diff;",
        ),
        (
            "SELECT status FROM shop_orders GROUP BY status HAVING SUM(id) > 3 LIMIT 2;",
            "SELECT status FROM shop_orders WHERE SUM(id) > 3 GROUP BY status LIMIT 2;",
        ),
    ],
    ids=["counted", "range", "named range", "where"],
)
def test_further_mistakes(gold, wrong):
    assert wrong in {one for seed in range(5) for one in wrong_statements(problem(gold), random.Random(seed))}


def test_an_aggregate_of_a_qualified_column_is_mistaken_too():
    gold = "SELECT SUM(so.unit_price) AS revenue FROM shop_orders AS so WHERE so.status = 'x';"
    made = {wrong for seed in range(40) for wrong in wrong_statements(problem(gold), random.Random(seed))}
    assert "SELECT revenue FROM shop_orders AS so WHERE so.status = 'x';" in made
    assert "SELECT SUM(so.unit_prices) AS revenue FROM shop_orders AS so WHERE so.status = 'x';" in made


def test_a_mistake_is_refused_and_repaired(load):
    """Whatever the statement: the database answers with its own error, and the task is solved."""
    environment = load(generate={"num_tasks": 40, "seed": 5}, repairs=1)
    for task in environment.tasks:
        wrong, right, answer = environment.demonstration(task)
        assert isinstance(wrong, Mistake) and wrong != right
        assert not isinstance(right, Mistake) and not isinstance(answer, Mistake)
        first, second, last = played(environment, task, (wrong, right, answer))
        assert first.observation.startswith("Error: ") and first.valid
        assert not second.observation.startswith("Error: ")
        assert last.outcome is Outcome.CORRECT


def test_a_share_of_the_demonstrations_repairs_and_the_others_are_as_before(load):
    tasks = {"num_tasks": 20, "seed": 6}
    plain, some, again = (load(generate=tasks, repairs=share) for share in (0, 0.3, 0.3))
    mistakes = 0
    for task in plain.tasks:
        expected, demonstration = plain.demonstration(task), some.demonstration(task)
        assert len(expected) == 2 and not any(isinstance(reply, Mistake) for reply in expected)
        assert demonstration[-2:] == expected and again.demonstration(task) == demonstration
        mistakes += len(demonstration) == 3
    assert 1 <= mistakes <= 11
    other = load(generate={**tasks, "seed": 7}, repairs=0.3)
    places = [
        [len(environment.demonstration(task)) for task in environment.tasks] for environment in (some, other)
    ]
    assert places[0] != places[1], "another seed repairs others"


def test_a_statement_that_no_mistake_makes_wrong_is_shown_alone(load, tmp_path):
    """SQLite takes a name in double quotes for a text, so nothing is refused here."""
    entry = next(iter(generate(1, 0).values()))
    entry["answer_info"] |= {"sql": "SELECT 1;", "direct": [[1]], "md5": None}
    environment = load(generate={"num_tasks": 1}, repairs=1)
    assert environment.demonstration(task_of("own", entry)) == (
        "Action: Operation\n```sql\nSELECT 1;\n```",
        "Action: Answer\nFinal Answer: [(1,)]",
    )


def test_repairs_need_three_turns(load):
    with pytest.raises(AgentPeftError, match="repairs has no effect with max_turns: 2"):
        load(generate={"num_tasks": 1}, repairs=0.1, max_turns=2)
