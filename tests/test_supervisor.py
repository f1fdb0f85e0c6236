"""Parts that fail, hang, refuse or are killed, under the supervisor. They are small programs, not models."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_peft.supervisor import Part, Supervisor
from agent_peft.types import InfrastructureError

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def program(name: str, code: str, *arguments: str, health: str | None = None) -> Part:
    return Part(name, (sys.executable, "-S", "-c", code, *arguments), health=health)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def server(port: int) -> Part:
    return program("sampler-0", SERVER, str(port), health=f"http://127.0.0.1:{port}/health")


def learner(code: str) -> Part:
    return program("learner", f"import os, pathlib, signal, sys, time\n{code}")


@pytest.fixture
def supervise(tmp_path: Path) -> Callable[..., tuple[Supervisor, list[str]]]:
    def make(*servers: Part, learner: Part | None, **keys: float) -> tuple[Supervisor, list[str]]:
        lines: list[str] = []
        settings = {"ready": 60.0, "restarts": 3, **keys}
        secrets, report = {"SECRET": "s"}, lines.append
        return Supervisor(servers, learner, tmp_path / "logs", secrets, report=report, **settings), lines

    return make


def test_the_trainer_starts_when_all_answer_and_ends_all(supervise, server: Part, tmp_path: Path) -> None:
    asks = "import urllib.request; urllib.request.urlopen(sys.argv[1]); sys.exit(os.environ['SECRET'] != 's')"
    asking = Part("learner", (*learner(asks).command, server.health))
    supervisor, lines = supervise(server, learner=asking)
    assert supervisor.run() == 0
    events = ["sampler-0: started", "sampler-0: answers", "learner: started"]
    assert len(lines) == 3 and all(line.startswith(event) for line, event in zip(lines, events, strict=True))
    assert all(keeper.process.poll() is not None for keeper in supervisor.keepers)


@pytest.mark.slow
def test_what_is_killed_is_started_again(supervise, server: Part, tmp_path: Path) -> None:
    """A server by its trainer, and the trainer by itself; at its third start it has what it came for."""
    code = f"""
place = pathlib.Path({str(tmp_path / "starts")!r})
starts = len(place.read_text()) if place.exists() else 0
place.write_text("x" * (starts + 1))
if starts < 2:
    if not starts:
        os.kill(int(pathlib.Path({str(tmp_path / "pid")!r}).read_text()), signal.SIGKILL)
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor, lines = supervise(server, learner=learner(code))
    start = supervisor._start

    def noting(keeper) -> None:
        start(keeper)
        if keeper.part is server:
            (tmp_path / "pid").write_text(str(keeper.process.pid))

    supervisor._start = noting
    assert supervisor.run() == 0
    assert (tmp_path / "starts").read_text() == "xxx"
    assert sum(line.startswith("sampler-0: ended with signal 9") for line in lines) == 1
    assert sum(line.startswith("learner: ended with signal 9") for line in lines) == 2


def test_what_a_killed_part_has_started_is_killed_before_it_starts_again(supervise, tmp_path: Path) -> None:
    code = f"""
import subprocess
place = pathlib.Path({str(tmp_path / "child")!r})
if place.exists():
    state = pathlib.Path(f"/proc/{{place.read_text()}}/stat")
    sys.exit(2 * (state.exists() and ") Z" not in state.read_text()))
place.write_text(str(subprocess.Popen(["sleep", "99"]).pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor, lines = supervise(learner=learner(code))
    assert supervisor.run() == 0 and len(lines) == 3


@pytest.mark.parametrize(("error", "code"), [("AgentPeftError", 2), ("TrustError", 3)])
def test_what_a_restart_does_not_mend_is_not_tried_again(supervise, error: str, code: int) -> None:
    """The trainer is our command line, with the error planted."""
    planted = f"""
import sys
from agent_peft import cli, types
@cli.app.command()
def planted():
    raise types.{error}("planted")
sys.exit(cli.run(["planted"]))
"""
    supervisor, lines = supervise(learner=Part("learner", (sys.executable, "-c", planted)))
    assert supervisor.run() == code and len(lines) == 1


def test_bad_input_of_a_server_ends_the_launch_at_its_first_start(supervise, port: int) -> None:
    refuses = "import sys; print('no such model'); sys.exit(2)"
    server = program("sampler-0", refuses, health=f"http://127.0.0.1:{port}/health")
    supervisor, _ = supervise(server, learner=learner(""))
    with pytest.raises(InfrastructureError, match=r"sampler-0: ended with exit code 2; .*: no such model$"):
        supervisor.run()


@pytest.mark.parametrize(("codes", "ends"), [((-15, 3), 3), ((1, 2), 2), ((1, -9), 1)])
def test_ranks_end_with_the_code_of_the_one_that_failed(
    codes: tuple[int, int], ends: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    from agent_peft.launch import torchrun

    file = str(tmp_path / "none")
    failures = {rank: errors.ProcessFailure(rank, 1, code, file) for rank, code in enumerate(codes)}

    def fail() -> None:
        raise errors.ChildFailedError("train", failures)

    monkeypatch.setattr(torchrun, "main", fail)
    with pytest.raises(SystemExit) as end:
        torchrun.run()
    assert end.value.code == ends


def test_a_part_that_always_fails_ends_the_launch_with_its_last_line(supervise, port: int) -> None:
    fails = program(
        "sampler-0", "raise SystemExit('no such model')", health=f"http://127.0.0.1:{port}/health"
    )
    supervisor, _ = supervise(fails, learner=learner(""), restarts=1)
    with pytest.raises(InfrastructureError) as error:
        supervisor.run()
    assert str(error.value).startswith("sampler-0: ended with exit code 1; the last line of ")
    assert "no such model; it was started 2 times (restarts)" in str(error.value)


def test_a_part_that_does_not_answer_is_named(supervise, port: int) -> None:
    hangs = program(
        "sampler-0",
        "print('loading', flush=True); import time; time.sleep(99)",
        health=f"http://127.0.0.1:{port}/health",
    )
    supervisor, _ = supervise(hangs, learner=learner(""), ready=1.0)
    with pytest.raises(InfrastructureError, match=r"has not answered within 1 s \(ready\); .*: loading"):
        supervisor.run()
    assert supervisor.keepers[0].process.poll() is not None


def test_servers_elsewhere_are_awaited_and_left_alone(supervise, server: Part, tmp_path: Path) -> None:
    elsewhere = subprocess.Popen(server.command)
    try:
        lines: list[str] = []
        supervisor = Supervisor(
            [],
            learner("sys.exit(0)"),
            tmp_path / "logs",
            {},
            elsewhere=[server],
            ready=60,
            restarts=0,
            report=lines.append,
        )
        assert supervisor.run() == 0 and lines[0].startswith("sampler-0: answers")
        assert elsewhere.poll() is None
    finally:
        elsewhere.kill()
        elsewhere.wait()


def test_a_program_that_is_not_there(supervise) -> None:
    supervisor, _ = supervise(learner=Part("learner", ("/nowhere/python",)))
    with pytest.raises(InfrastructureError, match="learner: /nowhere/python cannot be started"):
        supervisor.run()


def test_stop_ends_what_ignores_it(supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_peft.supervisor.GRACE", 0.5)
    ignores = learner("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)")
    supervisor, _ = supervise(learner=ignores)
    threading.Timer(1.0, supervisor.stop).start()
    assert supervisor.run() == 130
    assert supervisor.learner.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_a_supervisor_that_is_killed_leaves_nobody(server: Part, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from agent_peft.supervisor import Part, Supervisor
def report(line):
    if "started" in line:
        print(supervisor.keepers[0].process.pid, flush=True)
part = Part("sampler-0", {server.command!r}, health={server.health!r})
supervisor = Supervisor([part], None, Path({str(tmp_path)!r}), {{}}, ready=60, restarts=0, report=report)
supervisor.run()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _lives(child):
        time.sleep(0.05)
    assert not _lives(child)


@pytest.mark.parametrize("ends", [True, False])
def test_a_part_waits_for_its_process_of_an_earlier_launch(
    supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """It may hold a port. A number that another process has by now is not waited for."""
    monkeypatch.setattr("agent_peft.supervisor.GRACE", 20.0 if ends else 0.5)
    record = tmp_path / "logs" / "learner.pid"
    first, _ = supervise(learner=learner("time.sleep(99)"))
    first.learner.start()
    try:
        if ends:
            threading.Timer(1.0, first.learner.end).start()
        second, _ = supervise(learner=learner("pass"))
        if ends:
            threading.Thread(target=first.learner.process.wait).start()  # as init does of an orphan
            assert second.run() == 0 and first.learner.process.poll() is not None
        else:
            pid = first.learner.process.pid
            with pytest.raises(InfrastructureError, match=f"learner: process {pid} of an earlier launch"):
                second.run()
            record.write_text(record.read_text() + "0")  # another one of that number
            assert supervise(learner=learner("pass"))[0].run() == 0
    finally:
        first.learner.end()
        first.learner.kill(time.monotonic() + 5)


def test_a_part_that_ends_before_it_is_recorded_is_not_waited_for(
    supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = supervise(learner=learner("pass"))
    with monkeypatch.context() as patch:
        patch.setattr("agent_peft.supervisor.start_of", lambda pid: None)
        first.learner.start()
    first.learner.kill(time.monotonic() + 20)
    monkeypatch.setattr("agent_peft.supervisor.GRACE", 0.5)
    assert supervise(learner=learner("pass"))[0].run() == 0


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
