"""The table of sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from agent_peft.sandbox import docker_api
from agent_peft.sandbox.base import Sandbox, SandboxLimits
from agent_peft.sandbox.docker import DockerSandbox
from agent_peft.sandbox.fork_server import fork_server
from agent_peft.sandbox.namespaces import NamespaceSandbox
from agent_peft.sandbox.unsandboxed import NoSandbox
from agent_peft.types import AgentPeftError

SANDBOXES: Mapping[str, Callable[[SandboxLimits], Sandbox]] = {
    "namespaces": NamespaceSandbox,
    "bubblewrap": NamespaceSandbox,  # its name in older configurations
    "docker": partial(DockerSandbox, engine="docker"),
    "podman": partial(DockerSandbox, engine="podman"),
    "none": NoSandbox,
}


def build_sandbox(kind: str, limits: SandboxLimits) -> Sandbox:
    """Make a sandbox that is not yet started.

    Raises:
        AgentPeftError: there is no such kind, or this computer cannot have it; one line says what to install.
    """
    if kind not in SANDBOXES:
        raise AgentPeftError(f"sandbox: there is no kind {kind!r}; use one of {', '.join(SANDBOXES)}")
    return SANDBOXES[kind](limits)


def state_of(kind: str) -> str:
    """Say in words whether this computer can have sandboxes of this kind. An engine is only asked whether it
    listens.
    """
    try:
        if kind in docker_api.ENGINES:
            return docker_api.listening_at(kind)
        lacks = missing(kind)
    except OSError:
        return f"not here: no engine listens at {docker_api.address(kind)}"
    except AgentPeftError as error:
        return f"not here: {error}"
    return f"here, without {'; '.join(lacks)}" if lacks else "here"


def missing(kind: str) -> tuple[str, ...]:
    """List the features that sandboxes of this kind lack on this computer. Each line says how to get the
    feature.

    Raises:
        AgentPeftError: this computer cannot have such sandboxes at all.
    """
    if kind == "none":
        return ("isolation of any kind: the commands run on this computer, as this user",)
    if SANDBOXES.get(kind) is NamespaceSandbox and fork_server().single_id:
        return (
            "users other than root (useradd works; chown to others, chgrp and su do not): "
            "apt-get install uidmap, then "
            "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER",
        )
    return ()
