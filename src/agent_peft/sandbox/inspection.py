"""What an inspection shows: a trusted script examines the files that an untrusted agent left.

The script sees the agent's files as data. Programs, libraries and settings are those of the host, so that no
file of the agent decides how a program works. Where programs look for such files, the script sees only those
files of the agent that it names; elsewhere it sees all of them. ``links.py`` removes links into ``/proc`` and
``/dev``.
"""

from __future__ import annotations

import re

# Folders of /usr
PROGRAMS, LIBRARIES = ("bin", "sbin", "games"), ("lib", "lib32", "lib64", "libx32", "libexec", "share")
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


def words_of(script: str) -> set[str]:
    return set(_WORD.findall(script))


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
                name not in (*PROGRAMS, *LIBRARIES, "local") and name not in words_of(script)
            )
        case ["usr", folder, *rest] if folder in LIBRARIES or (folder in PROGRAMS and rest):
            return folder in LIBRARIES or rest[0] not in words_of(script)
    return False


def _is_setting(name: str, script: str) -> bool:
    if name in _ACCOUNT_FILES:
        return False
    return (
        name in UNTRUSTED_SETTINGS
        or _PYTHON.fullmatch(name) is not None
        or not (name in _ETC.findall(script) or _ALL_OF_ETC.search(script))
    )


def _is_home_setting(name: str, script: str) -> bool:
    if not name.startswith(".") or name in _DOT_NAME.findall(script):
        return False
    return _LOOKS_THROUGH.search(script) is None or _HOME_SETTINGS.fullmatch(name) is not None
