"""From facts to rewards: what an outcome is worth is the configuration's word, never the environment's."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from agent_peft.types import Outcome, StopReason, Trajectory


class RewardConfig(BaseModel):
    """Prices. That of a stop reason, where one is given, takes the place of the outcome's, unless the outcome is correct.

    >>> RewardConfig(timeout=-0.3).end(Outcome.INCORRECT, StopReason.TIMEOUT)
    -0.3
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    correct: float = 1.0
    incorrect: float = -0.1
    unknown: float = 0.0
    timeout: float | None = Field(default=None, description="null prices it as its outcome, and so the next two")
    turn_limit: float | None = None
    token_limit: float | None = None
    invalid_action: float = Field(default=0.0, description="for each turn whose action could not be understood")

    def end(self, outcome: Outcome, stop_reason: StopReason) -> float:
        """What the end of an episode is worth.

        Raises:
            ValueError: an infrastructure failure, which has no price: such an episode is repeated, never learnt from.
        """
        if stop_reason is StopReason.INFRASTRUCTURE:
            raise ValueError("an infrastructure failure has no price: keep its trajectory out")
        stops = {StopReason.TIMEOUT: self.timeout, StopReason.TURN_LIMIT: self.turn_limit, StopReason.TOKEN_LIMIT: self.token_limit}
        price = stops.get(stop_reason)
        if outcome is Outcome.CORRECT or price is None:
            return {Outcome.CORRECT: self.correct, Outcome.INCORRECT: self.incorrect, Outcome.UNKNOWN: self.unknown}[outcome]
        return price


def price(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """The trajectory with one reward per turn: an invalid action's at its turn, the end's at the last (the two add up there).

    Raises:
        ValueError: an infrastructure failure, or no turn to bear the price.

    >>> from agent_peft.types import Task, Turn
    >>> turns = (Turn((1,), (2,), (-0.5,), valid=False), Turn((3,), (4,), (-0.5,)))
    >>> price(Trajectory(Task("t"), turns, outcome=Outcome.CORRECT), RewardConfig(invalid_action=-0.1)).rewards
    (-0.1, 1.0)
    """
    end = config.end(trajectory.outcome, trajectory.stop_reason)
    if not trajectory.turns:
        raise ValueError(f"the trajectory of task {trajectory.task.id!r} has no turn to bear a reward")
    rewards = [0.0 if turn.valid else config.invalid_action for turn in trajectory.turns]
    rewards[-1] += end
    return replace(trajectory, rewards=tuple(rewards))
