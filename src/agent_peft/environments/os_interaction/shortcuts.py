"""What an evaluation's text shows of its weaknesses: programs of the agent that decide the verdict, and data
of the agent that bash takes for code.
"""

from __future__ import annotations

import posixpath
import re
import shlex

from agent_peft.environments.os_interaction.problems import Checks, Exits, ShellProblem

# A path in the place of a command, or as the script of an interpreter
_EXECUTED = re.compile(
    r"""(?:^|[;&|(`!{]|\$\(|\b(?:then|do|else|elif|if|while|until|exec|sudo|env|nice|nohup|xargs|eval|time|source)\s
        |\btimeout\s+\S+\s|\b(?:ba|da|k|z)?sh\s(?:-\w+\s+)*|\b(?:python|perl|ruby)[0-9.]*\s|\s\.\s)
        \s*["']?((?:/|~/|\./)[\w./@+-]+)""",
    re.VERBOSE | re.MULTILINE,
)
_ASSIGNED = re.compile(r"""\b(\w+)=["']?((?:/|~/)[\w./@+-]+)""")
_FOLDER = re.compile(r"""\bcd\s+["']?((?:/|~)[\w./@+-]*)""")
_OF_HOST = re.compile(r"/(usr/(?!local/)|s?bin/|lib|etc/|dev/|proc/|sys/)")
# Commands that print what stands in a file
_CONTENT = r"(?:\$\(|`)\s*(?:<|(?:cat|head|tail|awk|sed|cut|tr|echo|grep(?! -\w*[clq]))\b)[^)`|]*"
_COMPARED = r"-(?:eq|ne|lt|le|gt|ge)\s"
# Arithmetic evaluates the text of a variable or a file
_EVALUATED = re.compile(
    rf"\[\[[^]]*?{_CONTENT}[^]]*?\s{_COMPARED}|\[\[[^]]*?\s{_COMPARED}[\"' ]*{_CONTENT}|\(\([^;]*?{_CONTENT}"
)
_UNQUOTED = re.compile(
    rf"(?<!\[)\[ (?:[^]\"']*? )?{_CONTENT}[)`] {_COMPARED}"
    rf"|(?<!\[)\[ [^]]*? {_COMPARED}{_CONTENT}"
)


def executed_paths(problem: ShellProblem) -> tuple[str, ...]:
    """The paths of programs that the evaluation executes, and that are not the host's.

    >>> from agent_peft.environments.os_interaction.problems import Script
    >>> script = Script("[ -x /a.sh ] && /a.sh; bash ~/b; cd /srv; ./c; cat /d")
    >>> executed_paths(ShellProblem("", Exits(script)))
    ('/a.sh', '/root/b', '/srv/c')
    """
    found: dict[str, None] = {}
    for code in _codes(problem):
        for name, path in _ASSIGNED.findall(code):
            code = re.sub(rf"\$\{{?{name}\b\}}?", path, code)
        for match in _EXECUTED.finditer(code):
            path = match[1]
            if path.startswith("./"):
                folders = _FOLDER.findall(code[: match.start()])
                path = posixpath.join(folders[-1] if folders else "~", path)
            path = posixpath.normpath(re.sub(r"^~", "/root", path))
            if not _OF_HOST.match(path):
                found[path] = None
    return tuple(found)


def write_everywhere(paths: tuple[str, ...], content: str) -> str:
    """A command that puts an executable file with this content at each path."""
    words = " ".join(map(shlex.quote, paths))
    return (
        f'for f in {words}; do mkdir -p "$(dirname "$f")"; [ -d "$f" ] || '
        f'{{ printf %s {shlex.quote(content)} > "$f"; chmod 755 "$f"; }}; done'
    )


def warning(problem: ShellProblem) -> str | None:
    """One line about an evaluation in which the agent's data becomes code or further words.

    >>> from agent_peft.environments.os_interaction.problems import Script
    >>> warning(ShellProblem("", Exits(Script("[[ $(cat /n) -eq 3 ]]"))))
    'its evaluation takes data for code: $(…) in [[ … -eq … ]] or (( … )) is evaluated; compare with ='
    >>> warning(ShellProblem("", Exits(Script("[ $(cat /n) -eq 3 ]"))))
    'its evaluation splits data into words: write "$(…)" in [ … -eq … ]'
    >>> warning(ShellProblem("", Exits(Script('[ "$(cat /n)" -eq 3 ]')))) is None
    True
    """
    for code in _codes(problem):
        if _EVALUATED.search(code):
            return (
                "its evaluation takes data for code: $(…) in [[ … -eq … ]] or (( … )) is evaluated; "
                "compare with ="
            )
        if _UNQUOTED.search(code):
            return 'its evaluation splits data into words: write "$(…)" in [ … -eq … ]'
    return None


def _codes(problem: ShellProblem) -> list[str]:
    """The evaluation's scripts in bash."""
    evaluation = problem.evaluation
    if isinstance(evaluation, Exits):
        scripts = [evaluation.script]
    elif isinstance(evaluation, Checks):
        scripts = [step for step in evaluation.steps if step is not None and not isinstance(step, str)]
    else:
        scripts = []
    return [script.code for script in scripts if script.language == "bash"]
