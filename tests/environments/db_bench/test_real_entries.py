"""LifelongAgentBench's own entries, which are never committed: these tests skip where they are absent."""

import json
import re
from functools import cache

import pytest

from agent_peft.environments.db_bench import (
    DBBench,
    DBBenchConfig,
    GenerateConfig,
    load_tasks,
    primary_skill,
    skills_of,
)
from agent_peft.environments.db_bench.episode import DBBenchEpisode
from agent_peft.environments.db_bench.protocol import answer
from agent_peft.environments.db_bench.syntax import SKILLS
from agent_peft.environments.db_bench.tasks import read_entry
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.types import Outcome

CONFIG = DBBenchConfig(generate=GenerateConfig(num_tasks=1))


@pytest.fixture
def path(shared):
    file = shared / "data" / "lifelong_agent_bench" / "db_bench" / "entry_dict.json"
    if not file.is_file():
        pytest.skip("LifelongAgentBench's DB Bench is not here")
    return file


@cache
def environment_of(path) -> DBBench:
    """Loading replays every gold, which takes seconds."""
    return DBBench(DBBenchConfig(tasks=path))


# why a MySQL gold may not hold on SQLite, and how its cause and statement show it
KINDS = [
    (r"other rows", r"\bLIMIT\b"),  # without a total order, any rows may come
    (r"syntax error", r"^(UPDATE|DELETE)\b.*\bJOIN\b|^DELETE FROM \w+ AS"),
    (r"no such function: STDDEV", r"STDDEV"),
    (r"ties leave", r"ORDER BY|DELETE.*\(SELECT"),  # SQLite may evaluate a subquery of DELETE late
    (r"stored md5", r"\* 1\.\d"),  # MySQL rounds a fraction in an INT column, SQLite keeps it
]


@pytest.mark.slow
def test_all_entries_load_and_the_rejected_are_explained(path):
    tasks = {task.id: task for task in load_tasks(path)}
    assert len(tasks) == len(json.loads(path.read_text())) >= 400
    environment = environment_of(path)
    assert len(environment.tasks) + len(environment.rejected) == len(tasks)
    assert 0 < len(environment.rejected) <= 0.05 * len(tasks)
    for rejection in environment.rejected:
        sql = tasks[rejection.id].content["answer_info"]["sql"]
        print(rejection.id, rejection.cause, sql)
        assert any(re.search(cause, rejection.cause) and re.search(shape, sql) for cause, shape in KINDS), (
            rejection,
            sql,
        )


@pytest.mark.slow
def test_validation_agrees_with_loading(path):
    found, environment = validate_tasks("db_bench", tasks=path), environment_of(path)
    assert found["tasks"] == found["gold_correct"] + len(found["rejected"])
    assert found["nothing_correct"] == 0
    assert [rejection["id"] for rejection in found["rejected"]] == [
        rejection.id for rejection in environment.rejected
    ]


@pytest.mark.slow
def test_empty_and_wrong_answers_never_score(path):
    for task in load_tasks(path):
        problem = read_entry(task.id, task.content)
        texts = ["", " ", "[]", "()", "done", "None", "[()]", "[(None,)]", "[('wrong',)]"]
        if problem.direct:
            first = tuple("wrong" if cell == problem.direct[0][0] else cell for cell in problem.direct[0])
            texts += [
                repr([*problem.direct[1:], first]),
                repr(list(problem.direct[1:])),
                repr([*problem.direct, problem.direct[0]]),
            ]
        for text in texts:
            episode = DBBenchEpisode(problem, CONFIG, seed=0)
            episode.start()
            assert episode.step(answer(text)).outcome is not Outcome.CORRECT, (task.id, text)
            episode.close()


def test_skills_are_read_off_the_statements(path):
    entries = json.loads(path.read_text()).values()
    agree = [set(skills_of(entry["answer_info"]["sql"])) == set(entry["skill_list"]) for entry in entries]
    assert sum(agree) >= 0.95 * len(agree)
    assert {skill for entry in entries for skill in entry["skill_list"]} == set(SKILLS)


def test_every_statement_has_its_primary_skill(path):
    for task in load_tasks(path):
        statement = task.content["answer_info"]["sql"].split()[0].lower()
        assert task.skills[0] == primary_skill(task.content["skill_list"])
        assert (task.skills[0] in ("insert", "update", "delete")) == (statement != "select")
