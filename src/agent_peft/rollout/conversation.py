"""One episode in tokens, as the sampler sees it. Every exception of its environment ends in an outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agent_peft.environments.base import Demonstrated, Environment, Episode, Mistake
from agent_peft.environments.contract import ContractError, open_episode, opening_of, result_of, tools_of
from agent_peft.environments.tool_calls import TWO_ACTIONS, NotAToolCall, action_of, read_call
from agent_peft.policies.engine.base import NewRow
from agent_peft.policies.engine.daemon_threads import EnvironmentTimeout, within
from agent_peft.policies.sampling import end_of
from agent_peft.printable import printable
from agent_peft.replies import UNCLOSED_THOUGHT, Call
from agent_peft.rollout.replays import ReplayWindow
from agent_peft.seeding import derive
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from agent_peft.policies.native import NativeFormat
    from agent_peft.policies.tokenization import ChatTokenizer

# these end the program; no other exception of an environment does, such as the SystemExit of argparse
PASSING = (KeyboardInterrupt, GeneratorExit)


class ReadReply(NamedTuple):
    """A reply of an episode: its message, and what its world gets.

    Attributes:
        fault: what is wrong with a reply that should have been a call, or an empty text; None where the text
            may still have thoughts.
    """

    message: Message
    text: str
    fault: str | None = None


class EpisodeConversation:
    """One episode and its record. The record survives a failure of the environment: ``replay_episode`` opens
    another episode and repeats the recorded actions.

    After its beginning and after each action the episode continues, or is over, or has a ``failure``, which
    is an InfrastructureError of the world. Any other exception at an action is a defect. It ends the episode
    as incorrect, so that no reply gains by it. The world is opened when the sampler asks for the prompt, and
    closed when the episode is over or has failed.

    Args:
        defects: a list for exceptions that are not failures of the world.
        max_tokens: limit of the episode's tokens; None sets no limit. An opening without room for an action
            is a user's mistake.
        replays: earlier episodes to show before the task. They take at most half of ``max_tokens``, together
            with the opening.
        seconds: limit of one start or step of the world, which is left behind if it takes longer.

    Attributes:
        exact: whether the tokens of the whole episode must be the chat template's own text of it. Set it
            before the beginning.
    """

    def __init__(
        self,
        environment: Environment,
        task: Task,
        chat: ChatTokenizer,
        defects: list[BaseException],
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        on_end: Callable[[], None] | None = None,
        replays: ReplayWindow | None = None,
        seconds: float | None = None,
        max_thinking_tokens: int | None = None,
    ) -> None:
        self.seconds, self.max_thinking_tokens = seconds, max_thinking_tokens
        self.environment, self.task, self.chat, self.defects = environment, task, chat, defects
        self.stop, self.max_tokens = stop, max_tokens
        self.on_end, self.replays = on_end, replays
        self.seed = 0
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.outcome, self.stop_reason = Outcome.UNKNOWN, StopReason.INFRASTRUCTURE
        self.score: float | None = None
        self.over = False
        self.failure: BaseException | None = None
        self.exact = False
        self._observation: tuple[int, ...] = ()
        self._room = 0
        self._replies: list[ReadReply] = []
        self._native: NativeFormat | None = None
        self._episode: Episode | None = None

    @property
    def prompt(self) -> Sequence[int] | None:
        """Open a world, and return all tokens so far with the next observation. None where the world fails or
        the episode is over.
        """
        if self.turns:
            self.replay_episode()
        else:
            self.begin(self.seed)
        if self.over or self.failure is not None:
            self.close()
            return None
        if isinstance(self._observation, NewRow):
            return self._observation
        *earlier, row = self.trajectory.rows
        tokens = (*row, *self._observation)
        return NewRow(tokens, sum(map(len, earlier))) if earlier else tokens

    def begin(self, seed: int) -> None:
        """Open the episode of ``seed``, from which its world and the sampler draw."""
        self.seed, self.failure = seed, None
        try:
            opening = self._open()
            self.messages, self._observation = opening, tuple(self._tokens_of(opening))
            if self.max_tokens is not None and len(self._observation) >= self.max_tokens:
                raise AgentPeftError(
                    f"task {self.task.id}: its opening has {len(self._observation)} tokens, so there is no "
                    "room for an action within "
                    f"sampling.max_tokens: {self.max_tokens}; raise that (of an evaluation, "
                    "evaluation.sampling's), or leave the task out"
                )
        except ContractError as error:
            raise AgentPeftError(f"{self.where}: {error}") from error
        except (*PASSING, AgentPeftError):
            raise
        except BaseException as error:  # also what a library in Rust raises when it panics
            self._fail(error)

    def replay_episode(self) -> None:
        """Open an episode of the same seed, and replay the recorded actions in it. The last action had no
        answer yet.

        Nothing is sampled again, and the new world must answer as the first one did. Otherwise the recorded
        log-probabilities would belong to another context, and a failure would give the agent a second try.
        """
        self.failure = None
        try:
            self._replay(self._open())
        except PASSING:
            raise
        except BaseException as error:
            self._fail(error)

    def act(
        self,
        action: Sequence[int],
        logprobs: Sequence[float],
        room: int,
        mistake: bool = False,
        reply: ReadReply | None = None,
    ) -> Sequence[int] | None:
        """Take the sampled action. Return the tokens of the next observation, or None where there is none.

        Args:
            room: the token budget that is left. An observation that would use it up ends the episode, because
                no further action is possible.
            reply: of a demonstration; by default that of the tokens.
        """
        cut = end_of(action, self.stop, self.chat.token_bytes, self.chat.end_of_turn) is None
        new_row = isinstance(self._observation, NewRow)
        read = tuple(self._observation), tuple(action), tuple(logprobs)
        self.turns.append(Turn(*read, cut=cut, mistake=mistake, new_row=new_row))
        if self.max_thinking_tokens is not None:
            from agent_peft.policies.thinking import forced_places

            forced = forced_places(self.chat, self.max_thinking_tokens, self._observation, action)
            self.turns[-1] = replace(self.turns[-1], forced=forced)
        self._room = room
        self._replies.append(reply or self._read(action))
        following = self._step(self._replies[-1])
        if following is None:
            self.close()
        return following

    def demonstrate(self, action: str) -> Sequence[int] | None:
        """Take an action of a demonstration, as if the policy had written it."""
        message, fault = Message("assistant", str(action)), None
        if isinstance(action, Demonstrated):
            message, fault = action.message, ""
        elif self._native is not None and self._native.tools:
            try:
                call = read_call(action)
            except NotAToolCall:
                raise AgentPeftError(
                    f"task {self.task.id}: its episodes declare tools, and its demonstration has "
                    f"{printable(action, 60)!r}; give one call, as write_call writes it"
                ) from None
            message, fault = Message("assistant", "", self._with_ids([call])), ""
        if self._native is None:
            tokens = self.chat.action_tokens(action)
        else:
            tokens = self._native.action_tokens(self.messages, message)
        zeros, mistake = [0.0] * len(tokens), isinstance(action, Mistake)
        return self.act(tokens, zeros, 1 << 30, mistake, ReadReply(message, str(action), fault))

    def end(self, outcome: Outcome, stop_reason: StopReason) -> None:
        if self.on_end is not None and not self.over:
            self.on_end()
        self.outcome, self.stop_reason, self.over, self.failure = outcome, stop_reason, True, None

    @property
    def defective(self) -> bool:
        """Whether an exception that is not a failure of the world ended the episode or its beginning."""
        unbegun = (
            self.failure is not None and not self.turns and not isinstance(self.failure, InfrastructureError)
        )
        return unbegun or self.stop_reason is StopReason.DEFECT

    def defect(self, error: BaseException) -> None:
        """Record an exception that is not a failure of the world, with the place where it came first. One
        object may be raised several times.
        """
        if not getattr(error, "__notes__", ()):
            error.add_note(self.where)
        self.defects.append(error)

    @property
    def where(self) -> str:
        """The task, the environment's seed, and the turn."""
        moment = f"turn {len(self.turns)}" if self.turns else "at its start"
        return f"task {self.task.id!r}, seed {derive(self.seed, 'environment')}, {moment}"

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(
            self.task,
            tuple(self.turns),
            tuple(self.messages),
            self.outcome,
            self.stop_reason,
            score=self.score,
            seed=self.seed,
        )

    def close(self) -> None:
        """Close the world. The record stays."""
        episode, self._episode = self._episode, None
        if episode is None:
            return
        try:
            episode.close()
        except PASSING:
            raise
        except BaseException as error:
            self.defect(error)

    def _open(self) -> list[Message]:
        self._episode = episode = open_episode(self.environment, self.task, derive(self.seed, "environment"))
        try:
            opening = within(self.seconds, partial(opening_of, episode))
            tools = tools_of(episode)
        except EnvironmentTimeout as error:
            self._episode = None  # closing it may hang, too
            raise InfrastructureError(f"its start took more than {self.seconds:g} s") from error
        if tools or self.exact:
            from agent_peft.policies.native import format_of

            self._native = format_of(self.chat, tools, acts=not self.exact)
        if self.replays is None:
            return opening
        limit = math.inf if self.max_tokens is None else self.max_tokens // 2
        return self.replays.before(
            self.task, opening, lambda messages: len(self._tokens_of(messages)) <= limit
        )

    def _tokens_of(self, opening: Sequence[Message]) -> list[int]:
        return self.chat.opening(opening) if self._native is None else self._native.opening(opening)

    def _read(self, action: Sequence[int]) -> ReadReply:
        """A sampled reply. What is not one call, where tools are declared, has a fault."""
        # the prompt may have opened the thought that the action begins with
        text = self.chat.open_thought + self.chat.decode_action(action)
        if self._native is None:
            return ReadReply(Message("assistant", text), text)
        reply = self._native.read(action)
        faults = [call.fault for call in reply.calls if call.fault]
        if not reply.closed:
            faults = [UNCLOSED_THOUGHT]
        elif len(reply.calls) != 1:
            faults = [TWO_ACTIONS] if reply.calls else [f"No tool call found. Call {self._native.names}."]
        if faults:
            return ReadReply(Message("assistant", text), "", faults[0])
        message = Message("assistant", reply.text, self._with_ids(reply.calls), reply.thought)
        return ReadReply(message, action_of(message), "")

    def _with_ids(self, calls: Sequence[Call | ToolCall]) -> tuple[ToolCall, ...]:
        """Calls with an id of nine characters, as Mistral's templates want them, where they have none."""
        number = len(self.messages)
        return tuple(ToolCall(call.name, call.arguments, call.id or f"call{number:05}") for call in calls)

    def _answer(self, reply: Message, result: StepResult) -> Sequence[Message]:
        """What the policy reads after ``reply``: the result of its call, or a message of the user."""
        return result.messages or (Message("tool" if reply.tool_calls else "user", result.observation),)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, InfrastructureError):
            self.defect(error)
        self.failure = error

    def _replay(self, replayed: list[Message]) -> None:
        assert self._episode is not None
        for reply in self._replies[:-1]:
            if replayed != self.messages[: len(replayed)]:
                break
            result = result_of(self._episode, reply.text, reply.fault)
            replayed = [*replayed, reply.message, *self._answer(reply.message, result)]
        if replayed != self.messages[:-1]:
            raise InfrastructureError("its actions were replayed, and the world answered differently")
        self.messages = replayed
        self._step(self._replies[-1])

    def _step(self, reply: ReadReply) -> Sequence[int] | None:
        """Pass the last action of the record to the world."""
        turn = self.turns[-1]
        try:
            assert self._episode is not None
            self.messages.append(reply.message)
            result = within(self.seconds, partial(result_of, self._episode, reply.text, reply.fault))
            outcome = Outcome(result.outcome)
            stop_reason = result.stop_reason and StopReason(result.stop_reason)
            if stop_reason is StopReason.INFRASTRUCTURE:
                raise InfrastructureError("the environment reports that it failed")
            self.turns[-1] = replace(turn, valid=bool(result.valid), score=result.score)
            if stop_reason is not None:
                self.end(outcome, stop_reason)
                self.score = result.score
                return None
            new = self._answer(reply.message, result)
            observation = self._following(result, new, turn.action)
        except PASSING:
            raise
        except EnvironmentTimeout:
            self._episode = None  # closing it may hang, too
            self.end(Outcome.INCORRECT, StopReason.TIMEOUT)
            return None
        except InfrastructureError as error:
            self.failure = error
            return None
        except BaseException as error:
            self.defect(error)
            self.end(Outcome.INCORRECT, StopReason.DEFECT)
            return None
        self.messages += new
        room = self._room
        if isinstance(observation, NewRow):
            room += len(self.trajectory.rows[-1])
        if len(observation) >= room:  # there would be no room for an action
            self.end(Outcome.INCORRECT, StopReason.TOKEN_LIMIT)
            return None
        self._observation = observation
        return observation

    def _following(
        self, result: StepResult, new: Sequence[Message], action: Sequence[int]
    ) -> tuple[int, ...]:
        """The tokens to read after ``action``, or a `NewRow` where the template rewrites the history."""
        chat, native = self.chat, self._native
        if native is None and not chat.rewrites:
            return tuple(chat.following(result.observation, action))
        if native is not None and self.exact:
            return tuple(native.following(self.messages, new, action, exact=True))
        if native is None:
            from agent_peft.policies.native import format_of

            native = format_of(chat, (), acts=False)
        *earlier, row = self.trajectory.rows
        is_new, tokens = native.next_prompt(self.messages, new, row, action)
        return NewRow(tokens, sum(map(len, (*earlier, row)))) if is_new else tuple(tokens)
