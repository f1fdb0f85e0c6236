"""The episodes of a run for the page: a line of facts for each, and the whole of each when it is asked for.

A run in progress has a torn last line, and arrays may be gone: the page shows what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
from numpy.typing import NDArray

from agent_peft.files import MAX_JSONL_BYTES, read_bytes
from agent_peft.runs.reading import RunRecord, read_lines
from agent_peft.types import AgentPeftError, Message

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer

T = TypeVar("T")
_SHOWN = (
    *("seed", "skills", "rewards", "reward_terms", "score", "num_tokens", "num_action_tokens"),
    *("invalid_turns", "cut_turns", "mistake_turns", "reference"),
)
DIGITS = 4  # of log-probabilities and advantages on the page


@dataclass(frozen=True)
class EpisodeFile:
    """The lines of one step or evaluation.

    Attributes:
        key: its name in the page, such as ``r0_step_000012``; letters, digits and ``_`` only.
        evaluation: its name, if the episodes are of one.
    """

    key: str
    path: Path
    step: int
    evaluation: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the list of episodes shows of one."""

    stage: str
    group: int
    attempt: int
    task: str
    skills: tuple[str, ...]
    outcome: str
    stop_reason: str
    reward: float
    advantage: float | None
    tokens: int


def episode_files(run: RunRecord, number: int) -> list[EpisodeFile]:
    """The files with episodes of run ``number`` of a report, evaluations last."""
    folder = run.folder
    steps = [
        EpisodeFile(f"r{number}_step_{step:06d}", folder / "trajectories" / f"step_{step:06d}.jsonl", step)
        for step in run.trajectories.steps
    ]
    evaluations = [
        EpisodeFile(f"r{number}_evaluation_{place}", one.path.with_suffix(".jsonl"), -1, one.name)
        for place, one in enumerate(run.evaluations.values())
        if one.episodes.steps  # of recorded replies there are none
    ]
    return steps + evaluations


def facts_of(path: Path) -> Sequence[Facts]:
    """The facts of each episode in a file. They are read again only when the file has changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise AgentPeftError(f"{path}: cannot be read ({error.strerror}); write the report again") from error
    return _facts_of(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=10_000)
def _facts_of(path: Path, changed: int, size: int) -> Sequence[Facts]:
    return _told(path, lambda: [_facts(line) for line in read_lines(path)])


def _facts(line: Mapping[str, Any]) -> Facts:
    advantages = line.get("advantages")
    return Facts(
        stage=str(line.get("stage", "")),  # of training
        group=int(line["group"]),
        attempt=int(line["attempt"]),
        task=str(line["task"]),
        skills=tuple(map(str, line["skills"])),
        outcome=str(line["outcome"]),
        stop_reason=str(line["stop_reason"]),
        reward=math.fsum(map(float, line["rewards"])),
        advantage=math.fsum(map(float, advantages)) / len(advantages) if advantages else None,
        tokens=int(line["num_tokens"]),
    )


def chunk(file: EpisodeFile, chat: ChatTokenizer | None) -> dict[str, Any]:
    """The episodes of a file, whole, as JSON values.

    Returns:
        ``words``: id and text of each token that occurs, and ``episodes``. An episode's ``tokens`` are places
        in ``words``; ``runs`` are the lengths of what was read, written, read, …; ``sampler`` and ``trainer``
        the log-probabilities of what was written; ``advantages`` pairs of a value and how many
        written tokens in a row have it. Without ``chat`` there are no tokens.
    """

    def read() -> dict[str, Any]:
        lines = read_lines(file.path)
        arrays, fault = _arrays(file.path) if chat is not None else ({}, None)
        ids, places = numpy.unique(arrays.get("tokens", numpy.zeros(0, numpy.int32)), return_inverse=True)
        spelled = [] if chat is None else [[int(token), _text_of(chat, int(token))] for token in ids]
        return {
            "words": spelled,
            "fault": fault,
            "episodes": [
                {**_line(line), **(_tokens(line, arrays, places) if arrays else {})} for line in lines
            ],
        }

    return _told(file.path, read)


def _text_of(chat: ChatTokenizer, token: int) -> str | list[int]:
    """The text of a token; its bytes, which a reader joins with their neighbours, where those are no text."""
    content = chat.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


def _line(line: Mapping[str, Any]) -> dict[str, Any]:
    content = {name: line[name] for name in _SHOWN if name in line}
    content["turn_advantages"] = line.get("advantages")
    messages = map(Message.from_json, line["messages"])
    content["messages"] = [
        # of a reply with calls or a thought, the tokens are all that was written
        [str(one.role), one.text, *([1] if one.tool_calls or one.thought is not None else [])]
        for one in messages
    ]
    return content


def _tokens(
    line: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], places: NDArray[Any]
) -> dict[str, Any]:
    row = int(line["row"])
    start, end = (int(place) for place in arrays["offsets"][row : row + 2])
    mask = arrays["mask"][start:end]
    turns = numpy.flatnonzero(numpy.diff(mask, prepend=False, append=not mask[-1] if len(mask) else True))
    content: dict[str, Any] = {
        "tokens": places[start:end].tolist(),
        "runs": numpy.diff(turns, prepend=0).tolist(),
    }
    for name, array in (("sampler", "sampler_logprobs"), ("trainer", "trainer_logprobs")):
        if array in arrays:
            content[name] = _numbers(arrays[array][start:end][mask])
    if "advantages" in arrays:
        content["advantages"] = _lengths(_numbers(arrays["advantages"][start:end][mask]))
    return content


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Rounded; what is not finite, which JSON lacks, is None."""
    rounded = numpy.round(values.astype(numpy.float64), DIGITS)
    if numpy.isfinite(rounded).all():
        numbers: list[float | None] = rounded.tolist()
        return numbers
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def _lengths(values: Iterable[float | None]) -> list[list[Any]]:
    """
    >>> _lengths([0.5, 0.5, None])
    [[0.5, 2], [None, 1]]
    """
    pairs: list[list[Any]] = []
    for value in values:
        if pairs and pairs[-1][0] == value:
            pairs[-1][1] += 1
        else:
            pairs.append([value, 1])
    return pairs


def _arrays(lines: Path) -> tuple[dict[str, NDArray[Any]], str | None]:
    """The arrays next to the lines, or why there are none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = lines.with_suffix(".safetensors")
    try:
        arrays: dict[str, NDArray[Any]] = load(read_bytes(path, "the arrays", MAX_JSONL_BYTES))
    except (AgentPeftError, SafetensorError, ValueError) as error:
        return {}, f"{path.name}: the tokens cannot be read ({type(error).__name__})"
    if not {"offsets", "tokens", "mask"} <= arrays.keys():
        return {}, f"{path.name}: holds no tokens"
    return arrays, None


def _told(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise AgentPeftError(
            f"{path}: holds a line that is not an episode ({type(error).__name__}: {error})"
        ) from error
