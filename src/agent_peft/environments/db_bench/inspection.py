"""Which tasks can be used: the gold must pass, and doing nothing must not, each in a fresh episode."""

from __future__ import annotations

from collections.abc import Sequence

from agent_peft.environments.db_bench.episode import DBBenchEpisode, Rules, one_line, replies_of, run_gold
from agent_peft.environments.db_bench.protocol import answer
from agent_peft.environments.db_bench.tasks import Problem, table_md5
from agent_peft.environments.task_files.replay import Inspection
from agent_peft.types import AgentPeftError, Outcome, StepResult, StopReason

_LONGEST_CAUSE = 400  # characters: statements and names of strangers are quoted
DO_NOTHING = (answer("done"), answer(""))


def inspect(problem: Problem, rules: Rules) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        cause = _fault_of_gold(problem, rules)
        nothing = any(_replay(problem, rules, (reply,)).outcome is Outcome.CORRECT for reply in DO_NOTHING)
    except AgentPeftError as error:
        return Inspection(False, False, one_line(str(error), _LONGEST_CAUSE))
    return Inspection(cause is None, nothing, cause or ("doing nothing passes" if nothing else None))


def _fault_of_gold(problem: Problem, rules: Rules) -> str | None:
    executed, table = run_gold(problem, rules)
    if executed.error is not None:
        return one_line(f"the gold SQL fails: {executed.error}", _LONGEST_CAUSE)
    replies = replies_of(problem, executed)
    last = None if replies is None else _replay(problem, rules, replies)
    if last is not None and last.stop_reason is StopReason.TIMEOUT:
        return f"the gold SQL takes longer than episode_seconds = {rules.episode_seconds:g}"
    if last is None or last.outcome is not Outcome.CORRECT:
        return (
            "the gold SQL gives other rows than the stored answer"
            if problem.direct is not None
            else "the gold SQL drops the table"
        )
    if (
        problem.direct is None
        and problem.md5 is not None
        and (table is None or table_md5(table) != problem.md5)
    ):
        return "the gold SQL leaves another table than the stored md5 tells"
    return None


def _replay(problem: Problem, rules: Rules, replies: Sequence[str]) -> StepResult:
    episode = DBBenchEpisode(problem, rules, seed=0)
    try:
        episode.start()
        for reply in replies:
            result = episode.step(reply)
            if result.done:
                break
        return result
    finally:
        episode.close()
