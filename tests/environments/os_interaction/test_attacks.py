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


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user"
)
def test_all_of_it_as_an_ordinary_user_with_one_id():
    done = subprocess.run(
        [*_AS_USER, *_python_for_everybody(), str(Path(attacks.__file__))],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=400,
    )
    if "this machine does not let us make a sandbox" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    needs_users = {
        "honest: settings in /etc",
        "honest: a script that looks things up",
    }  # groupadd and useradd chown, and there is one id
    assert set(json.loads(done.stdout)) <= needs_users
