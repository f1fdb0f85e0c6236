"""Episodes, loading and validation, on tasks written here."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, load_tasks
from agent_peft.environments.db_bench.protocol import PROTOCOLS, answer, operation
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.types import AgentPeftError, Outcome, StopReason, Task


def entry(sql, direct=None, md5=None, rows=((1, "Ann", 5), (2, "Bob", 7), (3, "Cy", 7)), skills=("select",)):
    columns = [
        {"name": name, "type": kind}
        for name, kind in (("id", "INT"), ("first name", "TEXT"), ("score", "INT"))
    ]
    return {
        "instruction": "Do it.",
        "skill_list": list(skills),
        "table_info": {
            "name": "score list",
            "column_info_list": columns,
            "row_list": [list(row) for row in rows],
        },
        "answer_info": {"sql": sql, "direct": direct, "md5": md5},
    }


SELECT = entry('SELECT "first name" FROM "score list" WHERE score = 7', [["Bob"], ["Cy"]])
UPDATE = entry('UPDATE "score list" SET score = 9 WHERE id = 1', skills=["update", "where_single_condition"])


def environment(tmp_path, entries, **settings):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(entries))
    return DBBench(DBBenchConfig(tasks=path, **settings))


@pytest.fixture
def two(tmp_path):
    return environment(tmp_path, {"s": SELECT, "u": UPDATE})


def play(environment, index, *replies):
    episode = environment.episode(environment.tasks[index], seed=0)
    episode.start()
    results = [episode.step(reply) for reply in replies]
    episode.close()
    return results


def test_the_opening_says_the_protocol_the_turns_and_the_table(tmp_path):
    episode = environment(tmp_path, {"s": SELECT}, max_turns=5).episode(Task("s", content=SELECT), seed=0)
    system, user = episode.start()
    episode.close()
    assert (system.role, user.role) == ("system", "user")
    assert (
        "Action: Operation" in system.content
        and "Action: Answer" in system.content
        and "5 turns" in system.content
    )
    assert len(system.content.split()) <= 90
    assert (
        user.content
        == "Do it.\nThe name of this table is score list, and the headers of this table are id, first name, score."  # noqa: E501
    )


def test_a_query_then_its_answer(two):
    looked, finished = play(two, 0, operation(SELECT["answer_info"]["sql"]), answer([("Cy",), ("Bob",)]))
    assert (looked.observation, looked.done, looked.outcome) == (
        "[('Bob',), ('Cy',)]",
        False,
        Outcome.UNKNOWN,
    )
    assert (finished.observation, finished.done, finished.outcome, finished.stop_reason) == (
        "",
        True,
        Outcome.CORRECT,
        StopReason.FINISHED,
    )


def test_a_change_counts_only_with_a_finish(two):
    changed, finished = play(
        two,
        1,
        operation("UPDATE 'score list' SET score = 4 + 5 WHERE \"first name\" = 'Ann'"),
        answer("done"),
    )
    assert changed.observation == "Done. 1 row changed."
    assert finished.outcome is Outcome.CORRECT
    unfinished = play(two, 1, *[operation(UPDATE["answer_info"]["sql"])] * 3)[-1]
    assert (unfinished.outcome, unfinished.stop_reason) == (Outcome.INCORRECT, StopReason.TURN_LIMIT)


@pytest.mark.parametrize(
    "sql",
    [
        'UPDATE "score list" SET score = 9',
        'DELETE FROM "score list"',
        'DROP TABLE "score list"',
        'ALTER TABLE "score list" ADD COLUMN x',
        "INSERT INTO \"score list\" VALUES (1, 'Ann', 9)",
        "UPDATE \"score list\" SET score = '$9' WHERE id = 1",
    ],
)
def test_another_change_is_incorrect(two, sql):
    changed, finished = play(two, 1, operation(sql), answer("done"))
    assert changed.valid and not changed.observation.startswith("Error")
    assert finished.outcome is Outcome.INCORRECT


def test_other_tables_do_not_matter(two):
    results = play(
        two,
        1,
        operation('CREATE TABLE notes AS SELECT * FROM "score list"'),
        operation(UPDATE["answer_info"]["sql"]),
        answer("done"),
    )
    assert results[-1].outcome is Outcome.CORRECT


def test_malformed_replies_take_a_turn_and_say_what_to_write(two):
    first, second, last = play(two, 0, "SELECT 1", "Action: Answer\nFinal Answer:", "no")
    assert (first.valid, second.valid, last.valid) == (False, False, False)
    assert "Action: Operation" in first.observation and "Final Answer" in second.observation
    assert (last.done, last.outcome, last.stop_reason) == (True, Outcome.INCORRECT, StopReason.TURN_LIMIT)


def test_json_tool_calls(tmp_path):
    env = environment(tmp_path, {"s": SELECT, "u": UPDATE}, protocol="json_tool_calls")
    assert not env.rejected
    episode = env.episode(env.tasks[0], seed=0)
    system = episode.start()[0].content
    episode.close()
    assert "execute_sql" in system and "Action:" not in system
    for index, task in enumerate(env.tasks):
        replies = env.demonstration(task)
        assert all(reply.startswith('<tool_call>\n{"name": "') for reply in replies)
        assert [result.outcome for result in play(env, index, *replies)] == [
            Outcome.UNKNOWN,
            Outcome.CORRECT,
        ]
    answers = '{"name": "commit_final_answer", "arguments": {"answers": %s}}'
    for right in ('["Bob", "Cy"]', '[["Cy"], ["Bob"]]', "\"[('Bob',), ('Cy',)]\""):
        assert play(env, 0, answers % right)[-1].outcome is Outcome.CORRECT, right
    for wrong in ('["Bob"]', "[]", '["done"]', '"\\ud800"', "1e999", "9" * 500, '[{"a": 1}]'):
        assert play(env, 0, answers % wrong)[-1].outcome is Outcome.INCORRECT, wrong
    # the other protocol's replies are malformed here, and told how to do better
    malformed = play(env, 0, operation(SELECT["answer_info"]["sql"]))[0]
    assert not malformed.valid and "execute_sql" in malformed.observation


def test_every_reply_of_a_demonstration_follows_the_protocol():
    env = DBBench(DBBenchConfig(generate={"num_tasks": 4}, protocol="json_tool_calls"))
    demonstrations = [env.demonstration(task) for task in env.tasks]
    assert all(reply.startswith("<tool_call>") for replies in demonstrations for reply in replies)


def test_a_protocol_and_the_prompt_of_another_are_refused(tmp_path):
    assert DBBenchConfig(tasks="x").system_prompt == PROTOCOLS["action"].system_prompt
    calls = DBBenchConfig(tasks="x", protocol="json_tool_calls")
    assert calls.system_prompt == PROTOCOLS["json_tool_calls"].system_prompt
    resolved = json.loads(calls.model_dump_json())
    assert DBBenchConfig(**resolved) == calls
    with pytest.raises(ValidationError, match="system_prompt is the text of protocol: json_tool_calls"):
        DBBenchConfig(**{**resolved, "protocol": "action"})
    assert DBBenchConfig(tasks="x", protocol="json_tool_calls", system_prompt="").system_prompt == ""


def test_the_answer_may_come_on_the_last_turn(two):
    query = operation('SELECT * FROM "score list"')
    assert play(two, 0, query, query, answer([("Bob",), ("Cy",)]))[-1].outcome is Outcome.CORRECT


def test_observations_are_cut_visibly(tmp_path):
    env = environment(tmp_path, {"s": SELECT}, max_observation_chars=40)
    for sql in ('SELECT * FROM "score list" AS a, "score list" AS b', "SELECT " + "x" * 500):
        observation = play(env, 0, operation(sql))[0].observation
        assert len(observation) == 40 and observation.endswith("(cut)")


def test_errors_and_empty_results_are_told(two):
    assert play(two, 0, operation("SELECT x FROM t"))[0].observation == "Error: no such table: t"
    assert play(two, 0, operation('SELECT * FROM "score list" WHERE id = 99'))[0].observation == "[]"


def test_an_empty_result_needs_an_explicit_empty_answer(tmp_path):
    env = environment(tmp_path, {"e": entry('SELECT id FROM "score list" WHERE score = 1', [])})
    assert play(env, 0, answer("[]"))[-1].outcome is Outcome.CORRECT
    for text in ("done", "()x", "nothing", "[()]", "''"):
        assert play(env, 0, answer(text))[-1].outcome is Outcome.INCORRECT
    assert not play(env, 0, answer(""))[-1].valid


def test_steps_out_of_turn_raise(two):
    episode = two.episode(two.tasks[0], seed=0)
    with pytest.raises(RuntimeError, match="not started"):
        episode.step("x")
    episode.start()
    with pytest.raises(RuntimeError, match="started before"):
        episode.start()
    episode.close()


def test_episodes_are_stepped_in_other_threads(two):
    def run(i):
        episode = two.episode(two.tasks[i % 2], seed=i)
        episode.start()
        return episode, list(two.demonstration(two.tasks[i % 2]))

    with ThreadPoolExecutor(8) as pool:
        episodes = list(pool.map(run, range(64)))
        list(pool.map(lambda pair: pair[0].step(pair[1][0]), reversed(episodes)))
        results = list(pool.map(lambda pair: pair[0].step(pair[1][1]), episodes))
    assert {result.outcome for result in results} == {Outcome.CORRECT}


def test_what_cannot_be_used_is_listed_and_logged(tmp_path, caplog):
    bad = {
        "broken": entry('DELETE FROM "score list" AS s JOIN x'),
        "other": entry('SELECT id FROM "score list"', [[1], [2]]),
        "idle": entry('UPDATE "score list" SET score = score'),
        "stored": entry('DELETE FROM "score list" WHERE id = 1', md5="0" * 32),
        "drop": entry('DROP TABLE "score list"'),
        "table": entry("SELECT 1", [[1]], rows=((2**80, "a", 1),)),
    }
    with caplog.at_level(logging.WARNING):
        env = environment(tmp_path, {"s": SELECT, **bad, "u": UPDATE})
    assert [task.id for task in env.tasks] == ["s", "u"]
    causes = {rejection.id: rejection.cause for rejection in env.rejected}
    assert list(causes) == list(bad)
    for name, cause in zip(
        bad,
        ("gold SQL fails", "other rows", "doing nothing", "stored md5", "drops the table", "does not accept"),
        strict=True,
    ):
        assert cause in causes[name]
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert "6 of 8 tasks cannot be used" in caplog.text

    found = validate_tasks("db_bench", tasks=tmp_path / "tasks.json")
    assert (found["tasks"], found["gold_correct"], found["nothing_correct"]) == (8, 3, 1)
    assert [rejection["id"] for rejection in found["rejected"]] == list(bad)
    with pytest.raises(AgentPeftError, match="no task can be used"):
        environment(tmp_path, bad)


def test_results_too_long_to_read_are_told(tmp_path, caplog):
    rows = [[i, "x" * 30, 1] for i in range(50)]
    environment(tmp_path, {"long": entry('SELECT * FROM "score list"', rows, rows=rows)})
    assert "longer than max_observation_chars" in caplog.text


def test_skills_and_limit(tmp_path):
    entries = {"s": SELECT, "u": UPDATE, "v": UPDATE | {"instruction": "Again."}}
    assert [task.id for task in environment(tmp_path, entries, skills=["update"]).tasks] == ["u", "v"]
    assert [task.id for task in environment(tmp_path, entries, skills=["update"], limit=1).tasks] == ["u"]
    with pytest.raises(AgentPeftError, match="no task has one of the skills"):
        environment(tmp_path, entries, skills=["delete"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one"),
        ({"tasks": "x.json", "generate": {"num_tasks": 1}}, "exactly one"),
        ({"tasks": "x.json", "skills": ["updat"]}, "did you mean 'update'"),
        ({"generate": {"num_tasks": 1, "skills": ["inserts"]}}, "did you mean 'insert'"),
        ({"generate": {"num_tasks": 0}}, "greater than 0"),
        ({"generate": {"num_tasks": 1, "split": "test"}}, "heldout"),
        ({"tasks": "x.json", "database": "mysql"}, "sqlite"),
    ],
)
def test_wrong_configurations(settings, message):
    with pytest.raises(ValidationError, match=message):
        DBBenchConfig.model_validate(settings)


@pytest.mark.parametrize("form", ["object", "list", "lines", "one line"])
def test_file_forms(tmp_path, form):
    path = tmp_path / "tasks.jsonl"
    numbered = [SELECT | {"sample_index": 7}, UPDATE | {"sample_index": 9}]
    texts = {
        "object": json.dumps({"7": SELECT, "9": UPDATE}),
        "list": json.dumps(numbered),
        "lines": "\n".join(map(json.dumps, numbered)) + "\n",
        "one line": json.dumps(numbered[0]),
    }
    path.write_text(texts[form])
    assert [task.id for task in load_tasks(path)] == (["7"] if form == "one line" else ["7", "9"])


def _without(entry, *keys):
    copy = json.loads(json.dumps(entry))
    holder = copy
    for key in keys[:-1]:
        holder = holder[key]
    del holder[keys[-1]]
    return copy


def _with(entry, value, *keys):
    copy = json.loads(json.dumps(entry))
    holder = copy
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (7, "JSON object"),
        (_without(SELECT, "instruction"), "instruction"),
        (_without(SELECT, "table_info"), "table_info"),
        (_without(SELECT, "table_info", "name"), "table_info.name"),
        (_with(SELECT, [], "table_info", "column_info_list"), "table_info.column_info_list"),
        (
            _with(SELECT, "INT); DROP TABLE x", "table_info", "column_info_list", 1, "type"),
            r"table_info.column_info_list\[1\].type",
        ),
        (
            _with(SELECT, [1], "table_info", "row_list", 2),
            r"table_info.row_list\[2\] must be a list of 3 cells",
        ),
        (_with(SELECT, {}, "table_info", "row_list", 2, 1), r"table_info.row_list\[2\]\[1\]"),
        (_without(SELECT, "answer_info"), "answer_info"),
        (_with(SELECT, "", "answer_info", "sql"), "answer_info.sql"),
        (_with(SELECT, None, "answer_info", "direct"), "answer_info.direct"),
        (_with(SELECT, [[1], [1, 2]], "answer_info", "direct"), "answer_info.direct"),
        (_with(UPDATE, "x", "answer_info", "md5"), "answer_info.md5"),
        (_with(SELECT, "select", "skill_list"), "skill_list"),
    ],
)
def test_a_wrong_entry_is_named_with_its_key(tmp_path, wrong, key):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"good": SELECT, "bad one": wrong}))
    with pytest.raises(AgentPeftError, match=f"entry 'bad one': .*{key}") as raised:
        load_tasks(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"{}", "no entry"),
        (b"3", "object or list"),
        (b"[" * 100_000, "not JSON"),
        (b"", "holds no entry"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, content, message):
    (tmp_path / "tasks.json").write_bytes(content)
    with pytest.raises(AgentPeftError, match=message):
        load_tasks(tmp_path / "tasks.json")
    with pytest.raises(AgentPeftError, match="cannot be read"):
        load_tasks(tmp_path / "missing.json")


def test_validation_needs_a_source_of_tasks_and_knows_its_keys(tmp_path):
    with pytest.raises(AgentPeftError, match="set exactly one of tasks"):
        validate_tasks("db_bench")
    with pytest.raises(AgentPeftError, match=r"environment\.sandbox: unknown key"):
        validate_tasks("db_bench", tasks=tmp_path / "x.json", sandbox="docker")
    skills = {"skills": ["insert", "delete"], "combined": 0}
    found = validate_tasks("db_bench", generate={"num_tasks": 4, **skills}, limit=3, skills=["insert"])
    assert (found["tasks"], found["gold_correct"], found["rejected"]) == (2, 2, [])
