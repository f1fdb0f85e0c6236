"""What is learned and what is forgotten where skills come one after another: success on each skill's held-out
tasks, before the first segment and after each one.

R[i, j] is the success on skill j after segment i of T, and R[0, j] that before the first one. The measures
are those of Lopez-Paz and Ranzato (2017, "Gradient episodic memory", section 2) and of Chaudhry et al. (2018,
"Riemannian walk", section 3.2), with the policy before the first segment as their untrained classifier:

    average accuracy    mean over j of R[T, j]
    backward transfer   mean over j of R[T, j] - R[the segment of j, j], without the last segment's skill
    forward transfer    mean over j of R[the segment before j, j] - R[0, j], without the first segment's skill
    forgetting          mean over j of max over i from 1 to T - 1 of R[i, j] - R[T, j], without the last's

Where a skill comes in several segments, its first one counts for forward transfer, and its last one for
backward transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from agent_peft.rollout.intervals import Z95, Mean, Rate, rate_of
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.types import Outcome

MEASURES = ("average accuracy", "backward transfer", "forward transfer", "forgetting")


@dataclass(frozen=True)
class SkillMatrix:
    """The success of each held-out task in each row.

    >>> rows = ({"i": 0.0, "u": 0.5}, {"i": 1.0, "u": 0.5}, {"i": 0.5, "u": 1.0})
    >>> matrix = SkillMatrix(("insert", "update"), {"insert": ("i",), "update": ("u",)}, rows)
    >>> {name: mean.value for name, mean in matrix.measures().items()}
    {'average accuracy': 0.75, 'backward transfer': -0.5, 'forward transfer': 0.0, 'forgetting': 0.5}

    Attributes:
        segments: the skill of each segment.
        tasks: skill -> the ids of its held-out tasks; of the skills of segments, those that have any, in the
            order of their first segments.
        rows: task id -> success rate over its attempts; one before the first segment, and one after each.
    """

    segments: tuple[str, ...]
    tasks: Mapping[str, tuple[str, ...]]
    rows: tuple[Mapping[str, float], ...]

    def rate(self, row: int, skill: str) -> Rate:
        """R[row, skill] with its 95 % interval."""
        return rate_of((self.rows[row][task], 1) for task in self.tasks[skill])

    def measures(self) -> dict[str, Mean]:
        """The measures that there are segments for, in the order of ``MEASURES``.

        The intervals (95 %, normal) are over held-out tasks, each compared with itself; the skills and their
        order are given. They do not cover other seeds of training. Forgetting has none: the
        maximum over rows makes it too high by chance.
        """
        last, skills = len(self.rows) - 1, list(self.tasks)
        first_row = {skill: self.segments.index(skill) + 1 for skill in skills}
        last_row = {skill: last - self.segments[::-1].index(skill) for skill in skills}
        earlier = [skill for skill in skills if last_row[skill] < last]
        later = [skill for skill in skills if first_row[skill] > 1]
        found = {"average accuracy": _mean([list(self._of(last, skill)) for skill in skills], 0.0)}
        if earlier:
            found["backward transfer"] = _mean([self._change(last_row[s], last, s) for s in earlier], -1.0)
        if later:
            found["forward transfer"] = _mean([self._change(0, first_row[s] - 1, s) for s in later], -1.0)
        if earlier:
            best = [max(self.rate(row, s).value for row in range(1, last)) for s in earlier]
            lost = [high - self.rate(last, s).value for high, s in zip(best, earlier, strict=True)]
            tasks = sum(len(self.tasks[s]) for s in earlier)
            found["forgetting"] = Mean(math.fsum(lost) / len(lost), None, None, tasks)
        return found

    def table(self) -> Table:
        """Rows: after each segment; columns: skills."""
        table = Table(title="success by skill (its tasks) and segment (95 % interval)", title_justify="left")
        table.add_column("after segment")
        for skill, tasks in self.tasks.items():
            table.add_column(Text(f"{skill} ({len(tasks)})"), justify="right")
        for row in range(len(self.rows)):
            name = Text(f"{row} {self.segments[row - 1]}" if row else "0 (none)")
            table.add_row(name, *(self.rate(row, skill).percent for skill in self.tasks))
        table.caption = "; ".join(
            [
                *(f"{name} {mean.text}" for name, mean in self.measures().items()),
                *(f"{s}: no held-out task" for s in dict.fromkeys(self.segments) if s not in self.tasks),
            ]
        )
        return table

    def _of(self, row: int, skill: str) -> Iterable[float]:
        return (self.rows[row][task] for task in self.tasks[skill])

    def _change(self, before: int, after: int, skill: str) -> list[float]:
        pairs = zip(self._of(before, skill), self._of(after, skill), strict=True)
        return [new - old for old, new in pairs]


def skill_matrix(
    segments: Sequence[str], reports: Sequence[EvaluationReport], skills: Mapping[str, str]
) -> SkillMatrix | None:
    """The matrix of evaluations of the same tasks; None where no skill of a segment has a task in all.

    Args:
        reports: before the first segment, and after each one.
        skills: task id -> its first skill.
    """
    there = [task for task in reports[0].outcomes if all(task in report.outcomes for report in reports)]
    tasks = {
        skill: tuple(task for task in there if skills.get(task) == skill) for skill in dict.fromkeys(segments)
    }
    tasks = {skill: of for skill, of in tasks.items() if of}
    rows = tuple({task: _success(report.outcomes[task]) for task in there} for report in reports)
    return SkillMatrix(tuple(segments), tasks, rows) if tasks else None


def _success(outcomes: Sequence[str]) -> float:
    return sum(outcome == Outcome.CORRECT for outcome in outcomes) / len(outcomes)


def _mean(strata: Sequence[Sequence[float]], lowest: float) -> Mean:
    """The mean over skills of the means over their tasks, of numbers between ``lowest`` and 1.

    The interval counts one task more at each end of the range, shared by the skills, as Agresti and Caffo
    (2000) do for proportions, so that it has a width also where all tasks are alike.
    """
    value = math.fsum(math.fsum(of) / len(of) for of in strata) / len(strata)
    centre = variance = 0.0
    for of in strata:
        weights = [*(1.0 for _ in of), 1 / len(strata), 1 / len(strata)]
        pairs = list(zip(weights, [*of, lowest, 1.0], strict=True))
        n = math.fsum(weights)
        mean = math.fsum(weight * x for weight, x in pairs) / n
        centre += mean / len(strata)
        variance += math.fsum(weight * (x - mean) ** 2 for weight, x in pairs) / n / n / len(strata) ** 2
    half = Z95 * math.sqrt(variance)
    low, high = max(lowest, centre - half), min(1.0, centre + half)
    return Mean(value, min(low, value), max(high, value), sum(len(of) for of in strata))
