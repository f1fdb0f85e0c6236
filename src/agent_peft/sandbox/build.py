"""The table of sandboxes."""

from __future__ import annotations

from agent_peft.sandbox.base import Sandbox, SandboxLimits
from agent_peft.sandbox.engines import ENGINES, EngineSandbox, where
from agent_peft.sandbox.oci import OciSandbox
from agent_peft.sandbox.runtime import find_runtime
from agent_peft.sandbox.unsandboxed import NoSandbox
from agent_peft.types import AgentPeftError

SANDBOXES = ("oci", "docker", "podman", "none")


def build_sandbox(kind: str, limits: SandboxLimits, runtime: str = "auto") -> Sandbox:
    """Make a sandbox that is not yet started. ``runtime`` is the path of the program for the kind oci."""
    match kind:
        case "oci":
            return OciSandbox(limits, runtime)
        case "docker" | "podman":
            return EngineSandbox(limits, kind)
        case "none":
            return NoSandbox(limits)
    raise AgentPeftError(f"sandbox: there is no kind {kind!r}; use one of {', '.join(SANDBOXES)}")


def describe_sandbox(kind: str) -> str:
    """Describe whether this computer can have sandboxes of this kind."""
    try:
        if kind in ENGINES:
            return where(kind)
        lacks = missing(kind)
    except AgentPeftError as error:
        return f"not here: {error}"
    how = f"here, {find_runtime().case}" if kind == "oci" else "here"
    return f"{how}, without {'; '.join(lacks)}" if lacks else how


def missing(kind: str) -> tuple[str, ...]:
    """List what sandboxes of this kind lack on this computer, each with the way to get it."""
    if kind == "none":
        return ("isolation of any kind: the commands run on this computer, as this user",)
    if kind in ENGINES:
        where(kind)
    if kind == "oci" and find_runtime().case.single_id:
        return (
            "users other than root (useradd works; chown to others, chgrp and su do not, and no evaluation "
            "executes a program of the agent): "
            "apt-get install uidmap, then "
            "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER",
        )
    return ()
