"""How a person asks for a statement: its parts become phrases, from the conditions up to the sentences."""

from __future__ import annotations

from agent_peft.environments.db_bench.generation.english import finished, ordinal, plural
from agent_peft.environments.db_bench.generation.plan import (
    Aggregate,
    Calculation,
    Condition,
    Delete,
    Derived,
    Expression,
    Insert,
    Projection,
    Select,
    Sort,
    Statement,
    Update,
)
from agent_peft.environments.db_bench.generation.schemas import Column, Schema
from agent_peft.environments.db_bench.generation.wording import Wording, listed, plain_rows, value_kind


class Phrasing(Wording):
    """Says one statement. The style of values, dates and counts is drawn once and kept."""

    def say(self, statement: Statement) -> str:
        """The whole instruction."""
        match statement:
            case Select():
                text = self._query(statement)
            case Insert():
                text = self._insertion(statement)
            case Update() | Delete():
                text = self._change(statement)
        return finished(text)

    # Queries

    def _query(self, query: Select) -> str:
        if isinstance(query.source, Derived):
            return self._over_groups(query, query.source.query)
        after: list[str] = []
        if query.alias and self.draw.chance(0.3):  # it does not matter to the answer
            after.append(self.draw.say("table_alias", alias=query.alias))
        slots: dict[str, str | None] = {"table": self.schema.table}
        where, order, limit = query.where, query.order, query.limit
        if where is not None and self.draw.chance(0.1):
            after.insert(0, self.draw.say("where_sentence", m=self.noun, **self._condition(where)))
            where = None
        slots["who"] = (
            self.draw.say("who", m=self.noun, **self._condition(where)) if where is not None else None
        )
        key = order[0].expression if len(order) == 1 else None
        if (
            limit
            and query.where is None  # of which rows they are the first would be left open
            and isinstance(key, Column)
            and not query.offset
            and not query.groups
            and key.role in _SIZES
            and self.draw.chance(0.4)
        ):
            ranked = self.draw.say(
                "top" if limit > 1 else "top_one",
                n=self._count(limit),
                m=self.noun if limit > 1 else self.schema.entity.name,
                extreme=self._extreme(order[0]),
                key=self._column(key),
            )
            slots["rows"] = self._rows(where, ranked.removeprefix("the "), "the ")
            slots["who"], order, limit = None, (), None
        else:
            slots["rows"] = self._rows(where)
        slots["rows_plain"] = plain_rows(slots["rows"] or "")
        slots["rows_the"] = self._rows(where, self.noun, "the ")
        slots["tail"], tails = self._tail(order, limit, query.offset)
        slots["outs"] = listed(self.draw, [self._output(output) for output in query.outputs])
        if query.groups:
            text = self._grouped(query, slots, where, after)
        elif isinstance(query.outputs[0].expression, Column):
            slots["outs_pl"] = listed(
                self.draw, [self._output(output, many=True) for output in query.outputs]
            )
            text = self.draw.say("select_rows", list=None, **slots)
        else:
            text = self.draw.say("select_totals", **slots)
        return " ".join([text, *after, *tails])

    def _grouped(
        self, query: Select, slots: dict[str, str | None], where: Condition | None, after: list[str]
    ) -> str:
        names = [self._column(column) for column in query.groups]
        many = [
            plural(column.said if "_" in name else name)
            for column, name in zip(query.groups, names, strict=True)
        ]
        group, groups = listed(self.draw, names, "and"), listed(self.draw, many, "and")
        several = len(names) > 1
        computed = [output for output in query.outputs if not isinstance(output.expression, Column)]
        slots |= {
            "group": group,
            "groups_pl": f"{group} combinations" if several else groups,
            "each": self.draw.say("each_pair" if several else "each", group=group),
            "of_rows": self.draw.say("of_rows", rows=slots["rows"]) if where is not None else "",
            "rows_every": slots["rows"],
            "having": "",
        }
        if computed:
            slots["aggs"] = listed(self.draw, [self._output(output) for output in computed])
            slots["aggs_pl"] = listed(self.draw, [self._output(output, many=True) for output in computed])
        if query.having is None:
            return self.draw.say("select_groups", **slots)
        with_, clause = self._with(query.having), self._clause(query.having)
        if not computed or self.draw.chance(0.45):
            return self.draw.say("select_having", h_with=with_, **slots)
        singular = group if not several else f"{group} combination"
        if self.draw.chance(0.3):
            rule = dict(slots, group=singular, h_with=with_, h_clause=clause)
            after.insert(0, self.draw.say("having_sentence", **rule))
        else:
            slots["having"] = self.draw.say(
                "having_after", h_with=with_, h_clause=clause, groups_pl=slots["groups_pl"]
            )
        return self.draw.say("select_groups", **slots)

    def _over_groups(self, outer: Select, inner: Select) -> str:
        aggregate = outer.outputs[0].expression
        assert isinstance(aggregate, Aggregate)
        names = [self._column(column) for column in inner.groups]
        group = listed(self.draw, names, "and")
        function = {"AVG": "average", "MAX": "highest", "MIN": "lowest"}[aggregate.function]
        several = len(names) > 1
        what = self.draw.say(
            "of_groups",
            f=function,
            group=f"combination of {group}" if several else group,
            groups_pl=f"{group} combinations" if several else plural(group),
            a=self._expression(inner.outputs[-1].expression),
        )
        return self.draw.say(
            "select_totals", outs=what, rows=self._rows(inner.where), table=self.schema.table
        )

    def _output(self, output: Projection, many: bool = False) -> str:
        text = self._expression(output.expression, many)
        plain_rows = isinstance(output.expression, Column)
        if output.alias and (plain_rows or self.draw.chance(0.08)):
            if plain_rows and many:
                text = self._expression(output.expression)
            text += self.draw.say("as_name", alias=output.alias)
        return text

    # Sorts and limits

    def _tail(self, order: tuple[Sort, ...], limit: int | None, offset: int | None) -> tuple[str, list[str]]:
        """What sorts and limits, behind a sentence and as sentences of its own."""
        behind, sentences = "", []
        if order:
            keys = self._keys(order)
            if self.draw.chance(0.72):
                behind += ", " + self.draw.say("ordered", keys=keys)
            else:
                sentences.append(self.draw.say("order_sentence", keys=keys))
        if limit:
            res = self.draw.say("results", many=self.schema.entity.plural)
            slots = {
                "n": self._count(limit),
                "res": res if limit > 1 else _singular(res, self.schema),
                "oneres": _singular(res, self.schema),
            }
            if offset:
                few = _singular(res, self.schema) if offset == 1 else res
                slots |= {
                    "skip": f"{self._count(offset)} {few}" if offset > 1 else few,
                    "skipdigit": str(offset),
                    "nth": ordinal(offset + 1, self.words_for_counts),
                }
                attached, own = "skipped", "skip_sentence"
            else:
                attached, own = (
                    ("limited_one", "limit_one_sentence") if limit == 1 else ("limited", "limit_sentence")
                )
            if not sentences and self.draw.chance(0.72):
                behind += ", " + self.draw.say(attached, **slots)
            else:
                sentences.append(self.draw.say(own, **slots))
        return behind, sentences

    def _keys(self, order: tuple[Sort, ...]) -> str:
        kinds = {value_kind(sort.expression) for sort in order}
        if (
            len(order) == 2
            and kinds == {"number"}
            and order[0].descending == order[1].descending
            and self.draw.chance(0.4)
        ):
            names = {"k": self._expression(order[0].expression), "l": self._expression(order[1].expression)}
            return self.draw.say("both_down" if order[0].descending else "both_up", **names)
        keys = []
        for sort in order:
            rule = {"number": "key", "date": "date", "text": "text"}[value_kind(sort.expression)] + (
                "_down" if sort.descending else "_up"
            )
            keys.append(self.draw.say(rule, k=self._expression(sort.expression)))
        text = keys[0]
        for key in keys[1:]:
            text = self.draw.say("keys_two", first=text, second=key)
        return text

    # Changes

    def _change(self, statement: Update | Delete) -> str:
        rows = self._rows(statement.where)
        rows_plain = plain_rows(rows)
        tail = ""
        if statement.limit:
            sort = statement.order[0]
            res = self.schema.entity.plural if statement.limit > 1 else self.schema.entity.name
            tail = self.draw.say(
                "first_by",
                extreme=self._extreme(sort),
                key=self._expression(sort.expression),
                n=self._count(statement.limit),
                res=res,
            )
        if isinstance(statement, Delete):
            return self.draw.say("delete_rows", rows_plain=rows_plain, rows_all=rows, tail=tail)
        sets = listed(self.draw, [self._assignment(column, value) for column, value in statement.assignments])
        return self.draw.say("update_rows", sets=sets, rows_all=rows, tail=tail, table=self.schema.table)

    def _assignment(self, column: Column, value: Expression) -> str:
        name = self._column(column)
        if isinstance(value, Calculation):
            rule = {"+": "set_more", "-": "set_less", "*": "set_times"}[value.operator]
            return self.draw.say(rule, c=name, v=str(value.right))
        return self.draw.say("set_value", c=name, v=self._value(value, column))

    def _insertion(self, statement: Insert) -> str:
        entity, columns = self.schema.entity, statement.columns
        slots = {
            "one": entity.name,
            "table": self.schema.table,
            "names": ", ".join(column.name for column in columns),
        }
        source = statement.source
        if isinstance(source, Select):
            outputs, outputs_many = [], []
            for column, output in zip(columns, source.outputs, strict=True):
                name, names = self._column(column), self._column(column, many=True)
                if isinstance(output.expression, Calculation):
                    shifted = self.draw.say("shifted", v=str(output.expression.right))
                    name, names = name + shifted, names + shifted
                outputs.append(name)
                outputs_many.append(names)
            return self.draw.say(
                "copy_rows",
                rows=self._rows(source.where),
                outs=listed(self.draw, outputs),
                outs_pl=listed(self.draw, outputs_many),
                **slots,
            )
        said = [self._column(column) for column in columns]
        if len(source) > 1:
            tuples = "; ".join(
                "("
                + ", ".join(self._value(cell, column) for column, cell in zip(columns, row, strict=True))
                + ")"
                for row in source
            )
            return self.draw.say(
                "insert_rows",
                count=self._count(len(source)),
                m=entity.plural,
                names_said=listed(self.draw, said),
                tuples=tuples,
                **slots,
            )
        cells = [self._value(cell, column) for column, cell in zip(columns, source[0], strict=True)]
        joint = self.draw.rng.choice((" ", " ", " ", " of ", ": ", " = "))
        pairs = listed(self.draw, [f"{name}{joint}{cell}" for name, cell in zip(said, cells, strict=True)])
        equations = listed(
            self.draw, [f"{column.name} = {cell}" for column, cell in zip(columns, cells, strict=True)]
        )
        return self.draw.say("insert_row", pairs=pairs, equations=equations, cells=", ".join(cells), **slots)


_SIZES = ("total", "measure", "date")


def _singular(noun: str, schema: Schema) -> str:
    return {"results": "result", "entries": "entry", "rows": "row", "records": "record"}.get(
        noun, schema.entity.name
    )
