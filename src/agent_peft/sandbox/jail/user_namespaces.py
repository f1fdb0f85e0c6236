"""User namespaces with the ids that we have: one to live in, and one below for what shall have less say."""

from __future__ import annotations

import os

from agent_peft.sandbox.jail import syscalls


def leave_for(flags: int, ids: dict[str, str]) -> None:
    """Leave for a user namespace of our own, and others, in which a child that stays behind gives us all
    the ids we had.
    """
    left, mapped = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(left[0], 1)
            _map_ids(os.getppid(), ids)
            os.write(mapped[1], b"x")
        finally:
            os._exit(0)
    os.close(left[0])
    os.close(mapped[1])
    syscalls.unshare(syscalls.NEWUSER | flags)
    os.write(left[1], b"x")
    if not os.read(mapped[0], 1):
        raise OSError("a user namespace got no ids")
    os.close(left[1])
    os.close(mapped[0])
    os.waitpid(pid, 0)


def _map_ids(pid: int, ids: dict[str, str]) -> None:
    for name, text in ids.items():
        with open(f"/proc/{pid}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def below(ids: dict[str, str]) -> int:
    """A descriptor of a user namespace below ours with the same ids."""
    left, go = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.NEWUSER)
            os.write(left[1], b"x")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(left[1])
    try:
        if not os.read(left[0], 1):
            raise OSError("there is no user namespace for what runs in the machine")
        _map_ids(pid, ids)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(go[1], b"x")
        for descriptor in (left[0], *go):
            os.close(descriptor)
        os.waitpid(pid, 0)
