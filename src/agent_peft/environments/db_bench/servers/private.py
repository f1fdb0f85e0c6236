"""The private server of ``database: mariadb``: its own folder, a Unix socket, no network. It ends with this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from agent_peft.environments.db_bench.servers.client import Client, ServerAccount, ServerError
from agent_peft.types import AgentPeftError, InfrastructureError

_MEMORY_FOLDER = Path("/dev/shm")  # a table is made there in 1 ms, and on a disk, which is waited for, in 30
_ROOM = 1 << 30  # bytes that must be free there
_MAX_SOCKET = 100  # characters that a socket's path may have
_SCHEMA_BYTES = 64 << 20  # that an episode's tables may take
_FILE_BYTES = 1 << 30  # the largest file: InnoDB ends itself where it cannot write, so none should get there
_EXTRA_MEMORY = 160 << 20  # bytes that the server may hold above what it holds at its start
_MOST_MEMORY = 5 * _EXTRA_MEMORY  # above it the server is ended, since no statement could be stopped
_START_SECONDS = 60.0
_ACCOUNTS = ("mysql", "nobody")  # that it runs as where we are root
_FOLDERS = "/usr/sbin:/usr/local/sbin:/usr/libexec:/usr/local/libexec"  # often not on a user's search path

# Little memory, no network, no log that nobody reads, and nothing waits for a disk. One engine without
# partitions: its tables are files, and have a buffer of one size for all.
_OPTIONS = """
skip-networking skip-log-bin loose-skip-symbolic-links performance-schema=0 local-infile=0
character-set-server=utf8mb4 max-connections=600 max-allowed-packet=1M thread-cache-size=64
table-open-cache=400 open-files-limit=4096 tmp-table-size=4M max-heap-table-size=4M sort-buffer-size=256K
join-buffer-size=256K key-buffer-size=1M innodb-buffer-pool-size=32M innodb-flush-log-at-trx-commit=0
innodb-doublewrite=0 innodb-use-native-aio=0 innodb-autoextend-increment=8
innodb-temp-data-file-path=ibtmp1:4M:autoextend:max:64M innodb-buffer-pool-dump-at-shutdown=0
innodb-buffer-pool-load-at-startup=0 loose-debug-no-sync loose-sync-frm=0 loose-innodb-flush-method=nosync
loose-innodb-log-file-size=16M loose-aria-log-file-size=8M loose-aria-pagecache-buffer-size=2M
loose-feedback=0 loose-max-session-mem-used=64M loose-tmp-disk-table-size=64M
loose-event-scheduler=DISABLED loose-partition=OFF loose-enforce-storage-engine=InnoDB
"""


class PrivateServer:
    """The server, and the process above it that ends it (`watchdog`). ``name`` begins its folder's name."""

    def __init__(self, name: str) -> None:
        server = find_program("mariadbd", "mysqld")
        installer = find_program("mariadb-install-db", "mysql_install_db")
        if server is None or installer is None:
            raise AgentPeftError(
                "database: mariadb needs mariadbd and mariadb-install-db, which are not on the search path; "
                "install Debian's package mariadb-server, or give database: mysql://user:password@host"
            )
        with tempfile.TemporaryFile() as log:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=name, dir=place()))
                files, socket_path = self._folder / "files", self._folder / "socket"
                files.mkdir()
                account = _account(files, self._folder)
                base = ["--no-defaults", f"--datadir={self._folder / 'tables'}"]
                if os.geteuid() == 0 and not account:
                    base.append("--user=root")
                options = [f"--{option}" for option in _OPTIONS.split()]
                options += [f"--secure-file-priv={files}", f"--tmpdir={self._folder}"]
                first = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
                first += [option for option in options if re.search("sync|innodb|aria", option)]
                options += [f"--socket={socket_path}", f"--pid-file={self._folder / 'pid'}"]
                order = {
                    "folder": str(self._folder),
                    "commands": [[installer, *base, *first], [server, *base, *options]],
                    "account": account,
                    "file_bytes": _FILE_BYTES,
                }
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        str(Path(__file__).with_name("watchdog.py")),
                        json.dumps(order),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,  # an interrupt at the terminal is for us
                )
            except OSError as error:
                raise InfrastructureError(f"the database server cannot be started: {error}") from error
            self.address = ServerAccount(socket=str(socket_path), user="root")
            self._wait_until_ready(log)
        self._usual = self._memory()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_full(self) -> bool:
        """Whether its disk has no room for another table."""
        try:
            return shutil.disk_usage(self._folder).free < _SCHEMA_BYTES
        except OSError:
            return True

    def extra_memory(self) -> float:
        """The memory that it holds above its usual one, as a share of what it may hold; 0 without /proc. A
        server that cannot be stopped from growing is ended.
        """
        extra = self._memory() - self._usual
        if extra > _MOST_MEMORY:
            self.stop()
        return extra / _EXTRA_MEMORY

    def _memory(self) -> int:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int((self._folder / "pid").read_text())
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def large_schemas(self, prefix: str) -> list[str]:
        """The schemas of this prefix whose files take too much."""
        large = []
        with contextlib.suppress(OSError):  # a table is being dropped, or the server has ended
            for folder in (self._folder / "tables").glob(f"{prefix}*"):
                if sum(file.stat().st_size for file in folder.iterdir()) > _SCHEMA_BYTES:
                    large.append(folder.name)
        return large

    def stop(self) -> None:
        """End it and remove its folder. May be called twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def detach(self) -> None:
        """Release it in a fork of the process that it belongs to."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # else it would live as long as the fork
        self._process.returncode = 0  # the parent waits for it

    def _wait_until_ready(self, log: IO[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while self.running and time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                return Client(self.address, seconds=5.0).close()
            time.sleep(0.02)
        self.stop()
        lines = os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line] or lines or ["it exited without output"]
        raise InfrastructureError(f"the database server does not start: {errors[-1][:300]}")


def find_program(*names: str) -> str | None:
    """The path of the first program that is installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS.split(":")])
    return next((program for name in names if (program := shutil.which(name, path=path))), None)


def place() -> Path:
    """The folder for the server's: in memory where there is room, else the one for temporary files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(_MEMORY_FOLDER).free >= _ROOM:
            return _MEMORY_FOLDER
    temporary = Path(tempfile.gettempdir())
    return temporary if len(str(temporary)) + 70 < _MAX_SOCKET else Path("/tmp")


def _account(*folders: Path) -> dict[str, object]:
    """The account that runs the server and owns its folders, as arguments of Popen; none where it is ours."""
    for name in _ACCOUNTS if os.geteuid() == 0 else ():
        with contextlib.suppress(KeyError, OSError):  # none of this name, or not in this user namespace
            entry = pwd.getpwnam(name)
            for folder in folders:
                os.chown(folder, entry.pw_uid, entry.pw_gid)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    return {}
