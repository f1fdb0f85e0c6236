"""Functions of a running program as reward terms: a configuration names each
``agent_peft.agents.callables:NAME``. Another process does not have them, and says so.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_peft.types import Trajectory

_TERMS: dict[str, Callable[[Trajectory], float]] = {}


def keep(name: str, term: Callable[[Trajectory], float]) -> str:
    """Keep a function as long as the program runs. Return how a configuration names it.

    >>> keep("zero", lambda trajectory: 0.0)
    'agent_peft.agents.callables:zero'
    """
    _TERMS[name] = term
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Callable[[Trajectory], float]:
    if name not in _TERMS:
        raise AttributeError(
            f"the reward function {name} is of the Python program that trained; call its trainer again there"
        )
    return _TERMS[name]
