"""Variations of tasks: question and statement change together, and the gold solves each."""

import json
import re
from contextlib import closing
from functools import partial

import pytest
from pydantic import ValidationError

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, generate
from agent_peft.environments.db_bench.inspection import answer_of, inspect
from agent_peft.environments.db_bench.syntax import parse_sql
from agent_peft.environments.db_bench.tasks import load_tasks, read_entry, task_of
from agent_peft.environments.db_bench.variations import variations
from agent_peft.environments.task_commands import validate_tasks

COLUMNS = [
    {"name": "ticket_id", "type": "INT"},
    {"name": "movie_title", "type": "TEXT"},
    {"name": "genre", "type": "TEXT"},
    {"name": "unit_price", "type": "INT"},
    {"name": "seat_count", "type": "INT"},
    {"name": "sale_date", "type": "TEXT"},
]
ROWS = [
    [
        i,
        f"Movie {i}",
        ("drama", "comedy", "horror")[i % 3],
        100 + 7 * i,
        20 + 3 * (i * 7 % 20),
        f"2023-0{i % 9 + 1}-15",
    ]
    for i in range(20)
]


def entry(question, sql, direct=None, name="ticket_sales", columns=COLUMNS, rows=ROWS):
    return {
        "instruction": question,
        "table_info": {"name": name, "column_info_list": columns, "row_list": rows},
        "answer_info": {"sql": sql, "direct": direct, "md5": None},
    }


CONFIG = DBBenchConfig(generate={"num_tasks": 1})
ANSWER_OF = partial(answer_of, config=CONFIG)
SALES = entry(
    "What are the movie titles with a unit price above 200? Return the movie title, ordered by unit price in "
    "descending order, limited to 3 entries.",
    "SELECT movie_title FROM ticket_sales WHERE unit_price > 200 ORDER BY unit_price DESC LIMIT 3",
    [["Movie 19"], ["Movie 18"], ["Movie 17"]],
)
RENAMED = [
    {"name": name, "type": column["type"]}
    for name, column in zip(
        ("order_id", "client_name", "region", "total_cost", "item_count", "order_date"), COLUMNS, strict=True
    )
]
ORDERS = entry(
    "Delete all orders in the 'drama' region.",
    "DELETE FROM orders WHERE region = 'drama'",
    name="orders",
    columns=RENAMED,
)


def made_of(number, **entries):
    return variations([task_of(name, content) for name, content in entries.items()], number, ANSWER_OF)


def literals(sql):
    return {node.name for node in parse_sql(sql).find_all(type(parse_sql("SELECT 1").selects[0]))}


def check(task, source):
    """A variation is another task than its source, and its gold solves it."""
    problem = read_entry(task.id, task.content)
    assert inspect(problem, CONFIG).cause is None, task.id
    assert problem.instruction != source.instruction
    for text in literals(problem.sql) - literals(source.sql):
        dates = [text] if not re.fullmatch(r"\d{4}-\d\d-\d\d", text) else [text, text[:4]]
        commas = [f"{int(text):,}"] if text.isdigit() else []
        assert any(form in problem.instruction for form in (*dates, *commas)), (text, problem.instruction)


def test_what_changes_in_the_statement_changes_in_the_question():
    tasks = made_of(30, sales=SALES, orders=ORDERS)
    assert len(tasks) == len({task.content["instruction"] for task in tasks}) == 30
    sources = {"sales": read_entry("sales", SALES), "orders": read_entry("orders", ORDERS)}
    for task in tasks:
        check(task, sources[task.id.partition("~")[0]])
    seen = " ".join(task.content["instruction"] for task in tasks)
    for word in (
        "client names",
        "total cost",
        "seat count",
        "ascending",
        "below",
        "limited to 5",
        "genre",
        "all ticket sales",
    ):
        assert word in seen, word


def test_a_column_is_named_as_the_question_named_the_other_one():
    underscored = entry(
        "Update unit_price to 500 where ticket_id equals 7.",
        "UPDATE ticket_sales SET unit_price = 500 WHERE ticket_id = 7",
    )
    names = {
        name
        for task in made_of(30, sales=underscored, orders=ORDERS)
        for name in re.findall(r"\w+_\w+", task.content["instruction"])
    }
    assert {"unit_price", "seat_count"} <= names
    assert names <= {column["name"] for column in (*COLUMNS, *RENAMED)}


def test_functions_and_their_names_change_together():
    average = entry(
        "What is the average unit price of each genre? Return the genre and average unit price.",
        "SELECT genre, AVG(unit_price) AS avg_unit_price FROM ticket_sales GROUP BY genre",
        [["x", 1.0]],
    )
    for task in made_of(7, sales=average):
        sql, question = task.content["answer_info"]["sql"], task.content["instruction"]
        function, column, name = re.search(r"(\w+)\((\w+)\) AS (\w+)", sql).groups()
        word, short = {
            "AVG": ("average", "avg"),
            "SUM": ("total", "total"),
            "MAX": ("maximum", "max"),
            "MIN": ("minimum", "min"),
        }[function]
        assert f"{word} {column.replace('_', ' ')}" in question
        assert name == f"{short}_{column}"


def test_what_the_question_does_not_name_stays(caplog):
    silent = entry(
        "Which were dear?", "SELECT movie_title FROM ticket_sales WHERE unit_price > 200", [["Movie 19"]]
    )
    assert made_of(3, sales=silent) == ()
    assert "0 of 3 variations could be made of 1 tasks" in caplog.text


def test_odd_tables():
    """Of large and infinite numbers, dates that are none, names with blanks and odd letters."""
    columns = [{"name": name, "type": "REAL"} for name in ("item no", "größe", "when", "note", "large")]
    rows = [[i, i / 7 + 1, "2023-00-00", "²", 1e300 * (i + 1)] for i in range(8)]
    select = (
        "SELECT `item no` FROM odd WHERE größe > 1 AND `when` = '2023-00-00' AND large > 5 AND note = '²'"
    )
    question = "Which item no have größe above 1, when 2023-00-00, large over 5 and note ²?"
    tasks = made_of(6, odd=entry(question, select, [[0]], "odd", columns, rows), orders=ORDERS)
    assert {task.id.partition("~")[0] for task in tasks} == {"odd", "orders"}
    for task in tasks:
        assert inspect(read_entry(task.id, task.content), CONFIG).cause is None


def test_a_table_is_named_whole_where_a_column_is_a_part_of_its_name():
    columns = [{"name": name, "type": "TEXT"} for name in ("Genre", "Movie", "Seat")]
    rows = [[("drama", "comedy")[i % 2], f"M{i}", f"S{i}"] for i in range(9)]
    question = "Set the Genre to 'drama' where the Movie is 'M3' in the 'Movie Genre List' table."
    update = "UPDATE `Movie Genre List` SET Genre = 'drama' WHERE Movie = 'M3'"
    tasks = made_of(9, odd=entry(question, update, None, "Movie Genre List", columns, rows))
    assert any("the Seat is" in task.content["instruction"] for task in tasks)
    for task in tasks:
        assert "'Movie Genre List' table" in task.content["instruction"]


def test_the_same_tasks_give_the_same_variations():
    first, again = made_of(10, sales=SALES, orders=ORDERS), made_of(10, sales=SALES, orders=ORDERS)
    assert first == again
    assert made_of(4, sales=SALES, orders=ORDERS) == first[:4]


def test_variations_of_generated_tasks_of_every_skill():
    entries = generate(num_tasks=30, seed=3)
    made = made_of(30, **entries)
    assert len(made) > 20
    for task in made:
        check(task, read_entry(task.id, entries[task.id.partition("~")[0]]))


def test_they_follow_the_tasks_of_the_file(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"sales": SALES, "orders": ORDERS}))
    with closing(DBBench(DBBenchConfig(tasks=path, variations=6))) as environment:
        assert [task.id for task in environment.tasks[:2]] == ["sales", "orders"]
        assert len(environment.tasks) == 8
        assert all(environment.demonstration(task) for task in environment.tasks)
        assert environment.tasks[2:] == variations(environment.tasks[:2], 6, ANSWER_OF)
    found = validate_tasks("db_bench", tasks=path, variations=6)
    assert (found["tasks"], found["gold_correct"], found["rejected"]) == (8, 8, [])
    assert validate_tasks("db_bench", tasks=path, variations=6, limit=1)["tasks"] == 7


def test_generated_tasks_have_none():
    with pytest.raises(ValidationError, match="variations are made of a file's tasks; set tasks"):
        DBBenchConfig(generate={"num_tasks": 2}, variations=3)


def test_variations_of_real_tasks(shared):
    file = shared / "data" / "lifelong_agent_bench" / "db_bench" / "entry_dict.json"
    tasks = {task.id: task for task in load_tasks(file)[:60]}
    made = variations(list(tasks.values()), 30, ANSWER_OF)
    assert len(made) == 30
    moved = 0
    for task in made:
        source = tasks[task.id.partition("~")[0]]
        check(task, read_entry(source.id, source.content))
        moved += task.content["table_info"] != source.content["table_info"]
    assert moved > 5
