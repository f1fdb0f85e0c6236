"""Generated tasks: usable, of the skills asked for, unambiguous, said in full, the same for the same seed,
and apart between the splits.
"""

import datetime
import json
import re
from collections import Counter
from functools import cache
from hashlib import sha256

import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_peft.environments.db_bench import generate, primary_skill, skills_of
from agent_peft.environments.db_bench.database import DeclaredColumn, Table
from agent_peft.environments.db_bench.generation.english import ordinal, plural
from agent_peft.environments.db_bench.generation.plan import skeleton_of_sql
from agent_peft.environments.db_bench.generation.schemas import UNITS, attributes, entities, held_out
from agent_peft.environments.db_bench.generation.shapes import HELD_OUT_PAIRS
from agent_peft.environments.db_bench.generation.wording import _NUMBERS
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS, SPLITS
from agent_peft.environments.db_bench.grader import rounded_number
from agent_peft.environments.db_bench.sqlite import SQLiteDatabase
from agent_peft.environments.db_bench.syntax import SKILLS, order_keys
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.types import AgentPeftError
from tests.conftest import case


@cache
def made(name):
    """90 tasks of a split, or each skill three times: alone or combined with others."""
    if name in SPLITS:
        return generate(90, 0, split=name)
    return generate(22 * 3, 0, GENERATED_SKILLS, combined=float(name == "combined"))


@pytest.fixture
def entries(request):
    return made(request.param)


def test_every_generated_task_can_be_used():
    for generated in ({"split": "train"}, {"split": "heldout", "skills": GENERATED_SKILLS}):
        found = validate_tasks("db_bench", generate={"num_tasks": 33, "seed": 5, **generated})
        assert (found["tasks"], found["gold_correct"], found["nothing_correct"]) == (33, 33, 0)


@pytest.mark.parametrize("entries", ["alone", "combined"], indirect=True)
def test_the_skills_take_turns_and_come_first(entries):
    assert GENERATED_SKILLS == SKILLS
    for i, entry in enumerate(entries.values()):
        assert entry["skill_list"][0] == primary_skill(entry["skill_list"]) == SKILLS[i % len(SKILLS)]


@pytest.mark.parametrize(
    "entries",
    [case(which, fast=which in ("train", "heldout", "combined")) for which in (*SPLITS, "alone", "combined")],
    indirect=True,
)
def test_the_skills_are_those_of_the_sql(entries):
    for name, entry in entries.items():
        assert tuple(entry["skill_list"]) == skills_of(entry["answer_info"]["sql"]), name


def test_a_skill_alone_has_no_other_clause():
    skills = {entry["skill_list"][0]: set(entry["skill_list"]) for entry in made("alone").values()}
    assert skills["limit_only"] == {"select", "limit_only", "order_by_single_column"}
    assert skills["having_aggregate_calculation"] == {
        "select",
        "group_by_single_column",
        "having_single_condition_with_aggregate",
        "having_aggregate_calculation",
    }
    assert skills["insert"] == {"insert"} and skills["select"] == {"select"}
    assert skills["subquery_nested"] == {"select", "where_single_condition", "subquery_nested"}


def test_combined_tasks_show_many_combinations():
    combinations = {tuple(entry["skill_list"]) for entry in made("train").values()}
    assert len(combinations) > 50


@given(
    st.integers(-5, 2**40),
    st.integers(1, 6),
    st.none() | st.lists(st.sampled_from(GENERATED_SKILLS), min_size=1, unique=True),
    st.sampled_from(list(SPLITS)),
)
@settings(max_examples=15, deadline=None)
def test_the_same_arguments_give_the_same_bytes(seed, num_tasks, skills, split):
    first = json.dumps(generate(num_tasks, seed, skills, split))
    assert first == json.dumps(generate(num_tasks, seed, skills, split))
    assert first != json.dumps(generate(num_tasks, seed + 1, skills, split))
    if skills and split != "composition":
        assert {entry["skill_list"][0] for entry in json.loads(first).values()} <= set(skills)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "1d7601288dd23417"),
        (
            {
                "skills": ["insert", "where_single_condition"],
                "combined": 0,
                "max_answer_chars": 70,
                "plain": True,
            },
            "4b3a26db69e04ade",
        ),
    ],
)
def test_tasks_stay_what_they_were(arguments, expected):
    """Results of earlier versions are compared on them."""
    assert sha256(json.dumps(generate(40, 0, **arguments)).encode()).hexdigest()[:16] == expected


def test_more_tasks_begin_with_the_fewer():
    few, many = generate(20, 1), generate(40, 1)
    assert list(many.items())[:20] == list(few.items())


def test_skeletons_and_instructions_hardly_repeat():
    for entries in map(made, SPLITS):
        skeletons = [skeleton_of_sql(entry["answer_info"]["sql"]) for entry in entries.values()]
        values = sum(" VALUES " in skeleton for skeleton in skeletons)
        assert len(set(skeletons)) > 0.93 * (len(skeletons) - values)
        assert len({entry["instruction"] for entry in entries.values()}) == len(entries)


def test_the_words_of_the_splits_are_apart():
    """Entities never meet; attributes only where every entity has them."""
    train, heldout = (
        {column for entry in made(split).values() for column in _columns(entry)}
        for split in ("train", "words")
    )
    shared = (train & heldout) - {"id"}
    common = {
        name for name, attribute in attributes().items() if "*" in attribute.topics or attribute.role == "ref"
    }
    assert not {name for name in shared if name in attributes()} - common
    assert not {_own_id(entry) for entry in made("train").values()} & {
        _own_id(entry) for entry in made("words").values()
    } - {None, "id"}
    share = sum(held_out("entity", name) for name in entities()) / len(entities())
    assert 0.15 < share < 0.3


def test_only_the_composition_split_joins_held_out_pairs():
    together = {"having", "several subqueries"}
    assert frozenset(together) in HELD_OUT_PAIRS
    joined = {
        split: sum(map(_joins, entries.values()))
        for split, entries in ((split, made(split)) for split in SPLITS)
    }
    assert joined["train"] == joined["words"] == joined["phrasing"] == 0
    assert joined["composition"] > 0.9 * len(made("composition"))  # `_joins` sees the skills only


def test_other_phrases_are_held_out():
    """Sequences of three words that one split uses often and the other never."""
    train, phrasing = (_trigrams(made(split)) for split in ("train", "phrasing"))
    often = {words for words, count in phrasing.items() if count >= 4}
    assert len([words for words in often if words not in train]) > 20


@pytest.mark.slow
def test_the_alias_of_a_table_qualifies_its_columns_and_is_seldom_said():
    """As in the tasks of LifelongAgentBench. A query inside has no alias, so its columns have none."""
    found = generate(300, 4, skills=["table_alias"])
    assert (
        len(set(re.findall(r" AS ([a-z]+)[ ;]", " ".join(e["answer_info"]["sql"] for e in found.values()))))
        > 20
    )
    said = 0
    for entry in found.values():
        tree = sqlglot.parse_one(entry["answer_info"]["sql"], read="mysql")
        alias = tree.find(sqlglot.exp.Table).alias
        outputs = {output.alias for output in tree.selects if output.alias}
        said += f" {alias}" in re.sub(r"[.,]", " ", entry["instruction"]) and "alias" in entry["instruction"]
        for column in tree.find_all(sqlglot.exp.Column):
            inside = column.find_ancestor(sqlglot.exp.Subquery, sqlglot.exp.In) is not None
            own = column.find_ancestor(sqlglot.exp.Select) is tree
            if own and column.name not in outputs:
                assert column.table == alias, entry["answer_info"]["sql"]
            elif not own:
                assert inside and column.table == "", entry["answer_info"]["sql"]
    assert 40 < said < 140


@pytest.mark.slow
def test_computed_columns_are_also_called_by_a_part_of_their_name():
    """As in the tasks of LifelongAgentBench, where ``avg_price`` may be the mean of ``unit_price``."""
    forms = Counter()
    for entry in generate(200, 5, skills=["column_alias"]).values():
        for function, column, alias in re.findall(r"(\w+)\((\w+)\) AS (\w+)", entry["answer_info"]["sql"]):
            rest, words = alias.partition("_")[2], column.lower().split("_")
            if len(words) > 1 and alias.startswith(function.lower()):
                forms["whole" if rest == column.lower() else words.index(rest)] += 1
    assert min(forms["whole"], forms[0], forms[1]) > 2, forms


def test_plain_tasks_are_short_and_alike():
    skills = ("delete", "where_single_condition")
    plain = generate(60, 3, skills, combined=0, plain=True).values()
    varied = generate(60, 3, skills, combined=0).values()

    def endings(entries):
        return {entry["instruction"].split()[-1] for entry in entries if "delete" in entry["skill_list"]}

    assert endings(plain) == {"deleted."} and len(endings(varied)) > 10
    assert {entry["instruction"].split()[0] for entry in plain if "select" in entry["skill_list"]} == {"What"}
    assert max(len(entry["table_info"]["column_info_list"]) for entry in plain) == 4
    for entry in plain:
        assert re.fullmatch("[a-z_]+", entry["table_info"]["name"])
    conditions = [entry["answer_info"]["sql"].partition(" WHERE ")[2] for entry in plain]
    assert all(re.fullmatch(r"[a-z_]+ (<|>|<=|>=|=) (\d+|'[^']*');", text) for text in conditions)
    assert {text.split()[1] for text in conditions} == {"=", "<", ">", "<=", ">="}
    found = validate_tasks("db_bench", generate={"num_tasks": 33, "seed": 5, "plain": True})
    assert (found["gold_correct"], found["nothing_correct"]) == (33, 0)


@pytest.mark.parametrize("entries", [*SPLITS, "alone", "combined"], indirect=True)
def test_results_are_short_and_the_order_is_determined(entries):
    for name, entry in entries.items():
        answer, table = entry["answer_info"], entry["table_info"]
        assert {column["type"] for column in table["column_info_list"]} <= {"INT", "TEXT"}
        assert 5 <= len(table["row_list"]) <= 34
        if answer["direct"] is None:
            assert re.fullmatch("[0-9a-f]{32}", answer["md5"])
            continue
        assert (
            1 <= len(answer["direct"]) <= 25 and len(repr([tuple(row) for row in answer["direct"]])) <= 400
        ), name
        assert None not in {cell for row in answer["direct"] for cell in row}
        keys = order_keys(answer["sql"], _columns(entry), len(answer["direct"][0]))
        assert (keys is None) == (not any(skill.startswith("order_by") for skill in entry["skill_list"]))
        rows = tuple(map(tuple, answer["direct"]))
        if keys is None and {"limit_only", "limit_and_offset"} & set(entry["skill_list"]):
            # counted from the lowest id, which is the order of the table
            assert not {"group_by_single_column", "group_by_multiple_columns"} & set(entry["skill_list"])
            id_name = table["column_info_list"][0]["name"]
            by_id = re.sub(
                r" (LIMIT \d+( OFFSET \d+)?)$", rf" ORDER BY `{id_name}` \1", answer["sql"].rstrip(";")
            )
            assert "ORDER BY" in by_id and _run(entry, by_id, table["row_list"][::-1]) == rows, name
            continue
        for arranged in (table["row_list"][::-1], sorted(table["row_list"], key=repr)):
            again = tuple(tuple(map(rounded_number, row)) for row in _run(entry, answer["sql"], arranged))
            if keys is not None:
                assert again == rows, name
            else:
                assert sorted(again, key=repr) == sorted(rows, key=repr), name


def test_without_its_where_a_statement_answers_otherwise():
    for name, entry in made("train").items():
        tree = sqlglot.parse_one(entry["answer_info"]["sql"], read="mysql")
        if entry["answer_info"]["direct"] is not None and tree.args.get("where"):
            tree.set("where", None)
            answer = _run(entry, tree.sql("sqlite"), entry["table_info"]["row_list"])
            rows = tuple(tuple(map(rounded_number, row)) for row in answer)
            assert rows != tuple(map(tuple, entry["answer_info"]["direct"])), name


@pytest.mark.parametrize("entries", [*SPLITS, "alone", "combined"], indirect=True)
def test_the_instruction_says_every_value(entries):
    for name, entry in entries.items():
        said = entry["instruction"].lower()
        assert "{" not in said and "  " not in said and said[-1] in ".?:)", (name, said)
        for text in re.findall(r"'((?:[^']|'')*)'", entry["answer_info"]["sql"]):
            assert any(form.lower() in said for form in _forms(text)), (name, text, said)
        for number in re.findall(
            r"(?<![\w'.-])\d+(?![\w'.-])", re.sub(r"'[^']*'|`[^`]*`", "", entry["answer_info"]["sql"])
        ):
            assert any(form in said for form in _number_forms(int(number))), (name, number, said)


@pytest.mark.parametrize("entries", [*SPLITS, "alone", "combined"], indirect=True)
def test_the_instruction_names_every_column(entries):
    for name, entry in entries.items():
        said, sql = entry["instruction"].lower(), entry["answer_info"]["sql"]
        for header in _columns(entry):
            if re.search(rf"\b{header}\b", re.sub("'[^']*'", "", sql)):
                assert any(form in said for form in _column_forms(header)), (name, header, said)


@pytest.mark.parametrize("entries", [*SPLITS, "alone", "combined"], indirect=True)
def test_the_sql_is_in_the_common_dialect(entries):
    """Backticks only; a change reads its own table only within another query."""
    for name, entry in entries.items():
        sql = entry["answer_info"]["sql"]
        assert '"' not in sql and ";" not in sql[:-1], name
        tree = sqlglot.parse_one(sql, read="mysql")
        if isinstance(tree, sqlglot.exp.Update | sqlglot.exp.Delete):
            for select in tree.find_all(sqlglot.exp.Select):
                if select.parent_select is None:
                    assert isinstance(select.args["from_"].this, sqlglot.exp.Subquery), (name, sql)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tasks": 0}, "generate.num_tasks: .* greater than 0"),
        ({"skills": ["joins"]}, "joins"),
        ({"skills": ["insert"], "split": "test"}, "generate.split: .*'heldout'"),
        ({"skills": ["insert"], "combined": 1.5}, "generate.combined: .* less than or equal to 1"),
        ({"skill": ["insert"]}, "generate.skill: .* did you mean 'skills'"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(AgentPeftError, match=message):
        generate(**{"num_tasks": 1, "seed": 0, **arguments})


@pytest.mark.parametrize(
    ("sql", "skills"),
    [
        ("INSERT INTO t (a) VALUES (1)", "insert"),
        ("UPDATE t SET a = 1 WHERE b = 2 AND c = 3", "update where_multiple_conditions"),
        ("DELETE FROM t WHERE (a = 1 AND b = 2) OR c = 3", "delete where_nested_conditions"),
        ("SELECT a AS x FROM t AS y LIMIT 3 OFFSET 2", "limit_and_offset table_alias column_alias select"),
        ("SELECT a FROM t WHERE b > (SELECT AVG(b) FROM t)", "subquery_single where_single_condition select"),
        (
            "SELECT a, b FROM t GROUP BY a, b HAVING MAX(c) - MIN(c) > 2 ORDER BY a, b DESC",
            "having_aggregate_calculation having_single_condition_with_aggregate "
            "order_by_multiple_columns_different_directions group_by_multiple_columns select",
        ),
        ("this is no SQL (", ""),
    ],
)
def test_skills_of_a_statement(sql, skills):
    assert skills_of(sql) == tuple(skills.split())


def _columns(entry):
    return [column["name"] for column in entry["table_info"]["column_info_list"]]


def _own_id(entry):
    first = _columns(entry)[0].lower().replace(" ", "_")
    return first if first.endswith("id") and first not in attributes() else None


def _joins(entry):
    skills = set(entry["skill_list"])
    having = any(skill.startswith("having") for skill in skills)
    where = skills & {"where_multiple_conditions", "where_nested_conditions"}
    sorts = any(skill.startswith("order_by_multiple") for skill in skills)
    limit = skills & {"limit_only", "limit_and_offset"}
    change = skills & {"update", "delete"}
    nested = "where_nested_conditions" in skills
    return bool(
        (nested and (sorts or skills & {"delete", "insert"}))
        or {"group_by_multiple_columns", "limit_and_offset"} <= skills
        or ("having_aggregate_calculation" in skills and where)
        or (having and "subquery_multiple" in skills)
        or ("subquery_nested" in skills and limit and not change)
        or {"update", "subquery_multiple"} <= skills
    )


def _trigrams(entries):
    counts = {}
    for entry in entries.values():
        words = re.findall("[a-z]+", entry["instruction"].lower())
        for i in range(len(words) - 2):
            counts[tuple(words[i : i + 3])] = counts.get(tuple(words[i : i + 3]), 0) + 1
    return counts


def _run(entry, sql, rows):
    columns = tuple(
        DeclaredColumn(column["name"], column["type"]) for column in entry["table_info"]["column_info_list"]
    )
    table = Table(entry["table_info"]["name"], columns, tuple(map(tuple, rows)))
    database = SQLiteDatabase(table, seconds=5.0, steps=1_000_000, seed=0)
    try:
        executed = database.execute(sql)
        assert executed.error is None, executed.error
        return executed.rows
    finally:
        database.close()


def _forms(text):
    yield text.strip("%")
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        day = datetime.date.fromisoformat(text)
        yield f"{day:%B} {day.day}, {day.year}"
        yield f"{day.day} {day:%B} {day.year}"


def _column_forms(header):
    words = header.lower().replace("_", " ")
    yield header.lower()
    yield words
    yield plural(words)
    yield from ("name", "id") if words.endswith(("name", "id")) else ()
    if words.startswith(("is ", "in ")):
        yield words.split(" ", 1)[1]
    if words.split()[-1] in UNITS or words.endswith(("minutes", "days", "tons")):
        yield words.rsplit(" ", 1)[0]
    if attribute := attributes().get(words.replace(" ", "_")):
        if attribute.short:
            yield from (attribute.short.lower(), plural(attribute.short).lower())
        for _, saying in attribute.sayings:
            yield saying.split("{v}")[0].strip()


def _number_forms(number):
    yield str(number)
    yield str(number + 1)  # an offset, told by the entry to start from
    if number < 11:
        yield from (_NUMBERS[number], ordinal(number, True), ordinal(number + 1, True))
    if number == 1:
        yield from ("the first", "the one", "after skipping")
    if number in (2, 3):
        yield ("twice", "three times")[number - 2]


def test_answers_are_as_short_as_asked():
    skills = ["where_single_condition", "order_by_single_column", "insert"]
    short = generate(60, 0, skills, max_answer_chars=120).values()
    answers = [
        entry["answer_info"]["direct"] for entry in short if entry["answer_info"]["direct"] is not None
    ]
    assert len(answers) == 40
    assert max(len(repr([tuple(row) for row in rows])) for rows in answers) <= 120
    with pytest.raises(AgentPeftError, match=r"generate.max_answer_chars: .* 40"):
        generate(1, 0, max_answer_chars=39)
    with pytest.raises(AgentPeftError, match="for a larger max_answer_chars"):
        generate(60, 0, ["group_by_multiple_columns"], combined=0, max_answer_chars=40)
