"""Tests for a user's own code. They need no test framework: a failed check raises one exception."""

from __future__ import annotations

from typing import Any

from agent_peft.environments import Environment, load_environment
from agent_peft.environments.conformance import violations_of
from agent_peft.types import AgentPeftError


class ConformanceError(AgentPeftError):
    """An environment breaks rules; ``violations`` has one line for each."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("\n".join(violations))
        self.violations = violations


def check_environment(environment: str | type[Environment] | Environment, /, **keys: Any) -> None:
    """Check that an environment keeps the rules on which training relies.

    Its tasks are stable, have different ids, and are JSON. An episode repeats from its seed, and on several
    threads. Any text is answered with a result, and a score is between 0 and 1. Demonstrations are correct,
    and doing nothing is not. Episodes and the environment close twice.

    Args:
        environment: a class, a kind such as ``"my_module:MyEnvironment"``, or a loaded environment.
        keys: keys of its configuration.

    Raises:
        ConformanceError: it breaks some of the rules; each line names a task, a place and what to do.

    >>> check_environment("arithmetic", digits=1, num_tasks=5)
    """
    if isinstance(environment, Environment):
        loaded = environment
        violations = violations_of(lambda: loaded)
    else:
        kind = environment
        violations = violations_of(lambda: load_environment(kind, **keys))
    if violations:
        raise ConformanceError(violations)
