"""The machine: cores that this process may use, its device, native bfloat16, memory, and the lack of it."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agent_peft.lazy_torch import torch
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

CGROUPS, OWN_CGROUP, MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
# oneDNN and torch keep a kernel for each of the last 1,024 shapes that were multiplied, which makes a
# process in bfloat16 hundreds of megabytes larger. Lengths differ from batch to batch, so only the shapes
# of one batch's layers come again. Both libraries read these variables once.
for _name, _kernels in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"), ("LRU_CACHE_CAPACITY", "1")):
    os.environ.setdefault(_name, _kernels)
CACHED_WEIGHTS = 1 << 24  # the weights of a model this small stay in the caches of a CPU
# bytes of code, kernels of oneDNN and the tokenizer, from before a model is loaded to after some steps:
# 53 MB in fp32 and 112 MB in bfloat16 with SmolLM2-135M (benchmarks/memory.py)
FIRST_USE = 80_000_000
_BF16 = frozenset({"avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"})  # x86, then ARM
# Messages of torch, its CPU allocator and CUDA's libraries, where they raise a plain RuntimeError.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass(frozen=True)
class Threads:
    """The number of threads for torch, and the reason for it.

    >>> choose_threads(3)
    Threads(number=3, reason='threads')
    """

    number: int
    reason: str


def choose_threads(configured: int | None, neighbours: int = 1) -> Threads:
    """One thread for each core that this process may use. A container's quota or the affinity may allow fewer
    cores than torch sees.

    Args:
        configured: ``threads`` of the configuration, which overrides all else.
        neighbours: processes that torchrun started on this machine, this one included. They share the cores.
    """
    if configured is not None:
        return Threads(configured, "threads")
    variable = os.environ.get("OMP_NUM_THREADS")
    if variable and not (
        neighbours > 1 and variable == "1"
    ):  # torchrun sets it to 1 if the user has not set it
        return Threads(torch.get_num_threads(), "OMP_NUM_THREADS")
    has_affinity, quota = hasattr(os, "sched_getaffinity"), cpu_quota()
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    usable = cores if quota is None else min(cores, math.ceil(quota))
    reason = f"{cores} cores" + ("" if quota is None else f", of which the container may use {quota:g}")
    if neighbours > 1:
        return Threads(max(1, usable // neighbours), f"{reason}, for {neighbours} ranks")
    return Threads(max(1, min(usable, torch.get_num_threads())), reason)


def set_threads(configured: int | None, neighbours: int = 1) -> Threads:
    """Set torch's threads to ``choose_threads``."""
    threads = choose_threads(configured, neighbours)
    if threads.number != torch.get_num_threads():
        torch.set_num_threads(threads.number)
    return threads


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """The CPUs that the control groups (version 2 or 1) of this process may use, or None without a limit."""
    quotas = []
    for folder, _ in _control_groups("cpu", root, own):
        limit = (
            _read(folder / "cpu.max")
            or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        )
        match limit.split():
            case [allowed, period] if allowed.isdecimal() and period.isdecimal():  # else "max" or -1
                quotas.append(int(allowed) / int(period))
    return min(quotas, default=None)


def _control_groups(controller: str, root: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control groups and of those above, and whether they are of version 1."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        group = base / path.strip("/")
        for folder in (group, *group.parents):  # a limit also holds for the groups below
            if not folder.is_relative_to(base):
                break
            yield folder, bool(controllers)


@dataclass(frozen=True)
class Memory:
    """The memory that this process may use, in bytes: all of it, and what is free.

    >>> Memory(total=8 << 30, free=6 << 30).free >> 30
    6
    """

    total: int
    free: int


def total_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP, meminfo: Path = MEMINFO) -> Memory | None:
    """The machine's memory, or that which the control groups (version 2 or 1) of this process allow. None
    where the system does not report it.
    """
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(meminfo), re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= kilobytes.keys():
        return None
    total, free = (int(kilobytes[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for folder, is_first in _control_groups("memory", root, own):
        names = ("limit_in_bytes", "usage_in_bytes") if is_first else ("max", "current")
        limit, used = (_read(folder / f"memory.{name}") for name in names)
        if limit.isdecimal() and used.isdecimal() and int(limit) < total:
            total, free = int(limit), min(free, max(0, int(limit) - int(used)))
    return Memory(total, min(free, total))


def choose_device(configured: str) -> torch.device:
    """The device that ``policy.device`` names. ``auto`` is the GPU where torch has one, else the CPU."""
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if configured == "auto" else configured
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (device.type == "cpu" and not device.index) and not (
        device.type == "cuda" and (device.index or 0) < gpus
    ):
        have = "its CPU alone" if not gpus else f"cuda:0 … cuda:{gpus - 1}" if gpus > 1 else "cuda:0"
        raise AgentPeftError(
            f"policy.device: this machine has no {configured}; torch can compute on {have}: set "
            "policy.device=auto"
        )
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively. Elsewhere torch emulates it, several times slower than
    float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or bool(_BF16 & _cpu_features())


def take_peak(device: torch.device) -> int | None:
    """The peak of bytes since the last call: of tensors on the GPU, or of the whole process on a CPU. None
    where the system does not report it.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    resident = _resident("VmHWM")
    with suppress(OSError):  # then it stays the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # from now on
    return resident


@cache
def process_memory(device: torch.device) -> int:
    """The bytes that a process takes in addition to the tensors of its model. On a CPU: the size of this
    process when it is first asked, which has imported the same libraries, and what they load when they first
    compute. 0 on a GPU, and where the system does not report it.
    """
    present = _resident("VmRSS") if device.type == "cpu" else None
    return present + FIRST_USE if present else 0


def _resident(name: str) -> int | None:
    kilobytes = re.search(rf"^{name}:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE)
    return int(kilobytes[1]) * 1024 if kilobytes else None


def give_back_memory() -> None:
    """Give freed CPU memory back to the system. Otherwise the C library keeps it, in pieces that are too
    small for larger tensors, and the process outgrows its tensors. This takes milliseconds, and works with
    glibc only.
    """
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the CPU or of a GPU is full.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(ValueError("a bug"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextmanager
def explain_oom(action: str, hint: str) -> Iterator[None]:
    """Convert an out-of-memory error to ``AgentPeftError``: "out of memory ACTION: HINT"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise AgentPeftError(f"out of memory {action}: {hint}") from error


def _find_malloc_trim() -> Callable[[int], int] | None:
    with suppress(OSError, TypeError, AttributeError):  # another system, or another C library
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return None


_MALLOC_TRIM = _find_malloc_trim()


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
