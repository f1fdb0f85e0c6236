"""Every kind of sandbox behaves alike; machines of namespaces in detail."""

import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_peft.sandbox import fork_server, host
from agent_peft.sandbox.base import CommandResult, SandboxLimits
from agent_peft.sandbox.build import SANDBOXES, build_sandbox, missing
from agent_peft.sandbox.jail import seccomp
from agent_peft.types import AgentPeftError

LIMITS = SandboxLimits(memory_mb=128, processes=32, file_size_mb=16, cpu_seconds=5, output_chars=1000)


def available(kind):
    try:
        build_sandbox(kind, LIMITS).close()
        missing(kind)
    except AgentPeftError as error:
        return pytest.mark.skip(reason=str(error))
    return ()


KINDS = [
    pytest.param(kind, marks=available(kind)) for kind in SANDBOXES if kind != "bubblewrap"
]  # which is another name of the first
namespaces = pytest.mark.usefixtures("_namespaces")


@pytest.fixture
def _namespaces():
    mark = available("oci")
    if mark:
        pytest.skip(mark.kwargs["reason"])


@pytest.fixture
def machine(_namespaces):
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
    any_machine.run("x=5; mark=$RANDOM$RANDOM", 10)
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
    assert said(any_machine.run("echo $x", 10)) == "5\n"
    assert said(any_machine.inspect("echo inspected", 10)) == "inspected\n"


def test_files(any_machine):
    folder = said(any_machine.run("pwd", 10)).strip()
    any_machine.write_file(f"{folder}/new/deep/file", b"\x00\xff", 0o640)
    assert any_machine.read_file(f"{folder}/new/deep/file") == b"\x00\xff"
    assert any_machine.read_file(f"{folder}/new/deep/file", 1) == b"\x00"
    assert said(any_machine.run("stat -c %a new/deep/file", 10)) == "640\n"
    for path in ("nothing", "new"):
        with pytest.raises(FileNotFoundError):
            any_machine.read_file(f"{folder}/{path}")


def test_a_snapshot_brings_files_back(any_machine):
    any_machine.run(
        "echo 1 >kept; echo 2 >changed; chmod 751 kept; ln -s kept link; mkdir d; echo 3 >d/e", 10
    )
    snapshot = any_machine.snapshot()
    any_machine.run("rm -rf kept d; echo 9 >changed; echo 9 >new; x=1", 10)
    any_machine.restore(snapshot)
    assert (
        said(any_machine.run("cat link changed d/e; stat -c %a kept; ls new 2>/dev/null; echo x=$x", 10))
        == "1\n2\n3\n751\nx=\n"
    )


def test_closing_twice_or_before_the_start_is_fine(any_machine):
    any_machine.close()
    any_machine.close()
    with pytest.raises(RuntimeError):
        any_machine.run("true", 1)


# namespaces


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
    assert machine.inspect(
        "grep -q ann /etc/shadow && [ $(stat -c %U /root/f) = ann ]", 10).ok


def test_a_snapshot_holds_deletions_owners_links_and_goes_to_another_machine(machine):
    machine.run(
        "rm /etc/issue /usr/bin/stat; rm -rf /var/log; mkdir /var/log; "
        "ln /etc/passwd /srv/hard; mkfifo /srv/pipe; chmod 1700 /opt",
        10,
    )
    machine.run("touch -d 2001-02-03 /srv/old; echo x >>/usr/share/new", 10)
    with build_sandbox("oci", LIMITS) as other:
        other.run("touch /srv/other", 10)
        other.restore(machine.snapshot())
        output = said(
            other.run(
                "ls /etc/issue /usr/bin/stat 2>&1 | wc -l; ls -A /var/log /srv; "
                "date -r /srv/old +%F; cat /usr/share/new",
                10,
            )
        )
        assert output == "2\n/srv:\nhard\nold\npipe\n\n/var/log:\n2001-02-03\nx\n"
        assert said(
            other.run(
                "find /opt -maxdepth 0 -perm 1700; [ /srv/hard -ef /etc/passwd ] && echo same; "
                "[ -p /srv/pipe ] && echo fifo",
                10,
            )
        ) == ("/opt\nsame\nfifo\n")


def test_an_inspection_sees_files_but_no_processes_and_runs_clean_programs(machine):
    machine.run(
        "echo 'echo mine' >/usr/local/bin/tool; chmod +x /usr/local/bin/tool; "
        "cp /usr/local/bin/tool /usr/bin/newtool; sleep 600 &",
        10,
    )
    machine.run("cp /usr/local/bin/tool /usr/bin/ls; x=1; export PATH=/nowhere LD_PRELOAD=/x", 10)
    assert machine.run_fresh("ls /", 10).output.startswith("bin\n")
    script = (
        "/usr/local/bin/tool; newtool; ls -d /; echo $PATH; "
        "ps -eo args | grep -c '[s]leep 600'; echo 1 >/srv/note"
    )
    inspection = machine.inspect(script, 10)
    assert inspection.output == "mine\nmine\n/\n/usr/sbin:/usr/bin:/sbin:/bin\n0\n"
    assert (
        machine.inspect("cat /srv/note", 10).output == "1\n"
    )  # an inspection sees the changes of the one before
    with pytest.raises(RuntimeError, match="call restore before run"):
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
    assert machine.run_fresh("touch /usr/bin/x", 10).exit_code == 1  # not in place of the clean ones


def test_sixteen_at_once(_namespaces):
    def work(i):
        with build_sandbox("oci", LIMITS) as sandbox:
            return [said(sandbox.run(f"echo {i} >>/srv/n; cat /srv/n; hostname", 30)) for _ in range(3)][-1]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [f"{i}\n{i}\n{i}\nsandbox\n" for i in range(16)]


def left_behind():
    """Processes below our fork server, mounts, descriptors and temporary files."""
    server = fork_server.fork_server()._process.pid
    below = [len(Path(f"/proc/{server}/task/{server}/children").read_text().split())]
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    return below, mounts, len(os.listdir("/proc/self/fd")), sorted(os.listdir("/tmp"))


def test_many_in_a_row_leave_nothing(_namespaces):
    build_sandbox("oci", LIMITS).close()
    fork_server.fork_server()
    deadline = time.monotonic() + 20
    while (
        any(left_behind()[0]) and time.monotonic() < deadline
    ):  # the machine of the test before may still be ending
        time.sleep(0.05)
    before = left_behind()[:3]
    for i in range(40):
        with build_sandbox("oci", LIMITS) as sandbox:
            assert said(sandbox.run(f"sleep 600 & echo {i} >/srv/x; echo ok", 30)).endswith("ok\n")
    deadline = time.monotonic() + 20
    while left_behind()[:3] != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_behind()[:3] == before


def test_all_dies_with_us(_namespaces):
    program = """
import time
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox
machines = [build_sandbox("oci", SandboxLimits()) for _ in range(3)]
for machine in machines:
    machine.start()
    machine.run("setsid sleep 600 & disown", 30)
print("up", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"

    def lives(pid, began):
        try:
            columns = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            return False
        return columns[19] == began and columns[0] != "Z"

    todo, below = [process.pid], []
    while todo:
        pid = todo.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        todo += children
        below += [
            (child, Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()[19])
            for child in children
        ]
    assert (
        len(below) >= 1 + 3 * 4
    )  # the fork server; of each machine init and its parent, the shell, what it started
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(lives(*each) for each in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in below if lives(*each)]


def test_a_machine_outlives_the_thread_that_started_it(_namespaces):
    sandbox = build_sandbox("oci", LIMITS)
    thread = threading.Thread(target=sandbox.start)
    thread.start()
    thread.join()
    assert said(sandbox.run("echo alive", 10)) == "alive\n"
    sandbox.close()


def test_a_fork_server_that_died_is_replaced(_namespaces):
    server = fork_server.fork_server()
    server._process.kill()
    server._process.wait()  # of this server: to ask for it once more may start the next one
    with build_sandbox("oci", LIMITS) as sandbox:
        assert said(sandbox.run("echo alive", 10)) == "alive\n"


def test_a_command_inherits_only_its_three_streams(machine):
    assert said(machine.run("ls /proc/self/fd", 10)) == "0\n1\n2\n3\n"  # 3: the folder that ls reads
    assert said(machine.run_fresh("ls /proc/self/fd | sort -n | head -3", 10)) == "0\n1\n2\n"


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
    with pytest.raises(AgentPeftError, match="use one of namespaces, bubblewrap, docker, podman, none"):
        build_sandbox("chroot", LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(AgentPeftError, match="no filter of system calls for riscv64"):
            build_sandbox("oci", LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(AgentPeftError, match="needs Linux"):
            build_sandbox("oci", LIMITS)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "docker", None)
        with pytest.raises(AgentPeftError, match=r"pip install 'agent-peft\[docker\]'"):
            build_sandbox("docker", LIMITS)
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(AgentPeftError, match="no engine answers"):
        build_sandbox("podman", LIMITS)


def test_the_fork_server_starts_or_says_why():
    """A fork server that dies at once, as by a wrong import, is an error of ours: other tests would skip."""
    try:
        fork_server.fork_server()
    except AgentPeftError as error:
        assert "the fork server died" not in str(error)


def test_a_machine_without_a_fork_server_fails_at_once(monkeypatch):
    """Process 1 was never made, so that nothing waits for its end."""

    def fail():
        raise AgentPeftError("no user namespaces")

    monkeypatch.setattr(fork_server, "fork_server", fail)
    monkeypatch.setattr(fork_server, "_SECONDS", 2.0)
    before, began = len(os.listdir("/proc/self/fd")), time.monotonic()
    with pytest.raises(AgentPeftError, match="no user namespaces"):
        fork_server.Machine({})
    assert time.monotonic() - began < 1 and len(os.listdir("/proc/self/fd")) == before


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
    assert f"sysctl {setting}=" in host.explain_refusal()


def test_no_sandbox_warns(caplog):
    build_sandbox("none", LIMITS).close()
    assert "on this machine as this user" in caplog.text


def test_the_filter_refuses_and_allows():
    def verdict(number, argument=0, architecture=0xC000003E):
        """Run the program as the kernel would: little-endian seccomp_data of nr, arch, instruction
        pointer, args.
        """
        packed = struct.pack("<iIQQ", number, architecture, 0, argument)
        program = list(struct.iter_unpack("=HBBI", seccomp.seccomp_filter("x86_64")))
        at, accumulator = 0, 0
        while True:
            code, then, otherwise, value = program[at]
            at += 1
            if code == 0x20:
                accumulator = struct.unpack_from("<I", packed, value)[0]
            elif code in (0x15, 0x35):
                at += then if (accumulator == value if code == 0x15 else accumulator >= value) else otherwise
            else:
                return value

    allow, refuse = 0x7FFF0000, 0x00050001
    assert verdict(0) == verdict(59) == allow
    assert (
        verdict(321) == verdict(319) == verdict(250) == verdict(425) == refuse
    )  # bpf, memfd_create, keyctl, io_uring_setup
    assert [verdict(41, family) for family in (1, 2, 10, 16)] == [allow] * 4
    assert [verdict(41, family) for family in (17, 38, 40)] == [refuse] * 3  # packet, alg, vsock
    assert verdict(0, architecture=0x40000003) == verdict(0x40000000) == refuse  # 32 bit, x32
    assert seccomp.seccomp_filter("aarch64") is not None and seccomp.seccomp_filter("riscv64") is None


@pytest.mark.parametrize("kind", [p for p in KINDS if p.values[0] in ("namespaces", "none")])
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
