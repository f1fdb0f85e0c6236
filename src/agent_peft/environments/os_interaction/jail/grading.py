"""What the evaluation of a task sees of the agent's files: data, and nothing that decides how a program of the clean system works.

Programs, libraries and configuration are the host's. Of what the agent wrote where programs look for them, only those names are there
that the evaluation asks for by name; elsewhere, all is as the agent left it. Links that lead to what is different for each process (in
``/proc`` and ``/dev``) are taken away: they would show a program its own command line, or what was to be compared with.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator

from agent_peft.environments.os_interaction.jail import kernel
from agent_peft.environments.os_interaction.jail.layers import LIBRARIES, PROGRAMS, make_opaque

LAYERS = ("guard", "guard_usr", "view_written", "view_work")  # folders of process 1, made when grading
_NOWHERE = "/dev/null/none"  # settings are looked for here, where nothing can be
SETTINGS = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "XDG_CONFIG_HOME": _NOWHERE,
    "XDG_DATA_HOME": _NOWHERE,
    "XDG_CACHE_HOME": _NOWHERE,
    "XDG_CONFIG_DIRS": _NOWHERE,
    "XDG_DATA_DIRS": "/usr/share",
    "CURL_HOME": _NOWHERE,
    "GNUPGHOME": _NOWHERE,
    "MYSQL_HOME": _NOWHERE,
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_COUNT": "4",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
    "GIT_CONFIG_KEY_2": "diff.external",
    "GIT_CONFIG_VALUE_2": "",
    "GIT_CONFIG_KEY_3": "core.sshCommand",
    "GIT_CONFIG_VALUE_3": "false",
}
# What tasks are about in /etc and no program takes orders from. The rest of what the agent wrote there is seen if it is named.
_ABOUT = frozenset(
    ("passwd", "passwd-", "group", "group-", "shadow", "shadow-", "gshadow", "gshadow-", "subuid", "subuid-", "subgid", "subgid-")
)
# What decides which program a name means, or what is loaded into one: never the agent's.
NEVER = frozenset(
    (
        *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "nsswitch.conf", "pam.conf", "pam.d", "perl"),
        *("security", "ssl", "gitconfig", "curlrc", "host.conf", "selinux", "gss", "krb5.conf", "libnl-3", "terminfo", "vim", "zsh"),
    )
)
_PYTHON = re.compile(r"python[0-9.]*")
_ETC = re.compile(r"/etc/+([\w.+@-]+)")
_ALL_OF_ETC = re.compile(r"/etc(?![\w./+@-])|/etc/+(?![\w.+@/-])")
_DOT_NAME = re.compile(r"(?<![\w.])\.[A-Za-z0-9_][\w.+@-]*")
_WORD = re.compile(r"[\w.+@-]+")
_MOST_LINKS = 40  # that the kernel follows for one path
# What is the same for every process
_HARMLESS = re.compile(
    r"/dev/(null|zero|full|random|urandom|shm(/.*)?)|/proc/(cpuinfo|meminfo|version|uptime|loadavg|filesystems|stat|devices|cmdline)"
)


def make_layers(script: str) -> None:
    """Make the folders that lie above what the agent wrote when ``script`` looks at it. Process 1's root is the current one."""
    for name in LAYERS:
        shutil.rmtree(f"/{name}", ignore_errors=True)
        os.mkdir(f"/{name}")
    _guard_etc(script)
    for home in ("root", *(f"home/{name}" for name in _names("/root_written/home"))):
        _guard_home(home, script)
    _guard_usr(script)


def mount_layers(view: str) -> None:
    written = "/usr_written/local"
    local = [written] if stat.S_ISDIR(_mode(written)) else []
    lower = ["/base/guard", "/guard", "/root_written", "/base/root"]
    kernel.mount("overlay", view, 0, f"userxattr,lowerdir={':'.join(lower)},upperdir=/view_written,workdir=/view_work")
    kernel.mount("overlay", f"{view}/usr", kernel.RDONLY, "userxattr,lowerdir=/usr:/guard_usr:/usr_written:/base/usr")
    lower = ["/base/guard_local", *local, "/base/usr/local"]
    kernel.mount("overlay", f"{view}/usr/local", kernel.RDONLY, f"userxattr,lowerdir={':'.join(lower)}")


def links(*trees: tuple[str, str]) -> list[bytes]:
    """The symbolic links below some folders, each as the machine names it; what is too deep to be opened is left out."""
    found: list[bytes] = []
    for folder, name in trees:
        found += [os.fsencode(name) + path for path in _links(os.fsencode(folder))]
    return found


def remove_ways_out(paths: Iterable[bytes]) -> None:
    """Take away those links that lead to what is not the same for all processes. Our root is the evaluation's."""
    for path in [path for path in paths if _leads_out(path)]:
        try:
            os.unlink(path)
        except OSError:
            continue  # another link on the way to it is gone already


def _guard_etc(script: str) -> None:
    everything = _ALL_OF_ETC.search(script) is not None
    named = set(_ETC.findall(script))
    for name in _names("/root_written/etc"):
        if name in _ABOUT or ((name in named or everything) and name not in NEVER and not _PYTHON.fullmatch(name)):
            continue
        os.makedirs("/guard/etc", exist_ok=True)
        clean, target = f"/base/root/etc/{name}", f"/guard/etc/{name}"
        if not os.path.lexists(clean):
            os.mknod(target, stat.S_IFCHR, 0)  # a whiteout: there is none, whatever the machine says
        elif os.path.isdir(clean) and not os.path.islink(clean):
            shutil.copytree(clean, target, symlinks=True)
            for folder, _, _ in os.walk(target):
                make_opaque(folder)
        else:
            shutil.copy2(clean, target, follow_symlinks=False)


def _guard_home(home: str, script: str) -> None:
    """Hide a home's settings but those that the evaluation names."""
    written = f"/root_written/{home}"
    named = set(_DOT_NAME.findall(script))
    hidden = [name for name in _names(written) if name.startswith(".") and name not in named]
    if not hidden:
        return
    place = ""
    for part in home.split("/"):  # a folder of this layer has the say over the owner and mode of those below
        place = f"{place}/{part}"
        if not os.path.isdir(f"/guard{place}"):
            os.mkdir(f"/guard{place}")
        found = os.lstat(f"/root_written{place}")
        os.chown(f"/guard{place}", found.st_uid, found.st_gid)
        os.chmod(f"/guard{place}", stat.S_IMODE(found.st_mode))
    for name in hidden:
        clean = f"/base/root/{home}/{name}"
        if os.path.isfile(clean):
            shutil.copy2(clean, f"/guard/{home}/{name}")
        else:
            os.mknod(f"/guard/{home}/{name}", stat.S_IFCHR, 0)
    for part in (f"/{home}", *([f"/{os.path.dirname(home)}"] if "/" in home else [])):
        found = os.lstat(f"/root_written{part}")
        os.utime(f"/guard{part}", ns=(found.st_atime_ns, found.st_mtime_ns))


def _guard_usr(script: str) -> None:
    """Of the programs that the agent added, those that the evaluation names, and whose names the host does not have."""
    theirs = {name for folder in PROGRAMS for name in _names(f"/usr/{folder}")}
    for folder in (*PROGRAMS, *LIBRARIES):
        os.mkdir(f"/guard_usr/{folder}")
        make_opaque(f"/guard_usr/{folder}")
    named = set(_WORD.findall(script)) - theirs
    for folder in PROGRAMS:
        for name in named.intersection(_names(f"/usr_written/{folder}")):
            if not stat.S_ISDIR(_mode(f"/usr_written/{folder}/{name}")):
                os.link(f"/usr_written/{folder}/{name}", f"/guard_usr/{folder}/{name}", follow_symlinks=False)


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


def _links(folder: bytes) -> Iterator[bytes]:
    waiting = [b""]
    while waiting:
        place = waiting.pop()
        try:
            entries = list(os.scandir(folder + place))
        except OSError:  # too deep: no path leads there
            continue
        for entry in entries:
            path = place + b"/" + entry.name
            if entry.is_symlink():
                yield path
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _leads_out(path: bytes) -> bool:
    """Whether a link's way goes through /proc or /dev, wherever it ends: as the kernel goes, but past what is not there yet."""
    done, waiting, followed = b"", path.split(b"/")[::-1], 0
    while waiting:
        part = waiting.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done.rpartition(b"/")[0]
            continue
        here = done + b"/" + part
        if here in (b"/proc", b"/dev"):
            rest = b"/".join([here, *(each for each in reversed(waiting) if each not in (b"", b"."))])
            return _HARMLESS.fullmatch(os.fsdecode(rest)) is None
        try:
            target = os.readlink(here)
        except OSError:
            done = here
            continue
        followed += 1
        if followed > _MOST_LINKS:
            return False  # the kernel goes no further
        if target.startswith(b"/"):
            done = b""
        waiting += target.split(b"/")[::-1]
    return False
