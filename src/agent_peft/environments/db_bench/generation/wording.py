"""How people name things and state conditions: columns, values, aggregates, and what is known of rows."""

from __future__ import annotations

import datetime
import re
from typing import Any

from agent_peft.environments.db_bench.generation.english import agreeing, is_plural, plural
from agent_peft.environments.db_bench.generation.grammar import Derivation
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Alias,
    Among,
    Between,
    Calculation,
    Condition,
    Derived,
    Expression,
    Junction,
    Relation,
    Scalar,
    Select,
    Sort,
)
from agent_peft.environments.db_bench.generation.schemas import Column, Schema

_RULES = {">": "gt", "<": "lt", ">=": "ge", "<=": "le", "=": "eq", "<>": "ne"}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Wording:
    """The words for the parts of one statement. The style of values, dates and counts is drawn once."""

    def __init__(self, schema: Schema, derivation: Derivation) -> None:
        self.schema, self.draw = schema, derivation
        rng = derivation.rng
        self.quote = rng.choices(("'", '"', ""), (72, 16, 12))[0]
        self.date = rng.choices(("iso", "words", "british"), (62, 30, 8))[0]
        self.words_for_counts = rng.random() < 0.3
        if derivation.plain:
            self.quote, self.date, self.words_for_counts = "'", "iso", False
        self.noun = derivation.say("rows_noun", many=schema.entity.plural, one=schema.entity.name)

    def _column(self, column: Column, many: bool = False) -> str:
        said = column.said
        if column.role == "id" and column.name.lower() == "id":
            return "IDs" if many else "ID"
        if self.draw.plain:
            name = column.name.replace("_", " ")
            return plural(name) if many else name
        if not many and "_" in column.name and self.draw.chance(0.1):
            return column.name
        if column.attribute.short and self.draw.chance(0.35):
            said = column.attribute.short
        elif self._is_only_name(column) and self.draw.chance(0.25):
            said = "name"
        elif column.unit and not many and self.draw.chance(0.2):
            return f"{said} in {column.unit}"
        return plural(said) if many else said

    def _is_only_name(self, column: Column) -> bool:
        names = [other for other in self.schema.columns if other.name.lower().endswith("name")]
        return names == [column] and column.name.lower().endswith("_name")

    def _expression(self, expression: Expression, many: bool = False) -> str:
        entity = self.schema.entity
        match expression:
            case Column():
                return self._column(expression, many)
            case Alias(_, inner):
                return self._expression(inner, many)
            case Aggregate("COUNT"):
                text = self.draw.say("count", m=entity.plural, one=entity.name)
                if many and text.endswith("count"):
                    return plural(text)
                return text.replace("number of", "numbers of") if many and self.draw.chance(0.3) else text
            case Aggregate(function, Column() as column):
                rule = {"AVG": "avg", "SUM": "sum", "MAX": "max", "MIN": "min"}[function]
                if column.role == "date":
                    rule = "latest" if function == "MAX" else "earliest"
                name = self._column(column)
                if is_plural(name) and self.draw.chance(0.7):
                    name = f"number of {name}"
                elif rule == "sum" and name.startswith("total"):
                    rule = "sum_of_totals"
                text = self.draw.say(rule, c=name, cs=plural(name))
                return plural(text) if many and "_" not in text.split()[-1] and " of " not in text else text
            case Calculation("-", Aggregate("MAX", column)):
                return self.draw.say("range", c=self._name(column))
            case Calculation("*", Aggregate("AVG", column)):
                return self.draw.say("product", c=self._name(column), m=entity.plural)
            case Calculation(operator, Aggregate("SUM", left), Aggregate("SUM", right)):
                return self.draw.say(
                    "difference" if operator == "-" else "sum_of", c=self._name(left), d=self._name(right)
                )
            case Calculation("*", Scalar() as scalar, int() as factor):
                return f"{'twice' if factor == 2 else 'three times'} {self._expression(scalar)}"
            case Scalar(query):
                return self._overall(query)
        raise TypeError(f"nothing to say for {expression!r}")

    def _name(self, column: Column | str | None) -> str:
        assert isinstance(column, Column)
        return self._column(column)

    def _overall(self, query: Select) -> str:
        aggregate = self._expression(query.outputs[0].expression)
        if query.where is None:
            return self.draw.say("overall", a=aggregate, m=self.schema.entity.plural)
        rows = self.draw.say("rows_where", m=self.schema.entity.plural, **self._condition(query.where))
        return self.draw.say("overall_of", a=aggregate, rows=rows)

    def _value(self, value: Any, column: Expression | None = None) -> str:
        if isinstance(value, Column | Aggregate | Calculation | Scalar):
            return self._expression(value)
        if isinstance(value, str) and isinstance(column, Column | Aggregate) and _is_date(value):
            day = datetime.date.fromisoformat(value)
            month = day.strftime("%B")
            if self.date == "words":
                return f"{month} {day.day}, {day.year}"
            if self.date == "british":
                return f"{day.day} {month} {day.year}"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else str(value)

    def _count(self, number: int) -> str:
        return _NUMBERS[number] if self.words_for_counts and number <= 10 else str(number)

    # Conditions

    def _condition(self, condition: Condition) -> dict[str, str | None]:
        """The ways to say a condition: as a clause, after a word for the rows, and after "have"."""
        post = self._post(condition)
        return {"clause": self._clause(condition), "post": post, "having": self._with(condition)}

    def _clause(self, condition: Condition, article: str = "the ") -> str:
        """A condition as a sentence without its "where"."""
        match condition:
            case Junction(_, parts):
                texts = [self._clause(part) for part in parts]
                return joined(self.draw, condition, texts)
            case Relation(left, "LIKE", str() as pattern):
                return self.draw.say(
                    _like(pattern) + "_clause",
                    c=article + self._expression(left),
                    v=self._value(pattern.strip("%")),
                )
            case Relation(left, operator, right):
                rule = f"{_RULES[operator]}_clause"
                if value_kind(left) == "date" and f"date_{rule}" in self.draw.rules:
                    rule = f"date_{rule}"
                name = self._expression(left)
                text = self.draw.say(rule, c=article + name, v=self._value(right, left))
                return (
                    agreeing(text, article + name) if isinstance(left, Column) and is_plural(name) else text
                )
            case Between(left, low, high):
                return self.draw.say(
                    "between_clause",
                    c=article + self._expression(left),
                    v=self._value(low, left),
                    w=self._value(high, left),
                )
            case Among(left, values):
                name = self._column(left)
                if not isinstance(values, Select):
                    return self.draw.say(
                        "among_clause",
                        c=article + name,
                        any=listed(self.draw, [self._value(value) for value in values], "or"),
                    )
                return self._among(article + name, plural(name.replace("_", " ")), values)
        raise TypeError(f"no condition: {condition!r}")

    def _among(self, name: str, names: str, query: Select) -> str:
        if isinstance(query.source, Derived):
            inner = query.source.query
            sort, limit = inner.order[0], inner.limit
            assert limit is not None
            return self.draw.say(
                "in_top_clause",
                c=name,
                n=self._count(limit),
                m=self.schema.entity.plural,
                extreme=self._extreme(sort),
                key=self._expression(sort.expression),
            )
        if query.having is not None:
            return self.draw.say(
                "in_groups_clause",
                c=name,
                cs=names,
                h_with=self._with(query.having),
                h_clause=self._clause(query.having),
            )
        assert query.where is not None
        rows = self.draw.say("rows_where", m=self.schema.entity.plural, **self._condition(query.where))
        return self.draw.say("in_rows_clause", c=name, cs=names, rows=rows)

    def _with(self, condition: Condition) -> str | None:
        """A condition as what a row or a group has ("a price above 5"); None where it is none."""
        match condition:
            case Junction(_, parts):
                texts = [self._with(part) for part in parts]
                if any(text is None for text in texts) or any(isinstance(part, Junction) for part in parts):
                    return None
                return joined(self.draw, condition, texts)  # type: ignore[arg-type]
            case Relation(Aggregate("COUNT"), ">" | "<" | ">=" | "<=" as operator, int() as number):
                noun = self.schema.entity.name if number == 1 else self.schema.entity.plural
                return self.draw.say(f"{_RULES[operator]}_count", v=self._count(number), m=noun)
            case Relation(left, "LIKE", str() as pattern):
                rule = _like(pattern) + "_with"
                if rule not in self.draw.rules:
                    return None
                return self.draw.say(rule, c=self._expression(left), v=self._value(pattern.strip("%")))
            case Relation(left, operator, right):
                if isinstance(right, Scalar) and operator == "=":
                    extreme = right.query.outputs[0].expression
                    return f"the {self._expression(extreme)}" if right.query.where is None else None
                name = self._expression(left)
                if isinstance(left, Column) and is_plural(name):
                    rule = f"{_RULES[operator]}_count"
                    if rule not in self.draw.rules or not isinstance(right, int):
                        return None
                    return self.draw.say(rule, v=str(right), m=name)
                rule = f"{_RULES[operator]}_with"
                if value_kind(left) == "date":
                    rule = f"date_{rule}"
                if rule not in self.draw.rules:
                    return None
                return self.draw.say(rule, c=name, v=self._value(right, left))
            case Between(left, low, high):
                name = self._expression(left)
                if isinstance(left, Column) and is_plural(name):
                    return f"between {low} and {high} {name}"
                return self.draw.say(
                    "between_with", c=name, v=self._value(low, left), w=self._value(high, left)
                )
            case Among(left, values) if not isinstance(values, Select):
                return self.draw.say(
                    "among_with",
                    c=self._column(left),
                    any=listed(self.draw, [self._value(value) for value in values], "or"),
                )
        return None

    def _post(self, condition: Condition) -> str | None:
        """A condition as words after those for the rows ("older than 30", "with a price above 5")."""
        match condition:
            case Junction(_, parts):
                if any(isinstance(part, Junction) for part in parts):
                    return None
                if condition.connector == "AND":
                    texts = [self._post(part) for part in parts]
                    return None if None in texts else joined(self.draw, condition, texts)  # type: ignore[arg-type]
            case Relation(Column() as column, operator, right):
                sayings = [words for kind, words in column.attribute.sayings if kind == operator]
                if (
                    sayings
                    and not (isinstance(right, Scalar) and right.query.where is not None)
                    and not self.draw.plain
                    and self.draw.chance(0.6)
                ):
                    self.draw.bits += len(sayings).bit_length() - 1
                    saying = self.draw.rng.choice(sayings)
                    if not isinstance(right, Scalar) or saying.endswith("{v}"):
                        return saying.replace("{v}", self._value(right, column))
        with_ = self._with(condition)
        if with_ is not None and self.draw.chance(0.75):
            return f"with {with_}"
        if isinstance(condition, Junction):
            return None
        clause = self._clause(condition, article="")
        return f"whose {clause}" if not clause.startswith((self.quote or "\0", "whose")) else None

    def _rows(self, where: Condition | None, noun: str | None = None, article: str = "") -> str:
        """The rows, with what is known of them."""
        noun = noun or self.noun
        if not article and self.draw.chance(0.12):
            noun += self.draw.say("in_table", table=self.schema.table)
        if where is None:
            return article + noun if article else self.draw.say("every", m=noun)
        every = article + noun if article or self.draw.chance(0.6) else self.draw.say("every", m=noun)
        return self.draw.say("rows_where", m=every, **self._condition(where))

    def _extreme(self, sort: Sort) -> str:
        if value_kind(sort.expression) == "date":
            return self.draw.rng.choice(
                ("latest", "most recent") if sort.descending else ("earliest", "oldest")
            )
        return self.draw.rng.choice(("highest", "largest") if sort.descending else ("lowest", "smallest"))


def value_kind(first: Expression) -> str:
    """Whether a value is a number, a date or a text."""
    inner = first.expression if isinstance(first, Alias) else first
    if isinstance(inner, Aggregate):
        return "date" if isinstance(inner.column, Column) and inner.column.role == "date" else "number"
    if isinstance(inner, Column):
        return "date" if inner.role == "date" else "number" if inner.type == "INT" else "text"
    return "number"


def _like(pattern: str) -> str:
    if pattern.endswith("%"):
        return "contains" if pattern.startswith("%") else "starts"
    return "ends"


def plain_rows(rows: str) -> str:
    """The rows without "all" and "the"."""
    return re.sub(r"^(all the|all|the) ", "", rows)


def _is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None


def listed(draw: Derivation, texts: list[str], word: str = "and") -> str:
    """Texts with commas and a word before the last one."""
    if len(texts) == 1:
        return texts[0]
    comma = "," if len(texts) > 2 and draw.chance(0.6) else ""
    return f"{', '.join(texts[:-1])}{comma} {word} {texts[-1]}"


def joined(draw: Derivation, junction: Junction, texts: list[str]) -> str:
    """Conditions joined so that it is clear which belong together."""
    nested = [isinstance(part, Junction) for part in junction.parts]
    if not any(nested):
        if junction.connector == "OR":
            return ("either " if draw.chance(0.6) else "") + listed(draw, texts, "or")
        both = len(texts) == 2 and texts[0].startswith("the ") and draw.chance(0.03)
        return ("both " if both else "") + listed(draw, texts, "and")
    first, second = texts
    if junction.connector == "OR":  # (a and b) or c
        if draw.chance(0.25):
            return " or ".join(_marked(texts, nested, "({})"))
        return f"either {first}, or {second}" if draw.chance(0.6) else f"{first}, or else {second}"
    texts = [
        text.removeprefix("either ") if inner else text for text, inner in zip(texts, nested, strict=True)
    ]
    if draw.chance(0.25):
        return " and ".join(_marked(texts, nested, "({})"))
    first, second = _marked(texts, nested, "either {}")
    if all(nested):
        return f"{first}, and also {second}"
    plain_rows, choice = (second, first) if nested[0] else (first, second)
    return f"{plain_rows}, and {choice}" if draw.chance(0.5) else f"{plain_rows} and, in addition, {choice}"


def _marked(texts: list[str], nested: list[bool], form: str) -> list[str]:
    return [form.format(text) if inner else text for text, inner in zip(texts, nested, strict=True)]
