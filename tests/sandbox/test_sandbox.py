"""Every kind of sandbox behaves alike; machines of an OCI runtime in detail."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_peft.sandbox import bundle, proof, runtime
from agent_peft.sandbox import machine as machines
from agent_peft.sandbox.base import CommandResult, MachineLost, SandboxLimits
from agent_peft.sandbox.build import SANDBOXES, build_sandbox, missing
from agent_peft.sandbox.engines import ENGINES, IMAGE
from agent_peft.sandbox.owners import OwnerFolder
from agent_peft.sandbox.profile import seccomp
from agent_peft.sandbox.runtime import find_runtime
from agent_peft.sandbox.shell import PersistentShell
from agent_peft.types import AgentPeftError, InfrastructureError

LIMITS = SandboxLimits(memory_mb=128, processes=32, file_size_mb=16, cpu_seconds=5, output_chars=1000)


def available(kind):
    try:
        missing(kind)
        image = [kind, "image", "inspect", IMAGE]  # without it, an engine asks a registry
        if kind in ENGINES and subprocess.run(image, capture_output=True).returncode:
            raise InfrastructureError(f"{kind} has no image {IMAGE}")
        with build_sandbox(kind, LIMITS):
            pass
    except (AgentPeftError, InfrastructureError) as error:
        return pytest.mark.skip(reason=str(error))
    return ()


KINDS = [pytest.param(kind, marks=available(kind)) for kind in SANDBOXES]


@pytest.fixture
def _oci():
    mark = available("oci")
    if mark:
        pytest.skip(mark.kwargs["reason"])


@pytest.fixture
def machine(_oci):
    with build_sandbox("oci", LIMITS) as sandbox:
        yield sandbox


@pytest.fixture(params=KINDS)
def any_machine(request):
    with build_sandbox(request.param, LIMITS) as sandbox:
        yield sandbox


def said(result):
    assert result.exit_code == 0, result
    return result.output


# every kind of sandbox


def test_the_shell_keeps_its_state(any_machine):
    said(
        any_machine.run("x=1; export Y=2; f() { echo $1$x; }; mkdir -p a/b; cd a/b; alias g='echo alias'", 10)
    )
    assert said(any_machine.run("f 7; g; echo $Y; basename $PWD", 10)) == "71\nalias\n2\nb\n"
    assert any_machine.run("false", 10).exit_code == 1
    assert said(any_machine.run("echo $?", 10)) == "1\n"


def test_output_is_merged_in_order(any_machine):
    assert any_machine.run("echo a; echo b >&2; echo c; printf d >&2; (exit 4)", 10) == CommandResult(
        "a\nb\nc\nd", 4
    )


def test_a_command_may_be_any_text(any_machine):
    assert said(any_machine.run("cat <<'END'\nit's \"$x\" \\ !! é\nEND\n", 10)) == 'it\'s "$x" \\ !! é\n'
    assert any_machine.run("if then", 10).exit_code == 2
    assert said(any_machine.run("", 10)) == ""
    assert said(any_machine.run("# nothing", 10)) == ""
    assert said(any_machine.run("echo " + "y" * 100_000 + " | wc -c", 10)) == "100001\n"


def test_long_output_keeps_its_beginning_and_end(any_machine):
    result = any_machine.run("echo first; seq 100000; echo last", 20)
    assert (
        result.truncated
        and result.output.startswith("first\n1\n")
        and result.output.endswith("100000\nlast\n")
    )
    assert "characters cut out" in result.output and len(result.output) < 1100


def test_a_timed_out_command_dies_with_its_children_and_the_shell_comes_back(any_machine):
    assert any_machine.run("x=5", 10).exit_code == 0
    for command in (
        "sleep 987; echo REACHED",
        "for i in 1 2 3; do sleep 986; done",
        "(sleep 985 | cat) & sleep 984",
        "while :; do :; done",
    ):
        result = any_machine.run(command, 0.4)
        assert result.timed_out and result.exit_code is None and "REACHED" not in result.output, result
    assert said(any_machine.run("echo $x; pgrep -f 'sleep 98[4567]' | wc -l", 10)) == "5\n0\n"


def test_leaving_the_shell_gives_its_exit_code_and_a_new_shell(any_machine):
    any_machine.run("x=5", 10)
    assert any_machine.run("echo bye; exit 3", 10) == CommandResult("bye\n", 3)
    assert said(any_machine.run("echo x=$x", 10)) == "x=\n"
    assert any_machine.run("set -e; false; true", 10).exit_code == 1
    assert any_machine.run("kill -9 $$", 10).exit_code is None
    assert said(any_machine.run("echo back", 10)) == "back\n"


def test_a_shell_that_had_to_die_leaves_its_folder_exports_and_functions(any_machine):
    any_machine.run("cd /tmp; export X='a b'; f() { echo \"f $1\"; }; trap '' INT", 10)
    result = any_machine.run("while :; do :; done", 0.3)
    assert result.timed_out and "the shell had to be killed" in result.output
    assert said(any_machine.run('pwd; echo "$X"; f 1', 10)) == "/tmp\na b\nf 1\n"


def test_a_shell_that_is_killed_while_we_interrupt_it_leaves_them_too(any_machine):
    """By its limit of processor time, on a busy computer."""
    any_machine.run("cd /tmp; export X='a b'; trap 'kill -9 $$' INT", 10)
    result = any_machine.run("while :; do :; done", 0.3)
    assert result.timed_out and "the shell had to be killed" in result.output
    assert said(any_machine.run('pwd; echo "$X"', 10)) == "/tmp\na b\n"


class EndsAtOnce:
    """A shell that dies before its command begins."""

    def run(self, command, timeout):
        return None

    def close(self):
        pass


class Answers(EndsAtOnce):
    def run(self, command, timeout):
        return CommandResult(command, 0)


def test_a_shell_that_ends_at_once_is_replaced_and_its_command_is_not_lost():
    starts = [EndsAtOnce(), Answers()]
    assert PersistentShell(lambda state: starts.pop(0)).run("echo", 1) == CommandResult("echo", 0)
    starts = [EndsAtOnce(), EndsAtOnce(), Answers()]
    assert PersistentShell(lambda state: starts.pop(0)).run("echo", 1) == CommandResult("", None)
    assert len(starts) == 1  # the agent's own bash may be what ends; it is not started for ever


def test_a_shell_that_leaves_when_it_is_interrupted_was_not_killed(any_machine):
    any_machine.run("X=1; trap 'exit 3' INT", 10)
    assert any_machine.run("while :; do :; done", 0.3) == CommandResult("", None, timed_out=True)
    assert said(any_machine.run("echo X=$X", 10)) == "X=\n"


def test_a_first_shell_that_ends_at_once_is_replaced(_oci, monkeypatch):
    monkeypatch.setattr(bundle, "_PROCESS_1", bundle._PROCESS_1.replace(" ".join(bundle.SHELL), "/bin/false"))
    with build_sandbox("oci", LIMITS) as sandbox:
        assert said(sandbox.run("echo a", 10)) == "a\n"


def test_a_shell_survives_a_command_that_is_stopped_in_the_tick_of_its_start(_oci, monkeypatch):
    """A clock tick is 10 ms. All commands here seem to begin before the shell did."""
    signal_all = machines.Program.signal
    monkeypatch.setattr(machines.Program, "signal", lambda self, number, since: signal_all(self, number, 0))
    with build_sandbox("oci", LIMITS) as sandbox:
        assert sandbox.run("x=5", 10).exit_code == 0
        assert sandbox.run("while :; do sleep 1; done", 0.1).timed_out
        assert said(sandbox.run("echo $x", 10)) == "5\n"


def test_a_shell_that_starts_late_is_interrupted_like_another(_oci, monkeypatch):
    find, began = machines._only_child, []

    def late(pid):
        began.append(time.monotonic())
        return find(pid) if time.monotonic() > began[0] + 1.5 else None

    monkeypatch.setattr(machines, "_only_child", late)
    with build_sandbox("oci", LIMITS) as sandbox:
        sandbox.run("x=5", 10)
        assert sandbox.run("while :; do :; done", 0.3).timed_out
        assert said(sandbox.run("echo $x", 10)) == "5\n"


def test_daemons_do_not_hold_a_command_up(any_machine):
    began = time.monotonic()
    assert said(any_machine.run("sleep 30 & echo started", 20)).endswith("started\n")
    assert said(any_machine.run("setsid sleep 30 >/dev/null & jobs | grep -c Running", 20)).endswith("2\n")
    assert time.monotonic() - began < 20


def test_there_is_no_terminal_and_no_input(any_machine):
    assert (
        said(any_machine.run("cat; test -t 0 || test -t 1 || echo none; read x || echo end", 10))
        == "none\nend\n"
    )


def test_scripts_run_beside_the_shell(any_machine):
    any_machine.run("cd /; x=5", 10)
    assert any_machine.run_fresh('echo "$x"; echo e >&2; exit 6', 10) == CommandResult("\ne\n", 6)
    stopped = any_machine.run_fresh("sleep 600", 0.3)
    assert stopped.timed_out and stopped.exit_code is None
    assert all(any_machine.run_fresh("true", 10).ok for _ in range(20))  # may end before we look at it
    assert said(any_machine.run("echo $x", 10)) == "5\n"
    assert said(any_machine.inspect("echo inspected", 10)) == "inspected\n"


def test_closing_twice_or_before_the_start_is_fine(any_machine):
    any_machine.close()
    any_machine.close()
    with pytest.raises(RuntimeError):
        any_machine.run("true", 1)


# machines of an OCI runtime


def test_the_first_shell_ends_with_its_exit_code_or_without_one(machine):
    assert machine.run("exit 7", 10) == CommandResult("", 7)
    with build_sandbox("oci", SandboxLimits()) as another:  # the process that would report the code
        assert another.run("kill -9 $PPID; sleep 5", 10).exit_code is None
        assert another.run("echo $SHLVL; trap", 10) == CommandResult("1\n", 0)


def test_machines_and_programs_take_no_keyrings():
    """A user may have 200 of them, and the kernel keeps them for minutes."""
    case = find_runtime().case
    before = Path("/proc/key-users").read_text()
    for _ in range(2):
        with build_sandbox("oci", SandboxLimits()) as machine:
            assert machine.run_fresh("true", 10).ok and machine.inspect("true", 10).ok

    def keys(text):
        first = case.ids["uid"][0][1]
        found = re.search(rf"^ *{first}: +\d+ (\d+)/", text, re.MULTILINE)
        return int(found[1]) if found else 0

    assert keys(Path("/proc/key-users").read_text()) <= keys(before)


def test_users_and_owners(machine):
    if missing("oci"):
        pytest.skip(missing("oci")[0])
    said(
        machine.run(
            "groupadd staff2 && useradd -m -G staff2 ann && chage -M 30 ann && touch f && chown ann:staff2 f",
            10,
        )
    )
    assert (
        said(machine.run("stat -c %U:%G f; id -nG ann; su ann -c 'id -un; cd; pwd'", 10))
        == "ann:staff2\nann staff2\nann\n/home/ann\n"
    )
    assert machine.inspect("grep -q ann /etc/shadow && [ $(stat -c %U /root/f) = ann ]", 10).ok


def test_an_inspection_sees_deletions_owners_links_and_times(machine):
    machine.run(
        "rm /etc/issue; rm -rf /var/log; mkdir /var/log; mkdir /usr/src/new; echo x >/usr/src/new/a; "
        "mkfifo /srv/pipe; chmod 1700 /opt; rm /etc/skel/.bashrc; rmdir /etc/opt; echo file >/etc/opt; "
        "mkdir /srv/deep; ln /etc/hosts /srv/deep/hard; setfattr -n user.note -v 1 /srv/deep 2>/dev/null; "
        "truncate -s 1G /srv/sparse 2>/dev/null; truncate -s 8M /srv/sparse; touch -d 2001-02-03 /srv/old",
        10,
    )
    script = (
        "ls /etc/issue 2>&1 | grep -c cannot; ls -A /var/log; cat /usr/src/new/a; date -r /srv/old +%F; "
        "find /opt -maxdepth 0 -perm 1700; [ -p /srv/pipe ] && echo fifo; ls -A /etc/skel | grep -c bashrc; "
        "cat /etc/opt; stat -c %s /srv/sparse; [ $(stat -c %b /srv/sparse) -lt 100 ] && echo sparse"
    )
    expected = "1\nx\n2001-02-03\n/opt\nfifo\n0\nfile\n8388608\nsparse\n"
    assert machine.inspect(script, 10).output == expected


def test_an_inspection_sees_files_but_no_processes_and_runs_clean_programs(machine):
    machine.run(
        "echo 'echo mine' >/usr/local/bin/tool; chmod +x /usr/local/bin/tool; "
        "cp /usr/local/bin/tool /usr/bin/newtool; sleep 600 &",
        10,
    )
    machine.run("cp /usr/local/bin/tool /usr/bin/ls; x=1; export PATH=/nowhere LD_PRELOAD=/x", 10)
    script = (
        "/usr/local/bin/tool; newtool; ls -d /; echo $PATH; "
        "ps -eo args | grep -c '[s]leep 600'; echo 1 >/srv/note"
    )
    inspection = machine.inspect(script, 10)
    programs = "" if missing("oci") else "mine\nmine\n"
    assert inspection.output.endswith(f"{programs}/\n/usr/sbin:/usr/bin:/sbin:/bin\n0\n")
    # each inspection sees what the agent left
    assert not machine.inspect("cat /srv/note", 10).ok
    assert machine.inspect("exit 17", 10).exit_code == 17
    with pytest.raises(RuntimeError, match="its machine has ended"):
        machine.run("true", 1)


def test_what_is_run_before_the_agent_may_write_everywhere(machine):
    said(
        machine.run_fresh(
            "echo 'echo set up' >/usr/local/bin/tool; cp /usr/local/bin/tool /usr/bin/tool2; "
            "chmod +x /usr/local/bin/tool /usr/bin/tool2",
            10,
        )
    )
    assert said(machine.run("tool; tool2", 10)) == "set up\nset up\n"
    assert said(machine.run_fresh("/usr/local/bin/tool; touch /etc/still", 10)) == "set up\n"


def test_sixteen_at_once(_oci):
    def work(i):
        with build_sandbox("oci", LIMITS) as sandbox:
            return [said(sandbox.run(f"echo {i} >>/srv/n; cat /srv/n; hostname", 30)) for _ in range(3)][-1]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [f"{i}\n{i}\n{i}\nsandbox\n" for i in range(16)]


def machines_of(process: int) -> list[str]:
    """Processes, bundles, control groups and mounts of the machines of a process."""
    ours = [path.parent for path in _private().glob("*/runtime") if _holder(path.parent / "lock") == process]
    names = [path.name for folder in ours for path in (folder / "state").iterdir()]
    bundles = [path.name for folder in ours for path in folder.iterdir() if (path / "config.json").exists()]
    groups = [
        each.name for each in Path("/sys/fs/cgroup").glob("*/agent-peft-*") if each.name[11:] in bundles
    ]
    below = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _parent(pid) in ours]
    return [*names, *bundles, *groups, *below]


def _private() -> Path:
    return Path(tempfile.gettempdir()) / f"agent-peft-machines-{os.getuid()}"


def _holder(lock: Path) -> int | None:
    """The process that holds a lock."""
    node = str(lock.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        columns = line.split()
        if columns[5].rpartition(":")[2] == node:
            return int(columns[4])
    return None


def _parent(pid: str) -> Path | None:
    """The folder of whom a process's root was mounted for."""
    try:
        line = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return None
    found = re.search(r"upperdir=(\S+?)/[0-9a-f]{8}/mount/up", line)
    return Path(found[1]) if found else None


def test_many_in_a_row_leave_nothing(_oci, warm_process, tmp_path):
    """In a process without other tests: what they left may open a file meanwhile."""
    done = warm_process.run(__file__, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def run_many_in_a_row() -> None:
    build_sandbox("oci", LIMITS).close()
    find_runtime().finish()
    before = len(os.listdir("/proc/self/fd")), machines_of(os.getpid())
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    for i in range(12):
        with build_sandbox("oci", LIMITS) as sandbox:
            assert said(sandbox.run(f"sleep 600 & echo {i} >/srv/x; echo ok", 30)).endswith("ok\n")
            if i % 3 == 0:
                assert sandbox.inspect("cat /srv/x", 10).output == f"{i}\n"
    find_runtime().finish()
    deadline = time.monotonic() + 20  # the runtime's own processes end a moment later
    while len(os.listdir("/proc/self/fd")) > before[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    after = len(os.listdir("/proc/self/fd")), machines_of(os.getpid())
    assert after == before, (before, after)
    assert len(Path("/proc/self/mountinfo").read_text().splitlines()) == mounts


ABANDON = """
import os, sys, time
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox
machines = [build_sandbox("oci", SandboxLimits()) for _ in range(3)]
for machine in machines:
    machine.start()
    machine.run("setsid sleep 600 & disown; for f in 0 1 2; do (exec 9<>/proc/1/fd/$f; sleep 600) & done", 30)
held = [os.dup(machine._machine._lifeline) for machine in machines]
for each in held if sys.argv[1] == "held" else ():
    os.set_inheritable(each, True)
if sys.argv[1] == "held" and os.fork() == 0:  # as if the agent had got hold of them
    print("up", flush=True)
    time.sleep(30)
    os._exit(0)
if sys.argv[1] != "held":
    print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("descriptors", ["closed", "held"])
def test_all_dies_with_us(_oci, descriptors):
    """After kill -9, process 1 ends since nobody holds its input. If somebody does, the next process of this
    user ends the machines.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", ABANDON, descriptors], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    folder = next(path for path in _private().iterdir() if _holder_or_none(path) == process.pid)
    inside = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _parent(pid) == folder]
    assert len(inside) >= 3 * 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    if descriptors == "held":
        assert _alive(inside)
        code = "from agent_peft.sandbox.runtime import find_runtime; find_runtime()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    process.stdout.close()
    deadline = time.monotonic() + 20
    while _alive(inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(inside)
    code = "from agent_peft.sandbox.runtime import find_runtime; find_runtime()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not folder.exists()


def _holder_or_none(folder: Path) -> int | None:
    return _holder(folder / "lock") if (folder / "lock").exists() else None


def _alive(pids: list[str]) -> list[str]:
    return [pid for pid in pids if _parent(pid) is not None]


def test_a_machine_outlives_the_thread_that_started_it(_oci):
    sandbox = build_sandbox("oci", LIMITS)
    thread = threading.Thread(target=sandbox.start)
    thread.start()
    thread.join()
    assert said(sandbox.run("echo alive", 10)) == "alive\n"
    sandbox.close()


def test_a_command_inherits_only_its_three_streams(machine):
    assert said(machine.run("ls /proc/self/fd", 10)) == "0\n1\n2\n3\n"  # 3: the folder that ls reads
    for run in (machine.run_fresh, machine.inspect):
        assert said(run("ls /proc/self/fd | sort -n | head -4", 10)) == "0\n1\n2\n3\n"


RACE = """
import os, sys, time
end, won, seen = time.monotonic() + 5, set(), 0
while time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            os.readlink(f"/proc/{pid}/exe")
            continue
        except OSError:
            seen += pid != "1"
        try:
            os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
            if not os.readlink(f"/proc/{pid}/exe").startswith("/usr/"):
                won.add("the runtime")
        except OSError as error:
            won |= {"the runtime"} if error.filename == f"/proc/{pid}/exe" and error.errno == 13 else set()
print(seen, won or "nothing")
"""


@pytest.mark.slow
def test_the_runtime_cannot_be_opened_while_it_starts_a_program(machine):
    """It is in the machine before it becomes the program, and holds pipes of ours."""
    if not machine.run("command -v python3", 10).ok:
        pytest.skip("/usr/bin has no python3")
    machine.run(f"cat >/tmp/race.py <<'END'\n{RACE}\nEND\nsetsid python3 /tmp/race.py >/tmp/won & disown", 10)
    for _ in range(30):
        machine.run_fresh("true", 10)
    deadline = time.monotonic() + 20
    while not (said_by_race := machine.run("cat /tmp/won", 10).output) and time.monotonic() < deadline:
        time.sleep(0.2)
    seen, won = said_by_race.split()
    assert int(seen) > 0 and won == "nothing", said_by_race


def test_nothing_of_ours_is_inside(machine):
    output = said(
        machine.run(
            "cat /proc/mounts /proc/*/cmdline /proc/self/cgroup | tr '\\0' ' '; env; "
            "ls -A / /root /home /tmp /run /opt",
            10,
        )
    )
    for word in (
        str(Path.home()),
        str(Path(__file__).parents[2]),
        "venv",
        os.environ.get("USER", "agent_peft"),
    ):
        assert word == "/root" or word == "root" or word not in output


# without an engine, or a machine to try on


def test_a_missing_requirement_is_one_line(monkeypatch):
    with pytest.raises(AgentPeftError, match="use one of oci, docker, podman, none"):
        build_sandbox("chroot", LIMITS)
    cases = {
        "no filter of system calls for riscv64": (platform, "machine", lambda: "riscv64"),
        "needs Linux": (sys, "platform", "darwin"),
        "this is WSL1": (platform, "release", lambda: "4.4.0-19041-Microsoft"),
        "link to usr/bin": (os.path, "islink", lambda path: False),
    }
    for told, change in cases.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with pytest.raises(AgentPeftError, match=told):
                runtime.check_host()
    with pytest.raises(AgentPeftError, match="/nowhere/runc is not a program"):
        build_sandbox("oci", LIMITS, "/nowhere/runc")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(runtime, "_FOLDERS", ())
    with pytest.raises(AgentPeftError, match="needs a container runtime: install runc"):
        runtime.find_programs("auto")


@pytest.mark.parametrize(
    ("name", "told"),
    [("x" * 80, "too long"), ("a:b", "colon or comma"), ("a,b", "colon or comma")],
    ids=["long", "colon", "comma"],
)
def test_a_folder_that_machines_cannot_lie_in(monkeypatch, tmp_path, name, told):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(AgentPeftError, match=rf"{told}.*set TMPDIR"):
        OwnerFolder()


def test_a_private_temporary_folder_is_named_as_the_cause():
    """Users of a machine cannot reach their files there, so that machines have one user."""
    if find_runtime().case.single_id:
        pytest.skip("machines have one user here in any folder")
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's folders may be too long for sockets
    code = "from agent_peft.sandbox.runtime import find_runtime; find_runtime()"
    environment = {**os.environ, "TMPDIR": str(place)}
    messages = []
    for mode in (0o700, 0o711):
        place.chmod(mode)
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        )
        messages.append(run.stderr)
    shutil.rmtree(place)
    assert "machines with one user" in messages[0] and f"may not search {place}" in messages[0]
    assert messages[1] == ""


def test_a_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    (place / f"agent-peft-machines-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(AgentPeftError, match="belongs to another user"):
        OwnerFolder()
    shutil.rmtree(place)


def test_the_runtime_is_called_as_the_case_needs(monkeypatch, tmp_path):
    ids = {"uid": [(0, 1000, 1)], "gid": [(0, 1000, 1)]}

    def command(program, cgroups):
        return runtime.command_of(runtime.Case(program, ids, cgroups), Path("/s"))[1:]

    assert command("/usr/sbin/runc", "cgroupfs") == ["--root", "/s"]
    assert command("/usr/sbin/runc", "systemd") == ["--root", "/s", "--systemd-cgroup"]
    assert command("/usr/bin/crun", "cgroupfs") == ["--root", "/s", "--cgroup-manager=cgroupfs"]
    assert command("/usr/bin/crun", "systemd") == ["--root", "/s", "--cgroup-manager=systemd"]
    assert command("/usr/bin/crun", "") == ["--root", "/s", "--cgroup-manager=disabled"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert command("/usr/sbin/runc", "") == ["--root", "/s", "--rootless=true"]
    assert runtime.possible_cgroups() == ["cgroupfs", ""]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command("/usr/sbin/runc", "") == ["--root", "/s"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime.possible_cgroups() == [""]
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    monkeypatch.setattr(Path, "exists", lambda self: True)  # cgroup v2
    assert runtime.possible_cgroups() == ["systemd", ""]


def test_a_bundle_holds_what_was_asked_for():
    ids = {"uid": [(0, 1000, 1), (1, 100000, 65535)], "gid": [(0, 1000, 1)]}
    limits = SandboxLimits(memory_mb=128, processes=32, file_size_mb=16)

    def config(cgroup):
        return bundle.config(Path("/m"), ["/r"], ["/u", "/usr"], limits, ids, {"filter": 1}, 256, cgroup)

    content = config("user.slice:agent-peft:x")
    assert content["linux"]["cgroupsPath"] == "user.slice:agent-peft:x"
    assert content["linux"]["resources"] == {
        "memory": {"limit": 128 << 20, "swap": 128 << 20},
        "pids": {"limit": 32},
    }
    assert "resources" not in config(None)["linux"] and "cgroupsPath" not in config(None)["linux"]
    assert content["linux"]["uidMappings"][1] == {"containerID": 1, "hostID": 100000, "size": 65535}
    assert {each["type"] for each in content["linux"]["namespaces"]} == {
        "pid", "mount", "ipc", "uts", "network", "cgroup", "user",
    }  # fmt: skip
    assert content["process"]["noNewPrivileges"] and content["linux"]["seccomp"] == {"filter": 1}
    limited = {each["type"]: each["hard"] for each in content["process"]["rlimits"]}
    assert limited["RLIMIT_CORE"] == 1 and limited["RLIMIT_FSIZE"] == 16 << 20
    of_agent = bundle.process(["x"], "agent", limits, 256)["capabilities"]["permitted"]
    assert set(content["process"]["capabilities"]["permitted"]) - set(of_agent) == {"CAP_WAKE_ALARM"}


def test_a_machine_that_is_not_as_it_should_be_is_found():
    good = (
        "CapInh:\t0000000000000000\nCapPrm:\t00000000a00405fb\nCapEff:\t00000000a00405fb\n"
        "CapBnd:\t00000000a00405fb\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    )
    first = good.replace("00000000a00405fb", "00000008a00405fb")
    shown = f"{good}Network: lo\nDescriptor: 0\nDescriptor: 3\n"
    assert proof.differences(shown, first, good) == []
    for before, after, fault in (
        ("Seccomp:\t2", "Seccomp:\t0", "Seccomp is 0 instead of 2"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "NoNewPrivs is 0 instead of 1"),
        ("CapEff:\t00000000a00405fb", "CapEff:\t000001ffffffffff", "CapEff is 000001ffffffffff instead"),
        ("Network: lo", "Network: lo\nNetwork: eth0", "network eth0 is there"),
        ("Descriptor: 3", "Descriptor: 3\nDescriptor: 7", "descriptor 7 is there"),
        ("Network: lo", "Network: lo\nShown: /proc/kcore", "Shown: /proc/kcore"),
    ):
        (found,) = proof.differences(shown.replace(before, after), first, good)
        assert fault in found
    assert "process 1: CapPrm" in proof.differences(shown, good, good)[0]
    assert "the shell: CapPrm" in proof.differences(shown, first, first)[0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        ("user.max_user_namespaces", "0"),
    ],
)
def test_the_setting_that_forbids_user_namespaces_is_named(monkeypatch, setting, value):
    forbidding = f"/proc/sys/{setting.replace('.', '/')}"
    monkeypatch.setattr(Path, "read_text", lambda self: value if str(self) == forbidding else "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert f"sysctl {setting}=" in runtime.explain_refusal([])


def test_no_sandbox_warns(caplog):
    build_sandbox("none", LIMITS).close()
    assert "on this machine as this user" in caplog.text


def test_the_filter_refuses_and_allows():
    for machine, architecture in (("x86_64", "SCMP_ARCH_X32"), ("aarch64", "SCMP_ARCH_AARCH64")):
        content = seccomp(machine=machine)
        assert content["defaultAction"] == "SCMP_ACT_ERRNO" and architecture in content["architectures"]
        always = {
            name
            for rule in content["syscalls"]
            if rule["action"] == "SCMP_ACT_ALLOW" and "args" not in rule
            for name in rule["names"]
        }
        assert {"read", "execve", "openat", "wait4", "chroot"} <= always
        assert not always & {
            "mount", "unshare", "setns", "ptrace", "bpf", "keyctl", "memfd_create", "io_uring_setup",
            "vmsplice", "io_setup", "shmget", "socket", "clone", "clone3", "prlimit64", "inotify_init1",
        }  # fmt: skip
    asked = seccomp("/somewhere")
    assert asked["listenerPath"] == "/somewhere" and asked["syscalls"][-1]["action"] == "SCMP_ACT_NOTIFY"
    assert not [r for r in asked["syscalls"][:-1] if "execve" in r["names"] or "execveat" in r["names"]]


def test_the_filter_in_the_kernel(machine):
    """Families and protocols of sockets, flags of clone, and limits of other processes."""
    if not machine.run("command -v python3", 10).ok:
        pytest.skip("/usr/bin has no python3")
    code = """
import ctypes, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
for family, kind, protocol in ((1, 1, 0), (2, 1, 0), (2, 1, 6), (10, 2, 17), (16, 3, 0),
                               (2, 1, 262), (2, 1, 132), (17, 3, 0), (38, 5, 0), (40, 1, 0), (16, 3, 9)):
    descriptor = libc.socket(family, kind, protocol)
    print(family, protocol, descriptor >= 0)
print('pair', libc.socketpair(40, 1, 0, (ctypes.c_int * 2)()) >= 0)
print('namespace', libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0)
print('own', resource.prlimit(0, resource.RLIMIT_NOFILE) is not None)
try: print('first', resource.prlimit(1, resource.RLIMIT_NOFILE, (8, 8)))
except OSError as error: print('first', False)
"""
    lines = said(machine.run(f"python3 - <<'END'\n{code}\nEND", 10)).splitlines()
    assert [line.split()[-1] for line in lines[:5]] == ["True"] * 5, lines
    assert [line.split()[-1] for line in lines[5:13]] == ["False"] * 8, lines
    assert lines[13:] == ["own True", "first False"]


def test_a_machine_that_ended_is_lost(machine):
    machine._machine.processes.end(10)
    for call in (machine.run, machine.run_fresh):
        with pytest.raises(MachineLost):
            call("true", 5)


@pytest.mark.parametrize("kind", [p for p in KINDS if p.values[0] in ("oci", "none")])
def test_commands_can_be_stopped_where_interrupts_are_ignored(kind, tmp_path):
    """As in a job that a shell has put in the background: what ignores SIGINT passes that on."""
    script = tmp_path / "job.py"
    script.write_text(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from agent_peft.sandbox.base import SandboxLimits\n"
        "from agent_peft.sandbox.build import build_sandbox\n"
        f"with build_sandbox({kind!r}, SandboxLimits()) as sandbox:\n"
        "    sandbox.run('x=1', 5)\n"
        "    result = sandbox.run('while :; do sleep 1; done; echo REACHED', 0.5)\n"
        "    print(result.timed_out, 'REACHED' in result.output, sandbox.run('echo $x', 5).output)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "1"], done


if __name__ == "__main__":
    run_many_in_a_row()
