"""Rewards as functions of replies. Those made here are the rewards of a run's configuration; any other
callable becomes a term of it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_peft.agents.datasets import Dataset
from agent_peft.config import first_error
from agent_peft.environments.graders import normalized, spelled
from agent_peft.environments.gsm8k import GOLD_MARK, answer_pattern
from agent_peft.environments.quantities import last_quantity, parse_number
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.types import AgentPeftError, Message, Outcome, Task, Trajectory, Turn

RewardFunction = Callable[..., Sequence[float]]

_MARKED = answer_pattern(f"{GOLD_MARK} {{answer}}")
_TOKEN = re.compile(r"\w+|[^\w\s]")


class MathRewardFunction:
    """1 for a reply with the right answer, 0 for any other; then the terms of ``rewards``, which are keys of
    ``rewards`` in a configuration. Override ``__call__``, ``extract_answer`` or ``compare_answers`` for a
    reward of your own.

    >>> reward = MathRewardFunction()
    >>> reward(["48 / 2 = 24, so #### 24", "It is 25."], ground_truth=["24", "24"])
    [1.0, 0.0]
    """

    def __init__(self, rewards: Mapping[str, Any] | None = None) -> None:
        self.rewards = {"correct": 1.0, "incorrect": 0.0, **(rewards or {})}
        try:
            self._config = RewardConfig.model_validate(self.rewards)
        except ValueError as error:
            raise AgentPeftError(first_error(error, "reward", RewardConfig)) from error

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """The reward of each reply.

        Args:
            columns: ``ground_truth``, the right answer to each; and ``completion_ids``, its tokens. Without
                them a length is counted in words and marks.
        """
        truths = columns.get("ground_truth")
        if truths is None or len(truths) != len(completions):
            count = "none" if truths is None else str(len(truths))
            raise AgentPeftError(
                f"ground_truth: has {count} for {len(completions)} replies; give one for each"
            )
        tokens = columns.get("completion_ids") or [_TOKEN.findall(text) for text in completions]
        return [self._price(*row) for row in zip(completions, truths, tokens, strict=True)]

    def extract_answer(self, completion: str) -> str | None:
        """The number after the last ``####`` of a reply, else its last number; None where it has none.

        >>> MathRewardFunction().extract_answer("16 - 3 = 13 eggs, 13 * 2 = $26.")
        '26'
        """
        marked = [
            number for match in _MARKED.finditer(completion) if (number := parse_number(match[1])) is not None
        ]
        if marked:
            return format(marked[-1], "f")
        found = last_quantity(completion)
        return None if found is None else f"{found.value}{'%' if found.percent else ''}"

    def compare_answers(self, answer: str | None, ground_truth: Any) -> bool:
        """Whether an answer is the right one: as numbers where the right one holds a number.

        >>> MathRewardFunction().compare_answers("1,080.0", "#### 1080")
        True
        """
        if answer is None:
            return False
        truth = spelled(ground_truth).rpartition(GOLD_MARK)[2]
        expected, found = last_quantity(truth), last_quantity(answer)
        if expected is None:
            return normalized(answer) == normalized(truth)
        return found is not None and found.equals(expected)

    def is_right(self, completion: str, ground_truth: Any) -> bool:
        """Whether a reply holds the right answer, or is the right answer where that holds no number."""
        if last_quantity(spelled(ground_truth)) is None:
            return self.compare_answers(completion, ground_truth)
        return self.compare_answers(self.extract_answer(completion), ground_truth)

    def _price(self, completion: str, ground_truth: Any, tokens: Sequence[Any]) -> float:
        outcome = Outcome.CORRECT if self.is_right(completion, ground_truth) else Outcome.INCORRECT
        turn = Turn((), (0,) * len(tokens), (0.0,) * len(tokens))
        messages = (Message("assistant", completion),)
        return price(Trajectory(Task("reply"), (turn,), messages, outcome), self._config).reward


def create_accuracy_reward() -> MathRewardFunction:
    """1 for a right answer, 0 for a wrong one."""
    return MathRewardFunction()


def create_length_penalty_reward(
    base_reward_fn: MathRewardFunction | None = None, penalty_weight: float = 0.1, max_length: int = 128
) -> MathRewardFunction:
    """The base reward, less up to ``penalty_weight`` for a right answer of more than ``max_length`` tokens:
    all of it from twice that length on.
    """
    return _with_term(base_reward_fn, kind="length_penalty", weight=penalty_weight, target_tokens=max_length)


def create_step_reward(
    base_reward_fn: MathRewardFunction | None = None, step_bonus: float = 0.1, max_steps: int = 5
) -> MathRewardFunction:
    """The base reward, and ``step_bonus`` for each line of reasoning before a right answer, for at most
    ``max_steps`` different ones.
    """
    return _with_term(base_reward_fn, kind="reasoning_steps", weight=step_bonus, max_steps=max_steps)


def _with_term(base: MathRewardFunction | None, **term: Any) -> MathRewardFunction:
    base = base or MathRewardFunction()
    if prices_of(base) is None:
        raise AgentPeftError(
            f"base_reward_fn: {_name_of(base)!r} is a function of your own; add the term in that "
            "function, or give a reward of create_accuracy_reward, create_length_penalty_reward or "
            "create_step_reward"
        )
    return MathRewardFunction({**base.rewards, "terms": [*base.rewards.get("terms", ()), term]})


REWARDS: dict[str, Callable[..., MathRewardFunction]] = {  # by the names that a tool may give
    "accuracy": create_accuracy_reward,
    "length_penalty": create_length_penalty_reward,
    "step": create_step_reward,
}


def prices_of(reward: Any) -> dict[str, Any] | None:
    """The keys of ``rewards`` that a reward is; None where it is a function of the user's own."""
    ours = ("__call__", "extract_answer", "compare_answers", "is_right")
    if isinstance(reward, MathRewardFunction) and all(
        getattr(type(reward), name) is getattr(MathRewardFunction, name) for name in ours
    ):
        return dict(reward.rewards)
    return None


_TERMS: dict[str, Callable[[Trajectory], float]] = {}


def keep(reward: Any, term: Callable[[Trajectory], float]) -> str:
    """Keep a reward's term as long as the program runs. Return its name in a configuration:
    ``agent_peft.agents.rewards:NAME``.
    """
    name = f"{_name_of(reward)}_{_code_digest(reward)}"
    _TERMS[name] = term
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Callable[[Trajectory], float]:
    """A kept term. Another process has none."""
    if name not in _TERMS:
        raise AttributeError(
            f"the reward function {name} is of the Python program that trained; call its trainer again there"
        )
    return _TERMS[name]


def _name_of(reward: Any) -> str:
    name = getattr(reward, "__name__", None) or type(reward).__name__
    return re.sub(r"\W", "_", name)


def _code_digest(reward: Any) -> str:
    """A few letters that differ between functions of one name, so that another function is another training.
    Values that a function takes from around it, and attributes of a callable object, have no part in it.
    """

    def parts(code: Any) -> Any:
        inner = [parts(one) if hasattr(one, "co_code") else repr(one) for one in code.co_consts]
        return code.co_code.hex(), code.co_names, inner

    code = getattr(reward, "__code__", None) or getattr(type(reward).__call__, "__code__", None)
    content = None if code is None else (parts(code), getattr(reward, "__defaults__", None))
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def as_term(reward: Any, dataset: Dataset | None = None) -> Callable[[Trajectory], float]:
    """A function of replies as a term of a run's reward, which is called with one episode at a time. In
    addition to ``completions`` it gets, as far as it takes them, ``prompts``, ``completion_ids``,
    ``ground_truth`` and the columns of the task, each in a list. A task without an answer in its columns has
    that of the dataset.
    """
    if not callable(reward):
        raise AgentPeftError(
            f"reward_fn: {reward!r:.60} is not a function; give one of completions and ground_truth, such as "
            "create_accuracy_reward()"
        )
    parameters = inspect.signature(reward).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters}

    def term(trajectory: Trajectory) -> float:
        replies = [message.text for message in trajectory.messages if message.role == "assistant"]
        others = [message.content for message in trajectory.messages if message.role != "assistant"]
        answer = trajectory.task.content.get("answer")
        if answer is None and dataset is not None:
            answer = dataset.truths.get(trajectory.task.id)
        if isinstance(answer, str) and GOLD_MARK in answer:
            answer = answer.rpartition(GOLD_MARK)[2].strip()
        columns = {
            **{name: [value] for name, value in trajectory.task.content.items()},
            "prompts": ["\n\n".join(others)],
            "completion_ids": [[token for turn in trajectory.turns for token in turn.action]],
            "ground_truth": [answer],
        }
        columns.pop("completions", None)
        known = {name: value for name, value in columns.items() if takes_all or name in names}
        reply = "\n".join(replies[len(replies) - len(trajectory.turns) :])  # those before are examples
        values = list(reward([reply], **known))
        if len(values) != 1:
            raise ValueError(f"it returned {len(values)} rewards for one reply")
        return float(values[0])

    return term


def evaluate_rewards(
    completions: Sequence[str], ground_truths: Sequence[Any], reward_fn: RewardFunction | None = None
) -> dict[str, float]:
    """The rewards of replies in numbers: ``mean_reward``, ``min_reward``, ``max_reward``, ``std_reward``,
    ``accuracy`` (the share of right answers) and ``count``.

    >>> evaluate_rewards(["4", "5"], ["4", "4"])["accuracy"]
    0.5
    """
    if not completions:
        raise AgentPeftError("completions: is empty; give at least one reply")
    judge = MathRewardFunction()
    right = judge(completions, ground_truth=ground_truths)
    values = [float(one) for one in (reward_fn or judge)(completions, ground_truth=ground_truths)]
    mean = sum(values) / len(values)
    return {
        "mean_reward": mean,
        "min_reward": min(values),
        "max_reward": max(values),
        "std_reward": (sum((one - mean) ** 2 for one in values) / len(values)) ** 0.5,
        "accuracy": sum(right) / len(right),
        "count": float(len(values)),
    }
