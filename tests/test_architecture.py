"""The floors of docs and CONTRIBUTING.md, as data: a package imports only from lower floors, and never from another wing of its own."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

FLOORS = (  # each floor: its wings, each wing: its modules or packages
    (("types", "seeding", "batch", "lookup", "files", "printable", "search_path"),),
    (("environments",), ("policies",), ("algorithms",)),
    (("rollout",),),
    (("training",),),
    (("reports",), ("agents",)),
    (("cli", "__main__"),),
)
TORCH_FREE = (
    "types",
    "seeding",
    "environments",
    "environments.base",
    "environments.arithmetic",
    "environments.gsm8k",
    "environments.os_interaction",
    "environments.download",
)
FORBIDDEN_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "factory", "instance", "sample", "data", "info"}
LONGEST_FILE = 400

PLACE = {module: (floor, wing) for floor, wings in enumerate(FLOORS) for wing, modules in enumerate(wings) for module in modules}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}


def imports_of(tree: ast.AST) -> set[str]:
    """Every module of ours that is imported, at the top of the file or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from agent_peft import types` imports agent_peft.types; a class's name does no harm here
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("agent_peft.")}


def broken_rules(name: str, tree: ast.AST) -> list[str]:
    floor, wing = PLACE[name.split(".")[1]]
    broken = []
    for imported in imports_of(tree):
        part = imported.split(".")[1]
        if part not in PLACE:  # a name of agent_peft/__init__.py, such as __version__
            continue
        other_floor, other_wing = PLACE[part]
        if other_floor > floor or (other_floor == floor and other_wing != wing):
            broken.append(f"{name} (floor {floor}) imports {imported} (floor {other_floor})")
    return broken


def test_every_module_has_a_floor():
    homeless = {name.split(".")[1] for name in MODULES if name != "agent_peft"} - set(PLACE)
    assert not homeless, f"say in FLOORS where they belong: {sorted(homeless)}"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "agent_peft"])
def test_imports_point_down(name):
    assert not broken_rules(name, TREES[name])


def test_the_root_package_imports_nothing_of_its_own():
    assert not imports_of(TREES["agent_peft"])


@pytest.mark.parametrize(
    ("name", "line", "allowed"),
    [
        ("agent_peft.rollout.collector", "from agent_peft.policies.engine import Engine", True),
        ("agent_peft.rollout.collector", "from agent_peft.training.trainer import train", False),
        ("agent_peft.policies.engine", "from agent_peft import environments", False),
        ("agent_peft.policies.engine", "def f():\n    import agent_peft.algorithms.base", False),
        ("agent_peft.policies.engine", "from agent_peft.policies.base import PolicyOutput", True),
        ("agent_peft.cli", "from agent_peft import __version__", True),
    ],
)
def test_the_rule_itself(name, line, allowed):
    assert (not broken_rules(name, ast.parse(line))) == allowed


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_stays_unloaded(name):
    code = f"import sys, agent_peft.{name}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"importing agent_peft.{name} loads torch"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("agent_peft.environments")])
def test_no_environment_imports_torch(name):
    imported = {
        module.split(".")[0]
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert not imported & {"torch", "transformers", "peft"}


@pytest.mark.parametrize("name", MODULES)
def test_names_say_something(name):
    classes = [node.name for node in ast.walk(TREES[name]) if isinstance(node, ast.ClassDef)]
    words = {word.lower() for part in (*name.split("."), *classes) for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", part)}
    assert not words & FORBIDDEN_NAMES


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short(name):
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
