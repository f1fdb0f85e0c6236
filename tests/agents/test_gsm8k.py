"""The real problems of GSM8K through the tool's calls alone: rows, SFT, GRPO from its folder, and what is
told of both. The model is tiny and random, with the tokenizer of a real one.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agent_peft import RLTrainingTool

PROGRESS = {"output_dir", "state", "algorithm", "step", "steps", "checkpoint", "metrics"}
RESULT = PROGRESS | {"evaluations", "accuracy_before", "accuracy"}
SHORT = {"eval_samples": 2, "max_new_tokens": 16}


def ask(**parameters: Any) -> dict[str, Any]:
    told = json.loads(RLTrainingTool().run(parameters))
    assert told["status"] == "success", told
    assert told["action"] == parameters.get("action", "train")
    return {name: value for name, value in told.items() if name not in ("status", "action")}


@pytest.fixture
def rows(shared, smollm2, tmp_path, monkeypatch) -> list[dict[str, str]]:
    """The first problems of the training set. The current folder has both sets, and a model."""
    problems = shared / "data/gsm8k"
    if not problems.is_dir():
        pytest.skip("no GSM8K beside the repository")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(problems, "data/gsm8k")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    return [json.loads(line) for line in Path("data/gsm8k/train.jsonl").read_text().splitlines()[:4]]


@pytest.mark.slow
def test_sft_then_grpo_and_each_field_of_each_answer(rows, check_numbers):
    shown = ask(action="load_dataset", format="sft", split="train", max_samples=4)
    samples = shown.pop("samples")
    keys = ["id", "prompt", "completion", "text"]
    assert shown == {
        "dataset": "gsm8k", "format": "sft", "split": "train", "dataset_size": 4, "sample_keys": keys
    }  # fmt: skip
    for sample, row in zip(samples, rows, strict=False):
        assert row["question"].strip() in sample["prompt"]
        assert sample["completion"] == re.sub("<<.*?>>", "", row["answer"])
    rl = ask(action="load_dataset", format="rl", split="train", max_samples=4, model_name="tiny")
    assert rl["dataset_size"] == 4 and rl["sample_keys"] == ["id", "prompt", "ground_truth"]
    for sample, row in zip(rl["samples"], rows, strict=False):
        assert sample["prompt"].startswith("<|im_start|>") and row["question"].strip() in sample["prompt"]
        assert sample["ground_truth"] == row["answer"].rpartition("#### ")[2]
    reward = ask(action="create_reward", reward="length_penalty", max_length=8)
    assert reward["reward"] == "length_penalty" and reward["rewards"]["correct"] == 1.0

    sft = ask(
        algorithm="sft", model_name="tiny", dataset="gsm8k", max_samples=4, num_epochs=1, batch_size=2,
        output_dir="./output/sft", **SHORT,
    )  # fmt: skip
    check_numbers(sft)
    assert sft.keys() == RESULT | {"model_name", "dataset", "measured_on"}
    assert (sft["model_name"], sft["dataset"], sft["measured_on"]) == ("tiny", "gsm8k", "held-out tasks")
    assert (sft["algorithm"], sft["output_dir"], sft["step"]) == ("sft", "output/sft", 2)
    assert sft["evaluations"]["after_sft"]["tasks"] == 2

    grpo = ask(
        algorithm="grpo", model_name="./output/sft", max_samples=2, num_epochs=1, batch_size=1,
        num_generations=2, output_dir="./output/grpo", reward="length_penalty", max_length=8, **SHORT,
    )  # fmt: skip
    check_numbers(grpo)
    assert grpo.keys() == sft.keys() and grpo["steps"] == 2
    assert grpo["accuracy_before"] == sft["accuracy"]
    assert grpo["metrics"]["action_tokens"] == SHORT["max_new_tokens"]
    start = Path("output/grpo/start/adapter_model.safetensors").read_bytes()
    assert start == (Path(sft["checkpoint"]) / "adapter_model.safetensors").read_bytes()

    assert ask(action="status", output_dir="./output/grpo") == {name: grpo[name] for name in PROGRESS}
    report = ask(action="report", output_dir="./output/grpo")
    assert {name: report[name] for name in RESULT} == {name: grpo[name] for name in RESULT}
    assert report.keys() == RESULT | {"configuration", "course"}
    assert [point["step"] for point in report["course"]] == [0, 1]
    assert report["configuration"]["environment"]["kind"] == "gsm8k"
    measured = ask(
        action="evaluate", model_name="./output/grpo", split="test", max_samples=2, max_new_tokens=16
    )
    assert measured == grpo["evaluations"]["after_grpo"] | {
        "model_name": "./output/grpo", "dataset": "gsm8k", "mean_reply_tokens": 16.0, "cut_replies": 1.0
    }  # fmt: skip
