"""The parts of the generator: the grammar, the plan, the mutation test, the shapes and the tables."""

import itertools
import math
import random

import pytest

from agent_peft.environments.db_bench import skills_of
from agent_peft.environments.db_bench.config import GenerateConfig
from agent_peft.environments.db_bench.generation import (
    english,
    grammar,
    mutation,
    plan,
    sampler,
    schemas,
    shapes,
)
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Among,
    Projection,
    Relation,
    Select,
    sql,
)
from agent_peft.environments.db_bench.generator import SPLITS, Scratch, TaskMaker

PRICE, CITY, DAY = (
    schemas.Column(schemas.attributes()[name], name) for name in ("price", "city", "order_date")
)
SCHEMA = schemas.Schema("orders", schemas.entities()["order"], (PRICE, CITY, DAY))
ROWS = (
    (1, "Oslo", "2023-01-01"),
    (2, "Oslo", "2023-02-01"),
    (3, "Rome", "2023-03-01"),
    (3, "Rome", "2023-04-01"),
)
ALL = tuple(map(Projection, SCHEMA.columns))


@pytest.fixture
def table():
    scratch = Scratch(SCHEMA, ROWS)
    yield scratch
    scratch.close()


# -- grammar -------------------------------------------------------------------------------------------------


def test_every_phrase_of_a_grammar_comes_with_its_probability():
    rules = grammar.parse_grammar("= a\n3* <b> one\n<b> (two|three[ or {slot}])\n= b\nx\ny\n")
    seen = {}
    for seed in range(600):
        derivation = grammar.Derivation(random.Random(seed), rules)
        seen.setdefault(derivation.say("a", slot="four"), derivation.bits)
    probabilities = {phrase: 2**-bits for phrase, bits in seen.items()}
    assert math.isclose(sum(probabilities.values()), 1)
    assert math.isclose(probabilities["x one"], 3 / 4 / 2)
    assert math.isclose(probabilities["y three or four"], 1 / 4 / 2 / 2 / 2)


def test_what_needs_a_slot_that_is_missing_is_never_said():
    rules = grammar.parse_grammar("= a\n<b>\nnothing[ but {slot}]\n= b\n{slot} <c>\n= c\n{other}\n")
    said = {grammar.Derivation(random.Random(seed), rules).say("a") for seed in range(50)}
    assert said == {"nothing"}
    with pytest.raises(LookupError, match="no alternative of b"):
        grammar.Derivation(random.Random(0), rules).say("b", slot="x")


def test_a_plain_phrase_is_the_likeliest_and_takes_no_draw():
    rules = grammar.parse_grammar("= a\nrare\n3* <b> (one|two)[ more]\n= b\nx\ny\n")
    rng = random.Random(0)
    before = rng.getstate()
    derivation = grammar.Derivation(rng, rules, plain=True)
    assert (derivation.say("a"), derivation.chance(0.5), derivation.chance(0.4)) == ("x one", True, False)
    assert (derivation.bits, rng.getstate()) == (0, before)


def test_a_backslash_makes_a_sign_plain():
    rules = grammar.parse_grammar("= a\n{k} \\(largest first\\) > 3\n")
    assert grammar.Derivation(random.Random(0), rules).say("a", k="price") == "price (largest first) > 3"


def test_the_sides_of_the_grammar_are_apart():
    rules = grammar.grammar()
    for name, options in rules.items():
        held_out = sum(option.held_out for option in options)
        assert held_out < len(options), f"training would have no {name}"
        assert len(options) >= 4 or not held_out
    assert (
        0.15
        < sum(o.held_out for options in rules.values() for o in options) / sum(map(len, rules.values()))
        < 0.3
    )
    assert sum(map(len, rules.values())) >= 300


def test_most_requests_have_more_than_twenty_bits_of_phrasing():
    maker = TaskMaker(GenerateConfig(num_tasks=1))
    bits = [maker.draft(i, None, random.Random(i)).bits for i in range(60)]
    assert sum(bits) / len(bits) > 35
    assert sum(number > 20 for number in bits) > 0.75 * len(bits)  # an INSERT of values has fewer


# -- mutation ------------------------------------------------------------------------------------------------


def test_each_part_of_a_query_is_changed():
    where = plan.Junction("AND", (Relation(PRICE, ">", 1), plan.Between(DAY, "a", "b")))
    query = Select(
        (Projection(CITY), Projection(Aggregate("MAX", PRICE), "m")),
        "orders",
        where,
        (CITY,),
        Relation(Aggregate("COUNT"), ">=", 2),
        (plan.Sort(plan.Alias("m", Aggregate("MAX", PRICE)), True), plan.Sort(CITY, False)),
        3,
        1,
    )
    mutants = [sql(mutant) for mutant in mutation.mutants(query)]
    assert sql(query) not in mutants and len(set(mutants)) == len(mutants)
    for fragment in (
        "WHERE price > 1 OR order_date",
        "WHERE price > 1 GROUP",
        "WHERE order_date BETWEEN",
        "order_date >= 'a'",
        "order_date <= 'b'",
        "price < 1",
        "MIN(price)",
        "COUNT(*) <= 2",
        "GROUP BY city ORDER",
        "FROM orders GROUP",
        "ORDER BY m ASC, city ASC",
        "ORDER BY m DESC, city DESC",
        "ORDER BY city ASC LIMIT",
        "ORDER BY m DESC LIMIT",
    ):
        assert any(
            fragment in mutant and not (fragment == "LIMIT 3" and "OFFSET" in mutant) for mutant in mutants
        ), fragment
    assert any("LIMIT" not in mutant for mutant in mutants)


@pytest.mark.parametrize(
    ("where", "matters"),
    [
        (Relation(PRICE, ">", 1), True),
        (Relation(PRICE, ">", 0), False),  # all rows
        (Relation(PRICE, "<>", 9), False),
        (Among(CITY, ("Oslo", "Kyoto")), False),
        (plan.Junction("AND", (Relation(PRICE, ">", 2), Relation(CITY, "=", "Rome"))), False),
        (plan.Junction("AND", (Relation(PRICE, ">", 1), Relation(CITY, "=", "Oslo"))), True),
    ],
)
def test_an_idle_condition_is_found(table, where, matters):
    query = Select(ALL, "orders", where)
    assert mutation.every_part_matters(query, table.answer(query), table.answer) == matters


def test_a_tie_is_found(table):
    tied = Select((Projection(DAY),), "orders", order=(plan.Sort(PRICE, True),), limit=1)
    assert not mutation.is_determined(tied, SCHEMA.columns, table.answer)
    total = Select(
        (Projection(DAY),), "orders", order=(plan.Sort(PRICE, True), plan.Sort(DAY, True)), limit=1
    )
    assert mutation.is_determined(total, SCHEMA.columns, table.answer)
    change = plan.Delete("orders", order=(plan.Sort(PRICE, True),), limit=1)
    assert not mutation.is_determined(change, SCHEMA.columns, table.answer)


def test_a_tie_around_an_offset_is_found():
    """The middle one of three rows that tie is the same in both orders."""
    tied = [(1, "Oslo", "2023-01-01"), *((3, "Rome", f"2023-0{month}-01") for month in (2, 3, 4))]
    scratch = Scratch(SCHEMA, tuple(tied))
    try:
        for offset, determined in ((1, False), (3, True)):
            sort = (plan.Sort(PRICE, True),)
            second = Select((Projection(DAY),), "orders", order=sort, limit=1, offset=offset)
            assert mutation.is_determined(second, SCHEMA.columns, scratch.answer) == determined
    finally:
        scratch.close()


def test_a_change_is_undone(table):
    before = table.query(Select(ALL, "orders"))
    assert table.answer(plan.Delete("orders", Relation(CITY, "=", "Rome"))) == ROWS[:2]
    assert table.query(Select(ALL, "orders")) == before


def test_the_queries_of_a_change_are_wrapped():
    above = Relation(PRICE, ">", plan.Scalar(Select((Projection(Aggregate("AVG", PRICE)),), "orders")))
    change = plan.wrapped(plan.Delete("orders", above))
    assert sql(change) == (
        "DELETE FROM orders WHERE price > "
        "(SELECT avg_value FROM (SELECT AVG(price) AS avg_value FROM orders) AS sub)"
    )


# -- shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skill", shapes.ALONE)
def test_a_skill_alone_comes_first(skill):
    assert shapes.ALONE[skill].skills[0] == skill
    rng = random.Random(skill)
    assert shapes.shape_for(skill, 0.0, "train", rng) == shapes.ALONE[skill]
    assert {shapes.shape_for(skill, 1.0, "train", rng).skills[0] for _ in range(20)} == {skill}


def test_the_skills_of_a_shape_are_those_of_its_sql():
    rng, seen = random.Random(3), 0
    for i in itertools.count():
        shape = shapes.draw_shape(rng)
        if i % 3 == 0:
            shape = shapes.Shape("insert", where=1, copies=True, subqueries="nested")
        schema = schemas.draw_schema(rng)
        cells = schemas.draw_rows(schema, rng)
        scratch = Scratch(schema, cells)
        try:
            statement = plan.wrapped(
                sampler.StatementSampler(schema, cells, scratch.query, rng).statement(shape)
            )
        except sampler.Unsatisfiable:
            continue
        finally:
            scratch.close()
        assert skills_of(sql(statement)) == shape.skills, sql(statement)
        if (seen := seen + 1) == 150:
            break
        assert i < 2_000


@pytest.mark.parametrize("split", ["train", "composition"])
def test_a_limit_comes_with_a_sort(split):
    rng = random.Random(0)
    for skill in (None, *shapes.ALONE):
        drawn = [shapes.shape_for(skill, 1.0, split, rng) for _ in range(20)]
        assert all(shape.order or not shape.limit for shape in drawn)


def test_no_alias_is_a_reserved_word():
    rng = random.Random(0)
    names = [name for entity in schemas.entities() for name in (f"{entity} id".replace(" ", "_"), entity)]
    for name in (*names, *schemas.attributes()):
        column = schemas.Column(schemas.Attribute(name, "name", "title", frozenset()), name)
        assert not {sampler.other_name(column, rng) for _ in range(20)} & sampler.RESERVED
    assert {"case", "match", "transaction", "rank"} <= sampler.RESERVED


# -- tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words_held_out", [False, True])
def test_the_columns_of_a_table_cannot_be_confused(words_held_out):
    rng = random.Random(0)
    for _ in range(200):
        schema = schemas.draw_schema(rng, words_held_out)
        names = [column.name.lower() for column in schema.columns]
        said = [form for column in schema.columns for form in {column.said, column.attribute.short} - {""}]
        assert len(set(names)) == len(names) and len(set(said)) == len(said), schema
        assert schema.of("total", "measure") and schema.of("category", "flag", "ref")
        assert schemas.held_out("entity", schema.entity.name) == words_held_out


def test_all_words_lists_can_be_read():
    assert len(schemas.entities()) >= 150 and len(schemas.attributes()) >= 230
    topics = {topic for entity in schemas.entities().values() for topic in entity.topics}
    for attribute in schemas.attributes().values():
        assert attribute.topics and attribute.topics <= topics | {"*"}, attribute
        assert all(kind in (">", "<", "=") and "{v}" in words for kind, words in attribute.sayings), attribute


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("list a order. sort it", "List an order. Sort it"),
        ("a user, a unit, a hour, a ID and a one-off", "A user, a unit, an hour, an ID and a one-off"),
        ("can you list it. do it.", "Can you list it? Do it."),
        ("from Z to A and back", "From Z to A and back"),
    ],
)
def test_sentences_are_finished(text, finished):
    assert english.finished(text) == finished


def test_the_splits_change_one_thing_each():
    base = SPLITS["train"]
    for name in ("words", "phrasing", "composition"):
        assert sum(vars(SPLITS[name])[key] != value for key, value in vars(base).items()) == 1


def test_texts_sort_alike_with_and_without_case():
    """SQLite sorts by bytes, MariaDB without case: the answers are the same."""
    for attribute in schemas.attributes().values():
        if attribute.role in ("category", "flag"):
            values = attribute.values.split("/")
            assert sorted(values) == sorted(values, key=str.lower), attribute.name
            assert len({value.lower() for value in values}) == len(values)
