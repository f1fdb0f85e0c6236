"""The OCI runtime of this computer: looked for, tried, and proven by its first machine."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import pwd
import resource
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_peft.sandbox import bundle, proof
from agent_peft.sandbox.base import MachineLost, SandboxLimits
from agent_peft.sandbox.base_image import BaseImage
from agent_peft.sandbox.exec_guard import ExecGuard
from agent_peft.sandbox.machine import Machine
from agent_peft.sandbox.owners import STATE, OwnerFolder, closed_folder
from agent_peft.sandbox.profile import processor_is_known, seccomp
from agent_peft.sandbox.streams import PipeStreams
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

ADVICE = "or set sandbox: docker (or podman)"
_PROGRAMS = ("runc", "crun")
_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
_PACKAGE = "install runc (Debian, Ubuntu, Fedora, Arch: the package runc)"
_IDS = 65536
_TRIALS = 2  # of each case: a computer under load may fail once, and no run should be weaker for that
_FIRST_OUTER_ID = 0x70000000  # of root's machines on the host: no account has them (systemd-nspawn: 0x80000)

Ids = Mapping[str, Sequence[tuple[int, int, int]]]  # by "uid" and "gid": inside, outside, count


@dataclass(frozen=True)
class Case:
    """What this computer allows."""

    program: str  # the runtime
    ids: Ids
    cgroups: str  # "cgroupfs", "systemd", or "" where the kernel limits nothing and the trainer watches

    @property
    def single_id(self) -> bool:
        return sum(count for _, _, count in self.ids["uid"]) == 1

    def __str__(self) -> str:
        users = "one user" if self.single_id else "its own users"
        limits = f"control groups ({self.cgroups})" if self.cgroups else "the trainer, which watches"
        return f"{Path(self.program).name}: machines with {users}, limited by {limits}"


class Runtime:
    """An OCI runtime that has started a machine as this computer allows."""

    def __init__(self, case: Case, owner: OwnerFolder) -> None:
        """Raises where no machine starts, or one that starts is not as it should be."""
        self.case, self._folder = case, owner.path
        self.command = command_of(case, owner.path / STATE)
        owner.name_runtime(self.command)
        self._removals = ThreadPoolExecutor(1, thread_name_prefix="sandbox-removal")
        first = {kind: case.ids[kind][0][1] for kind in ("uid", "gid")}
        own = {"uid": os.getuid(), "gid": os.getgid()}
        self.image = BaseImage(owner.path / secrets.token_hex(4), None if first == own else first)
        self._descriptors = descriptor_limit(shared=case.single_id or first == own)
        streams = PipeStreams()
        try:
            machine = self.agents_machine(proof.LIMITS, streams)
            try:
                faults = proof.faults_of(machine)
            finally:
                machine.close()
        except MachineLost as error:
            raise InfrastructureError(str(error)) from error
        finally:
            streams.close()
        if faults:
            raise AgentPeftError(
                f"sandbox: oci: a machine of {case.program} is not as it should be: {'; '.join(faults)}"
            )

    def agents_machine(self, limits: SandboxLimits, shell: PipeStreams) -> Machine:
        """Start a machine for an agent. ``shell``: the streams of its first shell. Raises
        `InfrastructureError`: it did not start.
        """
        layers = [str(self.image.root)], [str(self.image.usr), "/usr"]
        folder = self.new_bundle()
        config = self._config(folder, limits, layers, seccomp())
        return Machine(self.command, folder, config, limits, self._later, shell)

    def inspection(
        self,
        limits: SandboxLimits,
        folder: Path,
        usr: Path,
        guard: ExecGuard,
        protected: Sequence[tuple[str, str]],
        script: Sequence[str],
        streams: PipeStreams,
        descriptors: Sequence[int],
    ) -> Machine:
        """Start a machine whose process 1 inspects the files of an agent.

        Args:
            folder: its bundle, made by ``new_bundle``.
            usr: the agent's additions to /usr.
            guard: answers before each execve.
            protected: sources and targets of what is mounted read-only.
            script: the arguments of process 1.
            descriptors: what process 1 gets as 6 and so on.

        Raises:
            InfrastructureError: it did not start.
        """
        layers = [str(self.image.root)], [str(self.image.usr), "/usr", str(usr)]
        mounts = [*protected, *guard.mounts]
        config = self._config(folder, limits, layers, seccomp(str(guard.socket)), mounts, script)
        return Machine(self.command, folder, config, limits, self._later, streams, descriptors)

    def new_bundle(self) -> Path:
        """Make a folder for a machine's bundle."""
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir()
        folder.chmod(0o711)
        return folder

    def _config(
        self,
        folder: Path,
        limits: SandboxLimits,
        layers: tuple[Sequence[str], Sequence[str]],
        filter: Mapping[str, Any],
        protected: Sequence[tuple[str, str]] | None = None,
        script: Sequence[str] = (),
    ) -> dict[str, Any]:
        cgroup = {
            "cgroupfs": f"/agent-peft-{folder.name}",
            "systemd": f"user.slice:agent-peft:{folder.name}",
            "": None,
        }[self.case.cgroups]
        return bundle.config(
            self.image.mount,
            *layers,
            limits,
            self.case.ids,
            filter,
            self._descriptors,
            cgroup,
            protected,
            script,
        )

    def _later(self, what: Callable[[], None]) -> None:
        try:
            self._removals.submit(what)
        except RuntimeError:  # the interpreter ends
            what()

    def finish(self) -> None:
        """Wait for the removal of all machines that were closed."""
        self._removals.submit(lambda: None).result()


_LOCK = threading.Lock()
_FOUND: dict[tuple[int, str], Future[Runtime]] = {}  # by process and the key ``runtime``


def find_runtime(named: str = "auto") -> Runtime:
    """Return the runtime of this process. The first call tries what there is. ``named``: the path of a
    runtime, or "auto" for runc or crun.
    """
    with _LOCK:
        key = (os.getpid(), named)
        if key not in _FOUND:
            future: Future[Runtime] = Future()
            try:
                future.set_result(_try_all(named))
            except AgentPeftError as error:
                future.set_exception(error)
            _FOUND[key] = future
    return _FOUND[key].result()


def _try_all(named: str) -> Runtime:
    check_host()
    programs = find_programs(named)
    owner, refusals = OwnerFolder(), []
    for program in programs:
        for ids in possible_ids():
            for cgroups in possible_cgroups():
                case = Case(program, ids, cgroups)
                for _ in range(_TRIALS):
                    try:
                        runtime = Runtime(case, owner)
                    except (InfrastructureError, OSError) as error:
                        refusals.append(str(error))
                        continue
                    if refusals:
                        why, closed = refusals[-1], closed_folder(owner.path)
                        if closed and case.single_id:
                            why += f"; others may not search {closed}: chmod o+x it, or set another TMPDIR"
                        logger.warning("sandbox: oci: %s; more was refused: %s", case, why)
                    return runtime
    raise AgentPeftError(f"sandbox: oci: {explain_refusal(refusals)} ({refusals[0]}), {ADVICE}")


def check_host() -> None:
    if not sys.platform.startswith("linux"):
        raise AgentPeftError(
            f"sandbox: oci needs Linux, and this is {platform.system()}: "
            "install Docker and set sandbox: docker"
        )
    if "Microsoft" in platform.release():  # WSL2 says microsoft
        raise AgentPeftError(
            f"sandbox: oci needs a Linux kernel, and this is WSL1: wsl --set-version NAME 2, {ADVICE}"
        )
    if not processor_is_known():
        raise AgentPeftError(
            f"sandbox: oci has no filter of system calls for {platform.machine()} processors: "
            f"use an x86_64 or aarch64 machine, {ADVICE}"
        )
    if not os.path.islink("/bin"):
        raise AgentPeftError(
            "sandbox: oci needs a system whose /bin is a link to usr/bin: "
            f"upgrade it (Debian: apt-get install usrmerge), {ADVICE}"
        )


def find_programs(named: str) -> list[str]:
    """List the runtimes that may be used."""
    if named != "auto":
        if not os.access(named, os.X_OK):
            raise AgentPeftError(f"sandbox: oci: runtime: {named} is not a program; name runc or crun")
        return [named]
    path = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS])
    found = [where for name in _PROGRAMS if (where := shutil.which(name, path=path))]
    if not found:
        raise AgentPeftError(f"sandbox: oci needs a container runtime: {_PACKAGE}, {ADVICE}")
    return found


def command_of(case: Case, state: Path) -> list[str]:
    """Return the runtime with its global options."""
    command = [case.program, "--root", str(state)]
    if "crun" in Path(case.program).name:
        manager = {"": "disabled"}.get(case.cgroups, case.cgroups)
        return [*command, f"--cgroup-manager={manager}"]
    if case.cgroups == "systemd":
        return [*command, "--systemd-cgroup"]
    return [*command, "--rootless=true"] if case.cgroups == "" and os.geteuid() == 0 else command


def possible_cgroups() -> list[str]:
    """List the ways in which limits may be had, the best first. Only a trial shows which one works."""
    if os.geteuid() == 0:
        return ["cgroupfs", ""]
    session = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")) / "systemd/private"
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return ["systemd", ""] if unified and session.exists() else [""]


def possible_ids() -> list[Ids]:
    """List the ids that a machine may have, the most first."""
    single = {"uid": [(0, os.getuid(), 1)], "gid": [(0, os.getgid(), 1)]}
    if os.geteuid() == 0:
        return [{kind: [(0, _outer_ids(kind), _IDS)] for kind in ("uid", "gid")}, single]
    ranges = {kind: _sub_ids(f"/etc/sub{kind}", os.getuid()) for kind in ("uid", "gid")}
    if not all(ranges.values()) or not shutil.which("newuidmap") or not shutil.which("newgidmap"):
        return [single]
    many = {
        kind: [(0, single[kind][0][1], 1), (1, found[0], min(found[1], _IDS - 1))]
        for kind, found in ranges.items()
        if found is not None
    }
    return [many, single]


def descriptor_limit(shared: bool) -> int:
    """Return the maximum number of descriptors of a machine's process. The kernel counts descriptors in
    flight by user. ``shared``: the machines are our user; with a fourth of our limit they never use up those
    that we need.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft < 0 or not shared else min(max(soft // 4, 64), 1024)


def _outer_ids(kind: str) -> int:
    """Return the first of enough free ids in our user namespace: far from any account, 0 in a container."""
    for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= _FIRST_OUTER_ID and first + count >= _FIRST_OUTER_ID + _IDS:
            return _FIRST_OUTER_ID
    return 0


def _sub_ids(path: str, user: int) -> tuple[int, int] | None:
    """Return the first range of a user in a file such as /etc/subuid: its start and length."""
    names = {str(user)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(user).pw_name)
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for fields in (line.split(":") for line in lines):
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            return int(fields[1]), int(fields[2])
    return None


def explain_refusal(refusals: Sequence[str]) -> str:
    """Return what most likely forbids machines here, and how to allow them."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text().strip()
        except OSError:
            return ""

    if read("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return "allow user namespaces with sysctl kernel.unprivileged_userns_clone=1"
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return (
            "AppArmor restricts user namespaces to paths of its profiles: install the distribution's runc "
            "(its profile: /etc/apparmor.d/runc), or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if read("/proc/sys/user/max_user_namespaces") == "0":
        return "allow user namespaces with sysctl user.max_user_namespaces=10000"
    if any("proc" in refusal and "operation not permitted" in refusal.lower() for refusal in refusals):
        return (
            "parts of /proc are hidden here, as inside a container: start that with "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        )
    return "no machine starts: it needs user namespaces and overlays (Linux 5.14 or newer)"
