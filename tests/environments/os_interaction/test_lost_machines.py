"""An agent that loses its machine is incorrect. A failure that the agent did not cause is an infrastructure
error.
"""

from __future__ import annotations

import socket

import pytest

from agent_peft.environments.os_interaction.config import OSGenerateConfig, OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.problems import Exits, Script, ShellProblem
from agent_peft.sandbox import fork_server
from agent_peft.sandbox.base import MachineLost, SandboxLimits
from agent_peft.sandbox.build import build_sandbox
from agent_peft.sandbox.namespaces import NamespaceSandbox
from agent_peft.types import AgentPeftError, InfrastructureError, Outcome, StopReason

LIMITS = SandboxLimits(memory_mb=64, processes=40, file_size_mb=16, cpu_seconds=1)


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        build_sandbox("oci", LIMITS)
        fork_server.fork_server()
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
    """Close the connection to process 1, as if it had died."""
    sandbox = playing._sandbox
    assert isinstance(sandbox, NamespaceSandbox)
    sandbox._machine._channel.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("reply", ["Act: bash\n\n```bash\nexit 3\n```", "Act: finish"])
def test_an_agent_whose_machine_dies_is_incorrect(reply):
    playing = episode()
    playing.start()
    playing.step("Act: bash\n\n```bash\nexit 1\n```")  # the next command needs a new shell
    kill_machine(playing)
    result = playing.step(reply)
    assert (result.done, result.outcome, result.stop_reason) == (True, Outcome.INCORRECT, StopReason.CRASHED)
    playing.close()


def test_a_machine_that_cannot_be_killed_is_incorrect(monkeypatch):
    playing = episode("true")
    playing.start()
    real = fork_server.Machine._ask

    def unkillable(self, what, descriptors, arguments):
        return (
            {"unkillable": True}
            if arguments.get("namespace") == "inspection"
            else real(self, what, descriptors, arguments)
        )

    monkeypatch.setattr(fork_server.Machine, "_ask", unkillable)
    result = playing.step("Act: finish")
    assert (result.outcome, result.stop_reason) == (Outcome.INCORRECT, StopReason.CRASHED)


def test_without_a_working_machine_nobody_is_to_blame(monkeypatch):
    playing = episode()
    playing.start()
    kill_machine(playing)

    def fail(self):
        raise InfrastructureError("no room")

    monkeypatch.setattr(NamespaceSandbox, "start", fail)
    with pytest.raises(InfrastructureError, match="no room"):
        playing.step("Act: finish")
    playing.close()


def test_the_end_of_the_fork_server_is_no_fault_of_the_agent():
    playing = episode()
    playing.start()
    server = fork_server.fork_server()
    server._process.kill()
    server._process.wait()
    with pytest.raises(InfrastructureError) as caught:
        playing.step("Act: finish")
    assert not isinstance(caught.value, MachineLost)
    playing.close()
