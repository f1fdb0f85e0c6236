"""Tables that compare evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from agent_peft.rollout.intervals import in_words
from agent_peft.rollout.statistics import EvaluationReport, other_settings, paired_test
from agent_peft.types import AgentPeftError


def tables(reports: Mapping[str, EvaluationReport]) -> list[Table]:
    """Return the table of reports, and that of their skills where there is more than one."""
    return [table(reports), *([skill_table(reports)] if len(_skills(reports)) > 1 else [])]


def table(reports: Mapping[str, EvaluationReport]) -> Table:
    """Return a table of reports, one column each ("base", "after sft", …), with the change since the column
    before.
    """
    columns = list(reports.values())
    last = columns[-1]
    of_replies = last.success is None
    rows = _table(f"{'held-out replies' if of_replies else 'success'} (95 % interval)", reports)
    if any(report.step is not None for report in columns):
        rows.add_row("step", *("" if report.step is None else str(report.step) for report in columns))
    rows.add_row(last.unit, *(str(report.headline.tasks) for report in columns))
    for name in last.measures:
        measured = [report.measure(name) for report in columns]
        if name == "reward":
            if any(not report.reward_follows_success for report in columns):
                _add_rewards(rows, columns)
        elif any(measured):
            texts = ("" if one is None else in_words(name, one) for one in measured)
            rows.add_row(f"{name.replace('_', ' ')}{', nats' * (name == 'loss')}", *texts)
    if len(columns) > 1:
        changes = [_change(before, after) for before, after in pairwise(columns)]
        unit = "nats" if of_replies else "points"
        rows.add_row(f"change, {unit}", "", *(change for change, _ in changes))
        rows.add_row("p, if no change", "", *(p for _, p in changes))
    if of_replies:
        rows.add_row("target tokens", *(f"{report.mean_action_tokens:.1f}" for report in columns))
        return _with_others(rows, reports)
    for k in sorted({k for report in columns for k in report.pass_at} - {1}):
        rows.add_row(
            f"pass@{k}", *(f"{report.pass_at[k]:.1%}" if k in report.pass_at else "" for report in columns)
        )
    rows.add_section()
    rows.add_row("attempts", *(str(report.attempts) for report in columns))
    for reason in sorted({reason for report in columns for reason in report.stop_reasons}):
        rows.add_row(
            f"ended: {reason}",
            *(f"{report.stop_reasons.get(reason, 0) / report.attempts:.1%}" for report in columns),
        )
    rows.add_row("invalid actions", *(f"{report.invalid_actions:.1%}" for report in columns))
    rows.add_row("cut actions", *(f"{report.cut_actions:.1%}" for report in columns))
    rows.add_row("turns", *(f"{report.mean_turns:.2f}" for report in columns))
    rows.add_row("action tokens", *(f"{report.mean_action_tokens:.1f}" for report in columns))
    if any(report.infrastructure_failures for report in columns):
        rows.add_row("left out (failed)", *(str(report.infrastructure_failures) for report in columns))
    return _with_others(rows, reports)


def _with_others(rows: Table, reports: Mapping[str, EvaluationReport]) -> Table:
    """The table with a note on reports that did not measure what the last one did."""
    last = list(reports.values())[-1]
    others = [(name, other_settings(one.settings, last.settings)) for name, one in reports.items()]
    if notes := [f"{name} measured with other settings ({', '.join(keys)})" for name, keys in others if keys]:
        lines = [] if rows.caption is None else [str(rows.caption)]
        rows.caption = "\n".join([*lines, *(f"{note} than {list(reports)[-1]}" for note in notes)])
    return rows


def _skills(reports: Mapping[str, EvaluationReport]) -> list[str]:
    return sorted({skill for report in reports.values() for skill in report.by_skill})


def skill_table(reports: Mapping[str, EvaluationReport]) -> Table:
    """Return a table of the success rates by skill (the first of a task), one column for each report."""
    rows = _table("success by skill (95 % interval)", reports, "tasks")
    for skill in _skills(reports):
        rates = [report.by_skill.get(skill) for report in reports.values()]
        counts = "/".join(sorted({str(rate.tasks) for rate in rates if rate is not None}))
        rows.add_row(Text(skill), counts, *("" if rate is None else rate.percent for rate in rates))
    return rows


def _table(title: str, reports: Mapping[str, EvaluationReport], *more: str) -> Table:
    rows = Table(title=title, title_justify="left")
    rows.add_column("")
    for name in (*more, *reports):
        rows.add_column(Text(name), justify="right")
    return rows


def _add_rewards(rows: Table, columns: Sequence[EvaluationReport]) -> None:
    """Add the row of mean rewards. Those of other prices than the last column's are marked."""
    prices = columns[-1].settings.get("rewards")
    other = [report.reward is not None and report.settings.get("rewards") != prices for report in columns]
    rewards = ("" if report.reward is None else report.reward.text for report in columns)
    rows.add_row("reward", *(text + " *" * mark for text, mark in zip(rewards, other, strict=True)))
    if any(other):
        rows.caption = "* under the rewards of another stage than the last column's"


def _change(before: EvaluationReport, after: EvaluationReport) -> tuple[str, str]:
    try:
        test = paired_test(before, after)
    except AgentPeftError:
        return "other tasks", ""
    return test.text(points=after.success is not None), f"{test.p:.2g}"
