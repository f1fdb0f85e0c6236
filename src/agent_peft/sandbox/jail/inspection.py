"""The file system of an inspection: a trusted script examines the files that an untrusted agent left.

The script sees the agent's files as data. Programs, libraries and settings are those of the host, so that no
file of the agent decides how a program works. Where programs look for such files, the script sees only those
files of the agent that it names; elsewhere it sees all of them. ``links.py`` removes links into ``/proc`` and
``/dev``.
"""

from __future__ import annotations

import os
import re
import shutil
import stat

from agent_peft.sandbox.jail import syscalls
from agent_peft.sandbox.jail.base_image import LIBRARIES, PROGRAMS, make_opaque
from agent_peft.sandbox.jail.links import escapes

FOLDER = "/inspection"  # a file system of process 1; the agent may have filled its own
SETTINGS = {
    **dict.fromkeys(  # no file can exist there
        (
            "XDG_CONFIG_HOME",
            "XDG_DATA_HOME",
            "XDG_CACHE_HOME",
            "XDG_CONFIG_DIRS",
            "CURL_HOME",
            "GNUPGHOME",
            "MYSQL_HOME",
        ),
        "/dev/null/none",
    ),
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "XDG_DATA_DIRS": "/usr/share",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_COUNT": "4",
}
for _i, _setting in enumerate(
    ("core.fsmonitor=false", "core.hooksPath=/dev/null", "diff.external=", "core.sshCommand=false")
):
    SETTINGS[f"GIT_CONFIG_KEY_{_i}"], _, SETTINGS[f"GIT_CONFIG_VALUE_{_i}"] = _setting.partition("=")
# Files of /etc that are data: no program takes orders from them. Other changed files there are visible if the
# script names them.
_ACCOUNT_FILES = frozenset(
    name + suffix
    for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")
    for suffix in ("", "-")
)
# These decide which program a name means, or which code is loaded into it: the agent's are never visible.
UNTRUSTED_SETTINGS = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "nsswitch.conf",
    "pam.conf", "pam.d", "perl", "security", "ssl", "gitconfig", "curlrc", "host.conf", "selinux", "gss",
    "krb5.conf", "libnl-3", "terminfo", "vim", "zsh", "pyvenv.cfg",
)  # fmt: skip
_PYTHON = re.compile(r"python[0-9.]*")
_ETC = re.compile(r"/etc/+([\w.+@-]+)")
_ALL_OF_ETC = re.compile(r"/etc(?![\w./+@-])|/etc/+(?![\w.+@/-])")
# A script that looks through a whole home sees all of it except these
_HOME_SETTINGS = re.compile(
    r"\.(git.*|config|curlrc|wgetrc|vim.*|viminfo|exrc|netrc|ssh|gnupg|npmrc|node.*|python.*|perl.*|inputrc"
    r"|nanorc|my\.cnf|mylogin.*|psqlrc|less.*|terminfo.*|local|cache|gdbinit|editrc|pam_environment|lynxrc"
    r"|screenrc|tmux.*|mailrc|toprc|digrc|bcrc|zshenv|zprofile|cpan.*|gem.*|irbrc|cargo|rustup|m2|java|gradle"
    r"|ansible.*|docker|kube|aws|sqliterc|Rprofile|octaverc|hushlogin|rpmmacros|fonts.*|selected_editor)"
)
_LOOKS_THROUGH = re.compile(
    r"\b(find|du|tar|tree|rsync|dotglob)\b|\bgrep -\w*[rR]|\bls -\w*[aA]|(?<![\w.])\.[*?\[]"
)
_DOT_NAME = re.compile(r"(?<![\w.])\.[A-Za-z0-9_][\w.+@-]*")
_WORD = re.compile(r"[\w.+@-]+")


def is_hidden(path: str, script: str) -> bool:
    """Whether ``script`` must not see the agent's file at an absolute path: it is a library, or it is a
    program or a setting that the script does not name.

    >>> is_hidden("/etc/app.conf", "grep -q x /etc/app.conf"), is_hidden("/srv/a", "cat /srv/a")
    (False, False)
    >>> is_hidden("/root/.gitconfig", "git log"), is_hidden("/usr/lib/libc.so.6", "ls")
    (True, True)
    """
    parts = path.strip("/").split("/")
    match parts:
        case ["etc", name, *_]:
            return _is_setting(name, script)
        case ["root", name, *_]:
            return _is_home_setting(name, script)
        case ["usr", "local", "lib", *_]:
            return True
        case ["usr", name]:
            return name in UNTRUSTED_SETTINGS or (
                name not in (*PROGRAMS, *LIBRARIES, "local") and name not in _WORD.findall(script)
            )
        case ["usr", folder, *rest] if folder in LIBRARIES or (folder in PROGRAMS and rest):
            return folder in LIBRARIES or rest[0] not in _WORD.findall(script)
    return False


def make_layers(script: str) -> None:
    """Make the overlay layers that lie above the agent's files while ``script`` inspects them. The root must
    be that of process 1.
    """
    for name in ("guard", "guard_usr"):
        os.mkdir(f"{FOLDER}/{name}")
    _guard_etc(script)
    _guard_home(script)
    _guard_usr(script)


def mount_layers(target: str) -> None:
    """Mount the file system of the inspection at ``target``. Its changes go to a separate layer."""
    changes = "/usr_upper/local"
    local = [changes] if stat.S_ISDIR(_mode(changes)) else []
    for folder, name, lower in (
        (target, "root", ["/base/guard", f"{FOLDER}/guard", "/root_upper", "/base/root"]),
        (f"{target}/usr", "usr", ["/usr", f"{FOLDER}/guard_usr", "/usr_upper", "/base/usr"]),
        (f"{target}/usr/local", "local", ["/base/guard_local", *local, "/base/usr/local"]),
    ):
        upper, work = f"{FOLDER}/{name}", f"{FOLDER}/{name}_work"
        os.mkdir(upper)
        os.mkdir(work)
        syscalls.mount(
            "overlay", folder, 0, f"userxattr,lowerdir={':'.join(lower)},upperdir={upper},workdir={work}"
        )


def close_usr() -> None:
    """Make /usr read-only. The root must be that of the inspection."""
    for folder in ("/usr", "/usr/local"):
        syscalls.mount("", folder, syscalls.REMOUNT | syscalls.BIND | syscalls.RDONLY)


def _is_setting(name: str, script: str) -> bool:
    if name in _ACCOUNT_FILES:
        return False
    return (
        name in UNTRUSTED_SETTINGS
        or _PYTHON.fullmatch(name) is not None
        or not (name in _ETC.findall(script) or _ALL_OF_ETC.search(script))
    )


def _guard_etc(script: str) -> None:
    for name in _names("/root_upper/etc"):
        if not _is_setting(name, script):
            continue
        os.makedirs(f"{FOLDER}/guard/etc", exist_ok=True)
        clean, target = f"/base/root/etc/{name}", f"{FOLDER}/guard/etc/{name}"
        if not os.path.lexists(clean):
            os.mknod(target, stat.S_IFCHR, 0)  # a whiteout hides the agent's file
        elif os.path.isdir(clean) and not os.path.islink(clean):
            shutil.copytree(clean, target, symlinks=True)
            for folder, _, _ in os.walk(target):
                make_opaque(folder)
        else:
            shutil.copy2(clean, target, follow_symlinks=False)


def _is_home_setting(name: str, script: str) -> bool:
    if not name.startswith(".") or name in _DOT_NAME.findall(script):
        return False
    return _LOOKS_THROUGH.search(script) is None or _HOME_SETTINGS.fullmatch(name) is not None


def _guard_home(script: str) -> None:
    """Hide the settings in root's home, except those that the script names. The script runs as root, so that
    the homes of other users have no effect on it.
    """
    hidden = [name for name in _names("/root_upper/root") if _is_home_setting(name, script)]
    if not hidden:
        return
    guard = f"{FOLDER}/guard/root"
    os.mkdir(guard)
    for name in hidden:
        if os.path.isfile(f"/base/root/root/{name}"):
            shutil.copy2(f"/base/root/root/{name}", f"{guard}/{name}")
        else:
            os.mknod(f"{guard}/{name}", stat.S_IFCHR, 0)
    shutil.copystat("/root_upper/root", guard)  # this folder's attributes hide those of the one below
    status = os.lstat("/root_upper/root")
    os.chown(guard, status.st_uid, status.st_gid)


def _guard_usr(script: str) -> None:
    """Show those programs that the agent added and the script names, unless the host has their names."""
    of_host = {name for folder in PROGRAMS for name in _names(f"/usr/{folder}")}
    for folder in (*PROGRAMS, *LIBRARIES):
        os.mkdir(f"{FOLDER}/guard_usr/{folder}")
        make_opaque(f"{FOLDER}/guard_usr/{folder}")
    named = set(_WORD.findall(script)) - of_host
    for folder in PROGRAMS:
        for name in named.intersection(_names(f"/usr_upper/{folder}")):
            _copy(f"/usr_upper/{folder}/{name}", f"{FOLDER}/guard_usr/{folder}/{name}")
    for name in _names("/usr_upper"):  # programs such as Python look for settings there
        if (
            not os.path.lexists(f"/usr/{name}")
            and name not in (*PROGRAMS, *LIBRARIES, "local")
            and (name in UNTRUSTED_SETTINGS or name not in named)
        ):
            os.mknod(f"{FOLDER}/guard_usr/{name}", stat.S_IFCHR, 0)


def _copy(source: str, target: str) -> None:
    """Copy a file or a link with its owner and times. Links that may escape and special files are skipped."""
    status = os.lstat(source)
    is_safe_link = (
        stat.S_ISLNK(status.st_mode)
        and ".." not in (to := os.readlink(source))
        and not escapes("/usr/bin/link", to)
    )
    if stat.S_ISREG(status.st_mode) or is_safe_link:
        shutil.copy2(source, target, follow_symlinks=False)
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder) if stat.S_ISDIR(_mode(folder)) else []
    except OSError:
        return []


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0
