"""User namespaces with all of our ids: one for ourselves, and one below for processes with fewer rights."""

from __future__ import annotations

import os

from agent_peft.sandbox.jail import syscalls


def unshare_with_ids(flags: int, ids: dict[str, str]) -> None:
    """Move this process to a new user namespace and to other new namespaces. It keeps all its ids: a child
    that stays outside maps them.

    Args:
        flags: the other namespaces (``syscalls.NEWNS``, ...).
        ids: the content of ``uid_map`` and ``gid_map``.
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
        raise OSError("the ids of a user namespace could not be mapped")
    os.close(left[1])
    os.close(mapped[0])
    os.waitpid(pid, 0)


def _map_ids(pid: int, ids: dict[str, str]) -> None:
    for name, text in ids.items():
        with open(f"/proc/{pid}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def child_namespace(ids: dict[str, str]) -> int:
    """Return a descriptor of a new user namespace below ours with the same ids."""
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
            raise OSError("the user namespace of the machine's processes could not be made")
        _map_ids(pid, ids)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.write(go[1], b"x")
        for descriptor in (left[0], *go):
            os.close(descriptor)
        os.waitpid(pid, 0)
