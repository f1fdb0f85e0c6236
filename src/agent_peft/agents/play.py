"""A person plays the policy's part: a sampler that asks, and does not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments import load_environment
from agent_peft.lookup import nearest
from agent_peft.policies.engine.base import Conversation, EngineStatistics
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.loading import load_policy
from agent_peft.policies.reply_text import decoded
from agent_peft.policies.sampling import SamplingConfig, end_of
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collector
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Trajectory


class Person:
    """A ``Sampler``: its tokens are those of a person's texts, within the limits of the policy.

    Args:
        show: gets the text of all tokens that the policy would read next, control tokens included.
        ask: returns a reply, or None at the end of the input.
        warn: gets a remark on a reply.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        show: Callable[[str], None],
        ask: Callable[[], str | None],
        warn: Callable[[str], None],
    ) -> None:
        self.chat, self.show, self.ask, self.warn = chat, show, ask, warn

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingConfig,
        schedule: Schedule | None = None,
    ) -> EngineStatistics:
        """See ``Sampler.generate``."""
        read = drawn = 0
        for conversation in conversations:
            news, length = conversation.prompt, 0
            while news is not None:
                length, read = length + len(news), read + len(news)
                self.show(decoded(self.chat, news))
                action = self._action(sampling, sampling.max_tokens - length)
                length, drawn = length + len(action), drawn + len(action)
                zeros = (0.0,) * len(action)
                news = conversation.act(action, zeros, sampling.max_tokens - length)
        return EngineStatistics(read, read, drawn, drawn)

    def hold(self) -> None:
        """See ``Sampler.hold``."""

    def score(self, tokens: Sequence[int], sampling: SamplingConfig, adapter: bool = True) -> list[float]:
        raise AgentPeftError("a person has no log-probabilities; measure a policy")

    def close(self) -> None:
        """See ``Sampler.close``."""

    def _action(self, sampling: SamplingConfig, room: int) -> tuple[int, ...]:
        """A reply's tokens, ended where the policy's would be."""
        while True:
            text = self.ask()
            if text is None:
                raise AgentPeftError("the input ended before the episode did; it counts for nothing")
            try:
                tokens = self.chat.action_tokens(text)
                break
            except AgentPeftError as error:  # such as a character that the policy does not have
                self.warn(f"{error}; write something else")
        most = min(sampling.max_new_tokens, room)
        end = end_of(tokens, sampling.stop, self.chat.token_bytes, self.chat.end_of_turn)
        if len(tokens) > most and (end is None or end > most):
            self.warn(f"the reply has {len(tokens)} tokens, and is cut after {most}, as the policy's is")
        return tuple(tokens[: most if end is None else min(most, end)])


def play(
    config: TrainConfig,
    task: str | None,
    show: Callable[[str], None],
    ask: Callable[[], str | None],
    warn: Callable[[str], None],
) -> Trajectory:
    """Play an episode of a configuration's environment, with the limits and the rewards of its last stage.
    ``task`` is an id; None takes the first.
    """
    stage = config.stages[-1]
    with closing(load_environment(config.environment)) as environment:
        tasks = environment.tasks
        chosen = tasks[0] if task is None else next((one for one in tasks if one.id == task), None)
        if chosen is None:
            ids = [one.id for one in tasks[:10_000]]
            raise AgentPeftError(f"--task: there is no {task!r}; {nearest(str(task), ids)}")
        person = Person(load_policy(config.policy, config.seed).chat, show, ask, warn)
        seed = derive(config.seed, "play")
        collection = Collector(environment, person).collect([chosen], 1, stage.sampling, stage.rewards, seed)
    played = collection.groups[0].trajectories
    if not played:
        raise AgentPeftError("the environment failed, so there is no outcome; play again")
    return played[0]
