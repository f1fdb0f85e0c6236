"""The floors of CONTRIBUTING.md, as data: a package imports only from lower floors, and never from another
wing of its own.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

FLOORS = (  # each floor: its wings; each wing: its modules or packages
    (
        (
            "types",
            "addresses",
            "seeding",
            "batch",
            "child_processes",
            "lookup",
            "ranks",
            "files",
            "hardware",
            "hub",
            "lazy_torch",
            "config",
            "output",
            "printable",
            "heap",
            "replies",
            "search_path",
            "supervisor",
            "version",
        ),
    ),
    (("sandbox",),),
    (("environments",), ("policies",), ("algorithms",)),
    (("rollout",), ("testing",)),
    (("training",),),
    (("configuration",),),
    (("runs",),),
    (("reports",), ("agents",), ("launch",)),
    (("cli", "__main__"),),
)
# a mistake in a configuration, or in a command, is answered before torch is imported
TORCH_FREE = ("environments", "sandbox", "configuration.load", "runs.progress", "cli")
FORBIDDEN_NAMES = {
    "utils",
    "util",
    "common",
    "helper",
    "helpers",
    "manager",
    "factory",
    "instance",
    "sample",
    "data",
    "info",
}
LONGEST_FILE = 400

PLACE = {
    module: (floor, wing)
    for floor, wings in enumerate(FLOORS)
    for wing, modules in enumerate(wings)
    for module in modules
}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}


def imports_of(tree: ast.AST) -> set[str]:
    """Every module of ours that is imported, at the top of the file or inside a function."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from agent_peft import types` imports agent_peft.types; a class's name does no harm here
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in imported if name.startswith("agent_peft.")}


def broken_rules(name: str, tree: ast.AST) -> list[str]:
    floor, wing = PLACE[name.split(".")[1]]
    broken = []
    for imported in sorted(imports_of(tree)):
        part = imported.split(".")[1]
        if part not in PLACE:
            broken.append(f"{name} imports {imported} through the front door")
            continue
        other_floor, other_wing = PLACE[part]
        if other_floor > floor or (other_floor == floor and other_wing != wing):
            broken.append(f"{name} (floor {floor}) imports {imported} (floor {other_floor})")
    return broken


def test_every_module_has_a_floor_and_imports_point_down() -> None:
    inside = {name: tree for name, tree in TREES.items() if name != "agent_peft"}
    homeless = {name.split(".")[1] for name in inside} - set(PLACE)
    assert not homeless, f"say in FLOORS where they belong: {sorted(homeless)}"
    assert not [rule for name, tree in inside.items() for rule in broken_rules(name, tree)]


@pytest.mark.parametrize(
    ("name", "line", "allowed"),
    [
        ("agent_peft.rollout.collector", "from agent_peft.policies.engine.base import Sampler", True),
        ("agent_peft.rollout.collector", "from agent_peft.training.trainer import Trainer", False),
        ("agent_peft.policies.policy", "from agent_peft import environments", False),
        ("agent_peft.policies.policy", "def f():\n    import agent_peft.algorithms.base", False),
        ("agent_peft.sandbox.base", "from agent_peft.environments.base import Environment", False),
        ("agent_peft.cli", "from agent_peft.version import __version__", True),
        ("agent_peft.cli", "from agent_peft import load_policy", False),
    ],
)
def test_the_rule_itself(name: str, line: str, allowed: bool) -> None:
    assert (not broken_rules(name, ast.parse(line))) == allowed


def imported_modules(name: str) -> set[str]:
    """The modules that a module imports, without the packages that lie on their paths."""
    names = imports_of(TREES[name])
    modules = {part if part in MODULES else part.rpartition(".")[0] for part in names}
    return (modules & MODULES.keys()) - {name, "agent_peft"}


@pytest.mark.parametrize("depth", [2, 3, 9])
def test_there_are_no_circles(depth: int) -> None:
    """Neither between wings, nor between the rooms of a wing, nor between modules."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    graph: dict[str, set[str]] = {}
    for name in MODULES.keys() - {"agent_peft"}:
        rooms = {room(imported) for imported in imported_modules(name)} - {room(name)}
        # a package's __init__ is no room of its own: it imports its rooms, and they import it
        inside = {other for other in rooms if depth == 9 or other.count(".") == room(name).count(".")}
        graph.setdefault(room(name), set()).update(inside)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_torch_stays_unloaded_below_the_policies_and_in_configurations() -> None:
    below = [name for name in MODULES if name.startswith(("agent_peft.environments", "agent_peft.sandbox"))]
    assert not [
        f"{name} imports {module}"
        for name in below
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        )
        if module.split(".")[0] in {"torch", "transformers", "peft"}
    ]
    imports = "; ".join(f"import agent_peft.{name}" for name in TORCH_FREE)
    heavy = {"torch", "transformers", "peft"}
    code = f"import sys; {imports}; sys.exit(list({heavy} & sys.modules.keys()) or 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_names_say_something_and_files_are_short() -> None:
    broken = []
    for name, tree in TREES.items():
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        words = {
            word.lower()
            for part in (*name.split("."), *classes)
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)
        }
        broken += [f"{name}: {word}" for word in words & FORBIDDEN_NAMES]
        length = len(MODULES[name].read_text(encoding="utf-8").splitlines())
        broken += [f"{name}: {length} lines"] if length > LONGEST_FILE else []
    assert not broken


def test_benchmarks_and_examples_import_what_is_there():
    """Private names too: most of these programs run rarely, and then for an hour."""
    programs = {
        file.stem: ast.parse(file.read_text())
        for folder in ("benchmarks", "examples")
        for file in (SRC.parent / folder).glob("*.py")
    }
    modules = TREES | programs
    missing = [
        f"{program}: {node.module}.{alias.name}"
        for program, tree in programs.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"agent_peft", *programs}
        for alias in node.names
        if f"{node.module}.{alias.name}" not in modules
        and not {alias.name, "__getattr__"} & _top_level(modules[node.module])
    ]
    assert missing == []


def _top_level(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {
                one.id
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
    return names
