"""The documentation's site: its navigation, its links, its pictures, and the names that its tables give."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import agent_peft as ap
from agent_peft.algorithms import ALGORITHMS
from agent_peft.cli import COMMANDS
from agent_peft.configuration.load import read_config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMING_FROM = ["trl.md", "verl.md", "stable_baselines3.md", "research_code.md"]


def loaded(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pages_of(navigation):
    for entry in navigation:
        for value in entry.values():
            yield from pages_of(value) if isinstance(value, list) else [value]


def test_the_navigation_names_every_page_once():
    pytest.importorskip("mkdocs", reason="the site needs agent-peft[docs]")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = list(pages_of(yaml.safe_load(text)["nav"]))
    others = set(loaded("docs/hook.py").PAGES.values())
    own = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(named) == sorted(own | others)
    assert named[0] == "index.md", "the site begins with the README"


def test_every_picture_of_the_results_is_drawn_from_the_json_that_is_there(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name, text in loaded("benchmarks/figures.py").pictures().items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == text, "make pictures"


def test_every_picture_is_light_and_dark():
    for file in (DOCS / "pictures").glob("*.svg"):
        ElementTree.parse(file)
        assert "prefers-color-scheme: dark" in file.read_text(encoding="utf-8"), file.name


def test_the_page_of_the_python_api_has_each_public_name():
    named = re.findall(
        r"^::: agent_peft\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted(name for name in ap.__all__ if not name.startswith("__"))


@pytest.mark.parametrize("page", [*COMING_FROM, "get_started.md"])
def test_every_command_of_a_page_is_one_of_ours_and_its_keys_are_valid(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    commands = re.findall(r"(?:`|^|-m )agent[-_]peft ([a-z-]+ [^`\n]*)", text, re.MULTILINE)
    assert commands
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name in {function.__name__.replace("_", "-") for function in COMMANDS}, command
        if name in ("train", "explain") and (ROOT / f"configs/{arguments[0]}.yaml").is_file():
            read_config(arguments[0], arguments[1:])


@pytest.mark.parametrize("page", COMING_FROM)
def test_every_key_of_our_side_of_a_table_is_there(page):
    reference = (DOCS / "configuration.md").read_text(encoding="utf-8")
    known = {*re.findall(r"^\| `(\w+)` \|", reference, re.MULTILINE), *ALGORITHMS, *ap.__all__, "kind"}
    names, *_ = (DOCS / page).read_text(encoding="utf-8").split("\n## Comparison")
    rows = re.findall(r"^\| (.*) \| (.*) \|$", names, re.MULTILINE)
    assert len(rows) > 10
    missing = [
        code
        for _, ours in rows
        for code in re.findall(r"`([a-z]\w*(?:\.[a-z_]+)*)(?:: [^`]*)?`", ours)
        if code.split(".")[-1] not in known
    ]
    assert not missing


@pytest.mark.slow
def test_the_first_look_runs(tmp_path, warm_process):
    text = (DOCS / "get_started.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        done = warm_process.run("-m", "agent_peft", *shlex.split(line)[1:], folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/look/report.html").is_file()


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ap.__version__ and citation["license"] == "Apache-2.0"


@pytest.mark.slow
def test_the_site_is_built_without_network_and_without_a_broken_link(tmp_path):
    """In strict mode every broken link, anchor or missing page is an error. A dead proxy is not a network."""
    pytest.importorskip("mkdocs", reason="the site needs agent-peft[docs]")
    proxies = {
        name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY")
    }
    environment = {**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/source/examples/custom_model.py").is_file()
    assert not (tmp_path / "site/hook.py").exists()
    api = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    assert 'id="agent_peft.Trainer"' in api or 'id="agent_peft.training.trainer.Trainer"' in api
    assert not re.findall(r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"', api)
