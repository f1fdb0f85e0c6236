"""Snapshots: folders to bytes and back, with owners, modes, times, links, whiteouts and extended attributes.

Each file is one line of JSON and its content. A folder comes before its entries.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from typing import IO, Any

from agent_peft.sandbox.jail.base_image import OPAQUE


def write(root: str, names: Sequence[str], file: IO[bytes]) -> None:
    """Write the folders ``names`` of ``root`` to a file."""
    seen: dict[int, str] = {}

    def visit(path: str) -> None:
        full = f"{root}/{path}"
        status = os.lstat(full)
        if stat.S_ISSOCK(status.st_mode):
            return  # its listener is not in the snapshot
        entry: dict[str, Any] = {
            "path": path,
            "mode": status.st_mode,
            "uid": status.st_uid,
            "gid": status.st_gid,
            "mtime": status.st_mtime_ns,
        }
        content = b""
        if stat.S_ISLNK(status.st_mode):
            entry["target"] = os.fsdecode(os.readlink(os.fsencode(full)))
        elif not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            if status.st_ino in seen:
                entry["same"] = seen[status.st_ino]
            seen.setdefault(status.st_ino, path)
        if "same" not in entry and not stat.S_ISLNK(status.st_mode):
            attributes = {
                name: os.getxattr(full, name, follow_symlinks=False).hex()
                for name in os.listxattr(full, follow_symlinks=False)
            }
            entry["attributes"] = {
                k: v for k, v in attributes.items() if k == OPAQUE or not k.startswith("user.overlay.")
            }
            if stat.S_ISREG(status.st_mode):
                with open(full, "rb") as source:
                    content = source.read()
                entry["size"] = len(content)
        file.write(json.dumps(entry).encode() + b"\n" + content)
        if stat.S_ISDIR(status.st_mode):
            for name in sorted(os.listdir(full)):
                visit(f"{path}/{name}")

    for name in names:
        visit(name)


def read(root: str, file: IO[bytes]) -> None:
    """Recreate the content of an archive under ``root``. Its topmost folders must exist.

    Raises:
        ValueError: a path leads out of ``root``.
    """
    folders: list[tuple[str, int]] = []
    while line := file.readline():
        entry = json.loads(line)
        if ".." in entry["path"].split("/"):
            raise ValueError(f"the snapshot holds the path {entry['path']!r}")
        path, mode = f"{root}/{entry['path']}", entry["mode"]
        if "same" in entry:
            os.link(f"{root}/{entry['same']}", path)
            continue
        if stat.S_ISDIR(mode):
            os.makedirs(path, exist_ok=True)
            folders.append((path, entry["mtime"]))
        elif stat.S_ISLNK(mode):
            os.symlink(entry["target"], path)
        elif stat.S_ISREG(mode):
            with open(path, "xb") as target:
                target.write(file.read(entry["size"]))
        else:
            os.mknod(path, mode, 0)  # a fifo, or a whiteout
        os.chown(path, entry["uid"], entry["gid"], follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(path, stat.S_IMODE(mode))
            for name, value in entry["attributes"].items():
                os.setxattr(path, name, bytes.fromhex(value))
        os.utime(path, ns=(entry["mtime"], entry["mtime"]), follow_symlinks=False)
    for path, mtime in reversed(folders):
        os.utime(path, ns=(mtime, mtime))
