"""The proof that a machine is as it was asked for: the first machine of a process is compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from agent_peft.sandbox import bundle
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.machine import WITHOUT_FILES, Machine
from agent_peft.types import InfrastructureError

LIMITS = SandboxLimits(memory_mb=64, processes=16)  # of that machine
_SECONDS = 60.0

_SHOW = (
    'grep -E "^(Seccomp|NoNewPrivs|Cap...):" /proc/self/status; '
    'sed -n "3,$ s/^ *\\([^:]*\\):.*/Network: \\1/p" /proc/net/dev; '
    'for f in /proc/self/fd/*; do echo "Descriptor: ${f##*/}"; done; '
    "for f in /proc/kcore /proc/keys /proc/timer_list; do [ -e $f ] && [ -s $f ] && echo Shown: $f; "
    "head -c 1 $f 2>/dev/null | grep -q . && echo Shown: $f; done; "
    "echo x 2>/dev/null >/proc/sys/kernel/hostname && echo Written: /proc/sys; true"
)


def faults_of(machine: Machine) -> list[str]:
    """List how a machine with ``LIMITS`` differs from what was asked for. Raises `InfrastructureError`: no
    program runs in it, or it lacks a control group's limits; `MachineLost`: it has ended.
    """
    shown = machine.run((*WITHOUT_FILES, _SHOW), "clean", _SECONDS)
    if not shown.ok:
        raise InfrastructureError(f"no program runs in a machine: {shown.output.strip()[-200:]}")
    first, shell = (
        Path(f"/proc/{program.pid}/status").read_text() if program.pid else ""
        for program in (machine.first, machine.shell)
    )
    _check_limits(machine)
    return differences(shown.output, first, shell)


def differences(shown: str, first: str, shell: str) -> list[str]:
    """List how a machine differs from what was asked for.

    Args:
        shown: what ``_SHOW`` printed in it.
        first: /proc/PID/status of its process 1.
        shell: that of its first shell.
    """
    agents = _mask(bundle.CAPABILITIES)
    wanted = {
        "Seccomp": "2",
        "NoNewPrivs": "1",
        "CapInh": _hexadecimal(0),
        "CapPrm": _hexadecimal(agents),
        "CapEff": _hexadecimal(agents),
        "CapBnd": _hexadecimal(agents),
        "CapAmb": _hexadecimal(0),
    }
    of_first = _hexadecimal(agents | _mask([bundle.CAPABILITY_OF_PROCESS_1]))
    faults = []
    for text, who, changed in (
        (shown, "", {}),
        (shell, "the shell: ", {}),
        (first, "process 1: ", dict.fromkeys(("CapPrm", "CapEff", "CapBnd"), of_first)),
    ):
        for name, value in {**wanted, **changed}.items():
            found = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
            if found is None or found[1] != value:
                faults.append(f"{who}{name} is {found[1] if found else 'not shown'} instead of {value}")
    for name, allowed in (("Network", {"lo"}), ("Descriptor", {"0", "1", "2", "3", "255"})):
        seen = set(re.findall(rf"^{name}: (.*)$", shown, re.MULTILINE))
        faults += [f"{name.lower()} {each} is there" for each in sorted(seen - allowed)]
    return faults + re.findall(r"^(?:Shown|Written): .*$", shown, re.MULTILINE)


def _check_limits(machine: Machine) -> None:
    """Compare the limits that the kernel has with those that were asked for."""
    if machine.cgroup is None:
        return
    groups = machine.cgroup
    if "memory" in groups and "pids" in groups:
        files = groups["memory"] / "memory.limit_in_bytes", groups["pids"] / "pids.max"
    elif "" in groups:
        files = groups[""] / "memory.max", groups[""] / "pids.max"
    else:
        raise InfrastructureError("the machine has no control group for memory and processes")
    for path, wanted in zip(files, (LIMITS.memory_mb << 20, LIMITS.processes), strict=True):
        try:
            found = path.read_text().strip()
        except OSError as error:
            found = str(error)
        if found != str(wanted):
            raise InfrastructureError(f"{path.name} of the machine's control group is {found}, not {wanted}")


def _mask(names: Sequence[str]) -> int:
    return sum(1 << _NUMBERS[name.removeprefix("CAP_")] for name in names)


def _hexadecimal(mask: int) -> str:
    return f"{mask:016x}"


_NUMBERS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
    "SETPCAP": 8, "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31,
    "WAKE_ALARM": 35,
}  # fmt: skip
