"""Runs compared: means over seeds for each configuration, with intervals, and paired tests on the same
held-out tasks. Torch is not loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.table import Table
from rich.text import Text

from agent_peft.rollout.intervals import SHARES, Mean, in_words, mean_over_tasks
from agent_peft.rollout.statistics import Comparison, EvaluationReport, other_settings, paired_test
from agent_peft.runs.overview import find_runs
from agent_peft.runs.reading import RunRecord, load_run
from agent_peft.types import AgentPeftError

OWN_KEYS = ("run_dir", "seed", "threads")  # runs that differ in nothing else are seeds of one experiment
COLLAPSED_TO = 0.5  # of the success before, or of the group's median; with a p below
COLLAPSE_P = 0.01
_CHOICE = ".kind"  # the keys below the same mapping follow from it


@dataclass(frozen=True)
class Measured:
    """A run with its evaluations in order; the last is the one that is compared."""

    run: RunRecord
    reports: Sequence[EvaluationReport]

    @property
    def last(self) -> EvaluationReport:
        return self.reports[-1]


@dataclass(frozen=True)
class Seeds:
    """The runs of one configuration. ``settings`` are the keys in which it differs from the others."""

    name: str
    settings: Mapping[str, str]
    measured: Sequence[Measured]

    @cached_property
    def last(self) -> EvaluationReport:
        """The last evaluations as one: an attempt of each seed at each task."""
        first, *others = (one.last for one in self.measured)
        outcomes, losses = dict(first.outcomes), dict(first.losses)
        for other in others:
            paired_test(first, other)  # raises where the tasks are others
            outcomes = {task: (*tried, *other.outcomes[task]) for task, tried in outcomes.items()}
            pairs = {task: (one, other.losses[task]) for task, one in losses.items()}
            losses = {task: (x + y, m + n) for task, ((x, m), (y, n)) in pairs.items()}
        return replace(first, outcomes=outcomes, losses=losses)

    def values(self, measure: str) -> list[float]:
        """A measure of the last evaluation for each seed, in their order; empty where one lacks it."""
        values = [one.last.metric(f"evaluation.{measure}") for one in self.measured]
        return [] if None in values else [value for value in values if value is not None]

    def mean(self, measure: str) -> Mean | None:
        """The mean over seeds. A rate's interval is cut at 0 and 1."""
        values = self.values(measure)
        mean = mean_over_tasks(values) if values else None
        if mean is None or mean.low is None or mean.high is None or measure not in SHARES:
            return mean
        return replace(mean, low=max(0.0, mean.low), high=min(1.0, mean.high))

    @property
    def start(self) -> float | None:
        """The mean before training of what is compared, where it was measured."""
        starts = [one.reports[0].headline.value for one in self.measured if one.reports[0].step == 0]
        return sum(starts) / len(starts) if len(starts) == len(self.measured) else None


@dataclass(frozen=True)
class RunComparison:
    """``pairs`` holds the test between each two groups, by their places, with p after Holm's correction."""

    groups: Sequence[Seeds]
    pairs: Mapping[tuple[int, int], Comparison]
    warnings: Sequence[str]

    @property
    def best(self) -> int:
        """The place of the group with the highest mean success, or the lowest mean loss."""
        means = [sum(values) / len(values) for group in self.groups if (values := group.values(self.measure))]
        return means.index(max(means) if self.measure == "success" else min(means))

    @property
    def measure(self) -> str:
        """What is compared."""
        return self.groups[0].last.measures[0]

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each group."""
        rows = []
        for place, group in enumerate(self.groups):
            row = {"name": group.name, **group.settings, "seeds": len(group.measured), "start": group.start}
            for measure in group.last.measures:
                if (mean := group.mean(measure)) is not None:
                    bounds = {f"{measure}_low": mean.low, f"{measure}_high": mean.high}
                    row |= {measure: mean.value, **bounds}
            test = self.pairs.get((place, self.best))
            rows.append(row | ({} if test is None else {"difference": -test.difference, "p": test.p}))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        groups = [
            {
                **row,
                "settings": dict(group.settings),
                "evaluation": group.last.name,
                "runs": [str(one.run.folder) for one in group.measured],
                "successes" if self.measure == "success" else "losses": group.values(self.measure),
            }
            for group, row in zip(self.groups, self.rows(), strict=True)
        ]
        pairs = [
            {"one": self.groups[one].name, "other": self.groups[other].name, **asdict(test)}
            for (one, other), test in self.pairs.items()
            if one < other
        ]
        return {"groups": groups, "pairs": pairs, "warnings": list(self.warnings)}

    def table(self) -> Table:
        """The table that ``agent-peft compare`` prints."""
        last, of_rates = self.groups[0].last, self.measure == "success"
        tasks = f"{last.headline.tasks} {last.unit}"
        title = f"held-out {self.measure}, mean over seeds (95 % interval), {tasks}"
        table = Table(title=title, title_justify="left")
        others = [
            name
            for name in last.measures[1:]
            if name != "reward" and any(group.values(name) for group in self.groups)
        ]
        names = [name.replace("_", " ") for name in (self.measure, *others)]
        for heading in ("what differs", "seeds", *names, "of each seed"):
            table.add_column(heading)
        for heading in ("before", f"to the best, {'points' if of_rates else 'nats'}", "p"):
            table.add_column(heading)
        for place, group in enumerate(self.groups):
            start, test = group.start, self.pairs.get((place, self.best))
            points = "best" if place == self.best else "other tasks"
            if test is not None:
                points = _reversed(test).text(points=of_rates)
            table.add_row(
                Text(group.name),
                str(len(group.measured)),
                *(
                    "" if (mean := group.mean(name)) is None else in_words(name, mean)
                    for name in (self.measure, *others)
                ),
                " ".join(
                    f"{100 * value:.1f}" if of_rates else f"{value:.3f}"
                    for value in group.values(self.measure)
                ),
                "" if start is None else f"{start:.1%}" if of_rates else f"{start:.3f}",
                points,
                "" if test is None else f"{test.p:.2g}",
            )
        if len(self.groups) > 1:
            what = "solve such tasks equally often" if of_rates else "do better on equally many"
            table.caption = f"p, if both {what} with these seeds: paired sign{'-flip' * of_rates} test"
            if (number := len(self.pairs) // 2) > 1:
                table.caption += f", corrected for {number} comparisons (Holm)"
        return table


def compare_runs(places: Sequence[Path], evaluation: str | None = None) -> RunComparison:
    """Compare runs. ``places``: run directories, and folders that are searched for some. ``evaluation``: the
    name of the evaluation to compare; None takes the one at the end of each run.
    """
    measured, warnings = list[Measured](), list[str]()
    for folder in dict.fromkeys(run for place in places for run in _runs(place)):
        run = load_run(folder)
        end = sum(steps for _, steps in run.stages) if evaluation is None else run.evaluation(evaluation).step
        reports = [one.report for one in run.evaluations.values() if one.step <= end]
        if reports and reports[-1].step == end:
            measured.append(Measured(run, reports))
        else:
            warnings.append(f"{folder}: has no evaluation at its end, after step {end}, and is left out")
    if not measured:
        raise AgentPeftError(f"nothing to compare: {warnings[0]}; name an earlier one with --evaluation")
    kinds = {one.last.unit: one.run.folder for one in measured}
    if len(kinds) > 1:
        places_of = ", ".join(f"{unit} by {folder}" for unit, folder in kinds.items())
        raise AgentPeftError(f"nothing to compare: the runs measured different things ({places_of})")
    groups = list(_groups(measured, warnings))
    pairs = _pairs(groups, warnings)
    for group in groups:
        warnings += _collapses(group)
        settings = (other_settings(one.last.settings, groups[0].last.settings) for one in group.measured)
        if keys := sorted({key for of_run in settings for key in of_run}):
            warnings.append(f"{group.name}: measured with other settings ({', '.join(keys)})")
    return RunComparison(groups, pairs, warnings)


def _runs(place: Path) -> list[Path]:
    if (place / "config.yaml").is_file() or not place.is_dir():
        return [place]
    if found := list(find_runs(place)):
        return found
    raise AgentPeftError(f"{place}: holds no runs; name run directories, or a folder of them")


def _groups(measured: Sequence[Measured], warnings: list[str]) -> Iterator[Seeds]:
    configs = [dict(flat_keys(one.run.config)) for one in measured]
    places = group_seeds(configs)
    settings = differences([configs[first] for first, *_ in places])
    for of_group, own in zip(places, settings, strict=True):
        name = ", ".join(f"{key}={value}" for key, value in own.items())
        runs = dict[str, Measured]()
        for one in (measured[place] for place in of_group):
            first = runs.setdefault(seed := str(one.run.config["seed"]), one)
            if first is not one:  # a copy adds no seed
                twin = f"has the seed {seed} of {first.run.folder}"
                warnings.append(f"{one.run.folder}: {twin}, and is left out")
        folder = measured[of_group[0]].run.folder.parent
        yield Seeds(name or str(folder), own, [runs[seed] for seed in sorted(runs)])


def _pairs(groups: Sequence[Seeds], warnings: list[str]) -> dict[tuple[int, int], Comparison]:
    """The tests between each two groups, both ways."""
    tests: dict[tuple[int, int], Comparison] = {}
    for one, other in combinations(range(len(groups)), 2):
        try:
            tests[one, other] = paired_test(groups[one].last, groups[other].last)
        except AgentPeftError as error:
            warnings.append(f"{groups[one].name} and {groups[other].name}: {error}")
    corrected = holm([test.p for test in tests.values()])
    for (one, other), p in zip(list(tests), corrected, strict=True):
        tests[one, other] = replace(tests[one, other], p=p)
        tests[other, one] = _reversed(tests[one, other])
    return tests


def _reversed(test: Comparison) -> Comparison:
    return Comparison(-test.difference, -test.high, -test.low, test.p)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979): they bound the chance of any false alarm.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = [1.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        least = max(least, min(1.0, ps[place] * (len(ps) - rank)))
        corrected[place] = least
    return corrected


def _collapses(group: Seeds) -> Iterator[str]:
    """A line for each seed whose success ended far below what it was, or below that of the other seeds."""
    if group.last.success is None:
        return
    middle = median_low(one.last.headline.value for one in group.measured)
    typical = next(one for one in group.measured if one.last.headline.value == middle)
    for one in group.measured:
        peak = max(one.reports[:-1], key=lambda report: report.headline.value, default=None)
        candidates = [] if peak is None else [(peak, f"{peak.name} it was")]
        if len(group.measured) > 2:
            candidates.append((typical.last, f"the median of {len(group.measured)} seeds is"))
        for better, what in candidates:
            try:
                p = paired_test(better, one.last).p
            except AgentPeftError:  # other tasks
                continue
            value, before = one.last.headline.value, better.headline.value
            if value < COLLAPSED_TO * before and p < COLLAPSE_P:
                yield (
                    f"{one.run.folder}: collapsed to {value:.1%} {one.last.name}; {what} {before:.1%} "
                    f"(p {p:.1g})"
                )
                break


# -- configurations ------------------------------------------------------------------------------------------


def flat_keys(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a configuration, with dots, and their values as text.

    >>> dict(flat_keys({"seed": 0, "stages": [{"steps": 2}], "at": ["end"]}))
    {'seed': '0', 'stages.0.steps': '2', 'at': '["end"]'}
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(place): item for place, item in enumerate(value)}
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from flat_keys(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def group_seeds(configs: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Group the places of runs that differ in nothing but ``OWN_KEYS``.

    >>> group_seeds([{"seed": "0", "a": "1"}, {"seed": "0", "a": "2"}, {"seed": "1", "a": "1"}])
    [[0, 2], [1]]
    """
    together: dict[Any, list[int]] = {}
    for number, config in enumerate(configs):
        rest = frozenset((key, value) for key, value in config.items() if key not in OWN_KEYS)
        together.setdefault(rest or number, []).append(number)
    return list(together.values())


def differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return for each configuration the keys in which they differ, as short as they are clear. A key of all
    stages counts once, and keys that follow from a ``kind`` are left out.

    >>> differences([{"stages.0.rate": "1", "stages.1.rate": "1"}, {"stages.0.rate": "2"}])
    [{'0.rate': '1', '1.rate': '1'}, {'0.rate': '2', '1.rate': ''}]
    >>> differences([{"stages.0.optimizer.rate": "1"}, {"stages.0.optimizer.rate": "2"}])
    [{'rate': '1'}, {'rate': '2'}]
    """
    keys = dict.fromkeys(key for config in configs for key in config if key not in OWN_KEYS)
    values = {key: tuple(config.get(key, "") for config in configs) for key in keys}
    differing = {key: of_key for key, of_key in values.items() if len(set(of_key)) > 1}
    brief = {
        key: of_key
        for key, of_key in differing.items()
        if key.endswith(_CHOICE)
        or not any(f"{key[:end]}{_CHOICE}" in differing for end, sign in enumerate(key) if sign == ".")
    }
    if len(set(zip(*brief.values(), strict=True))) == len(configs):
        differing = brief
    rests = {key: re.sub(r"^stages\.\d+\.", "", key) for key in differing}
    merged: dict[str, tuple[str, ...]] = {}
    for key, of_key in differing.items():
        alike = all(differing[other] == of_key for other, rest in rests.items() if rest == rests[key])
        merged[rests[key] if alike else key] = of_key
    names = short_names([key.removesuffix(_CHOICE) for key in merged])
    return [
        {name: of_key[place] for name, of_key in zip(names, merged.values(), strict=True)}
        for place in range(len(configs))
    ]


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the shortest end of each dotted key that no other key has.

    >>> short_names(["optimizer.learning_rate", "stages.0.steps", "stages.1.steps"])
    ['learning_rate', '0.steps', '1.steps']
    """
    names = []
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        unique = (end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1)
        names.append(next(unique, key))
    return names
