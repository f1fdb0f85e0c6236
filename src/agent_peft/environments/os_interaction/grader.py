"""Is the task done? Asked of the machine as the agent left it, with programs that the agent cannot have touched.

What an AgentBench example finds is the truth: it runs on a machine of its own, as it was before the agent acted, so that an agent
which deletes what it should count is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from agent_peft.environments.os_interaction.problems import Checks, Comparison, Exits, Matches, Problem, Script
from agent_peft.environments.os_interaction.sandbox import CommandResult, Sandbox

MAX_ANSWER = 4_000  # characters: no truth is near it

_UNITS: dict[str, int] = {"": 1} | {
    name: 1024**power
    for power, names in enumerate((("b", "byte", "bytes"), *((f"{k}", f"{k}b", f"{k}ib") for k in "kmgtp")))
    for name in names
}


def grade(problem: Problem, answer: str | None, sandbox: Sandbox, run_example: Callable[[Script], CommandResult], seconds: float) -> bool:
    """Whether the task is done. A script that runs out of time, or is killed, says no: the agent may have brought that about.

    Args:
        answer: what the agent said, None where it only finished.
        sandbox: the agent's machine; its processes are killed first.
        run_example: what an example does where the agent has not been; called only if the evaluation asks for it.
        seconds: the time limit of each script.

    Raises:
        InfrastructureError: a sandbox failed.
    """
    evaluation = problem.evaluation
    if answer is not None and len(answer) > MAX_ANSWER:
        return False
    if isinstance(evaluation, Exits):
        return sandbox.run_fresh(evaluation.script.code, seconds, kill_others=True).ok
    if answer is None and problem.needs_answer:
        return False
    if isinstance(evaluation, Matches):
        return answer is not None and matches(evaluation, answer)
    return _checks(evaluation, answer or "", sandbox, run_example, seconds)


def matches(wanted: Matches, answer: str) -> bool:
    """
    >>> matches(Matches("log"), " log\\n"), matches(Matches(regex="^[0-9]+$"), "12")
    (True, True)
    """
    said = answer.strip() if wanted.strip else answer
    return said == wanted.answer if wanted.answer is not None else re.search(wanted.regex or "", said) is not None


def compare(how: Comparison, answer: str, truth: str) -> bool:
    """
    >>> compare(Comparison.INTEGER, "1,024", "1024"), compare(Comparison.SIZE, "4 KB", "4.0K"), compare(Comparison.STRING, "a", "b")
    (True, True, False)
    """
    said, true = _newlines(answer), _newlines(truth)
    match how:
        case Comparison.INTEGER:
            return _integer(true) is not None and _integer(said) == _integer(true)
        case Comparison.SIZE:
            return _size(true) is not None and _size(said) == _size(true)
        case Comparison.STRING:
            return said == true
        case Comparison.ANSWER_IN_TRUTH:
            return bool(said) and said in true
        case Comparison.TRUTH_IN_ANSWER:
            return bool(true) and true in said


def _checks(checks: Checks, answer: str, sandbox: Sandbox, run_example: Callable[[Script], CommandResult], seconds: float) -> bool:
    outputs = [answer]
    for step in checks.steps:
        if isinstance(step, Comparison):
            if not compare(step, answer, outputs[1]):
                return False
            outputs.append("")
            continue
        if step is None:
            assert checks.example is not None  # the entry was checked
            result = run_example(checks.example)
        else:
            result = sandbox.run_fresh(step.command(*outputs), seconds, kill_others=True)
        if not result.ok:
            return False
        outputs.append(result.output)
    return True


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _integer(text: str) -> int | None:
    text = text.strip("`'\" .")
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,100}", text) else None


def _size(text: str) -> Decimal | None:
    """Bytes; K, M, … are powers of 1024, as AgentBench has them."""
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)", text.strip("`'\""))
    if match is None or match[2].lower() not in _UNITS:
        return None
    return Decimal(match[1]) * _UNITS[match[2].lower()]
