"""A throwaway server of this process: its own folder, a Unix socket, no network. It ends with us."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_peft.environments.db_bench.servers.address import Address
from agent_peft.environments.db_bench.servers.client import Client, ServerError
from agent_peft.environments.db_bench.servers.owner import is_orphan, owned_name
from agent_peft.types import AgentPeftError, InfrastructureError

_PREFIX = "agent-peft-server"
_WATCHDOG = Path(__file__).with_name("watchdog.py")
_MEMORY_FOLDER = Path("/dev/shm")  # there a table is made in 1 ms, and on a disk, which is waited for, in 30
_ROOM = 1 << 30  # bytes that must be free there
_MAX_SOCKET = 100  # characters that a socket's path may have
_SCHEMA_BYTES = 64 << 20  # that an episode's tables may take
_FILE_BYTES = 1 << 30  # the largest file: InnoDB ends itself where it cannot write, so none should get there
_EXTRA_MEMORY = 160 << 20  # bytes that the server may hold above what it holds at its start
_MOST_MEMORY = 5 * _EXTRA_MEMORY  # above it the server is ended, since no statement could be stopped
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_ACCOUNTS = ("mysql", "nobody")  # that it runs as where we are root
_FOLDERS = "/usr/sbin:/usr/local/sbin:/usr/libexec:/usr/local/libexec"  # often not on a user's search path
_ABSENT = (
    "database: mariadb needs a server, and neither mariadbd nor mysqld is on the search path; install "
    "Debian's package mariadb-server, or give database: mysql://user:password@host"
)

# The options of both: little memory, no network, no log that nobody reads, and nothing waits for a disk.
_OPTIONS = (
    "skip-networking",
    "skip-log-bin",
    "loose-skip-symbolic-links",
    "performance-schema=0",
    "local-infile=0",
    "character-set-server=utf8mb4",
    "max-connections=600",
    "max-allowed-packet=1M",
    "thread-cache-size=64",
    "table-open-cache=400",
    "open-files-limit=4096",
    "tmp-table-size=4M",
    "max-heap-table-size=4M",
    "sort-buffer-size=256K",
    "join-buffer-size=256K",
    "key-buffer-size=1M",
    "innodb-buffer-pool-size=32M",
    "innodb-flush-log-at-trx-commit=0",
    "innodb-doublewrite=0",
    "innodb-use-native-aio=0",
    "innodb-autoextend-increment=8",
    "innodb-temp-data-file-path=ibtmp1:4M:autoextend:max:64M",
    "innodb-buffer-pool-dump-at-shutdown=0",
    "innodb-buffer-pool-load-at-startup=0",
    "loose-debug-no-sync",
    "loose-sync-frm=0",
    "loose-innodb-flush-method=nosync",
    "loose-innodb-log-file-size=16M",
    "loose-aria-log-file-size=8M",
    "loose-aria-pagecache-buffer-size=2M",
    "loose-feedback=0",
    "loose-max-session-mem-used=64M",
    "loose-tmp-disk-table-size=64M",
    "loose-mysqlx=0",
    "loose-event-scheduler=DISABLED",
    "loose-partition=OFF",  # and one engine, whose tables are files and have a buffer of one size for all
    "loose-enforce-storage-engine=InnoDB",
    "loose-disabled-storage-engines=MyISAM,MEMORY,CSV,ARCHIVE,BLACKHOLE,MERGE,FEDERATED",
)


class PrivateServer:
    """The server, and the process above it that ends it.

    Attributes:
        address: where it listens.
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            AgentPeftError: no server is installed.
            InfrastructureError: it does not start.
        """
        program = find_program("mariadbd", "mysqld")
        if program is None:
            raise AgentPeftError(_ABSENT)
        is_mariadb = _is_mariadb(program)
        installer = find_program("mariadb-install-db", "mysql_install_db") if is_mariadb else program
        if installer is None:
            raise AgentPeftError(_ABSENT.replace("neither mariadbd nor mysqld", "no mariadb-install-db"))
        place = _place()
        remove_orphans(place)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=owned_name(_PREFIX) + "_", dir=place))
            (self._folder / "files").mkdir()
            ids = self._hand_over()
            socket = self._folder / "socket"
            options = [f"--{option}" for option in _OPTIONS]
            options += [f"--secure-file-priv={self._folder / 'files'}", f"--tmpdir={self._folder}"]
            base = ["--no-defaults", f"--datadir={self._folder / 'tables'}"]
            if os.geteuid() == 0 and ids is None:
                base.append("--user=root")
            first = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
            order: dict[str, Any] = {
                "folder": str(self._folder),
                "ids": ids,
                "install": [installer, *base, *(first if is_mariadb else ["--initialize-insecure"])]
                + (_unsynced(options) if is_mariadb else []),
                "serve": [program, *base, *options, f"--socket={socket}", f"--pid-file={self._folder}/pid"],
                "file_bytes": _FILE_BYTES,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WATCHDOG), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # an interrupt at the terminal is for us
            )
        except OSError as error:
            raise InfrastructureError(f"the database server cannot be started: {error}") from error
        self.address = Address(socket=str(socket), user="root")
        self._wait_until_ready()
        self._statm = self._folder.parent / "none"
        with contextlib.suppress(OSError, ValueError):
            self._statm = Path(f"/proc/{int((self._folder / 'pid').read_text())}/statm")
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
        """The memory that it holds above its usual one, as a share of what it may hold; 0 where the kernel
        does not tell. A server that cannot be stopped from growing is ended.
        """
        extra = self._memory() - self._usual
        if extra > _MOST_MEMORY:
            self._process.kill()  # the kernel ends the server with it
        return extra / _EXTRA_MEMORY

    def _memory(self) -> int:
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(self._statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def large_schemas(self, prefix: str) -> list[str]:
        """The schemas of this prefix whose files take too much."""
        large, tables = [], self._folder / "tables"
        with contextlib.suppress(OSError):  # the server has ended
            for name in os.listdir(tables):
                with contextlib.suppress(OSError):  # it is being dropped
                    if name.startswith(prefix):
                        sizes = (os.stat(tables / name / file).st_size for file in os.listdir(tables / name))
                        if sum(sizes) > _SCHEMA_BYTES:
                            large.append(name)
        return large

    def stop(self) -> None:
        """End it and remove its folder. May be called twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends the server with it
            self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def detach(self) -> None:
        """Forget it, in a fork of the process that it belongs to."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # else it would live as long as the fork
        self._process.returncode = 0  # which is not ours to wait for

    def _hand_over(self) -> tuple[int, int] | None:
        """Give the folder to the account that the server is to run as: none, where that is ours."""
        if os.geteuid() != 0:
            return None
        for name in _ACCOUNTS:
            with contextlib.suppress(KeyError, OSError):  # none of this name, or not in this user namespace
                account = pwd.getpwnam(name)
                for folder in (self._folder / "files", self._folder):
                    os.chown(folder, account.pw_uid, account.pw_gid)
                return account.pw_uid, account.pw_gid
        return None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self.address):
            if not self.running or time.monotonic() > deadline:
                log = _last_error(self._folder / "log")
                self.stop()
                raise InfrastructureError(f"the database server does not start: {log}")
            time.sleep(0.02)


def find_program(*names: str) -> str | None:
    """The path of the first program that is installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS.split(":")])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def remove_orphans(place: Path) -> None:
    """Remove the folders of processes that have ended together with their watchdogs."""
    for folder in place.glob(f"{_PREFIX}_*"):
        if is_orphan(folder.name, _PREFIX):
            shutil.rmtree(folder, ignore_errors=True)


def _place() -> Path:
    """The folder for the server's: in memory where there is room, else the one for temporary files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(_MEMORY_FOLDER).free >= _ROOM:
            return _MEMORY_FOLDER
    place = Path(tempfile.gettempdir())
    return place if len(str(place)) + 70 < _MAX_SOCKET else Path("/tmp")


def _unsynced(options: list[str]) -> list[str]:
    return [option for option in options if "sync" in option or "innodb" in option or "aria" in option]


def _is_mariadb(program: str) -> bool:
    run = subprocess.run([program, "--no-defaults", "--version"], capture_output=True, text=True)
    return "MariaDB" in run.stdout


def _answers(address: Address) -> bool:
    if not os.path.exists(address.socket or ""):
        return False
    try:
        Client(address, seconds=5.0).close()
    except ServerError:
        return False
    return True


def _last_error(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "ERROR" in line] or lines
        if told:
            return told[-1][:300]
    return "it ended without a word"
