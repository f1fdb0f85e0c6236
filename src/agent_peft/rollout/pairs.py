"""Preferences to learn from: pairs of a chosen and a rejected trajectory, or single ones with returns that
state which are desirable. They come from an environment, or from the episodes of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agent_peft.algorithms.base import PreferenceForm
from agent_peft.config import Config
from agent_peft.environments.base import Environment
from agent_peft.files import MAX_JSONL_BYTES, read_bytes
from agent_peft.printable import printable
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import Collection, gather_collection
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig, price
from agent_peft.rollout.sources import is_constant
from agent_peft.rollout.task_order import Order, TaskOrder
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, Group, Message, Outcome, StopReason, Task, Trajectory, Turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agent_peft.policies.tokenization import ChatTokenizer

EPISODE_PAIR_METRICS = ("groups_tied", "groups_unlike")  # of ``EpisodePairs``


@dataclass(frozen=True)
class Pairs:
    """The chosen and the rejected reply of each task, in this order: groups of two trajectories. With
    ``form`` "labels" a task may have one of them, and each is learned alone.
    """

    environment: Environment
    order: Order
    chat: ChatTokenizer
    rewards: RewardConfig
    seed: int
    ranks: Ranks
    form: PreferenceForm = "pairs"

    def collect(self, step: int) -> Collection:
        tasks, seed = self.order.at(step), derive(self.seed, "rollout", step)
        groups = [
            replay_sides(self.environment, task, self.chat, self.rewards, seed, self.form)
            for task in self.ranks.share(tasks)
        ]
        collection = gather_collection(self.ranks, Collection(groups), tasks)
        return with_mismatched(collection) if self.form == "labels" else collection


def replay_sides(
    environment: Environment,
    task: Task,
    chat: ChatTokenizer,
    rewards: RewardConfig,
    seed: int,
    form: PreferenceForm = "pairs",
) -> Group:
    """The chosen and the rejected reply of a task, replayed; with ``form`` "labels" there may be one."""
    sides = {"demonstration": environment.demonstration(task), "rejection": environment.rejection(task)}
    known = {name: actions for name, actions in sides.items() if actions is not None}
    if len(known) < 2 and not (known and form == "labels"):
        missing = next(name for name in sides if name not in known)
        raise AgentPeftError(
            f"task {printable(task.id, 60)}: the environment has no {missing}, so it is not a pair; take "
            "environment.kind: preferences, or learn from the episodes of a run (episodes_of)"
        )
    replays = {name: demonstrate(environment, task, chat, rewards, seed, known[name]) for name in known}
    return Group(task, [replace(one, desirable=name == "demonstration") for name, one in replays.items()])


class EpisodesOfConfig(Config):
    """The episodes of a run as preferences, priced by the rewards of this stage. A pair is the best and the
    worst episode of a group; with kto each episode counts alone.
    """

    run: Path = Field(description="a run directory with trajectories; this run's own has its earlier stages")
    stage: str | None = Field(
        default=None, description="the stage whose episodes are taken; null takes all that sampled episodes"
    )


class EpisodePairs:
    """The groups of a run, shuffled again in each pass over them. All ranks have the same."""

    def __init__(
        self, groups: Iterable[Group], per_step: int, seed: int, form: PreferenceForm, place: str
    ) -> None:
        self.form, self.groups = form, list[Group]()
        self.metrics = dict.fromkeys(EPISODE_PAIR_METRICS, 0.0) if form == "pairs" else {}
        for group in groups:
            pair = group if form == "labels" else best_and_worst(group)
            if isinstance(pair, Group):
                self.groups.append(pair)
            else:
                self.metrics[pair] += 1
        if not self.groups:
            ties, unlike = self.metrics.values()
            raise AgentPeftError(
                f"{place}: {ties:.0f} groups have one reward each, and in {unlike:.0f} the best and the "
                "worst episode do not begin alike, so there is no pair; give a run whose groups differ"
            )
        self.order = TaskOrder([Task(str(number)) for number in range(len(self.groups))], per_step, seed)

    def collect(self, step: int) -> Collection:
        groups = [self.groups[int(task.id)] for task in self.order.at(step)]
        # a step may have a group twice, and its trajectories are distinguished by identity
        copies = [Group(group.task, [replace(t) for t in group.trajectories]) for group in groups]
        collection = Collection(copies, metrics=self.metrics)
        return with_mismatched(collection) if self.form == "labels" else collection


def best_and_worst(group: Group) -> Group | str:
    """The first of the group's best trajectories and the first of its worst, or the metric that counts why
    they are no pair: all have one reward, or the two do not have the same opening.

    >>> turn = Turn((1,), (2,), (-0.5,))
    >>> bad, good = (Trajectory(Task("t"), (turn,), rewards=(reward,)) for reward in (0.0, 1.0))
    >>> [t.reward for t in best_and_worst(Group(Task("t"), [bad, good])).trajectories]
    [1.0, 0.0]
    >>> best_and_worst(Group(Task("t"), [good, good]))
    'groups_tied'
    """
    best = max(group.trajectories, key=lambda t: t.reward)
    worst = min(group.trajectories, key=lambda t: t.reward)
    if is_constant(Group(group.task, [best, worst])):
        return EPISODE_PAIR_METRICS[0]
    if best.turns[0].observation != worst.turns[0].observation:
        return EPISODE_PAIR_METRICS[1]
    return Group(group.task, [best, worst])


def with_mismatched(collection: Collection) -> Collection:
    """The collection with as many mismatched trajectories in each group as it has others: its opening, and
    the actions of the next group of another task. Where there is no such group, there are none.

    They are cut to the length of the longest trajectory, which the model is known to read.
    """
    groups = collection.groups
    longest = max(len(row) for group in groups for t in group.trajectories for row in t.rows)
    following = [
        next((other for other in (*groups[n + 1 :], *groups[:n]) if other.task.id != group.task.id), None)
        for n, group in enumerate(groups)
    ]
    return replace(
        collection,
        groups=[
            group
            if other is None
            else replace(group, mismatched=list(_mismatched(group, other.trajectories, longest)))
            for group, other in zip(groups, following, strict=True)
        ],
    )


def _mismatched(group: Group, others: Sequence[Trajectory], longest: int) -> Iterator[Trajectory]:
    for number, own in enumerate(group.trajectories):
        first, *later = others[number % len(others)].turns
        turns, room = list[Turn](), longest
        for turn in (replace(first, observation=own.turns[0].observation), *later):
            room -= len(turn.observation)
            if room <= 0 or (turns and turn.new_row):  # that row shows the other opening
                break
            action = turn.action[:room]
            # no policy sampled them after this opening: the trainer scores them
            forced = tuple(place for place in turn.forced if place < len(action))
            zeros = (0.0,) * len(action)
            turns.append(replace(turn, action=action, logprobs=zeros, forced=forced))
            room -= len(turn.action)
        yield Trajectory(group.task, tuple(turns))


# -- the episodes of a run -----------------------------------------------------------------------------------


def read_groups(config: EpisodesOfConfig, chat: ChatTokenizer, rewards: RewardConfig) -> Iterator[Group]:
    """The groups that a run's policy sampled, in the order of its steps, with the rewards that ``rewards``
    gives them. ``runs/trajectories.py`` wrote them.
    """
    paths = sorted((config.run.expanduser() / "trajectories").glob("step_*.jsonl"))
    others, found = set[str](), False
    for path in paths:
        try:
            content = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=2)
            lines = [json.loads(line) for line in content.splitlines()]
            arrays = read_arrays(path.with_suffix(".safetensors"))
            stage = str(lines[0]["stage"]) if lines else ""
            if "sampler_logprobs" not in arrays or config.stage not in (None, stage):
                others.add(stage)  # of demonstrations, or not asked for
                continue
            episodes = [price(read_episode(line, arrays), rewards) for line in lines]
        except (LookupError, TypeError, ValueError) as error:
            raise AgentPeftError(f"{path}: is damaged ({error}); take another run") from error
        for line, trajectory in zip(lines, episodes, strict=True):
            _check_tokens(line, trajectory, chat, path)
        for _, members in groupby(zip(lines, episodes, strict=True), key=lambda pair: pair[0]["group"]):
            trajectories = [trajectory for _, trajectory in members]
            found = True
            yield Group(trajectories[0].task, trajectories)
    if not found:
        stage = "" if config.stage is None else f" of a stage {config.stage!r}"
        there = f"; it has those of {', '.join(sorted(others))}" if others else ""
        raise AgentPeftError(
            f"episodes_of.run: {config.run} holds no episodes{stage} that its policy sampled{there}; give "
            "the run_dir of a run that keeps its trajectories"
        )


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a step's episodes (``runs/trajectories.py``)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return load(read_bytes(path, "the arrays of the trajectories", MAX_JSONL_BYTES, unlinked=2))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def read_episode(line: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trajectory:
    """The trajectory of a line, without rewards. Its turns are the runs of tokens in the mask."""
    span = slice(*arrays["offsets"][line["row"] : line["row"] + 2].tolist())
    columns = (arrays[name][span].tolist() for name in ("tokens", "mask", "sampler_logprobs"))
    turns, observation = list[Turn](), tuple[int, ...]()
    for is_action, members in groupby(zip(*columns, strict=True), key=lambda token: token[1]):
        tokens, _, logprobs = zip(*members, strict=True)
        if is_action:
            number = len(turns)
            valid, cut = number not in line["invalid_turns"], number in line["cut_turns"]
            scores = line.get("turn_scores")
            score = None if scores is None else scores[number]
            forced = tuple(line["forced"][number]) if "forced" in line else ()
            new_row = number in line.get("new_rows", ())
            turns.append(Turn(observation, tokens, logprobs, valid, cut, False, score, forced, new_row))
        observation = () if is_action else tokens
    if len(turns) != len(line["rewards"]):
        raise ValueError(f"row {line['row']} has {len(turns)} turns and {len(line['rewards'])} rewards")
    return Trajectory(
        Task(line["task"], tuple(line["skills"])),
        tuple(turns),
        tuple(Message.from_json(message) for message in line["messages"]),
        Outcome(line["outcome"]),
        StopReason(line["stop_reason"]),
        score=line.get("score"),
        seed=line["seed"],
    )


def _check_tokens(line: Mapping[str, Any], trajectory: Trajectory, chat: ChatTokenizer, path: Path) -> None:
    replies = [message for message in trajectory.messages if message.role == "assistant"]
    text = chat.open_thought + chat.decode_action(trajectory.turns[-1].action)
    parts = [
        (one.thought or "", one.content, *(call.name for call in one.tool_calls)) for one in replies[-1:]
    ]
    if not all(part in text for part in chain(*parts)):
        raise AgentPeftError(
            f"{path}: the tokens of row {line['row']} are not those of this policy's tokenizer; give a run "
            "with the same model"
        )
