"""No command reaches anything outside its machine, and no world fools its grader. This holds for root and for
an ordinary user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from agent_peft.sandbox.build import build_sandbox
from agent_peft.types import AgentPeftError, Outcome

from . import attacks


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        with build_sandbox("oci", attacks.LIMITS) as sandbox:
            if not sandbox.run("command -v python3 && command -v gcc", 20).ok:
                pytest.skip("the attacks are written in Python and C, and /usr/bin has no python3 or no gcc")
    except AgentPeftError as error:
        pytest.skip(str(error))


LONG = {  # some seconds each
    "dentries of names that do not exist",
    "epoll watches",
    "folders as deep as they go",
    "record locks",
    "the program of a shell that is being started",
}


def each(rows):
    return [pytest.param(row, marks=[pytest.mark.slow] * (row.what in LONG), id=row.what) for row in rows]


@pytest.mark.parametrize("reach", each(attacks.REACHES))
def test_out_of_reach(reach):
    assert attacks.reached(reach) is None


@pytest.mark.parametrize("trick", each(attacks.TRICKS))
def test_not_fooled(trick):
    assert attacks.outcome(trick) is Outcome.INCORRECT


@pytest.mark.parametrize("trick", each(attacks.HONEST))
def test_honest_work_is_seen(trick):
    assert attacks.outcome(trick) is Outcome.CORRECT


def test_names_are_used_once():
    for rows in (attacks.REACHES, attacks.TRICKS, attacks.HONEST):
        assert len({row.what for row in rows}) == len(rows)


NEEDS_USERS = {  # useradd and groupadd chown, and no program of the agent is executed where there is one id
    "honest: a new program",
    "honest: a script that looks things up",
    "honest: a script that makes a link of its own",
    "honest: a script that root alone may read",
    "honest: a script with an exit code",
    "honest: settings in /etc",
    "honest: two programs in a row",
}


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")),
    reason="only root can become another user and hide the control groups",
)
@pytest.mark.parametrize("case", [case for case, before in attacks.CASES.items() if before])
def test_all_of_it_where_there_is_less(case):
    command = attacks.command_of(case)
    if command is None:
        pytest.skip("no Python here can be run by an ordinary user")
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=550)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode != 0 and "AgentPeftError: sandbox: oci: " in last:  # a refusal; a warning is none
        pytest.skip(last)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert ("one user" in found["case"]) == (case == "a user with one id"), found["case"]
    assert "the trainer" in found["case"]
    assert [what for what, result in found["results"].items() if result == "open"] == []
    refused = {what for what, result in found["results"].items() if result == "refused"}
    assert refused <= (NEEDS_USERS if case == "a user with one id" else set())
