"""Is the task done? Asked of the files that the agent left, on a new machine, with programs that the agent
cannot have touched.

What an AgentBench example finds is the truth: it runs on its own machine, as it was before the agent
acted, so that an agent which deletes what it should count is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_peft.environments.os_interaction.matching import matches, matches_truth
from agent_peft.environments.os_interaction.problems import (
    AnswerCheck,
    Checks,
    Exits,
    Matches,
    Script,
    ShellProblem,
)
from agent_peft.sandbox.base import CommandResult, Sandbox

MAX_ANSWER = 4_000  # characters: no truth is near it


def grade(
    problem: ShellProblem,
    answer: str | None,
    sandbox: Sandbox,
    run_example: Callable[[Script], CommandResult],
    seconds: float,
) -> bool:
    """Whether the task is done. A script that runs out of time, or is killed, says no: the agent may have
    brought that about.

    Args:
        answer: None where the agent only finished.
        sandbox: the agent's machine; it ends first.
        run_example: runs an example on a machine without the agent's changes; called only if needed.
        seconds: the time limit of each script.
    """
    evaluation = problem.evaluation
    if answer is not None and len(answer) > MAX_ANSWER:
        return False
    if isinstance(evaluation, Exits):
        return sandbox.inspect(evaluation.script.code, seconds).ok
    if answer is None and problem.needs_answer:
        return False
    if isinstance(evaluation, Matches):
        return answer is not None and matches(evaluation, answer)
    return _checks(evaluation, answer or "", sandbox, run_example, seconds)


def _checks(
    checks: Checks,
    answer: str,
    sandbox: Sandbox,
    run_example: Callable[[Script], CommandResult],
    seconds: float,
) -> bool:
    outputs = [answer]
    for step in checks.steps:
        if isinstance(step, AnswerCheck):
            if not matches_truth(step, answer, outputs[1]):
                return False
            outputs.append("")
            continue
        if step is None:
            assert checks.example is not None  # the entry was checked
            result = run_example(checks.example)
        else:
            result = sandbox.inspect(step.command(*outputs), seconds)
        if not result.ok:
            return False
        outputs.append(result.output)
    return True
