"""Is the task done? Asked of the files that the agent left, on a new machine, with programs that the agent
cannot have touched.

What an AgentBench example finds is the truth: it runs on its own machine, as it was before the agent
acted, so that an agent which deletes what it should count is wrong. An answer is compared with it by its
text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from agent_peft.environments import expressions
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
_MORE_WORDS = 8  # that an answer may have than the truth it should contain: a sentence, not a list of guesses
_CANDIDATES = 3  # numbers and names among them, the truth included
_AROUND = ".,;:!?'\"`()[]{}<>*"  # what may stand around a word

_UNITS: dict[str, int] = {"": 1} | {
    name: 1024**power
    for power, names in enumerate((("b", "byte", "bytes"), *((f"{k}", f"{k}b", f"{k}ib") for k in "kmgtp")))
    for name in names
}


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


def matches(expected: Matches, answer: str) -> bool:
    """Whether an answer is the text that was asked for, or fits the expression.

    >>> matches(Matches("log"), " log\\n"), matches(Matches(regex="^[0-9]+$"), "12")
    (True, True)
    """
    said = answer.strip() if expected.strip else answer
    if expected.answer is not None:
        return said == expected.answer
    return expressions.found(expected.regex or "", said)


def matches_truth(how: AnswerCheck, answer: str, truth: str) -> bool:
    """Whether an answer is the truth, in AgentBench's ways; but one that guesses at many truths, or says next
    to nothing, is none.

    >>> matches_truth(AnswerCheck.INTEGER, "1,024", "1024"), matches_truth(AnswerCheck.SIZE, "4 KB", "4.0K")
    (True, True)
    >>> matches_truth(AnswerCheck.STRING, "a", "b")
    False
    """
    said, true = _newlines(answer), _newlines(truth)
    match how:
        case AnswerCheck.INTEGER:
            return _integer(true) is not None and _integer(said) == _integer(true)
        case AnswerCheck.SIZE:
            return _size(true) is not None and _size(said) == _size(true)
        case AnswerCheck.STRING:
            return said == true
        case AnswerCheck.ANSWER_IN_TRUTH:
            return said in true and _says_enough(said, true)
        case AnswerCheck.TRUTH_IN_ANSWER:
            return true in said and _says_little_else(said, true)


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


def _says_enough(said: str, true: str) -> bool:
    """Whether a part of the truth is at least half of it, or some whole words."""
    whole = 2 * len(said) >= len(true) or f" {' '.join(said.split())} " in f" {' '.join(true.split())} "
    return whole and any(letter.isalnum() for letter in said)


def _says_little_else(said: str, true: str) -> bool:
    """Whether an answer has the words of the truth and few others; numbers and names are counted apart."""
    words, wanted = ([word.strip(_AROUND) for word in text.split()] for text in (said, true))
    if len(words) > len(wanted) + _MORE_WORDS or not any(wanted):
        return False
    others = [word for word in words if word not in wanted and not word.isalpha() and word]
    return len(others) < _CANDIDATES and f" {' '.join(wanted)} " in f" {' '.join(words)} "
