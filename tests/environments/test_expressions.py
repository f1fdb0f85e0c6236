"""A stranger's regular expression costs little, whatever it is."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_peft.environments import expressions
from agent_peft.environments.expressions import fault, found

ENDLESS = ("^(a+)+$", "a" * 50 + "!")


@pytest.mark.parametrize(
    ("expression", "text", "same"),
    [
        ("^[0-9]+$", "12", True),
        ("^[0-9]+$", "a12", False),
        ("b", "abc", True),
        ("", "", True),
        ("^.$", "\ud800", True),
        ("\n", "a\nb", True),
        ("(", "(", False),  # no expression at all
        (ENDLESS[0], "aaa", True),
        (*ENDLESS, False),
        ("(x+x+)+y", "x" * 4_000, False),
        ("(.*)*=(.*)*;", "." * 4_000, False),
        ("(?:a{1,99999}){1,99999}b", "a" * 4_000, False),
    ],
)
def test_searching(expression, text, same):
    assert found(expression, text) is same
    assert found("^a", "ab")  # and continues


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("^[0-9]+$", None),
        ("(", "missing )"),
        ("(?P<\x1b>a)", "bad character in group name"),
        ("a{99999999999}", "too large"),
        ("(" * 499 + ")" * 499, None),
        ("a" * 2_000, "longer than 1000"),
        ("(?:" * 60 + "a" + "){1,9}" * 60, None),
        ("(?:(?:(?:a{65000}){65000}){65000}){65000}", None),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(expression, told):
    begun = time.monotonic()
    said = fault(expression)
    assert time.monotonic() - begun < 30
    if told is None:
        assert said is None or "too" in said
    else:
        assert any(part in said for part in told.split("|")) and said.isprintable() and len(said) < 250


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.text("ab(){}[]*+?|^$\\\\1,9<>=!:P.", max_size=40) | st.text(max_size=30),
    st.text("ab19 ", max_size=200),
)
@example("(?:a{1,99999}){1,99999}", "a" * 100)
@example("\\\\", "")
def test_no_expression_raises(expression, text):
    assert isinstance(found(expression, text), bool)
    assert isinstance(fault(expression), str | None)


def test_others_go_on_while_one_is_searched_for():
    beats = []
    stop = threading.Event()

    def beat():
        while not stop.wait(0.01):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert not found(*ENDLESS)
    finally:
        stop.set()
        thread.join()
    assert len(beats) > 10  # the interpreter's lock was free


@pytest.mark.slow
def test_threads_share_the_process():
    with ThreadPoolExecutor(8) as pool:
        asked = [("^a+$", "a" * n) if n % 7 else ENDLESS for n in range(1, 40)]
        assert list(pool.map(lambda each: found(*each), asked)) == [n % 7 != 0 for n in range(1, 40)]


def process():
    assert found("a", "a")
    return expressions._searcher._process


def test_one_that_was_killed_is_replaced():
    first = process()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert process().pid != first.pid


def test_a_fork_has_a_process_of_its_own():
    parents = process().pid
    child = os.fork()
    if child == 0:
        try:
            gc.collect()
            os._exit(0 if found("b", "abc") and not found(*ENDLESS) and process().pid != parents else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert process().pid == parents


def test_nothing_is_left_behind():
    code = (
        "from agent_peft.environments import expressions as e; import sys, os, signal\n"
        "e.found('a', 'a'); print(e._searcher._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == 'killed' else None"
    )
    for how in ("killed", "ended"):
        said = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=60)
        pid = int(said.stdout)
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}")
        assert not said.stderr


def test_it_stops_by_its_own_clock():
    pid = os.fork()
    if pid == 0:  # the asker dies while it waits
        try:
            threading.Timer(0.1, lambda: os._exit(0)).start()
            assert found("a", "a")
            found(*ENDLESS)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 20
    while (left := searching()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def searching():
    """Processes that search, but for our own."""
    ours = expressions._searcher._process.pid if expressions._searcher is not None else None
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                parent = int(file.read().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if b"ITIMER_PROF" in command and int(name) != ours and parent == 1:
            pids.append(int(name))
    return pids
