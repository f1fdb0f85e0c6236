"""The guide to HelloAgents' training: every block of it runs here, but for its import lines."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import agent_peft
from agent_peft.agents import TRAINING_AVAILABLE

NAMES = {name: getattr(agent_peft, name) for name in agent_peft.__all__}
NAMES["TRL_AVAILABLE"] = TRAINING_AVAILABLE  # the only one that has another name here


def blocks_of(guide: Path) -> list[str]:
    """The Python blocks, without their imports, which name another package."""
    if not guide.is_file():
        pytest.skip(f"no {guide.name} in the folder next to the repository")
    blocks = []
    for block in re.findall(r"^```python\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.M | re.S):
        tree = ast.parse(block)
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert all(node.module.startswith("hello_agents") for node in imports)
        assert all(alias.name in NAMES for node in imports for alias in node.names)
        tree.body = [node for node in tree.body if node not in imports]
        blocks.append(ast.unparse(tree))
    return blocks


@pytest.mark.slow
def test_every_block_of_the_guide_runs_and_its_numbers_are_the_runs(
    shared, place, endpoint, calling, check_numbers, capsys
):
    blocks = blocks_of(shared / "seeds/helloagents_rl_guide.md")
    told: list[dict[str, Any]] = []

    class Tool(agent_peft.RLTrainingTool):
        """Keeps what it returns, and compares it with the run while that is in its place."""

        def run(self, parameters: Any) -> str:
            text = super().run(parameters)
            told.append(json.loads(text))
            assert told[-1]["status"] == "success", text
            if told[-1]["action"] == "train":
                check_numbers(told[-1])
            return text

    model = "Qwen/Qwen2-0.5B-Instruct"
    train = calling(
        "rl_training", algorithm="sft", model_name=model, num_epochs=3, output_dir="./output/agent"
    )
    requests = endpoint([train, lambda request: {"content": "训练完成"}])
    scope = NAMES | {"RLTrainingTool": Tool, "List": list}  # the guide never imports List
    for block in blocks:
        exec(compile(block, "guide", "exec"), scope)
    assert "✅ TRL已安装，可以开始训练" in capsys.readouterr().out
    assert scope["response"] == "训练完成" and len(requests) == 2
    assert "请用SFT算法训练一个Qwen2-0.5B模型" in requests[0]["messages"][1]["content"]
    assert sum(one["action"] == "train" for one in told) == 8
    shown = [one for one in told if one["action"] == "load_dataset"]
    assert [one["format"] for one in shown] == ["sft", "rl"] and all(
        one["dataset_size"] == 4 for one in shown
    )
    for trainer in ("trainer", "grpo_trainer"):
        result = scope[trainer].result
        assert result["accuracy"] is not None and result["state"] == "done"
    check_numbers(scope["grpo_trainer"].result)
    assert scope["reward_fn"](["#### 72"], ground_truth=["72"]) == [1.0]
    assert len(scope["test_dataset"]) == 3
    flow = [one for one in told if one.get("model_name") == "./output/sft"]
    assert len(flow) == 1 and Path("output/grpo/start/adapter_config.json").is_file()
