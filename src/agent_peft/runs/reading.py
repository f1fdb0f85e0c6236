"""Reading a run: its configuration, metrics, episodes and evaluations as plain objects, without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_peft.configuration import yaml12
from agent_peft.files import MAX_JSONL_BYTES, MEGABYTE, parse_json, read_bytes, read_text
from agent_peft.lookup import install, nearest, needed
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.runs.layout import check_run_files
from agent_peft.types import AgentPeftError, Message, Outcome, StopReason

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    DataFrame = Any  # pandas has no types of its own

_REPORT = re.compile(r"step_(\d{6,})\.json")
_NOT_FINITE = ("nan", "inf", "-inf")  # as texts in metrics.jsonl, because JSON has no such numbers


def load_run(path: Path | str) -> RunRecord:
    """Return what a run directory holds. Everything is read when it is used, and may still be written: the
    reader stops at a last line that is not complete.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.yaml").is_file():
        fault = "holds no config.yaml, so it is not a run directory" if folder.is_dir() else "is not a folder"
        raise AgentPeftError(f"{folder}: {fault}; give the run_dir of a run")
    check_run_files(folder)
    return RunRecord(folder)


@dataclass(frozen=True)
class RunRecord:
    """A run on disk."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every effective value of the configuration."""
        path = self.folder / "config.yaml"
        content: dict[str, Any] = yaml12.plain(
            yaml12.parse(read_text(path, "a YAML file", MEGABYTE, unlinked=1), str(path))
        )
        return content

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """``step``, ``stage`` and the metrics of each step."""
        return [
            {name: float(value) if value in _NOT_FINITE else value for name, value in record.items()}
            for record in self._lines("metrics.jsonl")
        ]

    @cached_property
    def timing(self) -> list[dict[str, Any]]:
        """``step``, ``seconds``, tokens and memory of each step."""
        return self._lines("timing.jsonl")

    @property
    def trajectories(self) -> Episodes:
        """The episodes of training, of the steps that were kept."""
        paths = (self.folder / "trajectories").glob("step_*.jsonl")
        names = ((path.stem.removeprefix("step_"), path) for path in paths)
        steps = {int(number): path for number, path in names if number.isdecimal()}
        return Episodes({step: steps[step] for step in sorted(steps)})

    @property
    def stages(self) -> list[tuple[str, int]]:
        """The name and the number of steps of each stage; nothing where the configuration is damaged."""
        with suppress(AgentPeftError, KeyError, TypeError, ValueError):
            return [(str(stage["name"]), int(stage["steps"])) for stage in self.config["stages"]]
        return []

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """The evaluations by name, such as ``after_grpo``, in the order of the run."""
        stages = self.stages
        paths = evaluation_paths(self.folder).items()
        evaluations = [Evaluation(path, step, evaluation_name(stages, step)) for step, path in paths]
        return {one.name: one for one in evaluations}

    def evaluation(self, name: str) -> Evaluation:
        """Return the evaluation of this name; a blank counts as ``_``."""
        evaluations = self.evaluations
        if (evaluation := evaluations.get(name.replace(" ", "_"))) is None:
            advice = nearest(name, list(evaluations)) if evaluations else "there is none yet"
            raise AgentPeftError(f"{self.folder}: has no evaluation {name!r}; {advice}")
        return evaluation

    def metrics_frame(self) -> DataFrame:
        """The metrics as a pandas ``DataFrame``, one row for each step."""
        return _frame(self.metrics)

    def plot(self, metrics: str | Sequence[str] = ()) -> Figure:
        """Return a matplotlib figure of success, reward and loss, or of the metrics named, in each step, with
        the points of evaluations and their 95 % intervals.
        """
        from agent_peft.runs.plot import plot_run

        reports = [evaluation.report for evaluation in self.evaluations.values()]
        names = [metrics] if isinstance(metrics, str) else metrics
        return plot_run(self.folder, self.metrics, reports, names)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return read_lines(path) if path.is_file() else []


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run."""

    path: Path  # of its report
    step: int  # of the run, when it was made
    label: str  # such as "after grpo"

    @property
    def name(self) -> str:
        return self.label.replace(" ", "_")

    @cached_property
    def report(self) -> EvaluationReport:
        """Its rates and intervals."""
        return replace(read_report(self.path), name=self.label, step=self.step)

    @property
    def episodes(self) -> Episodes:
        lines = self.path.with_suffix(".jsonl")
        return Episodes({self.step: lines} if lines.is_file() else {}, self.name)


def evaluation_paths(run: Path) -> dict[int, Path]:
    """Return the reports of a run's evaluations, by the number of its steps that were done, in order."""
    matches = ((_REPORT.fullmatch(path.name), path) for path in (run / "evaluations").glob("step_*.json"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def evaluation_name(stages: Iterable[tuple[str, int]], step: int) -> str:
    """Return the name of the evaluation after ``step`` steps of a run. ``stages``: the name and the number of
    steps of each.

    >>> [evaluation_name([("sft", 2), ("rloo", 4)], step) for step in (0, 2, 4, 6)]
    ['base', 'after sft', 'step 4', 'after rloo']
    """
    if step == 0:
        return "base"
    keys, done = [], 0
    for name, steps in stages:
        keys.append(name.replace(" ", "_"))
        done += steps
        if done == step:
            number = keys.count(keys[-1])
            return f"after {name}" + (f" ({number})" if number > 1 else "")
    return f"step {step}"


def read_report(path: Path) -> EvaluationReport:
    """Read the report of an evaluation."""
    try:
        text = read_text(path, "a JSON file", 256 * MEGABYTE, unlinked=2)
        return EvaluationReport.from_json(parse_json(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it, and it is made again"
        ) from error


class Episodes:
    """Episodes on disk, by step. Iteration reads one step after another."""

    def __init__(self, files: Mapping[int, Path], evaluation: str | None = None) -> None:
        self._files, self._evaluation = files, evaluation

    @property
    def steps(self) -> list[int]:
        """The steps that have episodes here."""
        return list(self._files)

    def of_step(self, step: int) -> list[EpisodeRecord]:
        """The episodes of a step."""
        if step not in self._files:
            near = min(self.steps, key=lambda other: abs(other - step), default=None)
            advice = "there are none at all" if near is None else f"the nearest that has some is {near}"
            raise AgentPeftError(f"step {step} has no trajectories on disk; {advice}")
        path = self._files[step]
        arrays = _Arrays(path.with_suffix(".safetensors"))
        return [
            _record({**line, "evaluation": self._evaluation}, arrays, f"{path}:{n}")
            for n, line in enumerate(read_lines(path), start=1)
        ]

    def __iter__(self) -> Iterator[EpisodeRecord]:
        for step in self._files:
            yield from self.of_step(step)

    def frame(self) -> DataFrame:
        """A pandas ``DataFrame`` with one row for each episode, and the terms of its reward as columns. It
        holds neither messages nor tokens.
        """
        return _frame(episode.summary for episode in self)


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """An episode as a run wrote it, with its tokens where these are asked for: ``tokens`` and the other
    arrays have one number for each of T tokens.
    """

    group: int
    attempt: int
    seed: int
    row: int
    task: str
    skills: tuple[str, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    stop_reason: StopReason
    rewards: tuple[float, ...]  # of each turn
    reward_terms: Mapping[str, float]
    num_tokens: int
    num_action_tokens: int
    invalid_turns: tuple[int, ...]
    cut_turns: tuple[int, ...]
    stage: str | None = None  # in training
    evaluation: str | None = None  # in an evaluation
    step: int | None = None
    version: int | None = None  # steps that were done when it was sampled, in a stage with a lag
    score: float | None = None
    reference: str | None = None  # what would have been right
    mistake_turns: tuple[int, ...] = ()  # of a demonstration: shown, and not learned
    # of each turn, the places in its action that the sampler set (``Turn.forced``); empty where it set none
    forced: tuple[tuple[int, ...], ...] = ()
    new_rows: tuple[int, ...] = ()  # turns that begin another row: the template rewrote the history
    advantages: tuple[float, ...] | None = None  # of each turn, the mean over its action tokens
    _arrays: _Arrays = field(repr=False, compare=False)

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def tokens(self) -> NDArray[Any]:
        """(T,) int32, as the policy saw and sampled them."""
        return self._arrays.row("tokens", self.row)

    @property
    def mask(self) -> NDArray[Any]:
        """(T,) bool: the token was sampled, or is of an action of a demonstration."""
        return self._arrays.row("mask", self.row)

    @property
    def sampler_logprobs(self) -> NDArray[Any] | None:
        """(T,) fp32, nats, zero off the mask; None for demonstrations."""
        return self._arrays.row_or_none("sampler_logprobs", self.row)

    @property
    def trainer_logprobs(self) -> NDArray[Any] | None:
        """(T,) fp32, nats, zero off the mask, NaN in an episode without a forward before the step's first
        update; None for demonstrations and evaluations.
        """
        return self._arrays.row_or_none("trainer_logprobs", self.row)

    @property
    def token_advantages(self) -> NDArray[Any] | None:
        """(T,) fp32, zero off the mask; None where the algorithm sets none."""
        return self._arrays.row_or_none("advantages", self.row)

    @property
    def summary(self) -> dict[str, Any]:
        """Its facts in one flat mapping, without messages and tokens."""
        place = {"stage": self.stage} if self.evaluation is None else {"evaluation": self.evaluation}
        advantage = {"advantage": sum(self.advantages) / len(self.advantages)} if self.advantages else {}
        return {
            **place,
            **{name: getattr(self, name) for name in ("step", "group", "attempt", "seed", "task")},
            "outcome": self.outcome.value,
            "stop_reason": self.stop_reason.value,
            "score": self.score,
            "reward": self.reward,
            **{f"reward.{name}": value for name, value in self.reward_terms.items()},
            **advantage,
            "turns": len(self.rewards),
            "num_tokens": self.num_tokens,
            "num_action_tokens": self.num_action_tokens,
        }


@dataclass(frozen=True)
class _Arrays:
    """The arrays next to a file of lines, read once when the first of them is used."""

    path: Path

    @cached_property
    def _content(self) -> dict[str, NDArray[Any]]:
        from agent_peft.rollout.pairs import read_arrays

        try:
            return read_arrays(self.path)
        except ValueError as error:
            raise AgentPeftError(
                f"{self.path}: is damaged ({error}); the lines next to it are whole"
            ) from error

    def row(self, name: str, row: int) -> NDArray[Any]:
        try:
            start, end = self._content["offsets"][row : row + 2]
            return self._content[name][start:end]
        except (KeyError, ValueError) as error:
            raise AgentPeftError(f"{self.path}: has no {name!r} of row {row}; it is damaged") from error

    def row_or_none(self, name: str, row: int) -> NDArray[Any] | None:
        return self.row(name, row) if name in self._content else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file, up to a last line that is not complete."""
    *lines, _ = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=1).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise AgentPeftError(
                f"{path}:{number}: is damaged ({error}); repair or remove the line"
            ) from error
        records.append(record)
    return records


def _record(line: Mapping[str, Any], arrays: _Arrays, place: str) -> EpisodeRecord:
    names = {one.name for one in fields(EpisodeRecord)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in line.items()
        if name in names
    }
    try:
        values["messages"] = tuple(Message.from_json(message) for message in line["messages"])
        values["outcome"], values["stop_reason"] = Outcome(line["outcome"]), StopReason(line["stop_reason"])
        return EpisodeRecord(**values, _arrays=arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise AgentPeftError(
            f"{place}: is not a record of an episode ({error}); repair or remove it"
        ) from error


def _frame(records: Iterable[Mapping[str, Any]]) -> DataFrame:
    with needed(f"data frames need pandas, which is not installed; {install('pandas')}"):
        import pandas
    return pandas.DataFrame(list(records))
