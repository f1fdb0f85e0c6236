"""Agent frameworks, unmodified, in a Python that has them: each uses a tool and reads its result."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

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


def answers(*command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
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
