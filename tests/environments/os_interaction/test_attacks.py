"""No command reaches anything outside its machine, and no world fools its grader. This holds for root and for
an ordinary user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from agent_peft.sandbox.build import build_sandbox
from agent_peft.types import AgentPeftError, Outcome

from . import attacks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        with build_sandbox("oci", attacks.LIMITS) as sandbox:
            if not sandbox.run("command -v python3 && command -v gcc", 20).ok:
                pytest.skip("the attacks are written in Python and C, and /usr/bin has no python3 or no gcc")
    except AgentPeftError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("reach", attacks.REACHES, ids=[reach.what for reach in attacks.REACHES])
def test_out_of_reach(reach):
    assert attacks.reached(reach) is None


@pytest.mark.parametrize("trick", attacks.TRICKS, ids=[trick.what for trick in attacks.TRICKS])
def test_not_fooled(trick):
    assert attacks.outcome(trick) is Outcome.INCORRECT


@pytest.mark.parametrize("trick", attacks.HONEST, ids=[trick.what for trick in attacks.HONEST])
def test_honest_work_is_seen(trick):
    assert attacks.outcome(trick) is Outcome.CORRECT


def test_names_are_used_once():
    for rows in (attacks.REACHES, attacks.TRICKS, attacks.HONEST):
        assert len({row.what for row in rows}) == len(rows)


def _python_for_everybody() -> list[str]:
    """Return an interpreter that an ordinary user may run, and that can import our packages."""
    for path in (sys.executable, "/usr/bin/python3"):
        places = [
            str(ROOT / "src"),
            str(ROOT / "tests" / "environments" / "os_interaction"),
            sysconfig.get_path("purelib"),
        ]
        command = ["env", f"PYTHONPATH={os.pathsep.join(places)}", "HOME=/", path, "-B"]
        if (
            subprocess.run(
                [*_AS_USER, *command, "-c", "import attacks"], capture_output=True, cwd="/"
            ).returncode
            == 0
        ):
            return command
    pytest.skip("no Python here can be run by an ordinary user")


_AS_USER = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--no-new-privs")


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
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user"
)
def test_all_of_it_as_an_ordinary_user_with_one_id():
    assert set(_successful([*_AS_USER, *_python_for_everybody()])) <= NEEDS_USERS


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can hide the control groups"
)
def test_all_of_it_without_control_groups():
    each = "for m in /sys/fs/cgroup /sys/fs/cgroup/*/; do mount -o remount,bind,ro $m; done 2>/dev/null"
    hide = ["unshare", "-m", "bash", "-c", f'{each}; exec "$@"', "bash"]
    path = f"PYTHONPATH={ROOT / 'src'}"
    assert _successful([*hide, "env", path, sys.executable, "-B"]) == []


def _successful(python: list[str]) -> list[str]:
    """The attacks that were successful, and the honest work that was not seen."""
    done = subprocess.run(
        [*python, str(Path(attacks.__file__))], capture_output=True, text=True, cwd="/", timeout=550
    )
    if "sandbox: oci: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    successful: list[str] = json.loads(done.stdout)
    return successful
