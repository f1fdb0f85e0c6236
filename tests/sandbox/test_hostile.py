"""Hostile commands: against this computer, against the sandbox itself, against an inspection. docs/sandbox.md has the same table."""

# ruff: noqa: E501  (the rows of the table are commands)

import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_peft.sandbox.base import CommandResult, Sandbox, SandboxLimits
from agent_peft.sandbox.build import build_sandbox, missing
from agent_peft.types import AgentPeftError

LIMITS = SandboxLimits(memory_mb=192, processes=48, file_size_mb=24, cpu_seconds=2, output_chars=4096)
DOCS = Path(__file__).parents[2] / "docs" / "sandbox.md"


@dataclass(frozen=True)
class Host:
    """Things of this computer that no command may reach."""

    secret: Path
    port: int
    path: Path
    name: str  # of an abstract socket


@dataclass(frozen=True)
class Hostile:
    """A command, a statement that must hold afterwards, and a check of it."""

    what: str
    holds: str
    command: str
    check: Callable[[Sandbox, CommandResult, Host], None] = lambda sandbox, result, host: None
    timeout: float = 10.0
    fresh: bool = False  # the command ends its shell


def seen(result: CommandResult, text: str) -> None:
    assert text in result.output, result


def unseen(result: CommandResult, *texts: str) -> None:
    assert not [text for text in texts if text in result.output], result


def stopped(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    assert result.timed_out and result.exit_code is None, result


def refused(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    assert result.exit_code not in (0, None), result
    unseen(result, "REACHED")


def secret_safe(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    unseen(result, "host-secret", "REACHED")
    assert host.secret.read_text() == "host-secret"


# /srv/done does not exist. The other lines fail unless the programs are the host's.
INSPECTION = """
ls /srv/made >/dev/null || exit 9
[ "$(cat /srv/made | awk 1)" = made ] || exit 8
[ "$(stat -c %a /srv/made)" = 644 ] || exit 7
grep -q root /etc/passwd || exit 6
touch /srv/grading; sleep 0.1
test -e /srv/done
"""


def honest(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    verdict = sandbox.inspect(INSPECTION, 10)
    assert verdict.exit_code == 1, (result, verdict)


def survives_nothing(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    unseen(sandbox.inspect("ps -eo args", 10), "sleep 600")


INSPECTING = (honest, survives_nothing)  # afterwards the sandbox is only closed


def small(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    assert len(result.output) <= LIMITS.output_chars + 100 and result.truncated, len(result.output)


def prompt(sandbox: Sandbox, result: CommandResult, host: Host) -> None:
    assert not result.timed_out and result.exit_code == 0, result


def bounded(result: CommandResult) -> None:
    assert 20 < int(result.output.rpartition("processes=")[2].split()[0]) < LIMITS.processes + 12, result


FAKE = r"""fake() { rm -f "$1"; printf '#!/bin/sh\necho 600; exit 0\n' >"$1"; chmod 755 "$1"; }; """
PYTHON = "python3 - <<'END'\n"

HOSTILE = (
    # the computer's resources
    Hostile("fork bomb", "as many processes as allowed, all killed in a second; the shell answers", ":(){ :|:& };:"),
    Hostile(
        "fork bomb as many users",
        "the limit holds for the machine, not for each user",
        "mkfifo /tmp/p; exec 9<>/tmp/p; "  # to wait without a process
        "for u in $(seq 2000 2020); do setpriv --reuid $u --clear-groups sh -c 'for i in 1 2 3 4 5 6; do sleep 600 & done; wait' & done; "
        "for ((t = most = 0; t < (most > 30 ? 10 : 300); t++)); do "
        "set -- /proc/[0-9]*; ((most = $# > most ? $# : most)); read -t 0.05 -u 9; done; echo processes=$most",
        lambda s, r, h: missing("oci") or bounded(r),
        30,
    ),
    Hostile("disk filler, one file", "the file ends at its limit", "dd if=/dev/zero of=/tmp/big bs=1M; stat -c %s /tmp/big",
            lambda s, r, h: seen(r, str(LIMITS.file_size_mb << 20))),
    Hostile("disk filler, many files", "only the machine's disk is full", "for i in $(seq 20); do head -c 20M /dev/zero >/tmp/$i; done",
            lambda s, r, h: seen(r, "No space left")),
    Hostile("a million empty files", "at most as many as the file system allows", PYTHON + "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'x').close()\nEND",
            lambda s, r, h: seen(r, "No space left")),
    Hostile("memory filler", "an allocation above the limit fails", PYTHON + "x = bytearray(10**9)\nprint('REACHED')\nEND", refused),
    Hostile("memory filler, many processes", "the largest is killed when all together exceed the limit",
            "for i in 1 2 3 4; do python3 -c 'import time; x = bytearray(100 << 20); time.sleep(1.5); print(\"REACHED\")' & done; wait",
            lambda s, r, h: (prompt(s, r, h), None if r.output.count("REACHED") <= 1 else pytest.fail(r.output))[1]),
    Hostile("memory filler, shared", "killed", PYTHON + "import mmap\nx = mmap.mmap(-1, 10**9)\nfor i in range(0, 10**9, 4096): x[i] = 1\nprint('REACHED')\nEND",
            lambda s, r, h: unseen(r, "REACHED")),
    Hostile("memory filler in /dev/shm", "it has its own limit", "for i in $(seq 20); do head -c 20M /dev/zero >/dev/shm/$i; done",
            lambda s, r, h: seen(r, "No space left")),
    Hostile("memory filler, memfd", "refused", PYTHON + "import os\nos.memfd_create('x')\nprint('REACHED')\nEND", refused),
    Hostile("burning the CPU", "stopped at the limit of CPU time", "while :; do :; done", stopped, 60),
    Hostile("a sleep of 10 minutes", "stopped at its time limit; the shell keeps its variables", "kept=yes; sleep 600",
            lambda s, r, h: (stopped(s, r, h), seen(s.run("echo $kept", 5), "yes"))[1], 0.5),
    Hostile("a loop that ignores interrupts", "the shell is killed; a new one has its folder and exports", "trap '' INT; while :; do :; done", stopped, 0.5),
    Hostile("stopping its own shell", "stopped at its time limit", "kill -STOP $$; sleep 600", stopped, 0.5),
    Hostile("endless output", "cut to its limit, in bounded memory", "yes", lambda s, r, h: (stopped(s, r, h), small(s, r, h))[1], 1),
    Hostile("an endless line", "cut to its limit", "tr '\\0' x </dev/zero | head -c 40M", small, 20),
    Hostile("output that is not text", "bad bytes are replaced", "head -c 100000 /dev/urandom", lambda s, r, h: (prompt(s, r, h), small(s, r, h))[1]),
    Hostile("waiting for a person", "there is no terminal, and the input is empty", "read x; echo $?; cat; python3; sudo -S true; echo over",
            lambda s, r, h: seen(r, "over")),
    # the sandbox's own working
    Hostile("kill -9 -1", "its shell or a new one answers in the same machine", "touch /srv/kept; kill -9 -1",
            lambda s, r, h: (answers(s, False), seen(s.run("ls /srv", 10), "kept"))[1]),
    Hostile("kill -9 1", "process 1 cannot be killed from inside", "kill -9 1; kill -STOP 1; sleep 0.1", prompt),
    Hostile("closing its own shell", "its exit code is the result; the next command has a new shell", "exit 7",
            lambda s, r, h: seen(CommandResult(str(r.exit_code), 0), "7"), fresh=True),
    Hostile("killing its own shell", "no exit code; the next command has a new shell", "kill -9 $$",
            lambda s, r, h: seen(CommandResult(str(r.exit_code), 0), "None"), fresh=True),
    Hostile("replacing its own shell", "stopped at its time limit; a new shell", "exec sleep 600", stopped, 0.5, fresh=True),
    Hostile("closing every descriptor", "the machine continues", "for f in $(seq 3 255); do eval \"exec $f>&-\"; done; exec 0<&- 1>&- 2>&-", timeout=1),
    Hostile("forging the end of a command", "commands do not have the descriptor that reports it",
            "for f in $(seq 3 255); do { echo '0 0'; echo 'end'; } >&$f; done 2>/dev/null; (exit 5)",
            lambda s, r, h: seen(CommandResult(str(r.exit_code), 0), "5")),
    Hostile("replacing printf and builtin", "the shell no longer answers and is replaced", "printf() { :; }; builtin() { :; }; eval() { :; }", stopped, 0.5),
    Hostile("a daemon that keeps the output open", "the command returns at once", "setsid sleep 600 & disown; (setsid sleep 600 &)", prompt),
    # this computer
    Hostile("reading the host's files", "they are not there", "cat {secret}; ls {folder}; cat /etc/shadow-; ls -A /home", secret_safe),
    Hostile("reading our environment", "it is cleared", "env; cat /proc/*/environ | tr '\\0' '\\n'", secret_safe),
    Hostile("looking at the host's processes", "it sees only its own", "ls -d /proc/{pid}/fd; cat /proc/[0-9]*/cmdline | tr '\\0' ' '",
            lambda s, r, h: unseen(r, "pytest", "agent_peft", str(Path(__file__).parents[2]))),
    Hostile("writing outside", "its files end with the machine", "mkdir -p {folder}; echo x >{secret}; echo x >/usr/bin/agent-peft-was-here; rm -rf /usr/share /boot",
            lambda s, r, h: (secret_safe(s, r, h), None if not Path("/usr/bin/agent-peft-was-here").exists() and Path("/usr/share").exists() else pytest.fail("written"))[1]),
    Hostile("the host's loopback", "the machine has another network", "exec 3<>/dev/tcp/127.0.0.1/{port} && echo REACHED && false", refused, 5),
    Hostile("the internet", "there is no network", "exec 3<>/dev/tcp/1.1.1.1/53 && echo REACHED && false", refused, 5),
    Hostile("the host's sockets", "neither a path nor a name leads to them",
            PYTHON + "import socket\nfor name in ('{path}', '\\0{name}'):\n    try: socket.socket(socket.AF_UNIX).connect(name); print('REACHED')\n    except OSError: pass\nEND",
            lambda s, r, h: unseen(r, "REACHED")),
    Hostile("the virtual machine's socket", "refused", PYTHON + "import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint('REACHED')\nEND", refused),
    Hostile("mounting", "refused", "mount -t tmpfs none /mnt || mount --bind / /mnt || mount -o remount,rw /dev", refused),
    Hostile("its own user namespace", "refused", "unshare -Ur echo REACHED || unshare -m echo REACHED", refused),
    Hostile("the host's disk by device", "refused", "mknod /tmp/d b 254 0 && head -c 10 /tmp/d && echo REACHED; false", refused),
    Hostile("tracing process 1", "refused",
            PYTHON + "import ctypes\nprint('REACHED' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 'no')\nEND", lambda s, r, h: seen(r, "no")),
    Hostile("the host's files through /proc/1", "refused", "ls /proc/1/root/ /proc/1/cwd/ && echo REACHED; ls -l /proc/1/fd/ && echo REACHED; false", refused),
    Hostile("entering process 1's namespaces", "refused", "nsenter -t 1 -m -- echo REACHED || nsenter -t 1 -a -- echo REACHED", refused),
    Hostile("the kernel's settings", "read-only", "(echo '|/tmp/x' >/proc/sys/kernel/core_pattern) || (echo b >/proc/sysrq-trigger)", refused),
    Hostile("the kernel's log and keys", "refused", "dmesg -c && echo REACHED; " + PYTHON
            + "import ctypes\nprint('REACHED' if ctypes.CDLL(None).syscall(250, 0, -3, 0) >= 0 else 'no')\nEND", lambda s, r, h: (seen(r, "no"), unseen(r, "REACHED"))[1]),
    Hostile("breaking out of a chroot", "outside is only the machine's own root", PYTHON
            + "import os\nos.makedirs('/tmp/c', exist_ok=True)\nd = os.open('/', 0)\nos.chroot('/tmp/c')\nos.fchdir(d)\nfor _ in range(64): os.chdir('..')\nos.chroot('.')\nprint(open('{secret}').read())\nEND",
            secret_safe),
    # the verdict
    Hostile("replacing bash", "an inspection uses the host's", FAKE + "fake /usr/bin/bash.new; mv -f /usr/bin/bash.new /usr/bin/bash; cp -f /usr/bin/bash /usr/bin/sh", honest),
    Hostile("replacing stat, ls, test and awk", "an inspection uses the host's", FAKE + "for p in stat ls test [ awk cat grep; do fake /usr/bin/$p; done; hash -r", honest),
    Hostile("programs earlier in PATH", "an inspection has its own PATH", FAKE + "for p in stat ls awk cat grep; do fake /usr/local/bin/$p; fake /usr/local/sbin/$p; done", honest),
    Hostile("an alternative for awk", "an inspection uses the host's", FAKE + "fake /srv/evil; ln -sf /srv/evil /etc/alternatives/awk", honest),
    Hostile("a preloaded library", "an inspection preloads none",
            "echo 'void _exit(int); __attribute__((constructor)) void f(void) {{ _exit(0); }}' >/tmp/a.c; cc -shared -fPIC -o /tmp/a.so /tmp/a.c; "
            "echo /tmp/a.so >/etc/ld.so.preload", honest),
    Hostile("another libc, another loader", "an inspection uses the host's",
            "cd /usr/lib/*-linux-gnu && for f in libc.so.6 ld-linux-*.so.*; do echo x >/tmp/l; mv -f /tmp/l $f; done", honest, 3),
    Hostile("bash's startup files", "an inspection reads none",
            "echo 'exit 0' | tee /etc/bash.bashrc /etc/profile /root/.bashrc /root/.profile /root/.bash_profile >/srv/env; export BASH_ENV=/srv/env ENV=/srv/env PATH=/nowhere; "
            "ls() {{ :; }}; export -f ls; alias stat='echo 600'", honest),
    Hostile("links in place of folders", "the host's programs are where they were",
            "mv /bin /bin.old; ln -s /srv /bin; mv /lib64 /lib64.old; ln -s /root /lib64; rm -rf /usr/local; ln -s / /usr/local", honest, 3),
    Hostile("a process that waits for the inspection", "it is killed before", "(while :; do [ -e /srv/grading ] && touch /srv/done; done) & disown", honest),
    Hostile("a daemon that survives everything", "it is killed before an inspection", "trap '' TERM HUP INT; (setsid nohup sh -c 'trap \"\" TERM; sleep 600' >/dev/null 2>&1 &)",
            survives_nothing),
)  # fmt: skip


def table() -> str:
    lines = ["| | what it tries | what holds |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {i} | {hostile.what} | {hostile.holds} |" for i, hostile in enumerate(HOSTILE, 1))]
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A file, listening sockets, and a secret in our environment."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret.txt"
    secret.write_text("host-secret")
    name = f"agent-peft-{os.getpid()}"
    os.environ["AGENT_PEFT_TEST_SECRET"] = "host-secret"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        by_path.bind(str(folder / "s"))
        by_name.bind(f"\0{name}")
        for listener in (by_path, by_name):
            listener.listen()
        yield Host(secret, server.getsockname()[1], folder / "s", name)
    del os.environ["AGENT_PEFT_TEST_SECRET"]


@pytest.fixture(scope="module", autouse=True)
def oci():
    try:
        build_sandbox("oci", LIMITS)
    except AgentPeftError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("hostile", HOSTILE, ids=[hostile.what for hostile in HOSTILE])
def test_it_is_contained(hostile, host):
    words = {
        "secret": host.secret,
        "folder": host.secret.parent,
        "port": host.port,
        "path": host.path,
        "name": host.name,
        "pid": os.getpid(),
    }
    command = hostile.command
    for word, value in words.items():
        command = command.replace(f"{{{word}}}", str(value))
    command = command.replace("{{", "{").replace("}}", "}")
    threads = threading.active_count()
    with build_sandbox("oci", LIMITS) as sandbox:
        sandbox.run_fresh("echo made >/srv/made", 10)
        before = sandbox.run("mark=here; echo $mark", 30)
        assert before.output == "here\n"
        result = sandbox.run(command, hostile.timeout)
        hostile.check(sandbox, result, host)
        if hostile.check not in INSPECTING:
            answers(sandbox, fresh=hostile.fresh)
    assert host.secret.read_text() == "host-secret"
    deadline = time.monotonic() + 10
    while (
        threading.active_count() > threads and time.monotonic() < deadline
    ):  # each waits for a program's end
        time.sleep(0.01)
    assert threading.active_count() <= threads
    os.kill(os.getpid(), 0)


def answers(sandbox: Sandbox, fresh: bool) -> None:
    """The shell is usable, or cleanly new; a command or two may die with what was going on."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        result = sandbox.run("rm -f /tmp/* /dev/shm/* 2>/dev/null; expr 20 + 22", 5)
        if result.exit_code == 0 and result.output.endswith("42\n"):
            break
    else:
        raise AssertionError(f"the shell no longer answers: {result}")
    if fresh:
        assert sandbox.run("echo mark=$mark", 10).output == "mark=\n"


def test_without_a_clean_machine_the_inspection_would_be_fooled(host):
    """The tricks of the rows above must work where nothing prevents them."""
    for what in (
        "replacing stat, ls, test and awk",
        "programs earlier in PATH",
        "an alternative for awk",
        "a preloaded library",
    ):
        (hostile,) = (row for row in HOSTILE if row.what == what)
        with build_sandbox("oci", LIMITS) as sandbox:
            sandbox.run_fresh("echo made >/srv/made", 10)
            sandbox.run(hostile.command.replace("{{", "{").replace("}}", "}"), 10)
            assert sandbox.run(f"bash -c {shlex.quote(INSPECTION)}", 10).exit_code != 1, what


def test_the_documentation_has_this_table():
    assert len(HOSTILE) >= 40
    assert table() in DOCS.read_text(encoding="utf-8"), "copy table() to docs/sandbox.md"
