"""An agent that loses its machine is incorrect. A failure that the agent did not cause is an infrastructure
error.
"""

from __future__ import annotations

import pytest

from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.problems import Exits, Script, ShellProblem
from agent_peft.sandbox.base import MachineLost, SandboxLimits
from agent_peft.sandbox.build import build_sandbox
from agent_peft.sandbox.machine import Machine
from agent_peft.sandbox.oci import OciSandbox
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StopReason

LIMITS = SandboxLimits(memory_mb=64, processes=40, file_size_mb=16, cpu_seconds=1)


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        build_sandbox("oci", LIMITS)
    except AgentPeftError as error:
        pytest.skip(str(error))


def episode(evaluation: str = "[ -e /srv/done ]") -> OSEpisode:
    return OSEpisode(
        ShellProblem("x", Exits(Script(evaluation))),
        OSInteractionConfig(
            generate=OSGenerateConfig(num_tasks=1), limits=LIMITS, command_timeout=5, script_timeout=10
        ),
        seed=0,
    )


def kill_machine(playing: OSEpisode) -> None:
    sandbox = playing._sandbox
    assert isinstance(sandbox, OciSandbox) and sandbox._machine is not None
    assert sandbox._machine.processes.end(20)


def test_an_agent_whose_machine_dies_is_incorrect():
    playing = episode()
    playing.start()
    playing.step("Act: bash\n\n```bash\nexit 1\n```")  # the next command needs a new shell
    kill_machine(playing)
    result = playing.step("Act: bash\n\n```bash\nexit 3\n```")
    assert (result.done, result.outcome, result.stop_reason) == (True, Outcome.INCORRECT, StopReason.CRASHED)
    playing.close()


@pytest.mark.parametrize(
    ("before", "outcome"), [("true", Outcome.INCORRECT), ("touch /srv/done", Outcome.CORRECT)]
)
def test_the_files_of_a_machine_that_died_are_graded(before, outcome):
    """They outlive its processes, so that crashing the machine gains and loses nothing."""
    playing = episode()
    playing.start()
    playing.step(f"Act: bash\n\n```bash\n{before}\n```")
    kill_machine(playing)
    assert playing.step("Act: finish").outcome is outcome
    playing.close()


def test_a_machine_that_cannot_be_killed_is_incorrect(monkeypatch):
    playing = episode("true")
    playing.start()

    def unkillable(self):
        raise MachineLost("processes of a machine cannot be killed")

    monkeypatch.setattr(Machine, "end", unkillable)
    result = playing.step("Act: finish")
    assert (result.outcome, result.stop_reason) == (Outcome.INCORRECT, StopReason.CRASHED)


def test_without_a_working_machine_nobody_is_to_blame(monkeypatch):
    playing = episode()
    playing.start()
    kill_machine(playing)

    def fail(self):
        raise InfrastructureError("no room")

    monkeypatch.setattr(OciSandbox, "start", fail)
    with pytest.raises(InfrastructureError, match="no room"):
        playing.step("Act: bash\n\n```bash\ntrue\n```")
    playing.close()
