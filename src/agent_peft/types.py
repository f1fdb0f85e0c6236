"""The vocabulary of all other modules. It needs only the standard library.

One noun, one meaning. A *task* is one problem, a *skill* its tag; an *environment* holds the dynamics and an
*episode* is one run of it; a *turn* is one exchange, a *trajectory* the record of an episode, and a *group*
the trajectories of one task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


class AgentPeftError(Exception):
    """A user's mistake or a broken contract. Its text is one line with what to do. The command line
    prints it without a traceback.
    """


class TrustError(AgentPeftError):
    """A check that is always on has failed. The run stops, because its numbers could not be trusted."""


class InfrastructureError(Exception):
    """The world under an environment failed (a server died, a disk is full). The episode is tried again. If
    the agent may have caused the failure, its actions are replayed.
    """


class Outcome(StrEnum):
    """The result of grading. It is a fact; the configuration sets the rewards."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    UNKNOWN = "unknown"


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"  # the agent ended the episode
    TURN_LIMIT = "turn_limit"  # it used all its turns without finishing
    TOKEN_LIMIT = "token_limit"  # it ran into the context limit: truncated
    TIMEOUT = "timeout"  # the environment's clock ran out
    # the world failed after an action, and again when the action was replayed: it counts as the agent's doing
    CRASHED = "crashed"
    # the environment's code raised at an action: it is reported, and the agent never gains by it
    DEFECT = "defect"
    # the world failed before the agent had acted, also when it was tried again: the episode does not count
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool ``name``.

    >>> ToolCall("bash", {"command": "ls"}).arguments["command"]
    'ls'
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message of a conversation. An assistant's may have a thought and calls of tools, whose results are
    the next messages of the role tool, in the order of the calls.

    >>> Message("user", "How many rows are there?").role
    'user'
    >>> Message("assistant", "", (ToolCall("ls", {}),)).to_json()["tool_calls"]
    [{'name': 'ls', 'arguments': {}}]
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thought: str | None = None

    @property
    def text(self) -> str:
        """The thought, the content and the calls, for people."""
        thought = "" if self.thought is None else f"<think>{self.thought}</think>"
        calls = (f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in self.tool_calls)
        return "\n".join(filter(None, [thought, self.content, *calls]))

    def to_json(self) -> dict[str, Any]:
        """The message as JSON values, without what it does not have."""
        calls = [
            {name: value for name, value in vars(call).items() if value is not None}
            for call in self.tool_calls
        ]
        return {
            "role": self.role,
            "content": self.content,
            **({"tool_calls": calls} if calls else {}),
            **({} if self.thought is None else {"thought": self.thought}),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Message:
        """Take back what ``to_json`` returned. Other content is a TypeError or a KeyError."""
        calls = tuple(ToolCall(**call) for call in content.get("tool_calls", ()))
        return cls(**{**content, "tool_calls": calls})


@dataclass(frozen=True)
class Task:
    """One problem. ``content`` is the environment's description of it, as read from a file. The agent never
    sees all of it.

    >>> Task(id="insert-0007", skills=("insert",), content={"instruction": "Add a row."}).skills
    ('insert',)
    """

    id: str
    skills: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one action.

    ``observation`` is the text the agent reads next, empty when ``done``: the result of the action's call, or
    a message of the user. ``messages`` is what it reads instead, where that is more than one text.
    ``stop_reason`` is set exactly when ``done``; until then the outcome is UNKNOWN. ``valid`` is False when
    the action could not be understood (and the observation says why). ``score`` grades a finished episode
    between 0 and 1, and an earlier one is how far the episode has come; it is None where the environment does
    not know.

    >>> StepResult("[(1,)]").done
    False
    """

    observation: str
    done: bool = False
    outcome: Outcome = Outcome.UNKNOWN
    stop_reason: StopReason | None = None
    valid: bool = True
    score: float | None = None
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if self.done != (self.stop_reason is not None):
            raise ValueError("a step result carries a stop reason exactly when the episode is done")


@dataclass(frozen=True)
class Turn:
    """One exchange in tokens: the policy reads an observation and samples an action. No token was decoded and
    encoded again.

    ``logprobs[i]`` is the log-probability (nats) with which ``action[i]`` was sampled, under the sampling
    temperature, top-p and top-k. ``cut`` means that a limit on tokens ended the action, not the policy.
    ``mistake`` means that a demonstration shows the action as a mistake: it is read, and never trained. Of
    the action after it, only what that action changes is trained. ``score`` is how far the episode had come
    after it, where the environment reports that. ``forced`` are the places in ``action`` that the sampler set
    and the policy did not draw, with log-probability 0: they are read, and never trained. With ``new_row``,
    the observation is a whole prompt, in which the chat template has written the earlier turns differently.

    >>> Turn(observation=(5, 6), action=(7,), logprobs=(-0.1,)).action
    (7,)
    """

    observation: tuple[int, ...]
    action: tuple[int, ...]
    logprobs: tuple[float, ...]
    valid: bool = True
    cut: bool = False
    mistake: bool = False
    score: float | None = None
    forced: tuple[int, ...] = ()
    new_row: bool = False

    def __post_init__(self) -> None:
        if len(self.action) != len(self.logprobs):
            raise ValueError(f"{len(self.action)} action tokens but {len(self.logprobs)} log-probabilities")

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Which tokens of the action are not forced."""
        return tuple(place not in self.forced for place in range(len(self.action)))


@dataclass(frozen=True)
class Trajectory:
    """The record of an episode. It flattens to ``o1 y1 o2 y2 …`` with mask ``0 1 0 1`` (per token). What the
    policy read is one of its ``rows``: there are several where the template rewrote the history.

    ``rewards`` has one reward per turn; their sum is the return, and ``reward_terms`` is what each term of
    the reward gave to it. ``score`` is the environment's grade between 0 and 1, or None. ``seed`` is the
    episode's: its world draws from ``derive(seed, "environment")``. ``messages`` is for people; training
    reads only ``turns``. ``reference``, what would have been right, is for people, too. ``desirable`` is the
    label of a preference; with None its return decides.

    >>> t = Trajectory(Task("t"), turns=(Turn((1, 2), (3,), (-0.5,)), Turn((4,), (5, 6), (-0.1, -0.2))))
    >>> t.tokens, t.action_mask
    ((1, 2, 3, 4, 5, 6), (False, False, True, False, True, True))
    """

    task: Task
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...] = ()
    outcome: Outcome = Outcome.UNKNOWN
    stop_reason: StopReason = StopReason.FINISHED
    rewards: tuple[float, ...] = ()
    score: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    desirable: bool | None = None
    reference: str | None = field(default=None, compare=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for turn in self.turns for t in (*turn.observation, *turn.action))

    @property
    def rows(self) -> list[list[int]]:
        """The tokens in the sequences that the policy read. Each turn with a ``new_row`` begins one.

        >>> turns = Turn((1, 2), (3,), (-0.5,)), Turn((1, 4), (5,), (-0.5,), new_row=True)
        >>> Trajectory(Task("t"), turns).rows
        [[1, 2, 3], [1, 4, 5]]
        """
        rows: list[list[int]] = [[]]
        for number, turn in enumerate(self.turns):
            if turn.new_row and number:
                rows.append([])
            rows[-1] += (*turn.observation, *turn.action)
        return rows

    @property
    def action_mask(self) -> tuple[bool, ...]:
        return tuple(m for turn in self.turns for m in (*(False,) * len(turn.observation), *turn.sampled))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The log-probability of each token; zero where it was not sampled."""
        return tuple(x for turn in self.turns for x in (*(0.0,) * len(turn.observation), *turn.logprobs))

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def num_action_tokens(self) -> int:
        return sum(len(turn.action) - len(turn.forced) for turn in self.turns)

    @property
    def num_invalid(self) -> int:
        """Turns whose action the environment could not understand."""
        return sum(not turn.valid for turn in self.turns)

    @property
    def num_cut(self) -> int:
        """Turns whose action a limit on tokens ended."""
        return sum(turn.cut for turn in self.turns)

    @property
    def num_thoughts_cut(self) -> int:
        """Turns in which a budget of tokens ended a thought."""
        return sum(bool(turn.forced) for turn in self.turns)


@dataclass(frozen=True)
class Group:
    """The trajectories of one task that are compared with each other.

    ``mismatched`` have this task's opening and the actions of another one's. A loss may measure them, and
    nothing is learned from them.

    >>> Group(Task("t"), ()).task.id
    't'
    """

    task: Task
    trajectories: Sequence[Trajectory]
    mismatched: Sequence[Trajectory] = ()
