"""Generated tasks: usable, unambiguous, the same for the same seed, and apart between the splits."""

import json
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, generate, primary_skill, skills_of
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS, SPLITS
from agent_peft.environments.db_bench.syntax import SKILLS, order_keys, parse
from agent_peft.types import AgentPeftError

SEVERAL = {split: generate(400, 0, split=split) for split in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
def test_every_generated_task_can_be_used(split):
    environment = DBBench(
        DBBenchConfig.model_validate({"generate": {"num_tasks": 400, "seed": 5, "split": split}})
    )
    assert len(environment.tasks) == 400
    assert not environment.rejected


@pytest.mark.parametrize("split", SPLITS)
def test_ids_and_statements_are_distinct(split):
    entries = SEVERAL[split]
    assert len({entry["answer_info"]["sql"] for entry in entries.values()}) == len(entries) == 400


def test_the_skills_take_turns_and_come_first():
    for i, entry in enumerate(SEVERAL["train"].values()):
        skill = GENERATED_SKILLS[i % len(GENERATED_SKILLS)]
        assert entry["skill_list"][0] == skill == primary_skill(entry["skill_list"])
        assert set(entry["skill_list"]) == set(skills_of(entry["answer_info"]["sql"]))


@given(
    st.integers(-5, 2**40),
    st.integers(1, 12),
    st.lists(st.sampled_from(GENERATED_SKILLS), min_size=1, unique=True),
    st.sampled_from(list(SPLITS)),
)
@settings(max_examples=25, deadline=None)
def test_the_same_arguments_give_the_same_bytes(seed, num_tasks, skills, split):
    first = json.dumps(generate(num_tasks, seed, skills, split))
    assert first == json.dumps(generate(num_tasks, seed, skills, split))
    assert first != json.dumps(generate(num_tasks, seed + 1, skills, split))
    assert {entry["skill_list"][0] for entry in json.loads(first).values()} <= set(skills)


def test_more_tasks_begin_with_the_fewer():
    few, many = generate(40, 1), generate(80, 1)
    assert list(many.items())[:40] == list(few.items())


def test_more_tasks_than_statements():
    entries = generate(400, 0, ["group_by_single_column"], "heldout")
    assert len({json.dumps([entry["instruction"], entry["table_info"]]) for entry in entries.values()}) == 400


def test_the_splits_share_no_table_and_no_wording():
    (train, asked), (heldout, asked_otherwise) = SPLITS["train"], SPLITS["heldout"]
    tables, others = {schema.table for schema in train}, {schema.table for schema in heldout}
    assert not tables & others
    assert len(tables) == len(train) >= 24 and len(others) == len(heldout) >= 12
    for split, entries in SEVERAL.items():
        assert {entry["table_info"]["name"] for entry in entries.values()} <= {
            schema.table for schema in SPLITS[split][0]
        }
    assert set(asked.templates) == set(asked_otherwise.templates) == set(GENERATED_SKILLS)
    for skill in GENERATED_SKILLS:
        ours, theirs = (
            {re.sub(r"{\w+}|\W", " ", template).lower().strip() for template in phrasings.templates[skill]}
            for phrasings in (asked, asked_otherwise)
        )
        assert len(ours) >= 8 and len(theirs) >= 5, skill
        assert not ours & theirs, skill
    for name in ("comparisons", "day_comparisons", "directions", "extremes", "aggregates"):
        assert not set(getattr(asked, name).values()) & set(getattr(asked_otherwise, name).values()), name


def test_every_template_says_what_is_needed():
    needed = {
        "insert": [{"cells", "cells_said"}],
        "update": [{"column", "column_said"}, {"value"}, {"condition", "condition_said"}],
        "delete": [{"condition", "condition_said"}],
        "select": [{"columns", "columns_said"}],
        "where_single_condition": [{"columns", "columns_said"}, {"condition", "condition_said"}],
        "order_by_single_column": [{"columns", "columns_said"}, {"key", "key_said"}, {"direction"}],
        "limit_only": [{"columns", "columns_said"}, {"key", "key_said"}, {"extreme"}, {"count"}],
        "group_by_single_column": [{"outputs", "outputs_said"}, {"group", "group_said"}],
    }
    for _, phrasings in SPLITS.values():
        for skill, templates in phrasings.templates.items():
            for template in templates:
                slots = {slot for _, slot, _, _ in string.Formatter().parse(template) if slot}
                assert all(slots & choice for choice in needed[skill]), template


@pytest.mark.parametrize("split", SPLITS)
def test_results_are_short_and_sorts_are_total(split):
    for name, entry in SEVERAL[split].items():
        table, answer = entry["table_info"], entry["answer_info"]
        headers = [column["name"] for column in table["column_info_list"]]
        assert 3 <= len(headers) <= 5 and 5 <= len(table["row_list"]) <= 10
        assert {column["type"] for column in table["column_info_list"]} <= {"INT", "TEXT"}
        if answer["direct"] is None:
            assert re.fullmatch("[0-9a-f]{32}", answer["md5"])
            continue
        assert 1 <= len(answer["direct"]) <= 5 and 1 <= len(answer["direct"][0]) <= 3, name
        order = parse(answer["sql"]).args.get("order")
        if order is not None:
            key = headers.index(order.expressions[0].this.name)
            values = [row[key] for row in table["row_list"]]
            assert len(set(values)) == len(values), name
            assert order_keys(answer["sql"], headers, len(answer["direct"][0])) is not None


@pytest.mark.parametrize("split", SPLITS)
def test_the_instruction_names_every_value_and_output(split):
    for name, entry in SEVERAL[split].items():
        instruction, sql = entry["instruction"], entry["answer_info"]["sql"]
        assert "{" not in instruction and "_said" not in instruction
        for text, number in re.findall(r"'((?:[^']|'')*)'|\b(\d+)\b", sql):
            assert (text.replace("''", "'") or number) in instruction, name
        for header in (column["name"] for column in entry["table_info"]["column_info_list"]):
            if re.search(rf"\b{header}\b", sql):
                assert (
                    header.lower() in instruction.lower()
                    or header.replace("_", " ").lower() in instruction.lower()
                ), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "at least 1"),
        ((1, 0, ["subquery_nested"]), "subquery_nested"),
        ((1, 0, ["insert"], "test"), "train or heldout"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(AgentPeftError, match=message):
        generate(*arguments)


@pytest.mark.parametrize(
    ("sql", "skills"),
    [
        ("INSERT INTO t (a) VALUES (1)", {"insert"}),
        ("UPDATE t SET a = 1 WHERE b = 2 AND c = 3", {"update", "where_multiple_conditions"}),
        ("DELETE FROM t WHERE (a = 1 AND b = 2) OR c = 3", {"delete", "where_nested_conditions"}),
        (
            "SELECT a AS x FROM t AS y LIMIT 3 OFFSET 2",
            {"select", "column_alias", "table_alias", "limit_and_offset"},
        ),
        (
            "SELECT a FROM t WHERE b > (SELECT AVG(b) FROM t)",
            {"select", "where_single_condition", "subquery_single"},
        ),
        (
            "SELECT a, b FROM t GROUP BY a, b HAVING MAX(c) - MIN(c) > 2 ORDER BY a, b DESC",
            {
                "select",
                "group_by_multiple_columns",
                "having_single_condition_with_aggregate",
                "having_aggregate_calculation",
                "order_by_multiple_columns_different_directions",
            },
        ),
        ("this is no SQL (", set()),
    ],
)
def test_skills_of_a_statement(sql, skills):
    assert set(skills_of(sql)) == skills
    assert skills <= set(SKILLS)
