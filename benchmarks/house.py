"""Measure the size and the shape of a checkout: lines, files, circles, twins and hops.

python benchmarks/house.py [CHECKOUT]

Lines are those of .py files; code has no blanks, comments and docstrings. Data files are counted apart. A
twin is a public class or function that two modules define under one name. Hops are the files of the package,
without floor 0, that run between a cause and its effect. Prints JSON.
"""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from measuring import ROOT, command_line

FLOOR_0 = (
    "types", "seeding", "batch", "lookup", "ranks", "files", "text", "hardware", "hub", "config",
    "output", "printable", "search_path", "version", "__init__",
)  # fmt: skip
# Each effect of the script below is measured by itself
HOPS = r"""
import json, sys, tempfile, threading
from pathlib import Path
import agent_peft
from agent_peft import Stage, Trainer, load_config, load_environment, load_policy
package, entered = str(Path(agent_peft.__file__).parent), set()
def enter(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        entered.add(frame.f_code.co_filename[len(package) + 1 :])
def hops(work):
    entered.clear()
    threading.setprofile(enter), sys.setprofile(enter)
    try:
        result = work()
    finally:
        sys.setprofile(None), threading.setprofile(None)
    return result, sorted(entered)
folder = Path(tempfile.mkdtemp())
config = folder / "run.yaml"
config.write_text("extends: adder_fast\nseed: 3\n")
found = {}
_, found["one key"] = hops(lambda: load_config(config))
tables = load_environment("db_bench", generate={"num_tasks": 2})
episode = tables.episode(tables.tasks[0], 0)
episode.start()
reply = tables.demonstration(tables.tasks[0])[0]
_, found["one SQL reply"] = hops(lambda: episode.step(reply))
episode.close()
sums = load_environment("arithmetic", digits=1, num_tasks=4)
policy = load_policy(dict(kind="scratch", alphabet="0123456789+*-= ^$", architecture={
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2}))
stage = Stage(algorithm="rloo", steps=1, tasks_per_step=2, group_size=2)
trainer = Trainer(policy, sums, stage)
_, found["one task"] = hops(lambda: list(trainer))
_, found["one save and load"] = hops(lambda: (trainer.save(folder / "saved"), trainer.load(folder / "saved")))
print(json.dumps(found))
"""


def main() -> None:
    root = command_line(__doc__, {"checkout": ROOT}).checkout.resolve()
    package = root / "src" / "agent_peft"
    files = sorted(package.rglob("*.py"))
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    lines = {path: _lines(path) for path in files}
    by_package: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, (total, code) in lines.items():
        row = by_package["/".join(path.relative_to(package).parts[:-1][:2]) or "top"]
        for i, count in enumerate((1, total, code)):
            row[i] += count
    hops = {
        name: len([each for each in entered if each.split("/")[0].removesuffix(".py") not in FLOOR_0])
        for name, entered in _hops(root).items()
    }
    largest = sorted(files, key=lambda each: -lines[each][0])[:5]
    report = {
        "src": {
            "files": len(files),
            **{name: sum(row[i] for row in lines.values()) for i, name in enumerate(("lines", "code"))},
        },
        **{
            name: sum(_lines(path)[0] for path in sorted((root / name).rglob("*.py")))
            for name in ("tests", "benchmarks")
        },
        "data_lines": {
            str(path.relative_to(package)): len(path.read_text("utf-8").splitlines())
            for path in sorted(package.rglob("*"))
            if path.suffix in (".txt", ".yaml", ".json", ".js", ".css", ".html", ".pyi")
        },
        "largest": {str(path.relative_to(package)): lines[path][0] for path in largest},
        "packages": {
            name: dict(zip(("files", "lines", "code"), row, strict=True))
            for name, row in sorted(by_package.items())
        },
        "circle": _circle(package, trees),
        "twins": _twins(package, trees),
        "hops": hops,
    }
    print(json.dumps(report, indent=1))


_BLANK = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _lines(path: Path) -> tuple[int, int]:
    """Return the lines of a file, and those of code."""
    text = path.read_text("utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BLANK:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            code -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(text.splitlines()), len(code)


def _circle(package: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """List the modules of a circle of imports at the top of files; none if there is no circle."""
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in trees}
    known = {name.removesuffix(".__init__") for name in names.values()}
    graph = {}
    for path, tree in trees.items():
        imported = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                below = {f"{node.module}.{alias.name}" for alias in node.names} & known
                imported |= below or ({node.module} & known)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names} & known
        graph[names[path].removesuffix(".__init__")] = imported - {names[path].removesuffix(".__init__")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def _twins(package: Path, trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for name, count in Counter(
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ).items():
            homes[name] += [str(path.relative_to(package))] * min(count, 1)
    return {name: places for name, places in sorted(homes.items()) if len(places) > 1}


def _hops(root: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", HOPS],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
