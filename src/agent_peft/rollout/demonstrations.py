"""What is wrong with demonstrations: those that the sampler could never say, and those that the environment
does not grade as correct.

They are learnt from all the same, since they are what a user gave; but they are counted in every step, and
told once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer, StopMatcher
from agent_peft.printable import printable
from agent_peft.types import Group, Outcome, Trajectory, Turn

logger = logging.getLogger(__name__)

LONGEST_ID = 200  # characters


class DemonstrationCheck:
    """Counts the faults of each step's demonstrations, and warns of each kind of fault once."""

    def __init__(self, chat: ChatTokenizer, sampling: SamplingConfig, warns: bool = True) -> None:
        self.chat, self.sampling = chat, sampling
        self._told = set[str]() if warns else {"incorrect", "unsayable"}

    def count(self, groups: Sequence[Group]) -> dict[str, float]:
        """How many are not graded as correct, and how many the sampler could not say."""
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
        if faults and kind not in self._told:
            self._told.add(kind)
            trajectory, reason = faults[0]
            task = printable(trajectory.task.id, LONGEST_ID)
            logger.warning(
                "task %s: of its demonstration, %s; it is learnt from all the same (counted as demonstrations_%s)",
                task,
                reason,
                kind,
            )


def unsayable_because(trajectory: Trajectory, chat: ChatTokenizer, sampling: SamplingConfig) -> str | None:
    """Why the sampler could not have said what a demonstration says, within the limits and stop strings;
    None where it could.
    """
    return next(_limits_passed(trajectory, chat, sampling), None)


def _limits_passed(trajectory: Trajectory, chat: ChatTokenizer, sampling: SamplingConfig) -> Iterator[str]:
    for number, turn in enumerate(trajectory.turns, start=1):
        said = _text_of(turn, chat)
        if len(said) > sampling.max_new_tokens:
            yield f"turn {number} has {len(said)} tokens, more than sampling.max_new_tokens: {sampling.max_new_tokens}"
        if (stop := _stopped_inside(said, chat, sampling.stop)) is not None:
            yield f"turn {number} goes on after {stop!r}, which sampling.stop ends an action at"
    unsaid = sum(len(turn.action) - len(_text_of(turn, chat)) for turn in trajectory.turns[-1:])
    if (length := len(trajectory.tokens) - unsaid) > sampling.max_tokens:
        yield f"all turns have {length} tokens, more than sampling.max_tokens: {sampling.max_tokens}"


def _text_of(turn: Turn, chat: ChatTokenizer) -> list[int]:
    """The tokens of an action without its end token: an environment hears the same where a limit leaves no
    room for that.
    """
    said = list(turn.action)
    while said and said[-1] in chat.end_of_turn:
        said.pop()
    return said


def _stopped_inside(said: Sequence[int], chat: ChatTokenizer, stops: Sequence[str]) -> str | None:
    """A stop string that ends an action before its text is over. One at the very end only takes the place
    of the end token.
    """
    for stop in stops:
        matcher = StopMatcher([stop.encode()], chat.token_bytes)
        if any(matcher.push(token) for token in said[:-1]):
            return stop
    return None
