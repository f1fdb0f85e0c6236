"""What the evaluation of a task sees of the agent's files: data, and nothing that decides how a program of
the clean system works.

Programs, libraries and configuration are the host's. Of what the agent wrote where programs look for them,
only those names are there that the evaluation asks for by name; elsewhere, all is as the agent left it. Links
that lead to what is different for each process (in ``/proc`` and ``/dev``) are taken away: they would show a
program its own command line, or what was to be compared with.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator

from agent_peft.sandbox.jail import syscalls
from agent_peft.sandbox.jail.base_image import LIBRARIES, PROGRAMS, make_opaque

PLACE = "/grading"  # a file system of process 1's, since the agent may have filled its own
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
# What tasks are about in /etc and no program takes orders from. The rest of what the agent wrote there is
# seen if it is named.
_ABOUT = frozenset(
    (
        "passwd",
        "passwd-",
        "group",
        "group-",
        "shadow",
        "shadow-",
        "gshadow",
        "gshadow-",
        "subuid",
        "subuid-",
        "subgid",
        "subgid-",
    )
)
# What decides which program a name means, or what is loaded into one: never the agent's.
NEVER = frozenset(
    (
        *(
            "alternatives",
            "ld.so.cache",
            "ld.so.conf",
            "ld.so.conf.d",
            "ld.so.preload",
            "nsswitch.conf",
            "pam.conf",
            "pam.d",
            "perl",
        ),
        *(
            "security",
            "ssl",
            "gitconfig",
            "curlrc",
            "host.conf",
            "selinux",
            "gss",
            "krb5.conf",
            "libnl-3",
            "terminfo",
            "vim",
            "zsh",
            "pyvenv.cfg",
        ),
    )
)
_PYTHON = re.compile(r"python[0-9.]*")
_ETC = re.compile(r"/etc/+([\w.+@-]+)")
_ALL_OF_ETC = re.compile(r"/etc(?![\w./+@-])|/etc/+(?![\w.+@/-])")
# An evaluation that looks through a whole home sees all of it but these
_HOME_SETTINGS = re.compile(
    r"\.(git.*|config|curlrc|wgetrc|vim.*|viminfo|exrc|netrc|ssh|gnupg|npmrc|node.*|python.*|perl.*|inputrc|nanorc|my\.cnf|mylogin.*|psqlrc"
    r"|less.*|terminfo.*|local|cache|gdbinit|editrc|pam_environment|lynxrc|screenrc|tmux.*|mailrc|toprc|digrc|bcrc|zshenv|zprofile|cpan.*"
    r"|gem.*|irbrc|cargo|rustup|m2|java|gradle|ansible.*|docker|kube|aws|sqliterc|Rprofile|octaverc|hushlogin|rpmmacros|fonts.*|selected_editor)"
)
_LOOKS_THROUGH = re.compile(
    r"\b(find|du|tar|tree|rsync|dotglob)\b|\bgrep -\w*[rR]|\bls -\w*[aA]|(?<![\w.])\.[*?\[]"
)
_DOT_NAME = re.compile(r"(?<![\w.])\.[A-Za-z0-9_][\w.+@-]*")
_WORD = re.compile(r"[\w.+@-]+")
_MOST_LINKS = 40  # that the kernel follows for one path
# What is the same for every process
_HARMLESS = re.compile(
    r"/dev/(null|zero|full|random|urandom|shm(/.*)?)|/proc/(cpuinfo|meminfo|version|uptime|loadavg|filesystems|stat|devices|cmdline)"
)


def is_hidden(path: str, script: str) -> bool:
    """Whether ``script`` must not see what the agent wrote at an absolute path: a setting that it does not
    name, a program, a library.

    >>> is_hidden("/etc/app.conf", "grep -q x /etc/app.conf"), is_hidden("/root/.gitconfig", "git log"), is_hidden("/srv/a", "cat /srv/a")
    (False, True, False)
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
            return name in NEVER or (
                name not in (*PROGRAMS, *LIBRARIES, "local") and name not in _WORD.findall(script)
            )
        case ["usr", folder, *rest] if folder in LIBRARIES or (folder in PROGRAMS and rest):
            return folder in LIBRARIES or rest[0] not in _WORD.findall(script)
    return False


def leads_out(path: str, target: str) -> bool:
    """Whether a link at ``path`` names what is not the same for all processes, if no other link is on the
    way.

    >>> leads_out("/srv/a", "../proc/self/cmdline"), leads_out("/srv/a", "/dev/null")
    (True, False)
    """
    place = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return re.match(r"/+(proc|dev)(/|$)", place) is not None and _HARMLESS.fullmatch(place) is None


def make_layers(script: str) -> None:
    """Make the folders that lie above what the agent wrote when ``script`` looks at it. Process 1's root
    is the current one.
    """
    for name in ("guard", "guard_usr"):
        os.mkdir(f"{PLACE}/{name}")
    _guard_etc(script)
    _guard_home(script)
    _guard_usr(script)


def mount_layers(view: str) -> None:
    """Mount what the evaluation sees at ``view``. What is done there goes to a layer of its own."""
    written = "/usr_written/local"
    local = [written] if stat.S_ISDIR(_mode(written)) else []
    for target, name, lower in (
        (view, "root", ["/base/guard", f"{PLACE}/guard", "/root_written", "/base/root"]),
        (f"{view}/usr", "usr", ["/usr", f"{PLACE}/guard_usr", "/usr_written", "/base/usr"]),
        (f"{view}/usr/local", "local", ["/base/guard_local", *local, "/base/usr/local"]),
    ):
        upper, work = f"{PLACE}/{name}", f"{PLACE}/{name}_work"
        os.mkdir(upper)
        os.mkdir(work)
        syscalls.mount(
            "overlay", target, 0, f"userxattr,lowerdir={':'.join(lower)},upperdir={upper},workdir={work}"
        )


def links(*trees: tuple[str, str]) -> list[bytes]:
    """The symbolic links below some folders, each as the machine names it; what is too deep to be opened
    is left out.
    """
    found: list[bytes] = []
    for folder, name in trees:
        found += [os.fsencode(name) + path for path in _links(os.fsencode(folder))]
    return found


def new_links() -> list[bytes]:
    """The links that were made since the evaluation began."""
    return links((f"{PLACE}/root", ""), ("/shm", "/dev/shm"))


def remove_ways_out(paths: Iterable[bytes]) -> None:
    """Take away those links that lead to what is not the same for all processes. Our root is the
    evaluation's.
    """
    for path in [path for path in paths if _leads_out(path)]:
        with contextlib.suppress(
            FileNotFoundError, NotADirectoryError
        ):  # another link on the way to it is gone already
            os.unlink(path)


def close_usr() -> None:
    """Let nothing else be changed in /usr. Our root is the evaluation's."""
    for folder in ("/usr", "/usr/local"):
        syscalls.mount("", folder, syscalls.REMOUNT | syscalls.BIND | syscalls.RDONLY)


def _is_setting(name: str, script: str) -> bool:
    if name in _ABOUT:
        return False
    return (
        name in NEVER
        or _PYTHON.fullmatch(name) is not None
        or not (name in _ETC.findall(script) or _ALL_OF_ETC.search(script))
    )


def _guard_etc(script: str) -> None:
    for name in _names("/root_written/etc"):
        if not _is_setting(name, script):
            continue
        os.makedirs(f"{PLACE}/guard/etc", exist_ok=True)
        clean, target = f"/base/root/etc/{name}", f"{PLACE}/guard/etc/{name}"
        if not os.path.lexists(clean):
            os.mknod(target, stat.S_IFCHR, 0)  # a whiteout: there is none, whatever the machine says
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
    """Hide the settings in root's home, whose programs the evaluation runs, but those that it names. Other
    users' are theirs.
    """
    hidden = [name for name in _names("/root_written/root") if _is_home_setting(name, script)]
    if not hidden:
        return
    guard = f"{PLACE}/guard/root"
    os.mkdir(guard)
    for name in hidden:
        if os.path.isfile(f"/base/root/root/{name}"):
            shutil.copy2(f"/base/root/root/{name}", f"{guard}/{name}")
        else:
            os.mknod(f"{guard}/{name}", stat.S_IFCHR, 0)
    shutil.copystat("/root_written/root", guard)  # this folder has the say over the one below
    found = os.lstat("/root_written/root")
    os.chown(guard, found.st_uid, found.st_gid)


def _guard_usr(script: str) -> None:
    """Of the programs that the agent added, those that the evaluation names, and whose names the host does
    not have.
    """
    theirs = {name for folder in PROGRAMS for name in _names(f"/usr/{folder}")}
    for folder in (*PROGRAMS, *LIBRARIES):
        os.mkdir(f"{PLACE}/guard_usr/{folder}")
        make_opaque(f"{PLACE}/guard_usr/{folder}")
    named = set(_WORD.findall(script)) - theirs
    for folder in PROGRAMS:
        for name in named.intersection(_names(f"/usr_written/{folder}")):
            _copy(f"/usr_written/{folder}/{name}", f"{PLACE}/guard_usr/{folder}/{name}")
    for name in _names("/usr_written"):  # Python, for one, looks for settings there
        if (
            not os.path.lexists(f"/usr/{name}")
            and name not in (*PROGRAMS, *LIBRARIES, "local")
            and (name in NEVER or name not in named)
        ):
            os.mknod(f"{PLACE}/guard_usr/{name}", stat.S_IFCHR, 0)


def _copy(source: str, target: str) -> None:
    """Copy a file or a link, with its owner and times; of anything else, and of a link that may lead out,
    there is no copy.
    """
    found = os.lstat(source)
    plain = (
        stat.S_ISLNK(found.st_mode)
        and ".." not in (to := os.readlink(source))
        and not leads_out("/usr/bin/link", to)
    )
    if stat.S_ISREG(found.st_mode) or plain:
        shutil.copy2(source, target, follow_symlinks=False)
        os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)


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
    """Whether a link's way goes through /proc or /dev, wherever it ends: as the kernel goes, but past what
    is not there yet.
    """
    done, waiting, followed = b"", path.split(b"/")[::-1], 0
    while waiting:
        part = waiting.pop()
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done.rpartition(b"/")[0]
            continue
        here = done + b"/" + part
        if here == b"/dev" and waiting and waiting[-1] == b"shm":  # the agent's files, as elsewhere
            done = here
            continue
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
