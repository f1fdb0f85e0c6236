"""AgentBench's entry format.

``{"description", "create"?: {"init"?: SCRIPT or [SCRIPT, …], "image"?}, "start"?: SCRIPT, "labels"?,
"evaluation": {"match": "text" or {"answer"} or {"regex"}} or {"check": SCRIPT or [null or SCRIPT, …],
"example"?: SCRIPT}}``, where a SCRIPT is a text of bash, or an object with ``language`` and ``code`` or
``file``. A null in ``check`` stands for the example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agent_peft.environments import expressions
from agent_peft.environments.os_interaction.problems import (
    AnswerCheck,
    Checks,
    Matches,
    Script,
    ShellProblem,
    Unusable,
    is_typable,
)
from agent_peft.environments.task_files.reading import object_of, text_of, wrong

MAX_SCRIPT = 1 << 20  # characters of one that is a file
_COMPARISONS = {f"check/{comparison}.py": comparison for comparison in AnswerCheck}


def is_entry(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is one of AgentBench's."""
    return "description" in entry and "evaluation" in entry


def read_problem(name: str, entry: Mapping[str, Any]) -> ShellProblem:
    """Check an entry, and return its content. Raises `Unusable` if it needs what this machine lacks."""
    description = text_of(name, entry, "description")
    if not is_typable(description):
        raise wrong(name, "description", "a text without null characters and surrogates")
    create = entry.get("create")
    if isinstance(create, Mapping) and isinstance(create.get("image"), str):
        raise Unusable(f"asks for the container image {_short(create['image'])}")
    init = create.get("init") if isinstance(create, Mapping) else None
    scripts = init if isinstance(init, Sequence) and not isinstance(init, str) else [init]
    initialization = tuple(_script(name, "create.init", script) for script in scripts if script is not None)
    start = entry.get("start")
    evaluation = object_of(name, entry, "evaluation")
    example = evaluation.get("example", entry.get("example"))
    gold = _script(name, "evaluation.example", example) if example is not None else None
    started = _script(name, "start", start) if start is not None else None
    return ShellProblem(
        description,
        _evaluation(name, evaluation, gold),
        initialization=initialization,
        start=started.bash if started is not None else None,
        gold=gold.bash if gold is not None else None,
        answers=True,
    )


def bring_files(entry: Any, folder: Path) -> Any:
    """The entry, with every script that it names as a file (below ``folder``) put in as code; those that are
    not there stay named. Raises RecursionError if it is nested too deeply.
    """
    if isinstance(entry, Mapping):
        file = entry.get("file")
        if (
            isinstance(file, str)
            and "code" not in entry
            and file not in _COMPARISONS
            and (code := _read(file, folder)) is not None
        ):
            return {**{key: value for key, value in entry.items() if key != "file"}, "code": code}
        return {key: bring_files(value, folder) for key, value in entry.items()}
    return [bring_files(value, folder) for value in entry] if isinstance(entry, list) else entry


def _read(file: str, folder: Path) -> str | None:
    """A file below ``folder``; None where it is not there, elsewhere, or too large."""
    try:
        path = (folder / file).resolve()
        below = not PurePosixPath(file).is_absolute() and path.is_relative_to(folder.resolve())
        if not below or not path.is_file():
            return None
        with open(path, encoding="utf-8", errors="replace") as script:
            code = script.read(MAX_SCRIPT + 1)
    except (OSError, ValueError, RuntimeError):  # a name with a null character, one too long, a loop of links
        return None
    return code if len(code) <= MAX_SCRIPT else None


def _evaluation(name: str, evaluation: Mapping[str, Any], example: Script | None) -> Matches | Checks:
    if "match" in evaluation:
        match = evaluation["match"]
        if isinstance(match, str):
            return Matches(answer=match.strip())
        if isinstance(match, Mapping) and isinstance(match.get("answer"), str):
            strip = match.get("strip", True) is not False
            return Matches(answer=match["answer"].strip() if strip else match["answer"], strip=strip)
        if isinstance(match, Mapping) and isinstance(match.get("regex"), str):
            if (fault := expressions.fault(match["regex"])) is not None:
                raise wrong(name, "evaluation.match.regex", f"a regular expression ({fault})")
            return Matches(regex=match["regex"], strip=match.get("strip", True) is not False)
        raise wrong(name, "evaluation.match", "a text, or an object with answer or regex")
    if "check" not in evaluation:
        raise wrong(name, "evaluation", "an object with match or check")
    check = evaluation["check"]
    items = check if isinstance(check, list | tuple) else [check]
    steps = tuple(_step(name, f"evaluation.check[{i}]", item) for i, item in enumerate(items))
    if not steps:
        raise wrong(name, "evaluation.check", "a list of at least one step")
    if any(step is None for step in steps) and example is None:
        raise wrong(name, "evaluation.example", "a script, since check runs it")
    if any(isinstance(step, AnswerCheck) and i == 0 for i, step in enumerate(steps)):
        raise wrong(
            name,
            "evaluation.check[0]",
            "null or a script, since there is nothing yet to compare the answer with",
        )
    return Checks(steps, example)


def _step(name: str, key: str, item: Any) -> Script | AnswerCheck | None:
    if item is None:
        return None
    if isinstance(item, Mapping) and isinstance(item.get("file"), str) and item["file"] in _COMPARISONS:
        return _COMPARISONS[item["file"]]
    return _script(name, key, item)


def _script(name: str, key: str, script: Any) -> Script:
    if isinstance(script, str) and is_typable(script):
        return Script(script)
    if not isinstance(script, Mapping):
        raise wrong(name, key, "a bash script, or an object with code or file")
    language, code = script.get("language", "bash"), script.get("code")
    if not isinstance(code, str):
        if isinstance(script.get("file"), str):
            raise Unusable(
                f"{key} names the file {_short(script['file'])}, which is not in the task file's folder"
            )
        raise wrong(name, key, "a bash script, or an object with code or file")
    if language not in ("bash", "python"):
        raise Unusable(f"{key} is written in {_short(language)}; only bash and python are run")
    if not is_typable(code):
        raise wrong(name, f"{key}.code", "a text without null characters and surrogates")
    return Script(code, language)


def _short(value: Any) -> str:
    """A piece of somebody's entry as it may stand in a line of ours."""
    short = isinstance(value, str) and value.isprintable() and len(value) <= 80
    return str(value) if short else f"{str(value)[:80]!r}"
