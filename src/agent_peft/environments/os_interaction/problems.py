"""The checked content of a task: the preparation of its machine, the instruction, and the evaluation."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from agent_peft.types import AgentPeftError

# LifelongAgentBench's 29, the rarest of its entries first: what a task is about is the rarest skill it needs
SKILLS = (
    "sed", "gpasswd", "vi", "chage", "ln", "chsh", "sleep", "exit", "cp", "mv", "groupadd", "cat", "awk",
    "find", "wc", "rm", "useradd", "tee", "addgroup", "usermod", "chown", "chgrp", "cd", "ls", "grep",
    "touch", "echo", "mkdir", "chmod",
)  # fmt: skip

_UNTYPABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Script:
    """A program of a task's author.

    >>> Script("exit $1").command("3")
    "bash -c 'exit $1' -- 3"
    """

    code: str
    language: Literal["bash", "python"] = "bash"

    @property
    def bash(self) -> str:
        """The script in bash."""
        return self.code if self.language == "bash" else self.command()

    def command(self, *arguments: str) -> str:
        """One line of bash that runs it."""
        words = (
            ["python3", "-I", "-c", self.code]
            if self.language == "python"
            else ["bash", "-c", self.code, *(["--"] if arguments else [])]
        )
        return shlex.join([*words, *(argument.replace("\0", "") for argument in arguments)])


def is_typable(text: str) -> bool:
    """Whether a text can be given to a shell: without null characters, and without halves of characters.

    >>> is_typable("ls"), is_typable("a\\0b"), is_typable("\\ud800")
    (True, False, False)
    """
    return _UNTYPABLE.search(text) is None


class AnswerCheck(StrEnum):
    """The comparisons of answer and truth in AgentBench's check scripts."""

    INTEGER = "integer-match"
    STRING = "string-match"
    SIZE = "size-match"
    ANSWER_IN_TRUTH = "in"
    TRUTH_IN_ANSWER = "containing"


@dataclass(frozen=True)
class Exits:
    """Correct where ``script`` ends with exit code 0 (LifelongAgentBench)."""

    script: Script


@dataclass(frozen=True)
class Matches:
    """Correct where the answer is ``answer``, or where ``regex`` is found in it (AgentBench); exactly one is
    set.

    >>> Matches(regex="^[0-9]+$").answer is None
    True
    """

    answer: str | None = None
    regex: str | None = None
    strip: bool = True


@dataclass(frozen=True)
class Checks:
    """Correct where every step succeeds (AgentBench). None runs ``example``, whose output is the truth; a
    script is given the answer and all outputs before it, and succeeds with exit code 0.
    """

    steps: tuple[Script | AnswerCheck | None, ...]
    example: Script | None = None


@dataclass(frozen=True)
class ShellProblem:
    """One task. ``initialization`` runs before the agent, ``start`` is typed into its shell; ``gold`` is a
    bash script that solves it.

    >>> ShellProblem("Make /a.", Exits(Script("[ -d /a ]")), gold="mkdir /a").answers
    False
    """

    instruction: str
    evaluation: Exits | Matches | Checks
    initialization: tuple[Script, ...] = ()
    start: str | None = None
    gold: str | None = None
    answers: bool = False  # may the agent answer, or only finish?

    @property
    def needs_answer(self) -> bool:
        """Whether a finish without an answer cannot be right."""
        return isinstance(self.evaluation, Matches) or (
            isinstance(self.evaluation, Checks)
            and any(not isinstance(step, Script) for step in self.evaluation.steps)
        )


class Unusable(AgentPeftError):
    """The entry is well-formed, but asks for what cannot be had here; the text is the cause."""
