"""What a sandbox is: a machine of its own for one episode, thrown away with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field

from agent_peft.types import InfrastructureError


class SandboxLimits(BaseModel):
    """What everything inside one sandbox may use together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(default=512, ge=16, description="of all processes, and again of all files written")
    processes: int = Field(default=128, ge=4)
    file_size_mb: int = Field(default=64, ge=1, description="of one file")
    cpu_seconds: float = Field(default=60.0, gt=0, description="of one command, its children included")
    output_chars: int = Field(
        default=16_384, ge=256, description="of one command; the middle of what is longer is cut out"
    )


class MachineLost(InfrastructureError):
    """One episode's machine is of no more use, and what makes machines is well: the agent may have brought
    it about.
    """


@dataclass(frozen=True)
class CommandResult:
    """What a command did.

    >>> CommandResult("hello\\n", 0).ok
    True
    """

    output: str  # stdout and stderr in the order they were written, decoded leniently, cut to the limit
    exit_code: int | None  # None: killed at its time limit, or the shell died under it
    timed_out: bool = False
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Sandbox(ABC):
    """A private machine: files, processes and users of its own, no network. Owned by one thread at a time.

    Everything in it dies with ``close``, and also when our own process is killed. Any method may raise
    MachineLost: the machine died, does not answer, or cannot be killed.
    """

    @abstractmethod
    def start(self) -> None:
        """Bring it up, once.

        Raises:
            InfrastructureError: this machine could not, this time.
        """

    @abstractmethod
    def run(self, command: str, timeout: float) -> CommandResult:
        """Run ``command`` in the episode's one shell: working directory, variables and functions stay from
        command to command.

        At ``timeout`` (seconds) the command is killed with all its children, and the shell comes back as it
        was. A command that ends the shell itself (``exit 3``) gets its exit code as the result; the next
        command finds a new shell.
        """

    @abstractmethod
    def run_fresh(self, script: str, timeout: float, kill_others: bool = False) -> CommandResult:
        """Run a bash script in a process of its own that nothing in the sandbox can have prepared: a clean
        environment and PATH, and programs from the untouched system, not from what the episode wrote; it sees
        the episode's files and users. What it writes stays, but once ``run`` was called it cannot write to
        /usr (a task's preparation, before that, can).

        Args:
            kill_others: first kill every process of the episode, its shell included: for grading, after which
                only other scripts, reading files and ``close`` follow, and ``run`` raises RuntimeError until
                ``restore``. The script then sees the episode's files as data: programs, libraries and
                settings are the untouched system's.
        """

    @abstractmethod
    def read_file(self, path: str, limit: int = 1 << 20) -> bytes:
        """The first ``limit`` bytes of a regular file.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file as root, making its folders."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """All that was written so far, as one opaque piece. Processes and the shell's variables are not in
        it.
        """

    @abstractmethod
    def restore(self, snapshot: bytes) -> None:
        """Go back to a snapshot of this or another sandbox of the same base: files as they were then, no
        processes, a new shell.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill and remove everything. May be called twice, and before ``start``."""

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
