"""The base image of every machine: copies of the needed files of ``/etc``, empty homes, the host's ``/usr``.

It holds only files that are named here, and never a file that is not readable by everybody.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agent_peft.sandbox.inspection import is_hidden

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links of the root folder into /usr
_FOLDERS = {
    "boot": 0o755, "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755,
    "proc": 0o555, "root": 0o700, "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o555,
    "tmp": 0o1777, "usr": 0o755, "var": 0o755, "var/backups": 0o755, "var/cache": 0o755, "var/lib": 0o755,
    "var/lib/dpkg": 0o755, "var/local": 0o2775, "var/log": 0o755, "var/mail": 0o2775, "var/opt": 0o755,
    "var/spool": 0o755, "var/spool/cron": 0o755, "var/spool/cron/crontabs": 0o1730, "var/tmp": 0o1777,
    "etc/cron.d": 0o755, "etc/opt": 0o755, "etc/ssl": 0o755, "etc/ssl/certs": 0o755, "etc/sudoers.d": 0o755,
    "etc/update-motd.d": 0o755,
}  # fmt: skip
_LINKS = {
    "var/run": "/run",
    "var/lock": "/run/lock",
    "var/spool/mail": "../mail",
    "etc/mtab": "/proc/self/mounts",
}
_OF_ETC = (
    "adduser.conf", "alternatives", "bash.bashrc", "bash_completion.d", "bindresvport.blacklist",
    "cron.daily", "cron.hourly", "cron.monthly", "cron.weekly", "crontab", "debconf.conf", "debian_version",
    "default", "deluser.conf", "dpkg", "gai.conf", "host.conf", "init.d", "inputrc", "issue", "issue.net",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.gen", "localtime", "login.defs",
    "logrotate.d", "lsb-release", "magic", "magic.mime", "manpath.config", "mime.types", "motd", "nanorc",
    "networks", "nsswitch.conf", "os-release", "pam.conf", "pam.d", "perl", "profile", "profile.d",
    "protocols", "python3", "python3.11", "redhat-release", "rmt", "rpc", "security", "services", "shells",
    "skel", "sysctl.conf", "sysctl.d", "terminfo", "timezone", "vim", "xattr.conf",
)  # fmt: skip
# These decide which program a name means, or which code is loaded into it. In an inspection they
# are the originals, and nothing that runs there can write to them.
_PROTECTED = (
    "alternatives", "bash.bashrc", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "login.defs", "nsswitch.conf", "pam.conf", "pam.d", "perl", "profile", "profile.d",
    "python3", "python3.11", "security", "ssl", "terminfo", "vim",
)  # fmt: skip
_LOGIN = re.compile(r"sh\s+-\w*l|--login|\bsu\b|\blogin\b|\brunuser\b")  # a shell that reads more files
_LOCAL = ("bin", "etc", "games", "include", "lib", "sbin", "share", "share/man", "src")


class BaseImage:
    """The lower layers of all machines of this process, and the folder on which a root is mounted."""

    def __init__(self, folder: Path, first_ids: Mapping[str, int] | None) -> None:
        """Make the layers. ``folder``: where; it must not exist. ``first_ids``: by "uid" and "gid", the ids
        outside of a machine's root, None where it is ours.
        """
        self._first_ids = first_ids
        self.root, self.usr, self.mount = folder / "root", folder / "usr", folder / "mount"
        self._empty = folder / "empty"
        for path in (folder, self.root, self.usr, self.mount):
            _folder(path)
        _write(str(self._empty), "")
        _usr(self.usr)
        groups = _root(str(self.root))
        for name in ("up", "work"):  # for the changes of / and of /usr, which are mounted over them
            _folder(self.mount / name)
            _folder(self.root / "usr" / name)
        if first_ids is not None:
            self._give_away(folder, groups)
        # By path in a machine: the time of change, which nobody can set, and whether it is a folder
        self.known = {
            b"/" + os.fsencode(os.path.relpath(path, self.root)): _state(os.lstat(path))
            for path in _paths(self.root)
        }

    def known_of(self, path: bytes) -> tuple[int, bool] | None:
        """What ``known`` holds, also for a path in /usr."""
        if not path.startswith(b"/usr/"):
            return self.known.get(path)
        for layer in (os.fsencode(self.usr), b"/usr"):
            try:
                status = os.lstat(layer + path.removeprefix(b"/usr"))
            except OSError:
                continue
            return None if stat.S_ISCHR(status.st_mode) else _state(status)
        return None

    def protected(self, script: str) -> list[tuple[str, str]]:
        """List what an inspection by ``script`` mounts read-only: sources and targets."""
        homes = [f"root/{name}" for name in (".bashrc", ".profile")]
        files = [self.root / name for name in (*(f"etc/{name}" for name in _PROTECTED), *homes)]
        found = {str(path): "/" + str(path.relative_to(self.root)) for path in files}
        mounts = [
            (path, target)
            for path, target in found.items()
            if os.path.exists(path) and not os.path.islink(path)
        ]
        login = ("/root/.bash_profile", "/root/.bash_login") if _LOGIN.search(script) else ()
        mounts += [(str(self._empty), target) for target in ("/etc/ld.so.preload", *login)]
        shown = [each for each in mounts if is_hidden(each[1], script)]
        return [*shown, (str(self.usr / "local/lib"), "/usr/local/lib")]

    def give(self, path: Path) -> None:
        """Make a machine's root the owner of a file."""
        if self._first_ids is not None:
            os.chown(path, self._first_ids["uid"], self._first_ids["gid"])

    def _give_away(self, folder: Path, groups: Mapping[str, int]) -> None:
        """Make a machine's root, and the groups that some files need, the owners of all files."""
        assert self._first_ids is not None
        user, group = self._first_ids["uid"], self._first_ids["gid"]
        for path in (str(folder), *_paths(folder)):
            inside = groups.get(os.path.relpath(path, self.root), 0)
            mode = os.lstat(path).st_mode
            os.chown(path, user, group + inside, follow_symlinks=False)
            if inside:  # chown removes the bit that sets the group
                os.chmod(path, stat.S_IMODE(mode))


def _state(status: os.stat_result) -> tuple[int, bool]:
    return status.st_ctime_ns, stat.S_ISDIR(status.st_mode)


def _paths(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in (*folders, *names))


def _root(root: str) -> dict[str, int]:
    """Make the lowest layer of ``/``. Return the groups of the files that are not of root's."""
    owners: dict[str, int] = {}
    for name, mode in _FOLDERS.items():
        _folder(Path(root) / name, mode)
    for name in SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/{name}")
    _copy(_OF_ETC, f"{root}/etc")
    for source in _readable("/etc/skel"):
        shutil.copyfile(f"/etc/skel/{source}", f"{root}/root/{source}")
        os.chmod(f"{root}/root/{source}", 0o644)
    groups = _copy_accounts(f"{root}/etc")
    _write(f"{root}/etc/hostname", "sandbox\n")
    _write(f"{root}/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n")
    for name in ("fstab", "resolv.conf", "environment", "subuid", "subgid"):
        _write(f"{root}/etc/{name}", "")
    for name, group, mode in (
        ("btmp", "utmp", 0o660),
        ("wtmp", "utmp", 0o664),
        ("lastlog", "utmp", 0o664),
        ("faillog", "root", 0o644),
    ):
        _write(f"{root}/var/log/{name}", "", mode)
        owners[f"var/log/{name}"] = groups.get(group, 0)
    for name, group in (("var/mail", "mail"), ("var/local", "staff"), ("var/spool/cron/crontabs", "crontab")):
        owners[name] = groups.get(group, 0)
    return owners | dict.fromkeys(("etc/shadow", "etc/gshadow"), groups.get("shadow", 0))


def _usr(usr: Path) -> None:
    """Make our own folders over the host's for a machine's root to write in. ``/usr/local`` is empty."""
    for entry in os.scandir("/usr"):
        if entry.is_dir(follow_symlinks=False):
            _folder(usr / entry.name)
    for name in ("local", *(f"local/{each}" for each in _LOCAL)):
        _folder(usr / name)
    (usr / "local/man").symlink_to("share/man")
    for folder in (usr / "local", *(usr / "local" / each for each in _LOCAL)):
        _hide_others(folder, Path("/") / folder.relative_to(usr.parent))


def _hide_others(folder: Path, of_host: Path) -> None:
    """Hide the host's files in a folder by whiteouts."""
    try:
        names = os.listdir(of_host)
    except OSError:
        return
    for name in names:
        if not os.path.lexists(folder / name):
            os.mknod(folder / name, stat.S_IFCHR, 0)


def _copy(names: Iterable[str], target: str) -> None:
    """Copy files and folders of /etc. Files that are not readable by everybody are left out."""
    for name in names:
        source = f"/etc/{name}"
        try:
            status = os.lstat(source)
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), f"{target}/{name}")
        elif stat.S_ISDIR(status.st_mode):
            try:
                children = os.listdir(source)
            except PermissionError:
                children = []
            _folder(Path(target) / name)
            _copy((f"{name}/{child}" for child in children), target)
        elif stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH and status.st_size <= 1 << 20:
            shutil.copyfile(source, f"{target}/{name}")
            os.chmod(f"{target}/{name}", stat.S_IMODE(status.st_mode) & 0o755)
            os.utime(f"{target}/{name}", ns=(status.st_mtime_ns, status.st_mtime_ns))


def _copy_accounts(etc: str) -> dict[str, int]:
    """Write the users and groups of the system, without persons and passwords. Return the groups' ids."""
    users = [fields for fields in _table("/etc/passwd", 7) if _is_system(fields[2])]
    groups = [[*fields[:3], ""] for fields in _table("/etc/group", 4) if _is_system(fields[2])]
    ids = {fields[0]: int(fields[2]) for fields in groups}
    _write(f"{etc}/passwd", "".join(":".join([fields[0], "x", *fields[2:]]) + "\n" for fields in users))
    _write(f"{etc}/group", "".join(":".join([fields[0], "x", *fields[2:]]) + "\n" for fields in groups))
    _write(f"{etc}/shadow", "".join(f"{fields[0]}:*:19000:0:99999:7:::\n" for fields in users), 0o640)
    _write(f"{etc}/gshadow", "".join(f"{fields[0]}:*::\n" for fields in groups), 0o640)
    return ids


def _is_system(number: str) -> bool:
    return number.isdigit() and (int(number) < 1000 or int(number) == 65534)


def _table(path: str, columns: int) -> Sequence[list[str]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        rows = [line.rstrip("\n").split(":") for line in file]
    return [row for row in rows if len(row) == columns]


def _readable(folder: str) -> Sequence[str]:
    try:
        return [
            entry.name
            for entry in os.scandir(folder)
            if entry.is_file() and entry.stat().st_mode & stat.S_IROTH
        ]
    except OSError:
        return []


def _write(path: str, text: str, mode: int = 0o644) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)


def _folder(path: Path, mode: int = 0o755) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(mode)
