"""What a task of DB Bench holds."""

from __future__ import annotations

from dataclasses import dataclass

from agent_peft.environments.db_bench.database import Row, Table


@dataclass(frozen=True)
class SQLProblem:
    """The checked content of an entry. ``direct`` is the answer of a SELECT, None for a modification;
    ``order`` is `order_keys` of its SQL. ``labels`` is the answer of a question of AgentBench, which has no
    ``direct``, and whose SQL may be empty or give another answer.

    >>> from agent_peft.environments.db_bench.database import Column
    >>> table = Table("t", (Column("a", "INT"),), ((1,),))
    >>> SQLProblem("Delete all.", table, "DELETE FROM t", direct=None, md5=None, order=None).table.name
    't'
    """

    instruction: str
    table: Table
    sql: str
    direct: tuple[Row, ...] | None
    md5: str | None
    order: tuple[int, ...] | None
    labels: tuple[str, ...] | None = None

    @property
    def is_change(self) -> bool:
        return self.direct is None and self.labels is None
