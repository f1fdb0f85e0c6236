"""The base image of every machine: copies of the needed files of ``/etc``, empty homes, the host's ``/usr``.

It holds only files that are named here, and never a file that is not readable by everybody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Sequence

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
# Folders of /usr
PROGRAMS, LIBRARIES = ("bin", "sbin", "games"), ("lib", "lib32", "lib64", "libx32", "libexec", "share")
# These decide which program a name means, or which code is loaded into it. An inspection sees the originals.
_PROTECTED = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "nsswitch.conf",
    "pam.conf",
    "pam.d",
    "perl",
    "python3",
    "python3.11",
    "security",
)
_LOCAL = ("bin", "etc", "games", "include", "lib", "sbin", "share", "share/man", "src")
OPAQUE = "user.overlay.opaque"


def build(folder: str) -> None:
    """Make the layers of the base image in ``folder``.

    root is the lowest layer of ``/``. usr lies over the host's ``/usr``. guard and guard_local are the
    topmost layers of an inspection: guard holds the folders on which other file systems are mounted, so that
    they are folders even if the agent replaced them.
    """
    os.umask(0o022)
    for name in ("root", "usr", "guard", "guard_local"):
        os.mkdir(f"{folder}/{name}")
    _root(f"{folder}/root")
    _usr(f"{folder}/usr")
    guard = f"{folder}/guard"
    _links(guard)
    for name in ("dev", "proc", "sys", "usr", "etc"):
        os.mkdir(f"{guard}/{name}")
    _copy(_PROTECTED, f"{guard}/etc")
    for name in _PROTECTED:
        if os.path.isdir(f"{guard}/etc/{name}"):
            make_opaque(f"{guard}/etc/{name}")
    os.mknod(f"{guard}/etc/ld.so.preload", stat.S_IFCHR, 0)  # a whiteout hides the agent's file
    for name in ("lib", "share/perl"):  # Python and Perl look for modules here before /usr
        os.makedirs(f"{folder}/guard_local/{name}")
        make_opaque(f"{folder}/guard_local/{name}")


def make_opaque(folder: str) -> None:
    """Hide the content of the lower layers in this folder."""
    os.setxattr(folder, OPAQUE, b"y")


def _root(root: str) -> None:
    for name, mode in _FOLDERS.items():
        os.mkdir(f"{root}/{name}")
        os.chmod(f"{root}/{name}", mode)
    _links(root)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/{name}")
    _copy(_OF_ETC, f"{root}/etc")
    for source in _readable("/etc/skel"):
        shutil.copyfile(f"/etc/skel/{source}", f"{root}/root/{source}")
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
        _write(f"{root}/var/log/{name}", "", mode, groups.get(group, 0))
    for name, group in (("var/mail", "mail"), ("var/local", "staff"), ("var/spool/cron/crontabs", "crontab")):
        _set_group(f"{root}/{name}", groups.get(group, 0))
        os.chmod(f"{root}/{name}", _FOLDERS[name])


def _usr(usr: str) -> None:
    """Make our own folders over the host's, so that a machine's root can write there. ``/usr/local`` is
    empty.
    """
    for entry in os.scandir("/usr"):
        if entry.is_dir(follow_symlinks=False):
            os.mkdir(f"{usr}/{entry.name}")
    os.makedirs(f"{usr}/local", exist_ok=True)
    make_opaque(f"{usr}/local")
    for name in _LOCAL:
        os.mkdir(f"{usr}/local/{name}")
    os.symlink("share/man", f"{usr}/local/man")


def _links(root: str) -> None:
    for name in SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")


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
            os.makedirs(f"{target}/{name}", 0o755, exist_ok=True)
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
    shadow, group = "".join(f"{fields[0]}:*:19000:0:99999:7:::\n" for fields in users), ids.get("shadow", 0)
    _write(f"{etc}/shadow", shadow, 0o640, group)
    _write(f"{etc}/gshadow", "".join(f"{fields[0]}:*::\n" for fields in groups), 0o640, group)
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


def _write(path: str, text: str, mode: int = 0o644, group: int = 0) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    _set_group(path, group)
    os.chmod(path, mode)


def _set_group(path: str, group: int) -> None:
    if group:
        with contextlib.suppress(OSError):  # with a single id the group stays root's
            os.chown(path, 0, group)
