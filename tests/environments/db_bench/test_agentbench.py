"""AgentBench's dbbench entries: reading, grading, and its own file, which is never committed."""

import json
import logging

import pytest

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, load_tasks
from agent_peft.environments.db_bench.grader import answer_matches
from agent_peft.environments.db_bench.protocol import PROTOCOLS
from agent_peft.environments.db_bench.tasks import read_entry, table_md5
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.types import AgentPeftError, Outcome

ROWS = [["Ann", "5", "1,250"], ["Bob", "17", "none"], ["Cy", "7", "30%"]]
CHANGED = [("Ann", "5", "1,250"), ("Bob", "17", "none"), ("Cy", "8", "30%")]


def entry(kind, label, sql=None, **others):
    columns = [
        {"name": "Player name", "type": "TEXT"},
        {"name": "No.", "type": "INT"},
        {"name": "", "type": "x"},
    ]
    return {
        "description": "Who?",
        "type": [kind],
        "label": label,
        "add_description": "The name of this table is Score list.",
        "table": {"table_name": "Score list", "table_info": {"columns": columns, "rows": ROWS}},
        **({"sql": {"query": sql, "length": 1}} if sql else {}),
        **others,
    }


CHANGE = "UPDATE `Score list` SET `No.` = 8 WHERE `Player name` = 'Cy'"
QUESTION = entry("ranking", ["Bob"], "SELECT `Player name` FROM `Score list` WHERE `No.` = '17'")
UPDATE = entry("UPDATE", [CHANGE], answer_md5=f"[('{table_md5(CHANGED)}',)]")
OTHER_SQL = entry("counting", ["2.0"], "SELECT COUNT(*) FROM `Score list`")


@pytest.fixture
def environment(tmp_path):
    path = tmp_path / "dev.jsonl"
    wrong_md5 = {**UPDATE, "answer_md5": "0" * 32}
    entries = (QUESTION, UPDATE, OTHER_SQL, entry("other", ["x"]), wrong_md5)
    path.write_text("".join(json.dumps(each) + "\n" for each in entries))
    return DBBench(DBBenchConfig(tasks=path))


def grade(environment, index, *replies):
    episode = environment.episode(environment.tasks[index], seed=0)
    episode.start()
    results = [episode.step(reply) for reply in replies]
    episode.close()
    return results[-1].outcome


def test_entries_become_tasks_of_texts(environment, caplog):
    assert [task.skills[0] for task in environment.tasks] == ["ranking", "update", "counting", "other"]
    assert environment.tasks[1].skills == ("update", "where_single_condition")
    (rejection,) = environment.rejected
    assert (rejection.id, "stored md5" in rejection.cause) == ("4", True)
    problem = read_entry("q", QUESTION)
    assert {column.type for column in problem.table.columns} == {"TEXT"}
    episode = environment.episode(environment.tasks[0], seed=0)
    user = episode.start()[-1].content
    # a column of texts, whatever the entry declares
    seen = episode.step(PROTOCOLS["action"].operation("SELECT TYPEOF(`No.`), `` FROM `Score list` LIMIT 1"))
    episode.close()
    assert user == (
        "Who?\nThe name of this table is Score list, and the headers of this table are Player name, No., ."
    )
    assert seen.observation == "[('text', '1,250')]"


def test_the_label_decides_and_the_sql_is_a_demonstration_only_where_it_agrees(environment):
    tasks = environment.tasks
    assert [environment.demonstration(task) is None for task in tasks] == [False, False, True, True]
    for index in (0, 1):
        assert grade(environment, index, *environment.demonstration(tasks[index])) is Outcome.CORRECT
    write = PROTOCOLS["action"].answer
    assert grade(environment, 2, write([(2,)])) is Outcome.CORRECT
    assert grade(environment, 2, write([(3,)])) is Outcome.INCORRECT  # what its SQL gives
    assert grade(environment, 1, write("done")) is Outcome.INCORRECT


def test_questions_without_a_demonstration_are_told(tmp_path, caplog):
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps([QUESTION, OTHER_SQL]))
    with caplog.at_level(logging.WARNING):
        DBBench(DBBenchConfig(tasks=path))
    assert "1 of AgentBench's questions have no demonstration, since their SQL" in caplog.text
    assert "(1)" in caplog.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_does_nothing_is_not_right(tmp_path, protocol):
    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps(entry("other", [label])) + "\n" for label in ("none", "0", "x")))
    environment = DBBench(DBBenchConfig(tasks=path, protocol=protocol))
    assert len(environment.tasks) == 3
    assert validate_tasks("db_bench", tasks=path)["nothing_correct"] == 0


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("Bob", ["Bob"]),
        ("'Bob'", ["Bob"]),
        ('["Bob"]', ["Bob"]),
        ("[('Bob',)]", ["Bob"]),
        ("[('b',), ('a',)]", ["a", "b"]),
        ("['a', 'b', 'a']", ["a", "b"]),  # a set
        ("March 19, 1998", ["March 19, 1998"]),
        ("[('March 19, 1998',)]", ["March 19, 1998"]),
        ("2", ["2.0"]),
        ("[(2,)]", ["2.0"]),
        ("2.009", ["2"]),
        ("[(2.0,), (1,)]", ["1", "2"]),
        ("1250", ["1,250"]),
        ("1,250", ["1250"]),
        ("30", ["30%"]),
        ("[(None,)]", ["none"]),
        ("null", ["none"]),
        ("0", ["none"]),
        ("Pilot", ['"Pilot"']),  # quotes around a text do not count
        ('"Pilot"', ['"Pilot"']),
        ("[('Pilot',)]", ['"Pilot"']),
        ("""[('"Never" (with "X")',)]""", ['"Never" (with "X")']),
        ('"Never" (with "X")', ['"Never" (with "X")']),
        ("[1–0, 2–0]", ["1–0", "2–0"]),  # a list of bare texts
        ("[Bob]", ["Bob"]),
        ("""[('"',)]""", ['"']),  # a cell that is the same as the one above
        ("[12%, x]", ["x", "12"]),
        ("(3)", ["(3)"]),  # to the letter
        ("[a, b]", ["[a, b]"]),
        ("[('Zo\u00eb',)]", ["Zoe\u0308"]),
    ],
)
def test_answers_that_agentbench_accepts(text, labels):
    assert answer_matches(text, labels)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("bob", ["Bob"]),
        ("2.02", ["2"]),
        ("[(1,), (1,)]", ["1"]),  # numbers are counted
        ("[(1,), (1,)]", ["1", "2"]),
        ("['a']", ["a", "b"]),
        ("[('a', 'b')]", ["a", "b"]),
        ("[]", ["none"]),
        ("", ["none"]),
        ("''", ["none"]),
        ("['']", ["none"]),
        ("[]", []),
        ("done", ["none"]),
        ("[" * 100, ["x"]),
        ("9" * 200_000, ["9"]),
        ("['a', {}]", ["a"]),
        ("[a, b]", ["a"]),
        ("[a, b]", ["a, b"]),
        ("['', '']", ["none"]),
        ("[,]", ["none"]),
        ("(4)", ["(3)"]),
    ],
)
def test_answers_that_are_wrong(text, labels):
    assert not answer_matches(text, labels)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"description": " "}, "description"),
        ({"type": []}, "type"),
        ({"label": [1]}, "label"),
        ({"table": []}, "table"),
        ({"table": {"table_name": "t", "table_info": {"columns": [], "rows": []}}}, "columns"),
        ({"table": {"table_name": "t", "table_info": {"columns": [{}], "rows": []}}}, "columns"),
        ({"table": {"table_name": "t", "table_info": {"columns": [{"name": "a"}], "rows": [[]]}}}, "rows"),
        ({"table": {"table_name": "t", "table_info": {"columns": [{"name": "a"}], "rows": [[{}]]}}}, "rows"),
        ({"type": ["INSERT"], "label": [], "sql": None}, "label"),
    ],
)
def test_wrong_entries_are_refused_with_the_key(tmp_path, changes, key):
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps([QUESTION | changes]))
    with pytest.raises(AgentPeftError, match=rf"entry '0': .*{key}.* must be "):
        load_tasks(path)


def test_its_own_entries(shared):
    """All 40 changes leave the table that AgentBench stored; the SQL of 3 of the 20 questions gives its
    answer, and all 20 are graded by that answer.
    """
    path = shared / "data" / "agentbench" / "dbbench_dev.jsonl"
    if not path.is_file():
        pytest.skip("AgentBench's dbbench is not here")
    environment = DBBench(DBBenchConfig(tasks=path))
    assert (len(environment.tasks), len(environment.rejected)) == (60, 0)
    for index, task in enumerate(environment.tasks):
        change = task.skills[0] in ("insert", "update")
        replies = environment.demonstration(task)
        assert replies is not None or not change
        if replies is not None:
            assert grade(environment, index, *replies) is Outcome.CORRECT, task.id
        label = task.content["label"]
        answered = grade(environment, index, PROTOCOLS["action"].answer([(text,) for text in label]))
        assert (answered is Outcome.CORRECT) == (not change), task.id
    with_sql = [task for task in environment.tasks[:20] if environment.demonstration(task) is not None]
    assert [task.id for task in with_sql] == ["3", "4", "14"]


@pytest.mark.parametrize("name", ['a"; DROP TABLE x; --', "a`b", "a\0b", "x" * 2_000])
def test_hostile_names_are_a_table_or_a_rejection(tmp_path, name):
    table = {"table_name": name, "table_info": {"columns": [{"name": name}], "rows": [[None], [1.5]]}}
    path = tmp_path / "dev.jsonl"
    path.write_text(json.dumps([QUESTION, entry("other", ["1.5"], "SELECT 1.5", table=table)]))
    environment = DBBench(DBBenchConfig(tasks=path))
    causes = [rejection.cause for rejection in environment.rejected]
    assert len(environment.tasks) + len(causes) == 2 and not any("\n" in cause for cause in causes)
