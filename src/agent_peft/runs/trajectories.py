"""Episodes on disk: one line of JSON for each, and next to the lines one file with their arrays.

    trajectories/step_000012.jsonl         a record of each episode (``episode_record``)
    trajectories/step_000012.safetensors   their tokens, masks, log-probabilities and advantages

Evaluations write the same two files with ``write_episodes``, and ``reading.py`` reads both. The arrays are
written first, so a line never names a row that is not there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray
from safetensors.numpy import save

from agent_peft.files import write_atomic
from agent_peft.types import Group, Trajectory

if TYPE_CHECKING:
    from agent_peft.configuration.run_config import TrajectoriesConfig
    from agent_peft.runs.observers import RunStep
    from agent_peft.training.step_metrics import TokenValues

LINES, ARRAYS = ".jsonl", ".safetensors"
_STEP = re.compile(r"\.?step_(\d{6,})\.(?:jsonl?|safetensors)(?:\.aside)?")


def episode_record(
    trajectory: Trajectory, *, group: int, attempt: int, row: int, advantages: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return an episode of a training step or of an evaluation as JSON values.

    Args:
        group: the number of its task in the step, from 0.
        attempt: its number in the group, from 0.
        row: its row in the arrays next to the lines.
        advantages: one for each turn; None where nothing was learned from it.

    >>> from agent_peft.types import Task, Turn
    >>> solved = Trajectory(Task("t"), (Turn((1, 2), (3,), (-0.5,)),), rewards=(1.0,), seed=7)
    >>> record = episode_record(solved, group=0, attempt=3, row=3)
    >>> record["task"], record["attempt"], record["seed"], record["num_tokens"]
    ('t', 3, 7, 3)
    """
    mistakes = [number for number, turn in enumerate(trajectory.turns) if turn.mistake]
    new_rows = [number for number, turn in enumerate(trajectory.turns) if turn.new_row]
    scores = [turn.score for turn in trajectory.turns]
    forced = [list(turn.forced) for turn in trajectory.turns]
    return {
        "group": group,
        "attempt": attempt,
        "seed": trajectory.seed,
        "row": row,
        "task": trajectory.task.id,
        "skills": list(trajectory.task.skills),
        "outcome": trajectory.outcome.value,
        "stop_reason": trajectory.stop_reason.value,
        **({} if trajectory.score is None else {"score": trajectory.score}),
        **({"turn_scores": scores} if any(score is not None for score in scores) else {}),
        **({"forced": forced} if any(forced) else {}),
        "rewards": list(trajectory.rewards),
        "reward_terms": dict(trajectory.reward_terms),
        **({} if advantages is None else {"advantages": list(advantages)}),
        "num_tokens": _length(trajectory),
        "num_action_tokens": trajectory.num_action_tokens,
        "invalid_turns": [number for number, turn in enumerate(trajectory.turns) if not turn.valid],
        "cut_turns": [number for number, turn in enumerate(trajectory.turns) if turn.cut],
        **({"mistake_turns": mistakes} if mistakes else {}),
        **({"new_rows": new_rows} if new_rows else {}),
        **({} if trajectory.reference is None else {"reference": trajectory.reference}),
        "messages": [message.to_json() for message in trajectory.messages],
    }


def episode_arrays(
    trajectories: Sequence[Trajectory], *, sampled: bool = True, values: TokenValues | None = None
) -> dict[str, NDArray[Any]]:
    """Return the arrays of R episodes with N tokens in all. Row r is ``[offsets[r]:offsets[r + 1]]``.

    Args:
        sampled: False for demonstrations, which no sampler gave a log-probability.
        values: what the trainer computed for the same tokens.

    Returns:
        ``offsets`` (R + 1) int64, ``tokens`` (N) int32, ``mask`` (N) bool: an action's token; and, where
        there are any, ``sampler_logprobs``, ``trainer_logprobs`` and ``advantages`` (N) fp32.

    >>> from agent_peft.types import Task, Turn
    >>> arrays = episode_arrays([Trajectory(Task("t"), (Turn((1,), (2,), (-0.5,)),))])
    >>> {name: array.tolist() for name, array in arrays.items()}
    {'offsets': [0, 2], 'tokens': [1, 2], 'mask': [False, True], 'sampler_logprobs': [0.0, -0.5]}
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    lengths: list[int] = []  # of observation, action, observation, …
    for trajectory in trajectories:
        for turn in trajectory.turns:
            tokens += turn.observation
            tokens += turn.action
            logprobs += [0.0] * len(turn.observation)
            logprobs += turn.logprobs
            lengths += [len(turn.observation), len(turn.action)]
    arrays: dict[str, NDArray[Any]] = {
        "offsets": numpy.cumsum([0, *map(_length, trajectories)], dtype=numpy.int64),
        "tokens": numpy.array(tokens, dtype=numpy.int32),
        "mask": numpy.repeat(numpy.arange(len(lengths)) % 2 == 1, lengths),
    }
    if sampled:
        arrays["sampler_logprobs"] = numpy.array(logprobs, dtype=numpy.float32)
    if values is not None and values.logprobs is not None:
        arrays["trainer_logprobs"] = values.logprobs.numpy()
    if values is not None and values.advantages is not None:
        arrays["advantages"] = values.advantages.numpy()
    return arrays


def write_episodes(
    folder: Path,
    name: str,
    place: Mapping[str, Any],
    groups: Sequence[Group],
    *,
    sampled: bool = True,
    values: TokenValues | None = None,
) -> Path:
    """Write ``folder/name.jsonl`` and its arrays, each of them whole or not at all. Returns the path of the
    lines. ``place``: comes first in each line, such as ``{"step": 20}``.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    numbers = [(group, attempt) for group, of in enumerate(groups) for attempt in range(len(of.trajectories))]
    arrays = episode_arrays(trajectories, sampled=sampled, values=values)
    lines = []
    for row, (trajectory, (group, attempt)) in enumerate(zip(trajectories, numbers, strict=True)):
        advantages = None
        if "advantages" in arrays:
            start, end = arrays["offsets"][row : row + 2]
            advantages = _of_turns(trajectory, arrays["advantages"][start:end])
        record = episode_record(trajectory, group=group, attempt=attempt, row=row, advantages=advantages)
        lines.append(json.dumps({**place, **record}) + "\n")
    path = folder / f"{name}{LINES}"
    write_atomic(path.with_suffix(ARRAYS), save(arrays), unlinked=2)
    write_atomic(path, "".join(lines), unlinked=2)
    return path


def write_trajectories(
    folder: Path,
    step: int,
    stage: str,
    groups: Sequence[Group],
    *,
    sampled: bool = True,
    values: TokenValues | None = None,
    version: int | None = None,
) -> Path:
    """Write the episodes of a step to ``folder/step_000012.jsonl`` and its arrays. ``version``: the steps
    that were done when they were sampled, in a stage with a lag.
    """
    place = {"stage": stage, "step": step, **({} if version is None else {"version": version})}
    return write_episodes(folder, f"step_{step:06d}", place, groups, sampled=sampled, values=values)


def keep_trajectories(folder: Path, step: RunStep, keep: TrajectoriesConfig) -> None:
    """Write a step's episodes if ``keep`` wants them, and remove those of older steps that it does not."""
    if step.number % keep.every:
        return
    stage, collection = step.stage, step.collection
    write_trajectories(
        folder,
        step.number,
        stage.name,
        collection.groups,
        sampled=stage.samples,
        values=step.token_values,
        version=step.number - collection.lag if stage.lag else None,
    )
    if keep.last is not None:
        for number in steps_in(folder)[: -keep.last]:
            remove_step(folder, number)


def steps_in(folder: Path) -> list[int]:
    """Return the numbers of the steps with a file in ``folder``, whole or not, in their order."""
    matches = map(_STEP.fullmatch, os.listdir(folder) if folder.is_dir() else ())
    return sorted({int(match[1]) for match in matches if match})


def remove_step(folder: Path, step: int) -> None:
    """Remove the files of a step or of its evaluation, the report and the lines before the arrays."""
    for name in (f"step_{step:06d}{suffix}" for suffix in (".json", LINES, ARRAYS)):
        (folder / name).unlink(missing_ok=True)
        (folder / f".{name}.aside").unlink(missing_ok=True)  # left by a process that was killed


def _length(trajectory: Trajectory) -> int:
    return sum(len(turn.observation) + len(turn.action) for turn in trajectory.turns)


def _of_turns(trajectory: Trajectory, advantages: NDArray[Any]) -> list[float] | None:
    """The mean advantage of each turn's action tokens; None where the trainer set none."""
    means, end = [], 0
    for turn in trajectory.turns:
        start = end + len(turn.observation)
        end = start + len(turn.action)
        action = advantages[start:end].astype(numpy.float64)
        means.append(float(action.mean()) if len(action) else 0.0)
    return None if numpy.isnan(means).any() else means
