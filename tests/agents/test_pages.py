"""The page on training by agents: all its Python blocks run, with a tiny model and a local dataset."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_peft.agents.keys import TAKES, TrainingConfig

PAGE = (Path(__file__).parents[2] / "docs/helloagents.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}


def program(*headings):
    text = "\n".join(SECTIONS[heading] for heading in headings)
    return compile("\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)), headings[0], "exec")


@pytest.mark.parametrize(
    "heading", ["Trainers", "Datasets", "Reward functions", "What differs from HelloAgents"]
)
def test_the_program_of_a_section_runs(heading, place):
    exec(program(heading), {})


@pytest.mark.slow
def test_the_program_of_the_section_on_the_tool_runs(place, endpoint, calling, check_numbers):
    endpoint(
        [
            calling("rl_training", action="status", output_dir="./output/grpo"),
            lambda request: {"content": "0"},
        ]
    )
    scope = {}
    exec(program("The training tool", "SimpleAgent"), scope)
    check_numbers(json.loads(scope["sft"]))
    check_numbers(json.loads(scope["grpo"]))


def test_the_page_names_every_action_and_every_key():
    assert all(f"| `{action}` |" in SECTIONS["The training tool"] for action in TAKES)
    text = SECTIONS["Trainers"]
    assert all(f"`{key}`" in text or f"    {key}=" in text for key in TrainingConfig.model_fields)
