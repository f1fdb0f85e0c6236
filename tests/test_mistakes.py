"""The mistakes of ``mistakes.yaml``: each has an answer of one line that names the place and what to do."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from agent_peft.cli import run
from agent_peft.policies.models import positions

CONTENT = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text("utf-8"))


def write(files: dict[str, Any]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that is done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        write(CONTENT["files"])
        assert run(["train", "c.yaml", "run_dir=done"]) == 0
        return Path("done").resolve()


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules of a case are found in its folder, and are forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for case in CONTENT["cases"]:  # a module of another test may have the same name
        for file in CONTENT["files"] | case.get("files", {}):
            monkeypatch.delitem(sys.modules, file.removesuffix(".py"), raising=False)
    positions._check_new_tokens.cache_clear()  # so that it warns again
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("case", CONTENT["cases"], ids=lambda case: case["mistake"].replace(" ", "-"))
def test_a_mistake_has_an_answer_of_one_line(case, modules, request, capsys, caplog, monkeypatch):
    if case["mistake"].startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if "absent" in case and find_spec(case["absent"]) is not None:
        pytest.skip(f"{case['absent']} is installed")
    write(CONTENT["files"] | case.get("files", {}))
    if case.get("uses") == "done":
        shutil.copytree(request.getfixturevalue("done"), "done")
    for name, value in case.get("patch", {}).items():
        monkeypatch.setattr(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = case["run"].replace("PORT", str(taken.getsockname()[1]))
        code = run(shlex.split(line))
    out, err = capsys.readouterr()
    assert code == case.get("code", 2), err
    if code == 2:
        assert err.startswith("agent-peft: ") and err.count("\n") == 1, err
    assert case["expect"] in "\n".join((out, err, caplog.text))
