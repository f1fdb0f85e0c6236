"""``agent-peft report``: its line, its files and its errors."""

from __future__ import annotations

import json

import pytest

from agent_peft.cli import run as command


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "stage": "sft", "loss": 1.0}) + "\n")
    return run


def told(capsys, *arguments):
    code = command(["report", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_page_lies_in_the_run_or_here(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = told(capsys, folder)
    assert code == 0 and f"wrote {folder / 'report.html'}: 0 episodes" in out
    assert "Agent-PEFT report" in (folder / "report.html").read_text()
    assert told(capsys, folder, folder)[0] == 0 and (tmp_path / "report.html").is_file()
    assert told(capsys, folder, "--output", tmp_path / "new" / "b.html")[0] == 0
    assert (tmp_path / "new" / "b.html").is_file()


def test_mistakes_are_one_line(folder, tmp_path, capsys):
    for arguments, words in (
        ([tmp_path], "no run directory"),
        ([folder, "--port", "8"], "--port has no effect without --live"),
        ([folder, "--live", "--output", "x.html"], "--output has no effect with --live"),
        ([folder, "--output", folder], "--output"),
    ):
        code, _, error = told(capsys, *arguments)
        assert (code, error.count("\n")) == (2, 1) and words in error
