"""Generated tasks are replayed when they are first used; those of a file when they are loaded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.db_bench import environment as module
from agent_peft.environments.db_bench import generate
from agent_peft.environments.task_files.replay import replay
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.types import AgentPeftError, Outcome, StopReason, Task


def with_a_fault(place: int):
    """The generator, whose task at ``place`` has a stored answer that is wrong."""

    def broken(**keys):
        entries = generate(**keys)
        answer = list(entries.values())[place]["answer_info"]
        answer |= {"direct": [["none of them"]]} if answer["direct"] else {"md5": "0" * 32}
        return entries

    return broken


@pytest.fixture
def damaged(monkeypatch):
    """An environment of four generated tasks, the third of which is wrong."""
    monkeypatch.setattr(module, "generate", with_a_fault(2))
    made = load_environment("db_bench", generate={"num_tasks": 4, "seed": 11})
    yield made
    made.close()


def test_a_wrong_generated_task_is_an_error_when_it_is_used(damaged):
    """Each time, whatever uses it, and never an outcome. The other tasks are as good as ever."""
    assert len(damaged.tasks) == 4 and not damaged.rejected
    told = "task train-0002-any: the generated task cannot be used"
    for _ in range(2):
        with pytest.raises(AgentPeftError, match=told) as raised:
            damaged.episode(damaged.tasks[2], seed=0)
        assert "\n" not in str(raised.value)
        with pytest.raises(AgentPeftError, match=told):
            damaged.demonstration(damaged.tasks[2])
    for number in (0, 1, 3):
        task = damaged.tasks[number]
        results = replay(damaged.episode(task, seed=0), damaged.demonstration(task)).results
        assert results[-1].outcome is Outcome.CORRECT


def test_a_rollout_ends_there_and_has_no_outcome(damaged):
    conversation = EpisodeConversation(damaged, damaged.tasks[2], None, [])
    with pytest.raises(AgentPeftError, match="the generated task cannot be used"):
        _ = conversation.prompt
    trajectory = conversation.trajectory
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.UNKNOWN, StopReason.INFRASTRUCTURE)
    assert not trajectory.turns and not trajectory.rewards


def test_in_a_file_it_is_left_out_and_counted(tmp_path, caplog):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(with_a_fault(2)(num_tasks=4, seed=11)))
    environment = load_environment("db_bench", tasks=str(path))
    environment.close()
    assert [rejection.id for rejection in environment.rejected] == ["train-0002-any"]
    assert len(environment.tasks) == 3 and "1 of 4 tasks cannot be used" in caplog.text


def test_limits_that_no_task_fits_are_told_when_it_is_loaded():
    with pytest.raises(AgentPeftError, match="task train-0000-any: the generated task cannot be used"):
        load_environment("db_bench", generate={"num_tasks": 4}, episode_seconds=1e-9)


def test_first_uses_at_once(damaged):
    """Threads that meet at a task wait for its one replay, and all of them get their episode."""
    task = damaged.tasks[3]
    with ThreadPoolExecutor(6) as threads:
        episodes = list(threads.map(lambda seed: damaged.episode(task, seed), range(6)))
    assert len({id(episode) for episode in episodes}) == 6
    for episode in episodes:
        episode.close()


def test_a_strangers_task_of_a_known_id_is_read_and_not_replayed(damaged):
    content = json.loads(json.dumps(damaged.tasks[2].content)) | {"instruction": "Another one."}
    damaged.episode(Task("train-0002-any", content=content), seed=0).close()


def test_the_same_tasks_as_ever_in_the_same_order():
    environment = load_environment("db_bench", generate={"num_tasks": 6, "seed": 3}, limit=5)
    environment.close()
    entries = generate(100, 3)
    assert [(task.id, task.content) for task in environment.tasks] == list(entries.items())[:5]
    assert all(set(task.skills) == set(entries[task.id]["skill_list"]) for task in environment.tasks)


ITEMS = [[1, "a", 5], [2, "b", 9], [3, "c", 9], [4, "d", 9], [5, "e", None], [6, "f", None]]


def entry_of(sql, answer=None, rows=ITEMS):
    columns = [
        {"name": name, "type": kind} for name, kind in (("id", "INT"), ("name", "TEXT"), ("price", "INT"))
    ]
    return {
        "instruction": "x",
        "skill_list": [],
        "table_info": {"name": "items", "column_info_list": columns, "row_list": rows},
        "answer_info": {"sql": sql, "direct": answer, "md5": None},
    }


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        ("SELECT name FROM items ORDER BY price DESC LIMIT 1", [["b"]]),
        ("SELECT name FROM items ORDER BY price DESC LIMIT 1 OFFSET 1", [["c"]]),  # the middle of three
        ("SELECT name FROM items ORDER BY price LIMIT 1", [["e"]]),  # NULL comes first
        ("SELECT name, id FROM items WHERE price = 9 ORDER BY price", [["b", 2], ["c", 3], ["d", 4]]),
        ("SELECT price FROM items WHERE id = (SELECT id FROM items ORDER BY price LIMIT 1) OR id = 1", None),
        (
            "SELECT price > 5 AS p, COUNT(*) AS n FROM items WHERE id < 3 GROUP BY p ORDER BY n LIMIT 1",
            [[0, 1]],
        ),
        ("SELECT GROUP_CONCAT(name) FROM items", [["a,b,c,d,e,f"]]),
        (
            "WITH c AS (SELECT name, COUNT(*) n FROM items GROUP BY name) SELECT * FROM c ORDER BY n LIMIT 1",
            [["a", 1]],
        ),
        ("SELECT price, name FROM items WHERE price > 0 GROUP BY price", [[5, "a"], [9, "b"]]),
        ("UPDATE items SET price = 0 WHERE id IN (SELECT id FROM items ORDER BY price DESC LIMIT 2)", None),
        ("DELETE FROM items ORDER BY price DESC LIMIT 1", None),
        ("INSERT INTO items SELECT 7, name, 1 FROM items ORDER BY price DESC LIMIT 1", None),
    ],
)
def test_a_gold_that_ties_leave_open_is_rejected(tmp_path, sql, answer):
    if answer is None and sql.startswith("SELECT"):
        sql, answer = sql.replace("price FROM", "name FROM"), [["a"], ["e"]]
    entries = {"open": entry_of(sql, answer), "sound": entry_of("DELETE FROM items WHERE id = 1")}
    (tmp_path / "tasks.json").write_text(json.dumps(entries))
    made = load_environment("db_bench", tasks=tmp_path / "tasks.json")
    assert [task.id for task in made.tasks] == ["sound"]
    (rejected,) = made.rejected
    assert rejected.id == "open" and rejected.cause.startswith("ties leave the answer open")


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        ("SELECT name FROM items ORDER BY price DESC, id LIMIT 2", [["b"], ["c"]]),
        (
            "SELECT name, price FROM items WHERE id < 5 ORDER BY price",
            [["a", 5], ["b", 9], ["c", 9], ["d", 9]],
        ),
        (
            "SELECT name, price FROM items AS i WHERE i.id < 5 ORDER BY i.price",
            [["a", 5], ["b", 9], ["c", 9], ["d", 9]],
        ),
        ("SELECT i.* FROM items AS i WHERE i.id < 5 ORDER BY i.price", ITEMS[:4]),
        (
            "WITH c AS (SELECT price, COUNT(*) n FROM items GROUP BY price) SELECT * FROM c ORDER BY n DESC",
            [[9, 3], [None, 2], [5, 1]],
        ),
        ("SELECT name FROM items LIMIT 2", [["a"], ["b"]]),  # counts from the lowest number
        ("SELECT MAX(price) FROM items", [[9]]),
        ("SELECT name || 'x' FROM items ORDER BY price DESC, id LIMIT 1", [["bx"]]),  # in MySQL, || is OR
        ("DELETE FROM items ORDER BY id DESC LIMIT 2", None),
        ("WITH c AS (SELECT MAX(id) AS m FROM items) INSERT INTO items (id) SELECT m + 1 FROM c", None),
        ("WITH c AS (SELECT MAX(id) AS m FROM items) DELETE FROM items WHERE id IN (SELECT m FROM c)", None),
    ],
)
def test_a_gold_that_no_tie_leaves_open_is_kept(tmp_path, sql, answer):
    (tmp_path / "tasks.json").write_text(json.dumps({"sound": entry_of(sql, answer)}))
    assert load_environment("db_bench", tasks=tmp_path / "tasks.json").rejected == ()


def test_the_same_without_numbered_rows_is_rejected(tmp_path):
    rows = [[1, "a", 5], [1, "b", 9], [2, "c", 9]]
    entries = {"open": entry_of("SELECT name FROM items LIMIT 2", [["a"], ["b"]], rows)}
    (tmp_path / "tasks.json").write_text(
        json.dumps(entries | {"sound": entry_of("DELETE FROM items WHERE id = 1")})
    )
    assert [one.id for one in load_environment("db_bench", tasks=tmp_path / "tasks.json").rejected] == [
        "open"
    ]


@pytest.mark.parametrize(
    ("kind", "usable"),
    [
        ("VARCHAR(255)", True),
        ("VARCHAR(255) NOT NULL", True),
        ("DECIMAL(10, 2) NOT NULL", True),
        ("DOUBLE PRECISION", True),
        ("VARCHAR(9) PRIMARY KEY", True),
        ("INT(11) UNSIGNED", False),  # SQLite does not know it, MySQL does
    ],
)
def test_types_of_mysql_are_read(tmp_path, kind, usable):
    entry = entry_of("DELETE FROM items WHERE id = 1")
    entry["table_info"]["column_info_list"][0] = {"name": "id", "type": kind}
    entries = {"typed": entry, "sound": entry_of("DELETE FROM items WHERE id = 1")}
    (tmp_path / "tasks.json").write_text(json.dumps(entries))
    made = load_environment("db_bench", tasks=tmp_path / "tasks.json")
    assert [task.id for task in made.tasks] == ["typed", "sound"][not usable :]
