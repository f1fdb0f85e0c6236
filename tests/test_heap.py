"""A program starts again with settings of glibc under which freed tensors leave no useless holes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from agent_peft.heap import TUNABLES, VARIABLE

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")

START = """
import os
from agent_peft.heap import restart_with_tight_heap
restart_with_tight_heap()
"""
SHOW = (
    START
    + "print(os.environ.get('GLIBC_TUNABLES'), open('/proc/self/environ').read().count('GLIBC_TUNABLES='))"
)
GROWTH = (
    START
    + """
import torch
from agent_peft.hardware import take_peak

cpu, kept = torch.device("cpu"), []
take_peak(cpu)
before = take_peak(cpu)
for _ in range(200):  # of two large tensors, with a small one that stays behind each time
    wide = torch.ones(1_170_000)
    kept.append(torch.ones(3))
    wider = torch.ones(1_170_000)
    del wide
    narrow = torch.ones(440_000)
    del wider, narrow
print(take_peak(cpu) - before)
"""
)


def run(program: str, **environment: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_a_program_starts_again_once_and_its_children_do_not_inherit_it():
    assert run(SHOW) == ["None", "1"]


def test_the_users_own_settings_stay():
    assert run(SHOW, **{VARIABLE: "glibc.malloc.check=0"}) == ["glibc.malloc.check=0", "1"]
    assert run(SHOW, **{VARIABLE: TUNABLES}) == ["None", "1"]


@pytest.mark.slow
def test_freed_tensors_leave_room_for_tensors_of_their_size():
    """The heap grew with every tensor that followed: to 0.9 GB here, for at most 12 MB of tensors."""
    (growth,) = map(int, run(GROWTH))
    assert growth < 60e6
