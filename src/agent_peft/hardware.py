"""What the machine has: cores that this process may use, and 16-bit arithmetic that is not emulated."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# oneDNN, and torch above it, keep a kernel for each shape that was multiplied, by default the last 1,024; in
# bfloat16 a process grows by hundreds of megabytes so. Lengths differ from batch to batch: only those of one
# batch's layers are asked for again. Both read this once.
for _name, _kernels in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"), ("LRU_CACHE_CAPACITY", "1")):
    os.environ.setdefault(_name, _kernels)
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"})  # x86, then ARM


@dataclass(frozen=True)
class Threads:
    """How many threads torch is to use, and why.

    >>> choose_threads(3)
    Threads(number=3, reason='threads')
    """

    number: int
    reason: str


def choose_threads(configured: int | None, neighbours: int = 1) -> Threads:
    """One for each core that this process may use: a container's quota or an affinity may leave it fewer than
    torch sees.

    Args:
        configured: the user's word, which is last.
        neighbours: processes that torchrun started on this machine, this one included; they share the cores.
    """
    if configured is not None:
        return Threads(configured, "threads")
    given = os.environ.get("OMP_NUM_THREADS")
    if given and not (
        neighbours > 1 and given == "1"
    ):  # 1 is what torchrun sets where the user has said nothing
        return Threads(torch.get_num_threads(), "OMP_NUM_THREADS")
    cores, quota = _affinity(), cpu_quota()
    usable = cores if quota is None else min(cores, math.ceil(quota))
    found = f"{cores} cores" + ("" if quota is None else f", of which the container may use {quota:g}")
    if neighbours > 1:
        return Threads(max(1, usable // neighbours), f"{found}, for {neighbours} ranks")
    return Threads(max(1, min(usable, torch.get_num_threads())), found)


def set_threads(configured: int | None, neighbours: int = 1) -> Threads:
    """``choose_threads``, done."""
    chosen = choose_threads(configured, neighbours)
    if chosen.number != torch.get_num_threads():
        torch.set_num_threads(chosen.number)
    return chosen


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """CPUs' worth of time that the control groups (version 2 or 1) of this process may use; None where
    there is no limit.
    """
    quotas = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        group = base / path.strip("/")
        for folder in (group, *group.parents):  # a limit binds all below it
            if not folder.is_relative_to(base):
                break
            limit = (
                _read(folder / "cpu.max")
                or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
            )
            match limit.split():
                case [allowed, period] if (
                    allowed.isdecimal() and period.isdecimal()
                ):  # otherwise "max", or -1
                    quotas.append(int(allowed) / int(period))
    return min(quotas, default=None)


def choose_device(configured: str) -> torch.device:
    """``auto`` is the GPU where torch has one, else the CPU.

    Raises:
        AgentPeftError: this machine has no such device.
    """
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if configured == "auto" else configured
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (device.type == "cpu" and not device.index) and not (
        device.type == "cuda" and (device.index or 0) < gpus
    ):
        have = "its CPU alone" if not gpus else f"cuda:0 … cuda:{gpus - 1}" if gpus > 1 else "cuda:0"
        raise AgentPeftError(
            f"policy.device: {configured} is not here, where torch can compute on {have}; set policy.device=auto"
        )
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 by itself. Elsewhere torch emulates it, several times slower
    than float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or bool(_BF16 & _cpu_features())


def take_peak(device: torch.device) -> int | None:
    """The most bytes that tensors on the GPU (on a CPU: the whole process) have taken since this was asked
    last; None where unknown.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE)
    with suppress(OSError):  # then it stays that of the process's whole life
        Path("/proc/self/clear_refs").write_text("5")  # from now on
    return int(found[1]) * 1024 if found else None


def give_back_memory() -> None:
    """What was freed on the CPU goes back to the system. The C library keeps it, in pieces that larger
    tensors do not fit into; with this now and then the process stays as large as its tensors. It takes
    milliseconds. Only glibc can be asked for it.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    with suppress(OSError, TypeError, AttributeError):  # another system, or another C library
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None


_MALLOC_TRIM = _find_malloc_trim()


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_features() -> set[str]:
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, there in torch.cpu.get_capabilities().items() if there is True}
    flags = (
        line.partition(":")[2]
        for line in _read(Path("/proc/cpuinfo")).splitlines()
        if line.startswith(("flags", "Features"))
    )
    return set(next(flags, "").split())


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
