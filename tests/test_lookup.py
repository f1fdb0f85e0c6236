"""What a configuration names is imported in one place, and not at all where it is not trusted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agent_peft
from agent_peft.lookup import NotImportedError, alike, find, is_hub_id, may_import, nearest, without_imports


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "a:",
        ":b",
        "..:x",
        ".a:b",
        "a..b:c",
        "math:",
        "math:nothing",
        "no.such:X",
        "a b:c",
        "a\0b:c",
        "é:é",
    ],
)
def test_whatever_is_no_name_of_anything(name):
    with pytest.raises(ValueError, match=r"write it as package\.module:Class"):
        find(name)


@pytest.mark.parametrize(
    "line", ["raise SystemExit(0)", "1 / 0", "def", "raise RecursionError", "raise MemoryError"]
)
def test_a_module_that_fails_in_any_way(tmp_path, monkeypatch, line):
    (tmp_path / "failing_module.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'failing_module:x' cannot be imported"):
        find("failing_module:x")


@pytest.mark.parametrize("name", ["./badenv:X", "badenv.py:X", "./badenv.py:X", ".badenv:X", ".\\badenv:X"])
def test_a_path_is_no_module(name):
    with pytest.raises(ValueError, match=r"is expected; write it as package\.module:Class, such as badenv:X"):
        find(name)


def test_nothing_is_imported_without_trust(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with without_imports() as names:
        assert not may_import("never_imported:x")
        with pytest.raises(NotImportedError, match=r"'never_imported:x' is code .* --trust"):
            find("never_imported:x")
        with without_imports():
            pass
        assert not may_import("other:y")
    assert names == ["never_imported:x", "other:y"]
    assert may_import("never_imported:x")


def test_nothing_else_imports_by_name():
    """So that no new kind of name can forget to ask."""
    root = Path(agent_peft.__file__).parent
    for path in root.rglob("*.py"):
        words = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert path.name == "lookup.py" or "import_module" not in words, path


@pytest.mark.parametrize(
    ("module", "home", "what"),
    [("difflib", "lookup.py", "a second cut-off"), ("ConfigDict(frozen", "config.py", "a second base")],
)
def test_advice_and_the_base_of_configurations_are_written_once(module, home, what):
    root = Path(agent_peft.__file__).parent
    places = [
        str(path.relative_to(root)) for path in sorted(root.rglob("*.py")) if module in path.read_text()
    ]
    assert places == [home], what


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Learning_Rate", "did you mean 'learning_rate'?"),
        ("lerning_rat", "did you mean 'learning_rate'?"),
        ("rate", "give one of learning_rate, steps"),
        ("", "give one of learning_rate, steps"),
        (None, "give one of learning_rate, steps"),
        (3, "give one of learning_rate, steps"),
    ],
)
def test_advice_on_a_name(name, advice):
    assert nearest(name, ["learning_rate", "steps"]) == advice
    assert (alike(name, ["learning_rate", "steps"]) is None) == advice.startswith("give")


def test_advice_shows_the_texts_of_a_mapping():
    assert nearest("rows", {"row": "engine.rows"}) == "did you mean 'engine.rows'?"
    assert nearest("x", {"row": "engine.rows"}, "your own") == "give one of engine.rows, or your own"


@pytest.mark.parametrize(
    ("name", "candidates", "nearest"),
    [
        ("gpro", ["gspo", "grpo", "rloo"], "grpo"),
        ("stf", ["dpo", "sft"], "sft"),
        ("dbo", ["ppo", "dpo"], "dpo"),
        ("GPRO", ["grpo"], "grpo"),
        ("setps", ["epochs", "steps"], "steps"),
        ("ab", ["ac"], None),
        ("rate", ["sft", "rloo"], None),
    ],
)
def test_swapped_letters_come_first_then_one_other_letter(name, candidates, nearest):
    assert alike(name, candidates) == nearest


def test_a_path_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    paths = ("runs/typo", "runs/a/b", "./a", "../a", "~/a", "/a/b", ".", "", "a//b", "a/", "C:\\models\\a")
    assert not any(map(is_hub_id, paths))
    assert all(map(is_hub_id, ("gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "a/b")))
