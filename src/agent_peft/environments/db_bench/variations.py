"""Variations of tasks: a question keeps its wording, and has other columns, values, directions, comparisons
or functions, or another table.

A few hundred tasks of a person's own have more ways to ask than a generator, but their tables and
values are few. A variation is changed in the statement and in the question alike: what the question does not
name stays in the statement, too, or the variation is given up. Only what can be used as a task is kept.
"""

from __future__ import annotations

import logging
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from sqlglot import exp

from agent_peft.environments.db_bench.database import Cell, Row, Table
from agent_peft.environments.db_bench.question import DATE, MARKS, Question, singular
from agent_peft.environments.db_bench.syntax import parse_sql, skills_of
from agent_peft.environments.db_bench.tasks import SQLProblem, read_entry, task_of
from agent_peft.seeding import generator
from agent_peft.types import Task

logger = logging.getLogger(__name__)

MOST_ROWS = 12  # of an answer
_LARGE = 1e15  # from here on, floats are no whole numbers
_TRIES = 60  # of a task, for each variation
_ELSEWHERE = 40  # of them, in which another table may be taken
_OWN_TABLE = 0.1  # how often one of these stays in its own table
_FUNCTIONS: Mapping[type[exp.Expr], Callable[[list[Any]], float]] = {
    exp.Sum: sum,
    exp.Avg: fmean,
    exp.Max: max,
    exp.Min: min,
}
_FUNCTION_WORDS = ("total", "sum", "avg", "average", "max", "maximum", "min", "minimum", "highest", "lowest")
# words that are in many names, and mean nothing when one is left
_COMMON = frozenset(("date", "number", "total", "time", "count", "name", "type", "year", "average"))
_OTHER_WAYS = re.compile(r"\b(before|after|older|newer|earlier|later|since|least|most)\b|[<>]")  # to compare
_MORE = {
    "greater than": "less than",
    "more than": "fewer than",
    "higher than": "lower than",
    "exceeding": "below",
    "exceeds": "is below",
    "exceed": "are below",
    "above": "below",
    "over": "under",
}
_LESS = {
    "less than": "greater than",
    "fewer than": "more than",
    "lower than": "higher than",
    "below": "above",
    "under": "over",
}


class _Unfit(Exception):
    """This variation would not say in words what its statement does."""


@dataclass(frozen=True)
class _Source:
    """A task to vary, or a table to put it in."""

    problem: SQLProblem
    tree: exp.Expr

    @property
    def table(self) -> Table:
        return self.problem.table

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What each column holds."""
        return {name: _kind(name, self.values(name)) for name in self.table.headers}

    @cached_property
    def used(self) -> tuple[str, ...]:
        """The columns of the statement, in order."""
        names = dict.fromkeys(node.name for node in self.tree.find_all(exp.Identifier))
        return tuple(name for name in names if name in self.table.headers)

    def values(self, column: str) -> list[Any]:
        i = self.table.headers.index(column)
        return [row[i] for row in self.table.rows if row[i] is not None]


def variations(
    tasks: Sequence[Task], number: int, answer_of: Callable[[SQLProblem], tuple[Row, ...] | None]
) -> tuple[Task, ...]:
    """``number`` tasks made from ``tasks`` in turn, the same ones for the same tasks. Fewer, with a warning,
    where the questions do not name their columns and values.

    Args:
        answer_of: runs a gold statement; the rows of its answer or, after a change, of its table. None if it
            makes no usable task.
    """
    problems = {task.id: read_entry(task.id, task.content) for task in tasks}
    sources = {name: source for name, problem in problems.items() if (source := _source(problem))}
    made: dict[str, Task] = {}
    texts = {problem.instruction for problem in problems.values()}
    turn = 0
    while sources and len(made) < number:
        for name in list(sources)[: number - len(made)]:
            rng = generator(0, "db_bench", "variation", name, turn)
            for entry in _tries(sources[name], list(sources.values()), rng, answer_of):
                if entry["instruction"] not in texts:
                    texts.add(entry["instruction"])
                    made[f"{name}~{turn}"] = task_of(f"{name}~{turn}", entry)
                    break
            else:
                del sources[name]
        turn += 1
    if len(made) < number:
        logger.warning(
            "db_bench: %d of %d variations could be made of %d tasks", len(made), number, len(tasks)
        )
    return tuple(made.values())


def _source(problem: SQLProblem) -> _Source | None:
    tree = parse_sql(problem.sql) if problem.labels is None else None
    kinds = exp.Select | exp.Insert | exp.Update | exp.Delete
    if not isinstance(tree, kinds) or re.search(f"[{MARKS}]", problem.instruction):
        return None
    aliases = {node.alias for node in tree.find_all(exp.Alias, exp.TableAlias)}
    return None if aliases & set(problem.table.headers) else _Source(problem, tree)


def _tries(
    source: _Source,
    tables: Sequence[_Source],
    rng: random.Random,
    answer_of: Callable[[SQLProblem], tuple[Row, ...] | None],
) -> Iterator[dict[str, Any]]:
    for number in range(_TRIES):
        elsewhere = number < _ELSEWHERE and rng.random() >= _OWN_TABLE
        try:
            instruction, sql, table = _varied(source, rng.choice(tables) if elsewhere else source, rng)
        except (_Unfit, RecursionError):  # or it is nested too deeply
            continue
        asks = source.problem.direct is not None
        answer = answer_of(SQLProblem(instruction, table, sql, () if asks else None, None, None))
        if not answer or (
            asks and not (len(answer) <= MOST_ROWS and any(cell is not None for cell in answer[0]))
        ):
            continue
        yield {
            "instruction": instruction,
            "skill_list": list(skills_of(sql)),
            "table_info": {
                "name": table.name,
                "column_info_list": [{"name": column.name, "type": column.type} for column in table.columns],
                "row_list": [list(row) for row in table.rows],
            },
            "answer_info": {
                "sql": sql,
                "direct": [list(row) for row in answer] if asks else None,
                "md5": None,
            },
        }


def _varied(source: _Source, other: _Source, rng: random.Random) -> tuple[str, str, Table]:
    """A question, its statement and its table; the rows are those of ``other``."""
    moved = _moved_columns(source, other, rng)
    tree, question = source.tree.copy(), Question(source.problem.instruction)
    if " " in source.table.name:  # a column's name may be a part of it
        question.keep(source.table.name, other.table.name)
    _turn(tree, question, rng)
    names = moved | _moved_aliases(tree, moved, other.table.headers)
    # longer names first: total_price has price in it
    for old in sorted(names, key=len, reverse=True):
        if not question.rename(old, names[old]) and old in moved and moved[old] != old:
            raise _Unfit
    if other.table.name != source.table.name:
        question.move_table(source.table.name, other.table.name)
    _move_values(tree, question, source, other, moved, rng)
    lost = {word for old in moved if moved[old] != old for word in old.lower().split("_") if len(word) > 2}
    if {singular(word) for word in lost - _COMMON} & question.words_left():
        raise _Unfit
    names[source.table.name] = other.table.name
    for node in tree.find_all(exp.Identifier):
        new = names.get(node.name, node.name)
        node.set("this", new)
        node.set("quoted", node.quoted or not re.fullmatch(r"\w+", new))
    return question.finished(), tree.sql(dialect="mysql") + ";", other.table


def _moved_columns(source: _Source, other: _Source, rng: random.Random) -> dict[str, str]:
    """For each column of the statement, one of ``other`` with values of its kind."""
    grouped = {node.name for group in source.tree.find_all(exp.Group) for node in group.find_all(exp.Column)}
    headers = rng.sample(other.table.headers, len(other.table.headers))
    moved: dict[str, str] = {}
    for name in source.used:
        kind = source.kinds[name]
        if kind in ("flag", "other"):  # a question says "perishable", not "is perishable 1"
            fit = [name] if source is other else []
        else:
            fit = [column for column in headers if other.kinds[column] == kind]
        if name in grouped and kind != "category":
            fit = [column for column in fit if _repeats(other.values(column))]
        fit = [column for column in fit if column not in moved.values()]
        if not fit:
            raise _Unfit
        moved[name] = fit[0]
    return moved


def _kind(name: str, values: Sequence[Cell]) -> str:
    if values and all(isinstance(value, int | float) and abs(value) < _LARGE for value in values):
        if set(values) <= {0, 1}:
            return "flag"
        return "id" if name.lower().endswith("id") else "year" if "year" in name.lower() else "number"
    if not values or not all(isinstance(value, str) for value in values):
        return "other"
    if all(DATE.fullmatch(str(value)[:10]) for value in values):
        return "date"
    return "category" if _repeats(values) else "name"


def _repeats(values: Sequence[Cell]) -> bool:
    return len(set(values)) <= 0.6 * len(values)


def _moved_aliases(tree: exp.Expr, moved: Mapping[str, str], headers: Sequence[str]) -> dict[str, str]:
    """Other names for results: ``total_price`` is ``total_weight`` where price is weight."""
    names = {}
    for node in tree.find_all(exp.Alias):
        columns = [column.name for column in node.this.find_all(exp.Column) if column.name in moved]
        if not columns or moved[columns[0]] == columns[0]:
            continue
        first, _, rest = node.alias.partition("_")
        words = moved[columns[0]].split("_")
        if isinstance(node.this, exp.Column):
            names[node.alias] = words[-1]
        elif isinstance(node.this, tuple(_FUNCTIONS)) and rest and first.lower() in _FUNCTION_WORDS:
            words = words[1:] if words[0].lower() == first.lower() and len(words) > 1 else words
            names[node.alias] = f"{first}_{'_'.join(words)}"
            if first == "avg":
                names[f"average_{rest}"] = f"average_{'_'.join(words)}"
        if names.get(node.alias) in headers:
            raise _Unfit
    return names


def _move_values(
    tree: exp.Expr,
    question: Question,
    source: _Source,
    other: _Source,
    moved: Mapping[str, str],
    rng: random.Random,
) -> None:
    """Other values where the statement compares with, stores or counts some, in the question, too."""
    roles: dict[str, set[object]] = defaultdict(set)
    literals = [(node, _role(node)) for node in tree.find_all(exp.Literal)]
    for node, role in literals:
        roles[node.name].add(role)
    new: dict[str, str] = {}
    for node, role in literals:
        old, column = node.name, role[0] if role else None
        if old not in new:
            new[old] = old if len(roles[old]) > 1 else _other_value(node, role, other, moved, rng)
            if new[old] != old and not question.replace_value(old, new[old]):
                new[old] = old
            # a text that stays must be one of the column's that it is compared with now
            now = moved.get(column) if column else None
            known = now is not None and old in other.values(now)
            same = source is other and now in (None, column)
            if new[old] == old and node.is_string and not (known or same):
                raise _Unfit
        node.set("this", new[old])


_Role = tuple[str | None, type[exp.Expr] | None]  # the column that a literal is for, and the function of it


def _role(node: exp.Literal) -> _Role | None:
    parent = node.parent
    if isinstance(parent, exp.Limit):
        return None, exp.Limit
    if isinstance(parent, exp.Tuple) and isinstance(parent.parent, exp.Values):
        insert = parent.parent.parent
        columns = insert.this.expressions if isinstance(insert, exp.Insert) else []
        at = next(i for i, value in enumerate(parent.expressions) if value is node)
        return (columns[at].name, exp.Insert) if at < len(columns) else None
    if not isinstance(parent, exp.Predicate):
        return None
    side = parent.expression if parent.this is node else parent.this
    if isinstance(side, exp.Column):
        return side.name, None
    if isinstance(side, exp.Count):
        return None, exp.Count
    if isinstance(side, exp.AggFunc) and type(side) in _FUNCTIONS and isinstance(side.this, exp.Column):
        return side.this.name, type(side)
    return None


def _other_value(
    node: exp.Literal, role: _Role | None, other: _Source, moved: Mapping[str, str], rng: random.Random
) -> str:
    """Another value for a literal; the same one where none is known."""
    old = str(node.name)
    match role:
        case (None, exp.Limit):
            return str(rng.choice((2, 3, 4, 5, 6, 8, 10)))
        case (None, exp.Count):
            return str(rng.randint(1, 5))
        case (str(column), function) if column in moved and not isinstance(node.parent, exp.Like):
            values = other.values(moved[column])
        case _:
            return old
    if function is not None and function in _FUNCTIONS:
        group = node.find_ancestor(exp.Select)
        parts = group.args["group"].expressions if group and group.args.get("group") else ()
        names = [moved[part.name] for part in parts if part.name in moved]
        if not names or len(names) < len(parts) or node.is_string:
            return old
        values = _of_groups(other, names, moved[column], _FUNCTIONS[function])
    if node.is_string:
        texts = [value for value in values if isinstance(value, str)]
        return rng.choice(texts) if texts else old
    numbers = [value for value in values if isinstance(value, int | float) and abs(value) < _LARGE]
    if not numbers:
        return old
    value = rng.choice(numbers)
    if moved[column].lower().endswith("id"):
        return str(value + (rng.randint(1, 50) if function is exp.Insert else 0))
    return str(_round_number(value))


def _of_groups(
    source: _Source, groups: Sequence[str], column: str, function: Callable[[list[Any]], float]
) -> list[Any]:
    """A function's value for each group of rows."""
    at, j = [source.table.headers.index(name) for name in groups], source.table.headers.index(column)
    values: dict[Row, list[Any]] = defaultdict(list)
    for row in source.table.rows:
        value = row[j]
        if isinstance(value, int | float) and abs(value) < _LARGE:
            values[tuple(row[i] for i in at)].append(value)
    return [function(group) for group in values.values()]


def _round_number(value: float) -> float:
    """A number near ``value`` as people write one in a condition.

    >>> _round_number(78123), _round_number(4.0), _round_number(0.25)
    (75000, 4, 0.25)
    """
    if isinstance(value, float) and not value.is_integer() and abs(value) < 10:
        return value
    whole = int(value)
    step = 10 ** (len(str(abs(whole))) - 1) // 2
    return whole // step * step if step else whole


def _turn(tree: exp.Expr, question: Question, rng: random.Random) -> None:
    """Sort in another direction, compare the other way round, take another function, where the question has
    one word for each.
    """
    text = question.text
    sorts = list(tree.find_all(exp.Ordered))
    directions = Counter(sort.args["desc"] for sort in sorts if sort.args["desc"] is not None)
    named = [text.count("ascending"), text.count("descending")]
    if rng.random() < 0.5 and named == [directions[False], directions[True]]:
        for sort in sorts:
            if sort.args["desc"] is not None:
                sort.set("desc", not sort.args["desc"])
                sort.set("nulls_first", not sort.args["desc"])
        question.swap({"ascending": "descending", "descending": "ascending"})
    if rng.random() < 0.4 and not _OTHER_WAYS.search(text):
        for kind, opposite, words in ((exp.GT, exp.LT, _MORE), (exp.LT, exp.GT, _LESS)):
            nodes = list(tree.find_all(kind))
            if nodes and len(nodes) == sum(len(re.findall(rf"\b{word}\b", text)) for word in words):
                for node in nodes:
                    node.replace(opposite(this=node.this, expression=node.expression))
                question.swap(words)
                break
    functions = {type(node) for node in tree.find_all(exp.AggFunc)}
    if rng.random() < 0.5 and functions == {exp.Avg} and not re.search(r"\b(total|max|min|mean)", text):
        function, word, short = rng.choice(
            ((exp.Sum, "total", "total"), (exp.Max, "maximum", "max"), (exp.Min, "minimum", "min"))
        )
        for average in list(tree.find_all(exp.Avg)):
            average.replace(function(this=average.this))
        for name in tree.find_all(exp.Identifier):
            name.set("this", re.sub("^(avg|average)_", f"{short}_", name.name))
        question.swap({"an average": f"a {word}", "average": word})
        question.text = re.sub(r"\bavg_", f"{short}_", question.text)
