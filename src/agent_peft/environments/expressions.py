"""Regular expressions of a task or a configuration, whose author may be a stranger: compiled and matched in
another process, with little time and memory.

Some take for ever, to match or even to compile, and Python's ``re`` holds the interpreter's lock all the
while. The process is started at the first need and stays. It stops itself by its own clock, so that it never
outlives us for long, and ends when we do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import subprocess
import sys
import threading
from typing import Any

from agent_peft.types import InfrastructureError

MAX_EXPRESSION = 1_000  # characters
NO_GROUP = "it has no group"
_CPU_SECONDS = 0.5  # of one request
_SECONDS = 10.0  # of one request, should the machine be busy
_MEMORY = 256 << 20  # bytes of addresses

_PROGRAM = f"""
import json, re, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
for line in sys.stdin.buffer:
    signal.setitimer(signal.ITIMER_PROF, {_CPU_SECONDS})  # upon which it dies
    expression, text, every = json.loads(line)
    try:
        pattern = re.compile(expression)
        last = None if every else pattern.search(text)
        for last in pattern.finditer(text) if every else ():
            pass
        reply = [pattern.groups, last is not None, last[1] if last and pattern.groups else None]
    except re.error as error:
        reply = str(error)
    except (OverflowError, RecursionError) as error:
        reply = "it is too large"
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(reply), flush=True)
"""


class _Searcher:
    """The process, used by one thread at a time."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise InfrastructureError(
                f"no process could be started to match a regular expression: {error}"
            ) from error

    def running(self) -> bool:
        return self._process.poll() is None

    def ask(self, expression: str, text: str, every: bool) -> Any:
        """The reply; None if the process died or took too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        reply = b""
        try:
            self._process.stdin.write(json.dumps([expression, text, every]).encode() + b"\n")
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not reply.endswith(b"\n"):
                    piece = self._process.stdout.read(1 << 16) if selector.select(_SECONDS) else b""
                    if not piece:
                        raise EOFError
                    reply += piece
        except (OSError, EOFError):
            self.close()
            return None
        return json.loads(reply)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._release()

    def detach(self) -> None:
        """Let go of it in a child that we forked: it is our parent's."""
        self._process.returncode = 0  # there is nothing for us to wait for
        self._release()

    def _release(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_lock = threading.Lock()
_searcher: _Searcher | None = None


def found(expression: str, text: str) -> bool:
    """Whether the expression is found in the text. One that takes too long, or too much memory, is not.

    >>> found("^[0-9]+$", "12"), found("^(a+)+$", "a" * 40 + "!")
    (True, False)
    """
    reply = _ask(expression, text)
    return isinstance(reply, list) and bool(reply[1])


def last_group(expression: str, text: str) -> str | None:
    """The first group of an expression's last match in the text; None where there is none. Raises
    TimeoutError if the expression takes too much time or memory.

    >>> last_group("is (.)", "it is a, it is b")
    'b'
    """
    reply = _ask(expression, text, every=True)
    if not isinstance(reply, list):
        raise TimeoutError(f"{expression!r:.60} takes too much time or memory")
    return None if reply[2] is None else str(reply[2])


@functools.lru_cache(256)
def fault(expression: str, group: bool = False) -> str | None:
    """Why an expression cannot be used, in one line; None where it can. With ``group`` it needs one.

    >>> fault("(")
    'missing ), unterminated subpattern at position 0'
    """
    if len(expression) > MAX_EXPRESSION:
        return f"it is longer than {MAX_EXPRESSION} characters"
    reply = _ask(expression, "")
    if isinstance(reply, list):
        return None if reply[0] or not group else NO_GROUP
    return "it takes too much time or memory" if reply is None else ascii(reply)[1:-1][:200]


def _ask(expression: str, text: str, every: bool = False) -> Any:
    global _searcher
    with _lock:
        if _searcher is None or not _searcher.running():
            _stop()
            _searcher = _Searcher()
        return _searcher.ask(expression, text, every)


def _stop() -> None:
    global _searcher
    if _searcher is not None:
        _searcher.close()
        _searcher = None


def _after_fork() -> None:
    global _lock, _searcher
    _lock = threading.Lock()  # another thread of our parent may hold it for ever
    if _searcher is not None:
        _searcher.detach()
        _searcher = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_stop)
