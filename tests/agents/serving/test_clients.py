"""Agent frameworks, unmodified, in a Python that has them: each uses a tool and reads its result."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from agent_peft.agents.serving import prompts, server

from .templates import policy_of, script, tokens_of
from .test_prompts import QWENS

HERE = Path(__file__).parent


def reply_to(request):
    """What a policy that can add would answer."""
    tools = {tool.function.name: tool for tool in request.offered}
    texts = " ".join(message.text for message in request.messages)
    has_called = any(message.tool_calls or message.role == "tool" for message in request.messages)
    has_called |= "Calling tools:" in texts  # smolagents writes its calls as text
    called = None
    if "bash" in tools:
        called = "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo Four."}
    elif "add" in tools and not has_called:
        called = "add", {"a": 2, "b": 2}
    elif "final_answer" in tools:
        called = "final_answer", {"answer": "Four."}
    elif final := tools.keys() & {"final_result", "Total"}:
        called = final.pop(), {"total": 4}
    if called is None:
        form = request.response_format and request.response_format.form
        return json.dumps({"total": 4}) if form else "Four."
    call = json.dumps({"name": called[0], "arguments": called[1]})
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.fixture
def url(serving, tmp_path, monkeypatch):
    policy = policy_of(tmp_path, QWENS["hermes"], positions=20_000)

    def scripted(chat, request):
        prompt = prompts.chat_prompt(chat, request)
        script(policy, len(prompt.tokens), tokens_of(policy, reply_to(request)))
        return prompt

    monkeypatch.setattr(server, "chat_prompt", scripted)
    return serving(max_tokens=20_000, tiny=policy).url


def output(*command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answers(*command):
    read = json.loads(output(*command).splitlines()[-1])
    print(read)
    return {name: answer for name, (_, answer) in read.items()}


@pytest.mark.slow
def test_agent_frameworks_use_a_tool(url):
    python = os.environ.get("AGENT_PEFT_SDK_PYTHON")
    if not python:
        pytest.skip("AGENT_PEFT_SDK_PYTHON names no Python with agent frameworks (framework_clients.py)")
    read = answers(python, str(HERE / "framework_clients.py"), url)
    assert read and read == dict.fromkeys(read, "Four.")


@pytest.mark.slow
def test_vercels_sdk_uses_a_tool(url):
    folder = os.environ.get("AGENT_PEFT_SDK_NODE")
    if not folder:
        pytest.skip("AGENT_PEFT_SDK_NODE names no folder in which npm has installed ai (vercel_client.mjs)")
    assert answers("node", str(HERE / "vercel_client.mjs"), folder, url) == {"ai": "Four."}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_lm_eval_reads_the_models_own_probabilities(serving, policies, tmp_path, tokens):
    """Choices by log-likelihood, a perplexity, and replies, of tasks in a file."""
    python = os.environ.get("AGENT_PEFT_SDK_PYTHON")
    if not python or subprocess.run([python, "-c", "import lm_eval"], capture_output=True).returncode:
        pytest.skip("AGENT_PEFT_SDK_PYTHON names no Python with lm-eval[api] and transformers")
    policy = policies["trained"]
    tokenizer = policy.chat.tokenizer
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    questions = ["12+34=", "5*6=", "7-3="]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": text, "choices": ["1", "23"]}) + "\n" for text in questions))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    common |= {"test_split": "test", "target_delimiter": ""}
    asked = {"doc_to_text": "{{q}}", "doc_to_target": "0"}
    tasks = {
        "choice": {
            **asked,
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc"}],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
        "reply": {
            **asked,
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["="], "max_gen_toks": 4, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, task in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": f"own_{name}", **common, **task}))
    model = f"model=trained,base_url={serving().url}/v1/completions,tokenizer={tmp_path / 'tokenizer'}"
    names = ",".join(f"own_{name}" for name in tasks)
    # fmt: off
    output(python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
           f"{model},tokenized_requests={tokens},max_retries=1", "--tasks", names,
           "--include_path", str(tmp_path), "--output_path", str(tmp_path / "results"), "--log_samples")
    # fmt: on
    (results,) = (tmp_path / "results").rglob("results_*.json")
    measured = json.loads(results.read_text())["results"]

    def log_likelihood(text, before):
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        start = tokenizer.encode(before, add_special_tokens=False) or [prefix]
        ids = [*start, *tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            rows = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(rows[place - 1, ids[place]].item() for place in range(len(start), len(ids)))

    total = sum(log_likelihood(text, "") for text in questions)
    expected = math.exp(-total / sum(len(text.encode()) for text in questions))
    assert measured["own_perplexity"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)
    right = [log_likelihood("1", text) > log_likelihood("23", text) for text in questions]
    assert measured["own_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert measured["own_reply"]["sample_len"] == len(questions)
