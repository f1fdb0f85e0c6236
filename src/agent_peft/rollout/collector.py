"""Where policies meet environments: tasks in, groups of trajectories out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_peft.environments.base import Environment
from agent_peft.policies.engine import Engine, EngineStatistics
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Group, InfrastructureError, Message, Outcome, StopReason, Task, Trajectory, Turn

NOTHING = EngineStatistics(0, 0, 0, 0)
ATTEMPTS = 3  # how often an episode is tried whose environment fails


@dataclass(frozen=True)
class Collection:
    """What one trip collected. ``failures`` counts environments that failed; what still failed after retries is in no group."""

    groups: list[Group]
    failures: int = 0
    statistics: EngineStatistics = NOTHING


class Collector:
    """Acts in one environment with one engine."""

    def __init__(self, environment: Environment, engine: Engine) -> None:
        self.environment, self.engine = environment, engine

    def collect(
        self,
        tasks: Sequence[Task],
        group_size: int,
        sampling: SamplingConfig,
        rewards: RewardConfig,
        seed: int,
        positions: Sequence[int] | None = None,
    ) -> Collection:
        """``group_size`` episodes of each task, in the tasks' order. What an episode draws depends on its seed, which is that of the task's
        position, and on nothing around it.

        Args:
            positions: of the tasks to collect, where other processes collect the rest; None takes all.
        """
        positions = range(len(tasks)) if positions is None else positions
        keys = [(position, member) for position in positions for member in range(group_size)]
        done: dict[tuple[int, int], Trajectory] = {}
        failures, statistics = 0, EngineStatistics(0, 0, 0, 0)
        for attempt in range(ATTEMPTS):
            conversations: dict[tuple[int, int], EpisodeConversation] = {}
            try:
                for key in keys:
                    if key not in done:
                        seed_of_episode = derive(seed, attempt, *key)
                        conversations[key] = EpisodeConversation(self.environment, tasks[key[0]], self.engine.policy.chat, seed_of_episode)
                statistics += self.engine.generate([c for c in conversations.values() if not c.failed], sampling)
            finally:
                for conversation in conversations.values():
                    conversation.close()
            done |= {key: price(c.trajectory, rewards) for key, c in conversations.items() if not c.failed}
            failures += sum(c.failed for c in conversations.values())
            if len(done) == len(keys):
                break
        groups = [
            Group(tasks[position], [done[position, member] for member in range(group_size) if (position, member) in done])
            for position in positions
        ]
        return Collection(groups, failures, statistics)


class EpisodeConversation:
    """One episode, as the engine sees it: tokens in, tokens out."""

    def __init__(self, environment: Environment, task: Task, chat: ChatTokenizer, seed: int) -> None:
        self.task, self.chat, self.seed = task, chat, seed
        self.failed = False
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.outcome, self.stop_reason = Outcome.UNKNOWN, StopReason.INFRASTRUCTURE
        self.prompt: Sequence[int] = ()
        try:
            self.episode = environment.episode(task, derive(seed, "environment"))
            self.messages += self.episode.start()
            self.prompt = tuple(chat.opening(self.messages))
        except InfrastructureError:
            self.failed = True
        except BaseException:
            self.close()  # nobody else will have it
            raise
        self._observation = tuple(self.prompt)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        text = self.chat.decode_action(action)
        try:
            result = self.episode.step(text)
        except InfrastructureError:
            self.failed = True
            return None
        self.turns.append(Turn(self._observation, tuple(action), tuple(logprobs), valid=result.valid))
        self.messages.append(Message("assistant", text))
        if result.stop_reason is not None:
            self.outcome, self.stop_reason = result.outcome, result.stop_reason
            return None
        self.messages.append(Message("user", result.observation))
        self._observation = tuple(self.chat.following(result.observation, action))
        if len(self._observation) >= room:  # nothing could be said after reading it
            self.outcome, self.stop_reason = Outcome.INCORRECT, StopReason.TOKEN_LIMIT
            return None
        return self._observation

    @property
    def trajectory(self) -> Trajectory:
        return Trajectory(self.task, tuple(self.turns), tuple(self.messages), self.outcome, self.stop_reason)

    def close(self) -> None:
        if hasattr(self, "episode"):
            self.episode.close()


def demonstrate(environment: Environment, task: Task, chat: ChatTokenizer, rewards: RewardConfig, seed: int) -> Trajectory:
    """The trajectory of a task's demonstration, replayed in the environment: its observations are the real ones.

    Raises:
        AgentPeftError: the environment knows no demonstration of this task.
    """
    actions = environment.demonstration(task)
    if actions is None:
        raise AgentPeftError(f"task {task.id}: the environment knows no demonstration, so a supervised stage cannot use it")
    conversation = EpisodeConversation(environment, task, chat, seed)
    try:
        for action in () if conversation.failed else actions:
            tokens = chat.action_tokens(action)
            if conversation.act(tokens, [0.0] * len(tokens), room=1 << 30) is None:
                break
    finally:
        conversation.close()
    if conversation.failed:
        raise AgentPeftError(f"task {task.id}: the environment failed while its demonstration was replayed")
    if conversation.stop_reason is StopReason.INFRASTRUCTURE:  # still the one it began with
        raise AgentPeftError(f"task {task.id}: its demonstration does not end the episode")
    return price(conversation.trajectory, rewards)
