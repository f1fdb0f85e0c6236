"""Cores and 16-bit arithmetic: what the machine has, and what is said where it has not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent_peft import hardware
from agent_peft.hardware import choose_threads, cpu_quota, has_bf16

CPU = torch.device("cpu")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of them, all seen by torch, no quota, and nothing said by the user."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(hardware, "cpu_quota", lambda: None)


# -- cores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "neighbours", "number", "reason"),
    [
        (None, 1, 8, "8 cores"),
        (2.0, 1, 2, "8 cores, of which the container may use 2"),
        (1.5, 1, 2, "8 cores, of which the container may use 1.5"),
        (0.1, 1, 1, "8 cores, of which the container may use 0.1"),
        (32.0, 1, 8, "8 cores, of which the container may use 32"),
        (None, 3, 2, "8 cores, for 3 ranks"),
        (2.0, 4, 1, "8 cores, of which the container may use 2, for 4 ranks"),
    ],
)
def test_a_thread_for_each_core_that_may_be_used(cores, monkeypatch, quota, neighbours, number, reason):
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    chosen = choose_threads(None, neighbours)
    assert (chosen.number, chosen.reason) == (number, reason)


def test_never_more_than_torch_would_take(cores, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)  # it leaves out hyper-threads
    assert choose_threads(None).number == 4


def test_the_users_word_is_the_last(cores, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(None).reason == "OMP_NUM_THREADS"
    assert choose_threads(None).number == choose_threads(None, neighbours=2).number == 5
    assert choose_threads(3, neighbours=2).number == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    assert choose_threads(None, neighbours=2).number == 4


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an operating system with affinities")
def test_a_process_of_one_core_runs_one_thread():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from agent_peft.hardware import set_threads; import torch\n"
        "set_threads(None); print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1"


def make_tree(folder: Path, files: dict[str, str], own: str) -> tuple[Path, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "own").write_text(own)
    return folder, folder / "own"


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),  # a container's own root, version 2
        (
            {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"},
            "0::/a/b\n",
            2.0,
        ),  # a limit binds all below it
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "50000 100000\n"}, "0::/a/b\n", 0.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        (
            {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/docker/x\n1:pids:/\n",
            3.0,
        ),  # version 1
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", None),
        ({}, "0::/gone\n", None),
        ({}, "", None),
    ],
)
def test_quotas_of_control_groups(tmp_path, files, own, quota):
    assert cpu_quota(*make_tree(tmp_path, files, own)) == quota


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/\n", (8000, 6000)),
        ({"memory.max": "max", "memory.current": "5"}, "0::/\n", (8000, 6000)),
        ({"memory.max": "4096000", "memory.current": "1024000"}, "0::/\n", (4000, 3000)),
        ({"memory.max": "4096000", "memory.current": "9024000"}, "0::/\n", (4000, 0)),
        ({"a/memory.max": "2048000", "a/memory.current": "0"}, "0::/a/b\n", (2000, 2000)),
        (
            {"memory/a/memory.limit_in_bytes": "1024000", "memory/a/memory.usage_in_bytes": "512000"},
            "3:cpu:/x\n5:memory:/a\n",
            (1000, 500),
        ),
    ],
)
def test_the_memory_that_this_process_may_use(tmp_path, files, own, expected):
    root, group = make_tree(tmp_path, files, own)
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemFree:  1 kB\nMemAvailable:  6000 kB\n")
    found = hardware.total_memory(root, group, tmp_path / "meminfo")
    assert (found.total / 1024, found.free / 1024) == expected
    assert hardware.total_memory(root, group, tmp_path / "nothing") is None


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux")
def test_the_size_of_this_process(monkeypatch):
    """It is read once, so that a model that was loaded since is not counted again."""
    measure = hardware.process_memory.__wrapped__
    tensor = torch.ones(1 << 26)  # 256 MiB
    assert measure(CPU) > tensor.nbytes + hardware.FIRST_USE
    assert measure(torch.device("cuda")) == 0
    first = hardware.process_memory(CPU)
    more = torch.ones(1 << 26)
    assert hardware.process_memory(CPU) == first and len(more)
    monkeypatch.setattr(hardware, "_read", lambda _: "")
    assert measure(CPU) == 0


# -- bfloat16 ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="needs Linux")
def test_the_features_are_the_kernels():
    flags = Path("/proc/cpuinfo").read_text().split()
    assert has_bf16(CPU) == any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


RESIDENT = r"""
import re, torch
from agent_peft.hardware import give_back_memory

def resident():
    return int(re.search(r"^VmRSS:\s+(\d+) kB$", open("/proc/self/status").read(), re.M)[1]) * 1024

del (mapped := [torch.ones(1 << 22)])[:]  # 16 MB: from now on the C library keeps what is smaller in its heap
before = resident()
pieces = [torch.ones(1 << 18) for _ in range(200)]
del pieces[:-1]  # the last one lies at the heap's end, and holds all below it
kept = resident() - before
give_back_memory()
print(kept, resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for what it keeps")
def test_what_was_freed_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 150e6 and left < 20e6


KERNELS = r"""
import re, torch
{imported}

def resident():
    return int(re.search(r"^VmRSS:\s+(\d+) kB$", open("/proc/self/status").read(), re.M)[1]) * 1024

torch.set_num_threads(1)
weight = torch.ones(576, 576, dtype=torch.bfloat16)
for rows in range(256, 544):
    if rows == 384:
        before = resident()
    torch.ones(rows, 576, dtype=torch.bfloat16) @ weight
print(resident() - before)
"""


@pytest.mark.skipif(not has_bf16(CPU), reason="this CPU does not multiply bfloat16 natively")
def test_kernels_of_other_shapes_are_not_kept_for_ever():
    """Each batch has lengths of its own: in bfloat16 a process grew with every step."""

    def growth(imported):
        clean = {
            k: v
            for k, v in os.environ.items()
            if k not in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
        }
        done = subprocess.run(
            [sys.executable, "-c", KERNELS.format(imported=imported)],
            env=clean,
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    kept, left = growth(""), growth("import agent_peft.hardware")
    assert left < max(kept / 2, 32e6), (kept, left)  # as much as other things may grow by
