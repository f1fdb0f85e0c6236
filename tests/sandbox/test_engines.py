"""Containers of Docker and Podman. What needs an engine skips where none answers; the image is made of
programs of this computer.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from agent_peft.sandbox import engines
from agent_peft.sandbox.base import MachineLost, SandboxLimits
from agent_peft.sandbox.engines import ENGINES, EngineSandbox, pack, run_options, trusted_changes, where
from agent_peft.types import AgentPeftError, InfrastructureError

LIMITS = SandboxLimits(memory_mb=128, processes=32, file_size_mb=16)
IMAGE = "localhost/agent-peft-test:latest"
PROGRAMS = (
    "bash", "cat", "ls", "rm", "sleep", "seq", "grep", "tr", "xargs", "mkdir", "stat", "ln", "chmod",
    "cp", "chown", "head", "env", "id", "touch", "test", "true", "kill", "find",
)  # fmt: skip


def test_containers_have_the_same_limits():
    options = run_options(LIMITS)
    for option in (
        "--rm", "--stop-signal=KILL", "--network=none", "--memory=128m", "--memory-swap=128m",
        "--pids-limit=32", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--ulimit=fsize=16777216:16777216", "--ulimit=core=1:1",
    ):  # fmt: skip
        assert option in options
    assert not [option for option in options if "SYS_ADMIN" in option or "volume" in option]


def test_an_engine_that_is_not_here_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentPeftError, match="docker is not installed"):
        where("docker")
    fake = tmp_path / "podman"
    fake.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(AgentPeftError, match=r"podman does not answer \(no daemon\); start it"):
        EngineSandbox(LIMITS, "podman")


def test_the_visible_changes_of_a_container_are_packed():
    changes = {
        "/srv": "C", "/srv/a": "A", "/srv/link": "A", "/usr/bin/ls": "C", "/usr/lib/x.so": "A",
        "/etc/issue": "D", "/etc/ld.so.preload": "A", "/usr": "C", "/bin": "C",
    }  # fmt: skip
    visible = trusted_changes(changes, "cat /srv/a /etc/issue")
    assert visible == {"/srv": "C", "/srv/a": "A", "/srv/link": "A", "/etc/issue": "D"}
    export = io.BytesIO()
    with tarfile.open(fileobj=export, mode="w") as archive:
        for name, kind, link in (
            ("srv", tarfile.DIRTYPE, ""),
            ("srv/a", tarfile.REGTYPE, ""),
            ("srv/link", tarfile.SYMTYPE, "../proc/self/cmdline"),
            ("tmp/b", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
            member.uid = 7
            archive.addfile(member, io.BytesIO(b"abc"[: member.size]))
    export.seek(0)
    content, packed = pack(export, visible)
    assert packed == {b"/srv": True, b"/srv/a": False}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert [(each.name, each.uid) for each in archive] == [("srv", 7), ("srv/a", 7)]


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    try:
        where(request.param)
    except AgentPeftError as error:
        pytest.skip(str(error))
    made = subprocess.run([request.param, "import", "-", IMAGE], input=small_root(), capture_output=True)
    if made.returncode:
        pytest.skip(made.stderr.decode().strip()[-200:])
    try:
        with EngineSandbox(LIMITS, request.param, IMAGE):
            pass
    except InfrastructureError as error:
        pytest.skip(str(error))
    return request.param


def small_root() -> bytes:
    """A tar of a root folder with some programs of this computer and their libraries."""
    paths = {Path(found) for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin"))}
    for program in tuple(paths):
        said = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        paths |= {Path(path) for path in re.findall(r"(/\S+) \(0x", said)}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for folder in ("root", "srv", "tmp", "proc", "sys", "dev", "etc", "usr"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for name in ("bin", "lib", "lib64"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(member)
        for path in sorted(paths):
            name = str(path) if str(path).startswith("/usr") else f"/usr{path}"
            archive.add(path.resolve(), name.lstrip("/"))
    return content.getvalue()


def test_a_shell_in_a_container(engine):
    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        for i in range(5):  # what was printed before the end belongs to its command
            assert sandbox.run(f"x={i}; seq 300; echo end {i} >&2", 20).output.endswith(f"300\nend {i}\n")
        assert sandbox.run("exit 3", 20).exit_code == 3
        stopped = sandbox.run("cd /srv; y=1; sleep 600", 0.5)
        assert stopped.timed_out and sandbox.run("pwd", 20).output == "/srv\n"
        assert sandbox.run_fresh("echo $x; exit 6", 20).exit_code == 6
        sandbox.run("z=7", 20)
        assert sandbox.run_fresh("sleep 600", 0.3).timed_out and sandbox.run("echo $z", 20).output == "7\n"


def test_an_inspection_of_a_container(engine):
    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        sandbox.run("echo mine >/srv/a; ln -s /proc/self/cmdline /srv/riddle; rm -rf /tmp", 20)
        sandbox.run("cp /bin/true /bin/grep.new; cp /bin/grep.new /bin/grep; cp /bin/true /bin/test", 20)
        script = "cat /srv/a; grep -c nothing /srv/a; ls -d /tmp /srv/riddle 2>/dev/null; exit 9"
        found = sandbox.inspect(script, 20)
        assert (found.output, found.exit_code) == ("mine\n0\n", 9)
        with pytest.raises(RuntimeError, match="its machine has ended"):
            sandbox.run("true", 5)


def test_an_inspection_sees_owners_modes_times_and_links(engine):
    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        sandbox.run(
            "mkdir /srv/d; touch -d 2001-01-01T00:00Z /srv/h; ln /srv/h /srv/hard; ln -s h /srv/s", 20
        )
        sandbox.run(
            "chown 7:8 /srv/h; chown -h 9:8 /srv/s; chown 0:8 /srv/d; chmod 2775 /srv/d; chmod 700 /srv", 20
        )
        script = "stat -c '%n %u:%g %a %h %Y' /srv /srv/*"
        expected = [line.split() for line in sandbox.run(script, 20).output.splitlines()]
        assert [line[1] for line in expected] == ["0:0", "0:8", "7:8", "7:8", "9:8"]
        assert [line.split() for line in sandbox.inspect(script, 20).output.splitlines()] == expected


def test_a_file_may_take_the_place_of_a_folder_and_the_reverse(engine):
    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        sandbox.run(
            "rm -rf /srv; echo file >/srv; rm /bin/seq; mkdir /bin/seq; rm -r /tmp; ln -s root /tmp", 20
        )
        found = sandbox.inspect("cat /srv; test -d /bin/seq || echo ours; test -L /tmp; echo $?", 20)
        assert found.output == "file\nours\n0\n"


def test_tars_of_any_length_arrive(engine):
    """Podman refuses an archive that continues behind its end in another block of 32 KiB."""
    for size in (0, 57_000, 59_000, 60_000):
        with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
            sandbox.run(f"seq -s '' 99999 | head -c {size} >/srv/a", 20)
            assert sandbox.inspect("stat -c %s /srv/a", 20).output == f"{size}\n"


def test_what_an_engine_refuses_is_not_graded(engine, monkeypatch):
    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        sandbox.run("echo mine >/srv/a", 20)
        monkeypatch.setattr(engines, "pack", lambda *_: (b"no tar", {}))
        with pytest.raises(MachineLost, match=f"{engine} cp failed: "):
            sandbox.inspect("true", 20)


def test_a_copy_that_fails_does_not_wait_for_the_engine(engine, monkeypatch):
    def fail(*_):
        raise MachineLost("it is no tar")

    with EngineSandbox(LIMITS, engine, IMAGE) as sandbox:
        monkeypatch.setattr(engines, "pack", fail)
        with pytest.raises(MachineLost, match="it is no tar"):
            sandbox.inspect("true", 20)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["waits", "reads the files of a machine"])
def test_a_container_ends_with_us(engine, what):
    program = (
        "import sys, time\nfrom agent_peft.sandbox import engines\n"
        "from agent_peft.sandbox.base import SandboxLimits\n"
        f"s = engines.EngineSandbox(SandboxLimits(), {engine!r}, {IMAGE!r})\n"
        "s.start()\ns.run('sleep 600 &', 20)\n"
        "def wait(*_): print(s._name, flush=True), time.sleep(600)\n"
        "engines.pack = wait\n"
    ) + ("wait()" if what == "waits" else "s.inspect('true', 20)")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None
        name = ours.stdout.readline().strip()
        ours.kill()
    deadline = time.monotonic() + 30
    command = [engine, "ps", "--all", "--format", "{{.Names}}"]
    while not name or name in subprocess.run(command, capture_output=True, text=True, timeout=30).stdout:
        assert name and time.monotonic() < deadline
        time.sleep(0.2)
