"""What the page shows of runs, as JSON values. Every file is read as it is now: a run may be in progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from agent_peft.environments.base import OUTCOMES
from agent_peft.reports.episodes import EpisodeFile, Facts, episode_files, facts_of
from agent_peft.rollout.intervals import Z95, in_words, rate_of, t95
from agent_peft.rollout.statistics import NO_SKILL, EvaluationReport, other_settings, paired_test
from agent_peft.runs.comparison import flat_keys, group_seeds
from agent_peft.runs.overview import summarize_run
from agent_peft.runs.reading import RunRecord, load_run
from agent_peft.types import AgentPeftError, Outcome

SKILLS = 8  # curves by skill, of those with the most episodes
BINS = 30  # points of such a curve
DIGITS = 6  # significant, of a number of a curve


@dataclass
class PageContent:
    """What the page shows at its start (``values``), and where the episodes are that it shows later."""

    values: dict[str, Any]
    files: dict[str, EpisodeFile] = field(default_factory=dict)  # by key
    policies: Sequence[Any] = ()  # of each run's configuration

    def run_of(self, key: str) -> int:
        """The number of the run that a key of ``files`` belongs to."""
        return int(key[1 : key.index("_")])


def read_content(folders: Sequence[Path]) -> PageContent:
    """Read runs. What is damaged becomes a notice on the page; the rest is shown."""
    runs = [load_run(folder) for folder in folders]
    files: dict[str, EpisodeFile] = {}
    values, reports, policies = [], [], []
    for number, run in enumerate(runs):
        row, own, policy = _run(run, number, files)
        values.append(row)
        reports.append(own)
        policies.append(policy)
    names = _names([run.folder for run in runs])
    for name, row in zip(names, values, strict=True):
        row["name"] = name
    _note_others(values, reports)
    return PageContent(
        {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": values,
            "seeds": group_seeds([row["config"] for row in values]),
            "pairs": list(_pairs(reports)),
            "t95": [_short(t95(degrees)) for degrees in range(1, 31)] + [Z95],
        },
        files,
        policies,
    )


def _run(
    run: RunRecord, number: int, files: dict[str, EpisodeFile]
) -> tuple[dict[str, Any], dict[str, EvaluationReport], Any]:
    """What the page shows of a run, its evaluations' reports by name, and its policy's configuration."""
    notices: list[str] = []
    row: dict[str, Any] = {"folder": str(run.folder.absolute()), "notices": notices, "config": {}}
    summary = summarize_run(run.folder)
    row |= {"state": summary.state, "cause": summary.cause, "done": summary.step, "steps": summary.steps}
    policy = None
    with _noting(notices):
        row["config"], policy = dict(flat_keys(run.config)), run.config.get("policy")
    lines: list[dict[str, Any]] = []
    with _noting(notices):
        lines = run.metrics
    row["curves"] = _curves(lines)
    with _noting(notices):
        seconds = {line["step"]: line for line in run.timing}
        speeds = [_speed(seconds.get(step, {})) for step in row["curves"]["step"]]
        row["curves"]["metrics"]["tokens_per_second"] = speeds
    reports: dict[str, EvaluationReport] = {}
    for name, evaluation in run.evaluations.items():
        with _noting(notices):
            reports[name] = evaluation.report
    row["evaluations"] = _evaluations(reports)
    own = episode_files(run, number)
    readable: list[tuple[EpisodeFile, Sequence[Facts]]] = []
    for file in own:
        with _noting(notices):
            readable.append((file, facts_of(file.path)))
            files[file.key] = file
    row["episodes"] = _columns(readable)
    training = [(file.step, facts) for file, facts in readable if file.evaluation is None]
    acted = _acted(row["curves"], training)
    row |= {"intervals": _intervals(acted), "stops": _stops(training), "skills": _skills(acted)}
    return row, reports, policy


@contextmanager
def _noting(notices: list[str]) -> Iterator[None]:
    """Turn a fault of one file into a notice."""
    try:
        yield
    except AgentPeftError as error:
        notices.append(str(error))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        notices.append(f"a file could not be read ({type(error).__name__}: {error})")


def _curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics by name, each with one value a step; None where a step has none or it is not finite."""
    by_step = {line["step"]: line for line in lines if type(line.get("step")) is int}
    steps = sorted(by_step)
    names = dict.fromkeys(name for step in steps for name in by_step[step] if name not in ("step", "stage"))
    return {
        "step": steps,
        "stages": _stages([(step, str(by_step[step].get("stage", ""))) for step in steps]),
        "metrics": {name: [_short(by_step[step].get(name)) for step in steps] for name in names},
    }


def _stages(stages: Sequence[tuple[int, str]]) -> list[list[Any]]:
    """
    >>> _stages([(0, "sft"), (1, "sft"), (2, "rloo")])
    [[0, 'sft'], [2, 'rloo']]
    """
    starts = [] if not stages else [list(stages[0])]
    return starts + [list(after) for before, after in pairwise(stages) if before[1] != after[1]]


def _speed(timing: Mapping[str, Any]) -> float | None:
    sampled, seconds = timing.get("sampled"), timing.get("seconds")
    return _short(sampled / seconds) if sampled and seconds else None


def _short(value: Any) -> float | None:
    """
    >>> _short(0.123456789), _short(float("nan")), _short("text")
    (0.123457, None, None)
    """
    try:
        finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(f"{value:.{DIGITS}g}") if finite else None
    except OverflowError:  # an integer of more digits than a float holds
        return None


def _columns(files: Sequence[tuple[EpisodeFile, Sequence[Facts]]]) -> dict[str, Any]:
    """The facts of all episodes, a list for each. Texts that occur often are places in a list of texts."""
    texts: dict[str, dict[Any, int]] = {
        name: {} for name in ("stage", "task", "skills", "outcome", "stop_reason")
    }
    columns: dict[str, list[Any]] = {name: [] for name in Facts.__dataclass_fields__}
    for _, facts in files:
        for one in facts:
            for name, column in columns.items():
                value = getattr(one, name)
                if name in texts:
                    value = texts[name].setdefault(value, len(texts[name]))
                column.append(_short(value) if isinstance(value, float) else value)
    return {
        "files": [
            {"key": file.key, "step": file.step, "evaluation": file.evaluation, "episodes": len(facts)}
            for file, facts in files
        ],
        "texts": {name: list(places) for name, places in texts.items()},
        "columns": columns,
    }


def _acted(
    curves: Mapping[str, Any], training: Sequence[tuple[int, Sequence[Facts]]]
) -> list[tuple[int, Sequence[Facts]]]:
    """The steps in which the policy acted. The success of demonstrations is not its success."""
    pairs = zip(curves["step"], curves["metrics"].get("reward", ()), strict=False)
    steps = {step for step, reward in pairs if reward is not None}
    return [(step, facts) for step, facts in training if step in steps]


def _intervals(training: Sequence[tuple[int, Sequence[Facts]]]) -> dict[str, list[Any]]:
    """The interval of each step's success. A task counts once, so it takes the step's episodes."""
    columns: dict[str, list[Any]] = {"step": [], "low": [], "high": []}
    for step, facts in training:
        groups: dict[int, list[bool]] = {}
        for one in facts:
            if one.stop_reason != "infrastructure":
                groups.setdefault(one.group, []).append(one.outcome == Outcome.CORRECT)
        if groups:
            rate = rate_of((sum(group), len(group)) for group in groups.values())
            for name, value in (("step", step), ("low", _short(rate.low)), ("high", _short(rate.high))):
                columns[name].append(value)
    return columns


def _stops(training: Sequence[tuple[int, Sequence[Facts]]]) -> dict[str, Any]:
    """The share of each stop reason in each step."""
    reasons = sorted({one.stop_reason for _, facts in training for one in facts})
    steps = [(step, facts) for step, facts in training if facts]
    return {
        "step": [step for step, _ in steps],
        "shares": {
            reason: [
                _short(sum(one.stop_reason == reason for one in facts) / len(facts)) for _, facts in steps
            ]
            for reason in reasons
        },
    }


def _skills(training: Sequence[tuple[int, Sequence[Facts]]]) -> dict[str, Any]:
    """Success by a task's first skill, over some neighbouring steps at a time, because a step has few."""
    counts: dict[str, int] = {}
    for _, facts in training:
        for one in facts:
            skill = one.skills[0] if one.skills else NO_SKILL
            counts[skill] = counts.get(skill, 0) + 1
    largest = sorted(counts, key=lambda skill: -counts[skill])[:SKILLS]
    width = max(1, math.ceil(len(training) / BINS))
    bins = [training[start : start + width] for start in range(0, len(training), width)]
    rates: dict[str, list[float | None]] = {skill: [] for skill in largest}
    for steps in bins:
        outcomes: dict[str, list[bool]] = {skill: [] for skill in largest}
        for one in (one for _, facts in steps for one in facts):
            skill = one.skills[0] if one.skills else NO_SKILL
            if skill in outcomes:
                outcomes[skill].append(one.outcome == Outcome.CORRECT)
        for skill, of_skill in outcomes.items():
            rates[skill].append(_short(sum(of_skill) / len(of_skill)) if of_skill else None)
    return {
        "step": [steps[-1][0] for steps in bins],
        "width": width,
        "rates": rates,
        "others": len(counts) - len(largest),
    }


def _evaluations(reports: Mapping[str, EvaluationReport]) -> list[dict[str, Any]]:
    """The evaluations in their order, each with its change since the one before, where tasks are the same."""
    rows = []
    before: EvaluationReport | None = None
    for name, report in reports.items():
        change = None if before is None else _test(before, report)
        rows.append(
            {
                "name": report.name or name,
                "file": name,
                "step": report.step,
                "unit": report.unit,
                "number": report.headline.tasks,
                **{name: asdict(one) if (one := report.measure(name)) else None for name in OUTCOMES},
                "means": {name: in_words(name, mean) for name, mean in report.means.items()},
                "by_skill": {skill: asdict(rate) for skill, rate in report.by_skill.items()},
                "pass_at": {str(k): value for k, value in report.pass_at.items()},
                "attempts": report.attempts,
                "left_out": report.infrastructure_failures,
                "stop_reasons": dict(report.stop_reasons),
                "invalid_actions": report.invalid_actions,
                "mean_turns": report.mean_turns,
                "mean_action_tokens": report.mean_action_tokens,
                "change": change,
            }
        )
        before = report
    return rows


def _pairs(reports: Sequence[Mapping[str, EvaluationReport]]) -> Iterator[dict[str, Any]]:
    """The paired tests between runs, of evaluations of one name on the same tasks."""
    for (one, before), (other, after) in combinations(enumerate(reports), 2):
        for name in before:
            if name in after and (test := _test(before[name], after[name])) is not None:
                yield {"evaluation": name, "one": one, "other": other, **test}


def _note_others(values: Sequence[dict[str, Any]], reports: Sequence[Mapping[str, EvaluationReport]]) -> None:
    """Add a notice for each evaluation that did not measure what the last one of its run did, or what that of
    the same name in the first run did.
    """
    for row, own in zip(values, reports, strict=True):
        last = list(own)[-1:]
        pairs = [(name, f"{last[0]} of this run", own[last[0]]) for name in own if last]
        pairs += [(name, values[0]["name"], reports[0][name]) for name in own if name in reports[0]]
        for name, where, other in pairs:
            if keys := other_settings(own[name].settings, other.settings):
                row["notices"].append(f"{name} is not comparable with {where}: other {', '.join(keys)}")


def _test(before: EvaluationReport, after: EvaluationReport) -> dict[str, Any] | None:
    try:
        test = paired_test(before, after)
        return asdict(test) | {"nats": None if after.success is not None else test.text(points=False)}
    except AgentPeftError:
        return None  # other tasks


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ between the runs.

    >>> _names([Path("/runs/a/seed0"), Path("/runs/b/seed0")])
    ['a/seed0', 'b/seed0']
    """
    paths = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(path)} ({place})" for place, path in enumerate(paths)]
