"""Three datasets of Reasoning Gym and a game of TextArena train from the configurations of docs/games.md."""

import json
import re
import string
from pathlib import Path

import pytest

from agent_peft.configuration.load import read_config
from agent_peft.runs.run import train

PAGE = (Path(__file__).parents[2] / "docs" / "games.md").read_text(encoding="utf-8")
TINY = {
    "kind": "scratch",
    "alphabet": string.printable,
    "architecture": {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 1024},
    "device": "cpu",
}


def block(name: str) -> str:
    return re.search(rf"```yaml\n# {name}\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize(
    ("name", "library", "tokens"), [("reasoning.yaml", "reasoning_gym", 8), ("game.yaml", "textarena", 1)]
)
def test_a_configuration_of_ten_lines_trains(name, library, tokens, tmp_path, monkeypatch):
    pytest.importorskip(library, reason=f"the extra of {library} is not installed")
    monkeypatch.chdir(tmp_path)
    text = block(name)
    assert len(text.splitlines()) <= 10
    (tmp_path / name).write_text(text)
    small = [
        f"policy={json.dumps(TINY)}",
        "environment.num_tasks=12",
        "evaluation.environment.num_tasks=3",
        f"sampling.max_new_tokens={tokens}",
        "sampling.max_tokens=1024",
    ]
    config = read_config(tmp_path / name, small)[0]
    stages = [stage.model_copy(update={"steps": 1, "tasks_per_step": 3}) for stage in config.stages]
    reports = train(config.model_copy(update={"stages": tuple(stages)}))
    lines = (tmp_path / config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(stages) and "reward" in json.loads(lines[-1])
    assert all(report.score is not None for report in reports.values())
