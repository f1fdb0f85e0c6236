"""One episode, as the engine sees it: tokens in, tokens out, and whatever its environment raises ends in an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, Message, Outcome, StopReason, Task, Trajectory, Turn

PASSING = (KeyboardInterrupt, SystemExit, GeneratorExit)  # they end the program; nothing else that an environment raises does


class EpisodeConversation:
    """One episode and its record, which outlives a world that fails: ``begin_again`` brings a new world to where the record ends.

    Begun, and after each action, it goes on, or it is over, or it has a ``failure``: the world has ended this attempt. Anything else that
    is raised at an action is a defect. It ends the episode as incorrect, so that a reply which raises is never worth it.

    Args:
        defects: where exceptions go that are not the world's.
    """

    def __init__(self, environment: Environment, task: Task, chat: ChatTokenizer, defects: list[BaseException]) -> None:
        self.environment, self.task, self.chat, self.defects = environment, task, chat, defects
        self.seed = 0
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.outcome, self.stop_reason = Outcome.UNKNOWN, StopReason.INFRASTRUCTURE
        self.over = False
        self.failure: BaseException | None = None
        self.prompt: Sequence[int] = ()  # all tokens so far, the next observation included
        self._observation: tuple[int, ...] = ()
        self._room = 0
        self._episode: Episode | None = None

    def begin(self, seed: int) -> None:
        """Open the episode that ``seed`` decides: what is drawn in its world, and by the engine.

        Raises:
            AgentPeftError: it cannot be opened, for a reason that is the user's to mend.
        """
        self.seed, self.failure = seed, None
        try:
            opening = self._open()
            self.messages, self._observation = opening, tuple(self.chat.opening(opening))
        except (*PASSING, AgentPeftError):
            raise
        except BaseException as error:  # also what a library in Rust raises when it panics
            self._fail(error)
        self.prompt = self._observation

    def begin_again(self) -> None:
        """Open an episode of the same seed, and replay the recorded actions in it, the last of which was not answered.

        Nothing is sampled again, and the new world must say what the first one said: the actions were drawn after reading that. In
        another context their log-probabilities would be wrong, and another world would be a second try, which failing must not buy.
        """
        self.failure = None
        try:
            self._replay(self._open())
        except PASSING:
            raise
        except BaseException as error:
            self._fail(error)
        self.prompt = (*self.trajectory.tokens, *self._observation)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        """Take the sampled action; what to read next, or None where nothing is."""
        self.turns.append(Turn(self._observation, tuple(action), tuple(logprobs)))
        self._room = room
        return self._step()

    def end(self, outcome: Outcome, stop_reason: StopReason) -> None:
        self.outcome, self.stop_reason, self.over, self.failure = outcome, stop_reason, True, None

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(self.task, tuple(self.turns), tuple(self.messages), self.outcome, self.stop_reason)

    def close(self) -> None:
        """Free the world. The record stays."""
        episode, self._episode = self._episode, None
        if episode is None:
            return
        try:
            episode.close()
        except PASSING:
            raise
        except BaseException as error:
            self.defects.append(error)

    def _open(self) -> list[Message]:
        self._episode = self.environment.episode(self.task, derive(self.seed, "environment"))
        return list(self._episode.start())

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, InfrastructureError):
            self.defects.append(error)
        self.failure = error

    def _replay(self, heard: list[Message]) -> None:
        assert self._episode is not None
        actions = [message for message in self.messages if message.role == "assistant"][-len(self.turns) :]
        for action in actions[:-1]:
            if heard != self.messages[: len(heard)]:
                break
            heard = [*heard, action, Message("user", self._episode.step(action.content).observation)]
        if heard != self.messages[:-1]:
            raise InfrastructureError("its actions were replayed, and the world answered otherwise than before")
        self.messages = heard
        self._step()

    def _step(self) -> Sequence[int] | None:
        """Hand the last action of the record to the world."""
        turn = self.turns[-1]
        try:
            assert self._episode is not None
            text = self.chat.decode_action(turn.action)
            self.messages.append(Message("assistant", text))
            result = self._episode.step(text)
            outcome, stop_reason = Outcome(result.outcome), result.stop_reason and StopReason(result.stop_reason)
            if stop_reason is StopReason.INFRASTRUCTURE:
                raise InfrastructureError("the environment says that it failed")
            self.turns[-1] = replace(turn, valid=bool(result.valid))
            if stop_reason is not None:
                self.end(outcome, stop_reason)
                return None
            observation = tuple(self.chat.following(result.observation, turn.action))
        except PASSING:
            raise
        except InfrastructureError as error:
            self.failure = error
            return None
        except BaseException as error:
            self.defects.append(error)
            self.end(Outcome.INCORRECT, StopReason.DEFECT)
            return None
        self.messages.append(Message("user", result.observation))
        if len(observation) >= self._room:  # nothing could be said after reading it
            self.end(Outcome.INCORRECT, StopReason.TOKEN_LIMIT)
            return None
        self._observation = observation
        return observation
