"""The skill matrices of a run, from its evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.rollout.skill_matrix import SkillMatrix, skill_matrix
from agent_peft.rollout.statistics import EvaluationReport
from agent_peft.rollout.task_order import BySkillConfig


def skill_matrices(
    config: TrainConfig, reports: Iterable[EvaluationReport], skills: Mapping[str, str]
) -> dict[str, SkillMatrix]:
    """The matrix of each stage that takes one skill after another, by the stage's name, as far as evaluations
    were made before its first segment and after each next one.

    Args:
        config: with its steps (``with_steps``).
        skills: of the tasks that were measured: id -> first skill.
    """
    of_step, first = {report.step: report for report in reports}, 0
    matrices = {}
    for stage in config.stages:
        order = stage.task_order
        if isinstance(order, BySkillConfig) and order.skills:
            rows = []
            for step in range(first, first + stage.steps + 1, order.steps):
                if step not in of_step:
                    break
                rows.append(of_step[step])
            segments = [order.skills[place % len(order.skills)] for place in range(len(rows) - 1)]
            matrix = skill_matrix(segments, rows, skills) if segments else None
            if matrix is not None:
                matrices[stage.name] = matrix
        first += stage.steps
    return matrices
