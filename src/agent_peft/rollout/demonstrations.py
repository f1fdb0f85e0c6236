"""Replaying demonstrations, and their faults: those that the sampler could never produce, and those that the
environment does not grade as correct.

Training uses them all the same, because the user gave them. They are counted in every step, and the first one
of each kind is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent_peft.environments.base import Demonstrated, Environment
from agent_peft.environments.contract import ContractError
from agent_peft.policies.sampling import SamplingConfig, StopMatcher
from agent_peft.printable import printable
from agent_peft.rollout.collector import ATTEMPTS, LINE, error_line, origin_of
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.types import (
    AgentPeftError,
    Group,
    InfrastructureError,
    Outcome,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer

logger = logging.getLogger(__name__)
SEARCHED = 64  # tasks of which at least one must have a demonstration


class DemonstrationCheck:
    """Counts the faulty demonstrations of each step, and warns once of each kind of fault."""

    def __init__(self, chat: ChatTokenizer, sampling: SamplingConfig, warns: bool = True) -> None:
        self.chat, self.sampling = chat, sampling
        self._warned = set[str]() if warns else {"incorrect", "unsayable"}

    def count(self, groups: Sequence[Group]) -> dict[str, float]:
        """The metrics of a step: how many are not graded as correct, and how many the sampler could not
        produce.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        incorrect = [
            (t, f"it is graded {t.outcome.value}, not correct")
            for t in trajectories
            if t.outcome is not Outcome.CORRECT
        ]
        unsayable = [
            (t, reason) for t in trajectories if (reason := unsayable_because(t, self.chat, self.sampling))
        ]
        self._warn("incorrect", incorrect)
        self._warn("unsayable", unsayable)
        return {
            "demonstrations_incorrect": float(len(incorrect)),
            "demonstrations_unsayable": float(len(unsayable)),
        }

    def _warn(self, kind: str, faults: Sequence[tuple[Trajectory, str]]) -> None:
        if faults and kind not in self._warned:
            self._warned.add(kind)
            trajectory, reason = faults[0]
            task = printable(trajectory.task.id, LINE)
            logger.warning(
                "task %s: of its demonstration, %s; training uses it all the same (counted as "
                "demonstrations_%s)",
                task,
                reason,
                kind,
            )


def unsayable_because(trajectory: Trajectory, chat: ChatTokenizer, sampling: SamplingConfig) -> str | None:
    """Why the sampler could not produce a demonstration within its limits and stop strings, or None."""
    return next(_exceeded_limits(trajectory, chat, sampling), None)


def _exceeded_limits(trajectory: Trajectory, chat: ChatTokenizer, sampling: SamplingConfig) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns, start=1):
        text = _text_of(turn, chat)
        if len(text) > sampling.max_new_tokens:
            limit = f"sampling.max_new_tokens: {sampling.max_new_tokens}"
            yield f"turn {number} has {len(text)} tokens, more than {limit}"
        if (stop := _stopped_inside(text, chat, sampling.stop)) is not None:
            yield f"turn {number} continues after {stop!r}, which sampling.stop ends an action at"
    end_tokens = sum(len(turn.action) - len(_text_of(turn, chat)) for turn in trajectory.turns[-1:])
    if (length := max(map(len, trajectory.rows)) - end_tokens) > sampling.max_tokens:
        yield f"all turns have {length} tokens, more than sampling.max_tokens: {sampling.max_tokens}"


def _text_of(turn: Turn, chat: ChatTokenizer) -> list[int]:
    """The tokens of an action without its end tokens, for which a limit may leave no room."""
    text = list(turn.action)
    while text and text[-1] in chat.end_of_turn:
        text.pop()
    return text


def _stopped_inside(text: Sequence[int], chat: ChatTokenizer, stops: Sequence[str]) -> str | None:
    """A stop string that ends an action before the end of its text."""
    for stop in stops:
        matcher = StopMatcher([stop.encode()], chat.token_bytes)
        if any(matcher.push(token) for token in text[:-1]):
            return stop
    return None


def _missing(task: Task) -> AgentPeftError:
    return AgentPeftError(
        f"task {task.id}: the environment has no demonstration, so a supervised stage cannot use this "
        "task; name a column of a table (environment.demonstration), or return one from `demonstration`"
    )


def require_demonstrations(environment: Environment) -> None:
    """Refuse an environment whose first tasks have none, before a supervised stage costs anything."""
    first = environment.tasks[:SEARCHED]
    try:
        missing = all(
            environment.demonstration(t) is None and environment.rejection(t) is None for t in first
        )
    except Exception:  # the stage that uses this demonstration reports it
        return
    if missing:
        raise _missing(first[0])


def demonstrate(
    environment: Environment,
    task: Task,
    chat: ChatTokenizer,
    rewards: RewardConfig,
    seed: int,
    actions: Sequence[str] | None = None,
    failures: list[InfrastructureError] | None = None,
) -> Trajectory:
    """The trajectory of a task's demonstration, replayed in the environment, so its observations are real.

    Args:
        failures: a list for the failures of the environment after which it was tried again.

    Raises:
        InfrastructureError: the environment failed ``ATTEMPTS`` times, as many as in a rollout.
    """
    for _ in range(ATTEMPTS):
        try:
            return _replayed(environment, task, chat, rewards, seed, actions)
        except InfrastructureError as error:
            failure = error
            if failures is not None:
                failures.append(error)
    raise InfrastructureError(
        f"task {task.id}: the environment failed {ATTEMPTS} times while its demonstration was replayed: "
        f"{failure}"
    ) from failure


def _replayed(
    environment: Environment,
    task: Task,
    chat: ChatTokenizer,
    rewards: RewardConfig,
    seed: int,
    actions: Sequence[str] | None,
) -> Trajectory:
    if actions is None:
        actions = environment.demonstration(task)
    if actions is None:
        raise _missing(task)
    if (
        isinstance(actions, str)
        or not isinstance(actions, Sequence)
        or not all(isinstance(action, str) for action in actions)
    ):
        given = printable(repr(actions), 60)
        raise AgentPeftError(
            f"task {task.id}: its demonstration must be a list of texts, one for each turn; got {given}"
        )
    defects: list[BaseException] = []
    conversation = EpisodeConversation(environment, task, chat, defects)
    conversation.exact = any(isinstance(action, Demonstrated) for action in actions)
    try:
        conversation.begin(seed)
        for action in () if conversation.failure else actions:
            if conversation.demonstrate(action) is None:
                break
    finally:
        conversation.close()
    error = defects[0] if conversation.stop_reason is StopReason.DEFECT else conversation.failure
    if isinstance(error, InfrastructureError):
        raise error
    if isinstance(error, AgentPeftError) and not isinstance(error, ContractError):
        raise AgentPeftError(f"task {task.id}: {error}") from error
    if error is not None:
        place = f"{error_line(error)}, at {Path(origin_of(error)).name}"
        raise AgentPeftError(
            f"task {task.id}: the environment failed while its demonstration was replayed ({place})"
        ) from error
    for error in defects:
        logger.error("task %s: after its demonstration: %s", printable(task.id, LINE), error_line(error))
    if not conversation.over:
        raise AgentPeftError(f"task {task.id}: its demonstration does not end the episode")
    if all(turn.mistake for turn in conversation.turns):
        raise AgentPeftError(
            f"task {task.id}: its demonstration ends with a mistake, before a reply to learn"
        )
    return price(conversation.trajectory, rewards)
