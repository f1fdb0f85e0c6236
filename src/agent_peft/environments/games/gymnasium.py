"""Gymnasium's environments (https://gymnasium.farama.org), and TextArena's games among them.

The sum of the rewards so far is the score, and 1 is CORRECT. A task is a seed: training has even ones,
held-out odd.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agent_peft.environments.base import Environment, EnvironmentConfig, Episode
from agent_peft.environments.contract import error_text, quote
from agent_peft.environments.templates import fill, with_placeholders
from agent_peft.lookup import install, may_import
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Message, Outcome, StepResult, StopReason, Task

MAX_NUMBERS = 100  # of an observation


def _noted(name: str) -> str:
    if ":" in name:  # Gymnasium imports the module
        may_import(name)
    return name


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError("give [lowest, highest], of which the second is greater")
    return bounds


WorldId = Annotated[str, AfterValidator(_noted)]
Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]

warn_once = cache(logging.getLogger(__name__).warning)

ID = "an id, module:id, which imports the module first, or textarena/GAME for a game of TextArena"


class GymnasiumConfig(EnvironmentConfig):
    """One environment of Gymnasium. Its observations and actions are texts, or can be written as texts."""

    kind: str = "gymnasium"
    id: WorldId = Field(description=ID)
    make: dict[str, Any] = Field({}, description="arguments of gymnasium.make, or of the game")
    actions: tuple[str, ...] | None = Field(None, description="names of discrete actions; null: numbers")
    score: Bounds = Field((0.0, 1.0), description="sums of rewards that score 0 and 1")
    split: Literal["train", "heldout"] = Field("train", description="train or heldout, with other seeds")
    num_tasks: int = Field(100, ge=1, description="number of tasks")
    seed: int = Field(0, description="seed that the seeds of reset are derived from")
    max_turns: int = Field(20, ge=1, description="maximum number of turns; then the episode ends")
    prompt: Annotated[str, with_placeholders("observation", "actions", needs="observation")] = Field(
        "{observation}\n{actions}", description="first message; {actions} lists discrete actions"
    )


class Gymnasium(Environment):
    config_class = GymnasiumConfig

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config: GymnasiumConfig = config
        world = make_world(config.id, config.make)
        try:
            self.read, self.hint = reader_of(world.action_space, config.actions)
            if not is_text(world.observation_space):
                raise ValueError(f"an observation is {world.observation_space}, which is no text")
            world.reset(seed=0)
        except Exception as error:
            raise AgentPeftError(f"environment.id: {config.id}: {error_text(error)}") from error
        finally:
            world.close()

    @property
    def tasks(self) -> Sequence[Task]:
        config, odd = self.config, self.config.split == "heldout"
        seeds = [2 * (derive(config.seed, "gymnasium", n) >> 33) + odd for n in range(config.num_tasks)]
        return [Task(f"{config.split}-{n}", (config.id,), {"seed": seed}) for n, seed in enumerate(seeds)]

    def episode(self, task: Task, seed: int) -> GymnasiumEpisode:
        if type(task.content.get("seed")) is not int:
            raise AgentPeftError(f"task {quote(task.id)} has no seed, which is a whole number")
        return GymnasiumEpisode(self, task.content["seed"])


class GymnasiumEpisode(Episode):  # Gymnasium has one seed, which is the task
    def __init__(self, environment: Gymnasium, seed: int) -> None:
        self._environment, self._seed, self._over, self._turns, self._total = environment, seed, False, 0, 0.0
        self._world: Any = None

    def start(self) -> Sequence[Message]:
        config = self._environment.config
        self._world = make_world(config.id, config.make)
        observation, _ = self._world.reset(seed=self._seed)
        values = {"observation": observation, "actions": self._environment.hint}
        return [Message("user", fill(config.prompt, values).strip())]

    def step(self, action: str) -> StepResult:
        if self._over or self._world is None:
            raise RuntimeError("the episode is over, or was not started")
        environment, config, valid = self._environment, self._environment.config, False
        observation, terminated, truncated = f"This is no action. {environment.hint}", False, False
        if (chosen := environment.read(action)) is not None:
            observation, reward, terminated, truncated, facts = self._world.step(chosen)
            self._total += float(reward)
            valid = facts.get("valid") is not False
        self._turns += 1
        score = scaled_score(self._total, config.score)
        if not (terminated or truncated or self._turns == config.max_turns):
            return StepResult(str(observation), valid=valid, score=score)
        self.close()
        warn_beyond(self._total, config.score)
        outcome = Outcome.CORRECT if score == 1 else Outcome.INCORRECT
        reason = StopReason.FINISHED if terminated else StopReason.TURN_LIMIT
        return StepResult("", True, outcome, reason, valid, score)

    def close(self) -> None:
        world, self._world, self._over = self._world, None, True
        if world is not None:
            world.close()


def make_world(name: str, arguments: Mapping[str, Any]) -> Any:
    """An environment of Gymnasium's, or a game of TextArena's."""
    is_game = name.startswith("textarena/")
    try:
        import gymnasium

        if is_game:
            import agent_peft.environments.games.textarena  # noqa: F401 (it registers the games)
    except ImportError as error:
        extra = "textarena" if is_game else "gymnasium"
        raise AgentPeftError(f"{name} is an extra: {install(extra)}") from error
    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except Exception as error:
        raise AgentPeftError(f"environment.id: {name}: {error_text(error)}") from error


def is_text(space: Any) -> bool:
    """Whether ``str`` shows an observation: it is a text, at most 100 numbers, or a group of such."""
    from gymnasium.spaces import Text

    if hasattr(space, "spaces"):
        return all(map(is_text, space.spaces.values() if isinstance(space.spaces, Mapping) else space.spaces))
    return isinstance(space, Text) or (space.shape is not None and math.prod(space.shape) <= MAX_NUMBERS)


def reader_of(space: Any, names: tuple[str, ...] | None) -> tuple[Callable[[str], Any], str]:
    """A function that finds the action in a reply, or None, and a line on how to write one. The last of the
    ``names`` counts, in any case.
    """
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text) and names is None:

        def read_text(reply: str) -> str | None:
            text = reply.strip()
            return text if space.contains(text) else None

        return read_text, ""
    if not isinstance(space, Discrete):
        raise ValueError(f"an action is {space}, which has no names")
    first, count = int(space.start), int(space.n)
    names = tuple(map(str, range(first, first + count))) if names is None else names
    numbers = {name.lower(): number for number, name in enumerate(names, first)}
    if len(numbers) != count or len(names) != count:
        raise ValueError(f"there are {count} actions, and {len(numbers)} names in environment.actions")
    longest_first = sorted(map(re.escape, numbers), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")

    def read_name(reply: str) -> int | None:
        found = pattern.findall(reply.lower())
        return numbers[found[-1]] if found else None

    return read_name, f"Reply with one of these actions: {', '.join(names)}"


def warn_beyond(total: float, bounds: tuple[float, float]) -> None:
    """Warn once of an episode whose sum of rewards is not within the bounds."""
    lowest, highest = bounds
    if not lowest <= total <= highest:
        warn_once(
            f"an episode's rewards add up to {'more' if total > highest else 'less'} than environment.score: "
            f"[{lowest:g}, {highest:g}], and score {float(total > highest):g}; such episodes all score alike"
        )


def scaled_score(total: float, bounds: tuple[float, float]) -> float:
    """The score of a sum of rewards: 0 up to the lower bound, 1 from the upper one on.

    >>> scaled_score(125, (0, 500))
    0.25
    """
    lowest, highest = bounds
    return min(1.0, max(0.0, round((total - lowest) / (highest - lowest), 9)))
