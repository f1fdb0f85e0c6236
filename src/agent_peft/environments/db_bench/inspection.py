"""Which tasks can be used: its gold must pass, and doing nothing must not, each in a fresh episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent_peft.environments.db_bench.episode import DBBenchEpisode, Rules, demonstrate, run_gold
from agent_peft.environments.db_bench.protocol import answer
from agent_peft.environments.db_bench.tasks import Problem, table_md5
from agent_peft.types import AgentPeftError, Outcome

DO_NOTHING = (answer("done"), answer(""))


@dataclass(frozen=True)
class Rejection:
    """A task that cannot be used, and why.

    >>> Rejection("7", "the gold SQL fails: no such function: STDDEV").id
    '7'
    """

    id: str
    cause: str


@dataclass(frozen=True)
class Inspection:
    """What replaying a task showed; ``cause`` is None where the task can be used.

    >>> Inspection(gold_is_correct=True, nothing_is_correct=False, cause=None).cause is None
    True
    """

    gold_is_correct: bool
    nothing_is_correct: bool
    cause: str | None


def inspect(problem: Problem, rules: Rules) -> Inspection:
    """Replay the gold, then replies that do nothing, through episodes."""
    try:
        replies = demonstrate(problem, rules)
        gold = replies is not None and _replay(problem, rules, replies) is Outcome.CORRECT
        nothing = any(_replay(problem, rules, (reply,)) is Outcome.CORRECT for reply in DO_NOTHING)
        cause = _cause(problem, rules, gold, nothing)
    except AgentPeftError as error:
        return Inspection(False, False, str(error))
    return Inspection(gold and cause is None or gold and nothing, nothing, cause)


def _cause(problem: Problem, rules: Rules, gold: bool, nothing: bool) -> str | None:
    executed, table = run_gold(problem, rules)
    if executed.error is not None:
        return f"the gold SQL fails: {executed.error}"
    if not gold:
        return "the gold SQL gives other rows than the stored answer" if problem.direct is not None else "the gold SQL drops the table"
    if problem.direct is None and problem.md5 is not None and (table is None or table_md5(table) != problem.md5):
        return "the gold SQL leaves another table than the stored md5 tells"
    return "doing nothing passes" if nothing else None


def _replay(problem: Problem, rules: Rules, replies: Iterable[str]) -> Outcome:
    episode = DBBenchEpisode(problem, rules, seed=0)
    try:
        episode.start()
        outcome = Outcome.UNKNOWN
        for reply in replies:
            outcome = episode.step(reply).outcome
        return outcome
    finally:
        episode.close()
