"""Inspection of tasks: the gold must pass, and doing nothing must not, each in a new episode."""

from __future__ import annotations

from collections.abc import Sequence

from agent_peft.environments.base import Inspection
from agent_peft.environments.db_bench.config import DBBenchConfig
from agent_peft.environments.db_bench.episode import DBBenchEpisode, one_line, replies_of, run_gold
from agent_peft.environments.db_bench.problem import SQLProblem
from agent_peft.environments.db_bench.protocol import PROTOCOLS
from agent_peft.environments.db_bench.tasks import table_md5
from agent_peft.environments.task_files.replay import replay
from agent_peft.types import AgentPeftError, Outcome, StepResult, StopReason

MAX_CAUSE = 400  # characters: statements and names of strangers are quoted
DO_NOTHING = ("done", "")  # answers


def inspect(problem: SQLProblem, config: DBBenchConfig) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        cause = _fault_of_gold(problem, config)
        write = PROTOCOLS[config.protocol].answer
        nothing = any(
            _replay(problem, config, (write(text),)).outcome is Outcome.CORRECT for text in DO_NOTHING
        )
    except AgentPeftError as error:
        return Inspection(False, False, one_line(str(error), MAX_CAUSE))
    return Inspection(cause is None, nothing, cause or ("doing nothing passes" if nothing else None))


def _fault_of_gold(problem: SQLProblem, config: DBBenchConfig) -> str | None:
    if problem.labels is not None:  # its answer decides, whatever its SQL gives
        told = PROTOCOLS[config.protocol].answer([(label,) for label in problem.labels])
        correct = _replay(problem, config, (told,)).outcome is Outcome.CORRECT
        return None if correct else "its label is no answer"
    executed, table = run_gold(problem, config)
    if executed.error is not None:
        return one_line(f"the gold SQL fails: {executed.error}", MAX_CAUSE)
    replies = replies_of(problem, executed, PROTOCOLS[config.protocol])
    last = None if replies is None else _replay(problem, config, replies)
    if last is not None and last.stop_reason is StopReason.TIMEOUT:
        return f"the gold SQL takes longer than episode_seconds = {config.episode_seconds:g}"
    if last is None or last.outcome is not Outcome.CORRECT:
        return (
            "the gold SQL gives other rows than the stored answer"
            if problem.direct is not None
            else "the gold SQL drops the table"
        )
    if problem.is_change and problem.md5 is not None and (table is None or table_md5(table) != problem.md5):
        return "the gold SQL leaves another table than the stored md5 tells"
    return None


def _replay(problem: SQLProblem, config: DBBenchConfig, replies: Sequence[str]) -> StepResult:
    return replay(DBBenchEpisode(problem, config, seed=0), replies).results[-1]
