"""Gymnasium as text: its environments by their ids, its spaces as an agent reads and writes them, its rewards
as a score.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator

from agent_peft.environments.contract import describe
from agent_peft.lookup import may_import
from agent_peft.types import AgentPeftError

MAX_NUMBERS = 100  # of an observation


def _noted(name: str) -> str:
    if ":" in name:  # Gymnasium imports the module
        may_import(name)
    return name


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError("give [lowest, highest], of which the second is greater")
    return bounds


WorldId = Annotated[str, AfterValidator(_noted)]
Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]

warn_once = cache(logging.getLogger(__name__).warning)


def make_world(name: str, arguments: Mapping[str, Any]) -> Any:
    """Make an environment of Gymnasium's, or a game of TextArena's.

    Raises:
        AgentPeftError: a package is not installed, or the environment cannot be made.
    """
    is_game = name.startswith("textarena/")
    try:
        import gymnasium

        if is_game:
            import agent_peft.environments.games.textarena  # noqa: F401 (it registers the games)
    except ImportError as error:
        extra = "textarena" if is_game else "gymnasium"
        raise AgentPeftError(f"{name} is an extra: pip install 'agent-peft[{extra}]'") from error
    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except Exception as error:
        raise AgentPeftError(f"environment.id: {name}: {describe(error)}") from error


def is_text(space: Any) -> bool:
    """Whether ``str`` shows an observation: it is a text, at most 100 numbers, or a group of such."""
    from gymnasium.spaces import Text

    if hasattr(space, "spaces"):
        return all(map(is_text, space.spaces.values() if isinstance(space.spaces, Mapping) else space.spaces))
    return isinstance(space, Text) or (space.shape is not None and math.prod(space.shape) <= MAX_NUMBERS)


def reader_of(space: Any, names: tuple[str, ...] | None) -> tuple[Callable[[str], Any], str]:
    """Return a function that finds the action in a reply, or None, and a line that says how to write one.

    Args:
        names: of discrete actions, in the order of their numbers; None takes the numbers. The last name in a
            reply counts, and case does not.

    Raises:
        ValueError: an agent cannot write these actions, or these are not their names.
    """
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text) and names is None:

        def read_text(reply: str) -> str | None:
            text = reply.strip()
            return text if space.contains(text) else None

        return read_text, ""
    if not isinstance(space, Discrete):
        raise ValueError(f"an action is {space}, which has no names")
    first, count = int(space.start), int(space.n)
    names = tuple(map(str, range(first, first + count))) if names is None else names
    numbers = {name.lower(): number for number, name in enumerate(names, first)}
    if len(numbers) != count or len(names) != count:
        raise ValueError(f"there are {count} actions, and {len(numbers)} names in environment.actions")
    longest_first = sorted(map(re.escape, numbers), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")

    def read_name(reply: str) -> int | None:
        found = pattern.findall(reply.lower())
        return numbers[found[-1]] if found else None

    return read_name, f"Reply with one of these actions: {', '.join(names)}"


def warn_beyond(total: float, bounds: tuple[float, float]) -> None:
    """Warn once of an episode whose sum of rewards is not within the bounds."""
    lowest, highest = bounds
    if not lowest <= total <= highest:
        warn_once(
            f"an episode's rewards add up to {'more' if total > highest else 'less'} than environment.score: "
            f"[{lowest:g}, {highest:g}], and score {float(total > highest):g}; such episodes all score alike"
        )


def score_of(total: float, bounds: tuple[float, float]) -> float:
    """The score of a sum of rewards: 0 up to the lower bound, 1 from the upper one on.

    >>> score_of(125, (0, 500))
    0.25
    """
    lowest, highest = bounds
    return min(1.0, max(0.0, round((total - lowest) / (highest - lowest), 9)))
