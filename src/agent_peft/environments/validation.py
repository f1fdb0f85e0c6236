"""Replaying a task file: do its golds pass, and does doing nothing fail?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench.episode import Rules
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.tasks import load_tasks, read_entry
from agent_peft.types import AgentPeftError


def validate(environment_kind: str, tasks_file: Path | str, database: str = "sqlite") -> dict[str, Any]:
    """Replay every gold, and replies that do nothing, through real episodes.

    Returns:
        ``{"tasks", "gold_correct", "nothing_correct", "rejected": [{"id", "cause"}]}``: three counts, and the tasks that cannot be used.

    Raises:
        AgentPeftError: the file or an argument is wrong.
    """
    if environment_kind != "db_bench":
        raise AgentPeftError(f"no task file of {environment_kind!r} can be replayed; choose db_bench")
    if database != "sqlite":
        raise AgentPeftError(f"there is no database {database!r}; choose sqlite")
    tasks = load_tasks(Path(tasks_file))
    found = [(task.id, inspect(read_entry(task.id, task.content), Rules(database))) for task in tasks]
    return {
        "tasks": len(found),
        "gold_correct": sum(inspection.gold_is_correct for _, inspection in found),
        "nothing_correct": sum(inspection.nothing_is_correct for _, inspection in found),
        "rejected": [{"id": name, "cause": inspection.cause} for name, inspection in found if inspection.cause is not None],
    }
