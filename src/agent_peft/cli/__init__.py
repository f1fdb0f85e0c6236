"""The command line. Exit codes: 0 worked, 1 failed, 2 bad input, 3 a failed check (``TrustError``), 130
interrupted. An error is one line on stderr.

Each command imports what it needs inside its function, so that ``agent-peft --help`` does not load torch.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from agent_peft.cli.app import LINE, app
from agent_peft.cli.comparison import compare, sweep
from agent_peft.cli.configuration import explain
from agent_peft.cli.environments import download, generate, serve, validate
from agent_peft.cli.launch import launch
from agent_peft.cli.policies import chat, mcp, serve_policy
from agent_peft.cli.runs import evaluate, merge, runs, train
from agent_peft.cli.show import report, show
from agent_peft.lookup import alike
from agent_peft.output import flush_output, open_output
from agent_peft.printable import printable
from agent_peft.search_path import search_current_folder_last
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

# as --help lists them
COMMANDS = (
    *(train, evaluate, merge, launch, sweep, compare, runs, show, report, generate, validate, download),
    *(serve, serve_policy, chat, mcp, explain),
)
INTERRUPTED = 130
TRACEBACK = "AGENT_PEFT_TRACEBACK"
_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it

for command in COMMANDS:
    app.command()(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors are printed on stderr."""
    try:
        code: int = app(args=list(arguments), prog_name="agent-peft", standalone_mode=False) or 0
        if code != INTERRUPTED:
            return code
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else app.info.name
        return _fail(f"{error.format_message()}{_key_of(error)} ({command} --help tells more)", 2)
    except InfrastructureError as error:
        return _fail(str(error), 1)
    except TrustError as error:
        return _fail(str(error), 3)
    except AgentPeftError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):  # some versions of typer raise, others return 130
        pass
    except (SystemExit, GeneratorExit):
        raise
    except BrokenPipeError:  # the reader has closed the pipe, and knows
        return 1
    except BaseException as error:  # also what a library in Rust raises when it panics
        if os.environ.get(TRACEBACK):
            raise
        return _fail(_unforeseen(error), 1)
    resumes = arguments[:1] in (["train"], ["sweep"])
    advice = "; run the same command (without --fresh) to continue" if resumes else ""
    return _fail(f"interrupted{advice}", INTERRUPTED)


def _key_of(error: Any) -> str:
    """Advice on an unknown option that is called as a key of a configuration: ``--learning-rate``."""
    name = str(getattr(error, "option_name", "")).strip("-").replace("-", "_")
    if not name or not any(one.name == "overrides" for one in error.ctx.command.params):
        return ""
    from agent_peft.configuration.keys import all_keys

    paths = [key.path for key in all_keys()]
    near = alike(name, [path.rpartition(".")[2] for path in paths])
    path = next((path for path in paths if near is not None and path.rpartition(".")[2] == near), None)
    return "" if path is None else f"; write {path}=VALUE"


def _unforeseen(error: BaseException) -> str:
    """The message for an error that no other code has put into words."""
    if isinstance(error, OSError) and error.strerror is not None:
        place = f"{error.filename}: " if error.filename is not None else ""
        advice = "nothing that was whole is lost: mend that, then run the same command again"
        return f"{place}{error.strerror}; {advice}"
    if isinstance(error, MemoryError):
        return "there is not enough memory; give it a smaller input, or more memory"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    kind = type(error).__name__
    return f"unforeseen: {kind}: {error} (at {where}; {TRACEBACK}=1 shows the whole traceback)"


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # nobody reads it
        print("agent-peft: " + printable(" ".join(message.split()), LINE), file=sys.stderr)
    return code


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record).strip(), LINE)


def _make_output_printable() -> None:
    """Print each warning as one line, without control characters. A character that the terminal's encoding
    lacks is printed as an escape.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable())
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)


def main() -> None:
    """Run the command of ``sys.argv`` and exit: the entry point of ``agent-peft``."""
    search_current_folder_last()
    open_output()
    _make_output_printable()
    try:
        code = run(sys.argv[1:])
    finally:
        flush_output()
    sys.exit(code)
