"""The interface of a sandbox: an isolated machine for untrusted commands, deleted when it is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import Field

from agent_peft.config import Config
from agent_peft.types import InfrastructureError


class SandboxLimits(Config):
    """The limits of one sandbox. A limit holds for all processes together, except where its
    description differs.
    """

    memory_mb: int = Field(
        default=512,
        ge=16,
        description="memory of a machine in MiB, of its processes and its files, which may take half of it",
    )
    processes: int = Field(default=128, ge=4, description="maximum number of processes")
    file_size_mb: int = Field(default=64, ge=1, description="maximum size of one file in MiB")
    cpu_seconds: float = Field(
        default=60.0, gt=0, description="processor time of one command and its children, in seconds"
    )
    output_chars: int = Field(
        default=16_384,
        ge=256,
        description="maximum output of one command in characters; the middle of a longer output is cut out",
    )


class MachineLost(InfrastructureError):
    """One machine cannot be used any more, although new ones can be made. Its commands may be the cause."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command.

    >>> CommandResult("hello\\n", 0).ok
    True
    """

    output: str  # stdout and stderr in the order in which they were written; bad UTF-8 is replaced
    exit_code: int | None  # None: the command was killed at its time limit, or its shell died
    timed_out: bool = False
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Sandbox(ABC):
    """A private machine with its own files, processes and users, and without a network. One thread at a time
    may use it.

    Everything in it ends with ``close``, and also when our own process is killed. Every method may raise
    MachineLost: the machine died, does not answer, or has processes that cannot be killed.
    """

    @abstractmethod
    def start(self) -> None:
        """Start the machine. Call this once. Raises `InfrastructureError`: the machine did not start."""

    @abstractmethod
    def run(self, command: str, timeout: float) -> CommandResult:
        """Run ``command`` in the persistent shell of the machine. The working directory, the variables and
        the functions stay from command to command.

        After ``timeout`` seconds the command is killed with all its children, and the shell is usable as
        before. A command that ends the shell itself (``exit 3``) returns its exit code; the next command
        gets a new shell.
        """

    @abstractmethod
    def run_fresh(self, script: str, timeout: float) -> CommandResult:
        """Run a trusted bash script in a new process, with a clean environment and PATH, on the machine as it
        is. Its programs are the machine's: after the agent acted, only ``inspect`` gives a verdict.
        """

    @abstractmethod
    def inspect(self, script: str, timeout: float) -> CommandResult:
        """Run a trusted bash script over the files that the agent left, on a new machine.

        The first call ends the machine, with all its processes, and copies its files to the new one. There
        they are data: programs, libraries and settings are those of the original system. The exit code comes
        from the container runtime. Only further calls and ``close`` may follow.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill and remove everything. It may be called twice, and before ``start``."""

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
