"""Replaying actions in an episode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agent_peft.environments.base import Environment, Episode, Inspection
from agent_peft.environments.contract import error_text, open_episode, opening_of, place_of, quote, result_of
from agent_peft.types import AgentPeftError, InfrastructureError, Message, Outcome, StepResult, Task

NOTHINGS = ("",) * 100  # replies that do nothing, for an episode that does not end by itself


@dataclass(frozen=True)
class GoldReplay:
    """The conversation of replayed actions, and the result of each action up to the end of the episode."""

    messages: list[Message]
    results: list[StepResult]


def replay(episode: Episode, actions: Sequence[str], pause: float = 0.0) -> GoldReplay:
    """Play actions in a new episode until it is done, and close it; ``pause`` seconds before the last."""
    try:
        messages, results = opening_of(episode), []
        for number, action in enumerate(actions, 1):
            if number == len(actions):
                time.sleep(pause)
            results.append(result_of(episode, action))
            messages.append(Message("assistant", action))
            if results[-1].done:
                break
            messages.append(Message("user", results[-1].observation))
        return GoldReplay(messages, results)
    finally:
        episode.close()


def inspect(environment: Environment, task: Task) -> Inspection:
    """Replay the demonstration of a task, which must be correct, and empty replies, which must not."""
    try:
        fault = _fault_of_demonstration(environment, task)
        nothing = _last_result(environment, task, NOTHINGS).outcome is Outcome.CORRECT
    except (AgentPeftError, InfrastructureError) as error:
        return Inspection(False, False, str(error))
    except Exception as error:
        return Inspection(False, False, f"{error_text(error)}, at {place_of(error, type(environment))}")
    return Inspection(fault is None, nothing, fault or ("doing nothing passes" if nothing else None))


def _fault_of_demonstration(environment: Environment, task: Task) -> str | None:
    actions = environment.demonstration(task)
    if actions is None:
        return "it has no demonstration that could be replayed"
    if isinstance(actions, str) or not actions or not all(isinstance(action, str) for action in actions):
        return f"its demonstration is {quote(actions)}; give a list of texts, one for each turn"
    last = _last_result(environment, task, actions)
    if not last.done:
        return "its demonstration does not end the episode"
    return None if last.outcome is Outcome.CORRECT else f"its demonstration is graded {last.outcome}"


def _last_result(environment: Environment, task: Task, actions: Sequence[str]) -> StepResult:
    return replay(open_episode(environment, task, seed=0), actions).results[-1]
