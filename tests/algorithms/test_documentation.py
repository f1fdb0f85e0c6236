"""The pages on algorithms against the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_peft.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGE, POLICY_GRADIENTS, PREFERENCE_LOSSES = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("algorithms", "policy_gradients", "preference_losses")
)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_every_kind_has_its_section_with_its_row_and_keys(kind):
    page = "policy_gradients" if f"\n## {kind}\n" in POLICY_GRADIENTS else "preference_losses"
    text = POLICY_GRADIENTS if page == "policy_gradients" else PREFERENCE_LOSSES
    section = text.split(f"\n## {kind}\n")[1].split("\n## ")[0]
    config = ALGORITHMS[kind]
    assert f"`{config.__name__}`" in section
    assert f"[`{kind}`]({page}.md#{kind})" in PAGE
    assert all(f"`{key}`" in section for key in config.model_fields if key != "kind")


def test_the_curves_are_those_of_the_benchmark():
    content = json.loads((ROOT / "benchmarks" / "results" / "algorithm_curves.json").read_text())
    assert content["curves"].keys() == ALGORITHMS.keys()
    picture = (ROOT / "docs" / "pictures" / "algorithm_curves.svg").read_text(encoding="utf-8")
    for kind, runs in content["curves"].items():
        assert f">{kind}</text>" in picture and len(runs) == len(content["seeds"]) == 3
        shares = [sum(share for _, share in run[-4:]) / 4 for run in runs]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {kind} |"))
        assert f"{100 * sum(shares) / len(shares):.0f} %" in row


@pytest.mark.slow
def test_the_reader_s_own_algorithm_trains(tmp_path):
    section = PAGE.split("\n## Your own algorithm\n")[1]
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    assert "agent-peft train ranks.yaml" in section
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "agent_peft", "train", "ranks.yaml"]
    for _ in range(2):  # the second time there is nothing left to do
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "ranks" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["RankBased"] * 2
    assert "kind: my_algorithm:RankBased" in (tmp_path / "runs" / "ranks" / "config.yaml").read_text()
