"""Experience replay in the prompt: the run's latest successful episodes, as earlier turns of a conversation.

The policy sees them and learns nothing from their tokens, which are an observation. Zheng et al. (2025,
"LifelongAgentBench", https://arxiv.org/abs/2505.11942) compare agents so.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_peft.environments.digests import task_digest
from agent_peft.files import MEGABYTE, parse_json, read_text, write_atomic
from agent_peft.types import AgentPeftError, Group, Message, Outcome, Task, Trajectory

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer

FILE = "replays.json"  # in a checkpoint


@dataclass(frozen=True)
class Replay:
    """A successful episode: the last message of its opening, then its actions and their observations.

    >>> Replay("t", (Message("user", "1+1="), Message("assistant", "2"))).messages[1].content
    '2'
    """

    task: str  # its digest
    messages: tuple[Message, ...]


class Replays:
    """The latest successful episodes of a run, one of each task: the first one of its latest group that has
    any. All ranks add the same groups.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._episodes: list[Replay] = []  # oldest first

    def add(self, groups: Sequence[Group], chat: ChatTokenizer) -> None:
        """Add the successes of a step. One with a text that the tokenizer cannot write, such as a special
        token for a model with an alphabet, is left out.
        """
        for group in groups if self.size else ():
            correct = (_own(t) for t in group.trajectories if t.outcome is Outcome.CORRECT)
            messages = next((own for own in correct if _can_be_written(own, chat)), ())
            if not messages:
                continue
            if messages[0].role != "user":
                raise AgentPeftError(
                    "replay_in_prompt: an episode is shown from the user's message before its first action, "
                    f"and task {group.task.id!r:.60} begins with a message of the {messages[0].role}; set "
                    "replay_in_prompt: 0"
                )
            asked = task_digest(group.task)
            others = [replay for replay in self._episodes if replay.task != asked]
            # one more than is shown, as a task never sees its own
            self._episodes = [*others, Replay(asked, messages)][-self.size - 1 :]

    def latest(self) -> tuple[Replay, ...]:
        """All that are kept, oldest first."""
        return tuple(self._episodes)

    def write(self, folder: Path) -> None:
        """Write them into a checkpoint."""
        content = [
            {"task": replay.task, "messages": [message.to_json() for message in replay.messages]}
            for replay in self._episodes
        ]
        write_atomic(folder / FILE, json.dumps(content, indent=1) + "\n")

    def read(self, folder: Path) -> None:
        """Take those of a checkpoint instead."""
        self._episodes = list(read_replays(folder))[-self.size - 1 :]


def _own(trajectory: Trajectory) -> tuple[Message, ...]:
    """An episode without the system message and what else comes before its task."""
    return trajectory.messages[-2 * len(trajectory.turns) :]


def _can_be_written(messages: Sequence[Message], chat: ChatTokenizer) -> bool:
    try:
        for message in messages:
            chat.opening([Message("user", message.content)])
    except AgentPeftError:
        return False
    return True


def read_replays(folder: Path) -> tuple[Replay, ...]:
    """The episodes that a checkpoint holds; none where it was written without ``replay_in_prompt``."""
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        return tuple(
            Replay(item["task"], tuple(Message.from_json(message) for message in item["messages"]))
            for item in parse_json(read_text(path, "a JSON file", 64 * MEGABYTE, unlinked=1))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(f"{path}: is damaged ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class ReplayWindow:
    """What each episode of a collection shows: the latest ``number`` of ``episodes`` that fit.

    >>> one, two = Task("a", content={"q": "1"}), Task("b", content={"q": "3"})
    >>> messages = (Message("user", "1"), Message("assistant", "2"))
    >>> shown = ReplayWindow((Replay(task_digest(one), messages),), 4)
    >>> opening = [Message("system", "Add."), Message("user", "3")]
    >>> [message.content for message in shown.before(two, opening, lambda messages: True)]
    ['Add.', '1', '2', '3']
    >>> shown.before(one, opening, lambda messages: True) == opening
    True
    """

    episodes: tuple[Replay, ...] = ()
    number: int = 0

    def before(
        self, task: Task, opening: Sequence[Message], fits: Callable[[Sequence[Message]], bool]
    ) -> list[Message]:
        """The opening of ``task`` with the episodes of other tasks before its last message. The oldest ones
        are left out until the messages fit.
        """
        asked = task_digest(task)
        others = [replay for replay in self.episodes if replay.task != asked]

        def showing(number: int) -> list[Message]:
            replays = others[len(others) - number :]
            earlier = [message for replay in replays for message in replay.messages]
            return [*opening[:-1], *earlier, *opening[-1:]]

        numbers = range(1, min(self.number, len(others)) + 1)
        return showing(bisect_left(numbers, True, key=lambda number: not fits(showing(number))))
