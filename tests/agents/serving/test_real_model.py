"""SmolLM2 over the wire: words of several tokens, characters of several bytes."""

from __future__ import annotations

import pytest

from agent_peft.policies.engine import load_sampler
from agent_peft.policies.generation import generate
from agent_peft.policies.loading import load_policy
from agent_peft.types import Message

openai = pytest.importorskip("openai")


@pytest.mark.slow
def test_smollm2_answers_as_the_engine_does(serving, smollm2):
    policy = load_policy(smollm2, lora=None, dtype="float32", device="cpu")
    running = serving(rows=4, smollm=policy)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=600)
    questions = ["What is the capital of France?", "Repeat: żółć, 日本語, 🙂🙂!", "Count to ten."]
    sampler = load_sampler(policy)
    expected = generate(sampler, [[Message("user", text)] for text in questions], {"max_new_tokens": 40})
    for text, own in zip(questions, expected, strict=True):
        body = {"model": "smollm", "messages": [{"role": "user", "content": text}], "temperature": 0}
        whole = client.chat.completions.create(**body, max_tokens=40).choices[0].message.content
        parts = list(client.chat.completions.create(**body, max_tokens=40, stream=True))
        assert whole == own
        assert "".join(part.choices[0].delta.content or "" for part in parts) == own
        assert len(parts) > 3
    assert "Paris" in expected[0]
