"""AgentBench's entry format.

``{"description", "create"?: {"init"?: SCRIPT or [SCRIPT, …], "image"?}, "start"?: SCRIPT, "labels"?, "evaluation": {"match": "text" or
{"answer"} or {"regex"}} or {"check": SCRIPT or [null or SCRIPT, …], "example"?: SCRIPT}}``, where a SCRIPT is a text of bash, or an object
with ``language`` and ``code`` or ``file``. A null in ``check`` stands for the example.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agent_peft.environments.entries import object_of, text_of, wrong
from agent_peft.environments.os_interaction.problems import Checks, Comparison, Matches, Problem, Script, Unusable

_COMPARISONS = {f"check/{comparison}.py": comparison for comparison in Comparison}


def is_entry(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is one of AgentBench's."""
    return "description" in entry and "evaluation" in entry


def check_shape(name: str, entry: Mapping[str, Any]) -> None:
    """
    Raises:
        AgentPeftError: the entry is not as it should be. What merely cannot be had here is let through.
    """
    with contextlib.suppress(Unusable):
        read_problem(name, entry)


def read_problem(name: str, entry: Mapping[str, Any]) -> Problem:
    """What an entry says.

    Raises:
        Unusable: it asks for what cannot be had here: an image, a language, a file that is not there.
        AgentPeftError: the entry is not as it should be.
    """
    description = text_of(name, entry, "description")
    create = entry.get("create")
    if isinstance(create, Mapping) and isinstance(create.get("image"), str):
        raise Unusable(f"asks for the container image {create['image']}")
    init = create.get("init") if isinstance(create, Mapping) else None
    scripts = init if isinstance(init, Sequence) and not isinstance(init, str) else [init]
    initialization = tuple(_script(name, "create.init", script) for script in scripts if script is not None)
    start = entry.get("start")
    evaluation = object_of(name, entry, "evaluation")
    example = evaluation.get("example", entry.get("example"))
    gold = _script(name, "evaluation.example", example) if example is not None else None
    started = _script(name, "start", start) if start is not None else None
    return Problem(
        description,
        _evaluation(name, evaluation, gold),
        initialization=initialization,
        start=started.bash if started is not None else None,
        gold=gold.bash if gold is not None else None,
        answers=True,
    )


def bring_files(entry: Any, folder: Path) -> Any:
    """The entry, with every script that it names as a file (below ``folder``) put in as code; those that are not there stay named."""
    if isinstance(entry, Mapping):
        file = entry.get("file")
        if isinstance(file, str) and "code" not in entry and file not in _COMPARISONS:
            path = folder / file
            inside = not PurePosixPath(file).is_absolute() and path.resolve().is_relative_to(folder.resolve())
            if inside and path.is_file():
                kept = {key: value for key, value in entry.items() if key != "file"}
                return {**kept, "code": path.read_text(encoding="utf-8", errors="replace")}
        return {key: bring_files(value, folder) for key, value in entry.items()}
    return [bring_files(value, folder) for value in entry] if isinstance(entry, list) else entry


def _evaluation(name: str, evaluation: Mapping[str, Any], example: Script | None) -> Matches | Checks:
    if "match" in evaluation:
        match = evaluation["match"]
        if isinstance(match, str):
            return Matches(answer=match.strip())
        if isinstance(match, Mapping) and isinstance(match.get("answer"), str):
            strip = match.get("strip", True) is not False
            return Matches(answer=match["answer"].strip() if strip else match["answer"], strip=strip)
        if isinstance(match, Mapping) and isinstance(match.get("regex"), str):
            try:
                re.compile(match["regex"])
            except re.error as error:
                raise wrong(name, "evaluation.match.regex", f"a regular expression ({error})") from error
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
    if any(isinstance(step, Comparison) and i == 0 for i, step in enumerate(steps)):
        raise wrong(name, "evaluation.check[0]", "null or a script, since there is nothing yet to compare the answer with")
    return Checks(steps, example)


def _step(name: str, key: str, item: Any) -> Script | Comparison | None:
    if item is None:
        return None
    if isinstance(item, Mapping) and item.get("file") in _COMPARISONS:
        return _COMPARISONS[item["file"]]
    return _script(name, key, item)


def _script(name: str, key: str, script: Any) -> Script:
    if isinstance(script, str) and "\0" not in script:
        return Script(script)
    if not isinstance(script, Mapping):
        raise wrong(name, key, "a bash script, or an object with code or file")
    language, code = script.get("language", "bash"), script.get("code")
    if not isinstance(code, str):
        if isinstance(script.get("file"), str):
            raise Unusable(f"{key} names the file {script['file']}, which is not beside the task file")
        raise wrong(name, key, "a bash script, or an object with code or file")
    if language not in ("bash", "python"):
        raise Unusable(f"{key} is written in {language}; only bash and python are run")
    if "\0" in code:
        raise wrong(name, f"{key}.code", "a text without null characters")
    return Script(code, language)
