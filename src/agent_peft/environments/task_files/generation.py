"""Making up tasks with known answers, for the environments that can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent_peft.environments import db_bench, os_interaction
from agent_peft.environments.task_files.validation import chosen_options
from agent_peft.types import AgentPeftError

# for each kind: what makes the entries of a task file, and the options it takes besides num_tasks, seed,
# skills and split
GENERATORS: dict[str, tuple[Callable[..., dict[str, dict[str, Any]]], tuple[str, ...]]] = {
    "db_bench": (db_bench.generate, ()),
    "os_interaction": (os_interaction.generate, ("combined",)),
}


def generate_entries(
    environment_kind: str,
    num_tasks: int,
    seed: int,
    skills: list[str] | None,
    split: str,
    options: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """The entries of a task file, by id.

    Args:
        options: such as ``{"combined": 0.5}``; an option that is None was not given.

    Raises:
        AgentPeftError: an argument is wrong, or the environment takes no such option.
    """
    if environment_kind not in GENERATORS:
        raise AgentPeftError(
            f"no tasks can be generated for {environment_kind!r}; choose {' or '.join(GENERATORS)}"
        )
    generator, known = GENERATORS[environment_kind]
    return generator(num_tasks, seed, skills, split, **chosen_options(environment_kind, options, known))
