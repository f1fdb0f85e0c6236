"""Servers on free loopback ports, for whatever test wants to see an environment from the other end of a
wire.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache

import pytest

from agent_peft.environments.base import Environment
from agent_peft.environments.db_bench.servers.private import find_program
from agent_peft.environments.http.guard import Limits
from agent_peft.environments.http.server import Host
from agent_peft.environments.http.transport import Address
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.build import build_sandbox
from agent_peft.types import AgentPeftError


@pytest.fixture(scope="module", autouse=True)
def one_list_of_certificates() -> Iterator[None]:
    """Each HTTP client reads it again otherwise, which takes longer than most of what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@contextmanager
def running(
    environments: Mapping[str, Environment], limits: Limits | None = None, token: str | None = None
) -> Iterator[Host]:
    """A server on a thread. Nothing of it may be left at the end."""
    host = Host(environments, Address("127.0.0.1", 0), limits or Limits(), token)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(host.run(ready.set)), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield host
    finally:
        host.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert not host.sessions.open
    assert not [each for each in threading.enumerate() if each.name.startswith(host.sessions.name)]


@pytest.fixture
def serving() -> Iterator[Callable[..., Host]]:
    """``serving({"train": environment}, limits=..., token=...)``: a server that runs until the test is
    over.
    """
    with ExitStack() as stack:
        yield lambda environments, **more: stack.enter_context(running(environments, **more))


@pytest.fixture(scope="module")
def serving_all_along() -> Iterator[Callable[..., Host]]:
    """The same, until the module's last test is over."""
    with ExitStack() as stack:
        yield lambda environments, **more: stack.enter_context(running(environments, **more))


@pytest.fixture(scope="session")
def _why_no_sandbox() -> str | None:
    """In one line; None where this machine can sandbox."""
    try:
        with build_sandbox("oci", SandboxLimits()):
            return None
    except AgentPeftError as error:
        return str(error)


@pytest.fixture
def sandboxed(_why_no_sandbox: str | None) -> None:
    """Skips the test where this machine cannot sandbox."""
    if _why_no_sandbox is not None:
        pytest.skip(_why_no_sandbox)


@pytest.fixture(scope="session")
def mariadb() -> str:
    """The name of DB Bench's private server, which this process then has until it ends."""
    pytest.importorskip("pymysql", reason="the extra mysql is not installed")
    if find_program("mariadbd", "mysqld") is None:
        pytest.skip("neither mariadbd nor mysqld is installed (Debian's package mariadb-server)")
    return "mariadb"
