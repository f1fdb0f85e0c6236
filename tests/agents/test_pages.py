"""The pages on training by agents: all their Python blocks run, with a tiny model and a local dataset."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_peft.agents.parameters import ACTIONS
from agent_peft.agents.training import TrainingConfig

DOCS = Path(__file__).parents[2] / "docs"


def program(page):
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    )


@pytest.mark.parametrize("page", ["datasets.md", "reward_functions.md", "trainers.md", "helloagents.md"])
def test_the_program_of_a_page_runs(page, place):
    exec(compile(program(page), page, "exec"), {})


@pytest.mark.slow
def test_the_program_of_the_page_on_the_tool_runs(place, endpoint, calling, check_numbers):
    endpoint(
        [
            calling("rl_training", action="status", output_dir="./output/grpo"),
            lambda request: {"content": "0"},
        ]
    )
    scope = {}
    exec(compile(program("training_tool.md"), "training_tool.md", "exec"), scope)
    check_numbers(json.loads(scope["sft"]))
    check_numbers(json.loads(scope["grpo"]))


def test_the_pages_name_every_action_and_every_key():
    text = (DOCS / "training_tool.md").read_text(encoding="utf-8")
    assert all(f"| `{action}` |" in text for action in ACTIONS)
    text = (DOCS / "trainers.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text or f"    {key}=" in text for key in TrainingConfig.model_fields)
