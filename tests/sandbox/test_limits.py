"""The resources of a machine are limited, also those that no single number of the kernel shows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import time

import pytest

from agent_peft.sandbox import processes
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox
from agent_peft.sandbox.runtime import descriptor_limit, find_runtime
from agent_peft.types import AgentPeftError

LIMITS = SandboxLimits(memory_mb=64, processes=40, file_size_mb=16, cpu_seconds=1)


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        with build_sandbox("oci", LIMITS) as sandbox:
            if not sandbox.run("command -v python3", 20).ok:
                pytest.skip("the attacks are written in Python, and /usr/bin has no python3")
    except AgentPeftError as error:
        pytest.skip(str(error))


def watched() -> bool:
    """Whether the trainer bounds machines: then the whole machine ends above a limit."""
    return find_runtime().case.cgroups == ""


@pytest.fixture
def machine():
    with build_sandbox("oci", LIMITS) as sandbox:
        yield sandbox


def python(code: str) -> str:
    return f"python3 - <<'PYTHON'\n{textwrap.dedent(code)}\nPYTHON"


def answers(machine) -> bool:
    return machine.run("echo alive", 20).output.endswith("alive\n")


def test_page_tables_count(machine):
    code = """
        import mmap, os
        file = os.open('/srv/f', os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 8 << 20)
        held = []
        for i in range(40000):
            held.append(mmap.mmap(file, 8 << 20, mmap.MAP_SHARED | 0x8000))  # populate: 16 KB of tables
        print('REACHED')
    """
    result = machine.run(python(code), 15)
    assert "REACHED" not in result.output and answers(machine)


def test_sockets_count(machine):
    code = """
        import socket, time
        held = [socket.socketpair() for _ in range(450)]
        for a, b in held:
            for end in (a, b):
                end.setblocking(False)
                try:
                    while end.send(b'x' * 65536): pass
                except OSError: pass
        time.sleep(2)
        print('REACHED')
    """
    result = machine.run(python(code), 15)
    assert "REACHED" not in result.output and answers(machine)


def test_children_that_nobody_waits_for_count(machine):
    code = """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(120):  # 12 seconds of CPU time, however loaded the computer is
            if os.fork() == 0:
                stop = time.process_time() + 0.1
                while time.process_time() < stop: pass
                os._exit(0)
            time.sleep(0.1)
        try: os.wait()  # for the last one; the system collects them
        except ChildProcessError: print('REACHED')
    """
    result = machine.run(python(code), 20)
    assert result.timed_out or result.exit_code == 137, result  # stopped by us or by process 1
    assert "REACHED" not in result.output and answers(machine)


@pytest.mark.slow
def test_a_loop_between_commands_ends(machine):
    machine.run("(while :; do :; done) & echo $! >/srv/pid", 10)
    for seconds in (3, 6, 12, 24):  # each command allows more; a busy computer gives the loop little time
        time.sleep(seconds)
        if machine.run("kill -0 $(cat /srv/pid)", 10).exit_code != 0:
            return
    raise AssertionError("a loop in the background continued and on")


@pytest.mark.slow
def test_a_flood_of_the_control_stream_is_read_slowly(machine):
    before = time.process_time()
    result = machine.run(
        "(head -c 100M /dev/zero >&251) 2>/dev/null; "
        "trap 'head -c 8M /dev/zero >&251' DEBUG; while :; do :; done",
        1.5,
    )
    assert result.timed_out and time.process_time() - before < 1.5
    assert answers(machine)


def test_an_exit_code_of_any_length_is_one(machine):
    machine.run(
        """trap 's=${BASH_COMMAND#*printf }; s=${s:1:16}; printf "%s %05000d\\n" "$s" 7 >&251' DEBUG""", 10
    )
    for digits in (3, 18, 19, 400, 5000):
        result = machine.run(f"printf -v n '%0{digits}d' 0; exit ${{n//0/9}}", 10)
        assert result.exit_code is None or 0 <= result.exit_code <= 255


def test_descriptors_in_flight_do_not_take_ours():
    """As the trainer's own user, who may have 1,024 descriptors, a machine has a fourth of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        assert descriptor_limit(shared=True) == 256 and descriptor_limit(shared=False) == 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000) if hard > 0 else 20_000, hard))
        assert descriptor_limit(shared=True) == 1024 or hard < 4096
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with build_sandbox("oci", LIMITS) as machine:
        assert int(machine.run("ulimit -n; ulimit -Hn", 10).output.split()[1]) <= 1024


def test_who_cannot_be_seen_is_seen():
    """A process whose first thread has ended still lives, with its memory; from our own /proc."""
    code = (
        "import ctypes, threading, time\n"
        "def rest():\n  held = bytearray(b'x' * (30 << 20)); print('up', flush=True); time.sleep(60)\n"
        "threading.Thread(target=rest).start(); ctypes.CDLL(None).syscall(60, 0)"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit is x86-64's")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        process = processes._process(str(child.pid))
        assert process is not None and process.thread != process.pid and process.resident > 30 << 20
        child.kill()


def test_a_process_that_has_ended_costs_no_descriptor():
    """An inspection may end before we look at it."""
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has waited for it
        for _ in range(3):
            with pytest.raises(OSError):
                processes.Processes(child.pid)
    assert len(os.listdir("/proc/self/fd")) == before
