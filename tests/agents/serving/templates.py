"""Tiny models with chat templates that think and call tools, and that write what a test sets."""

# ruff: noqa: E501 (chat templates)
from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
WIDTH, POSITIONS = 128, 4096
HERMES = "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>"
CODER = "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
# in the manner of Qwen3: a thought is kept until the next message of the user
QWEN = """{%- macro one(f) %}CALL{% endmacro %}
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n' if messages[0].role == 'system' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'system' or not tools %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}{{ one(call.function) }}{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def policy_of(folder: Path, template: str, marks: list[str] = MARKS, positions: int = POSITIONS) -> Policy:
    """A model that reads its place in the text, and not the text (``script``)."""
    tokenizer = character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n")
    tokenizer.add_tokens([mark for mark in marks if mark not in MARKS[:2]])
    tokenizer.add_tokens(MARKS[:2], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    assert len(tokenizer) <= WIDTH
    config = GPT2Config(n_embd=WIDTH, n_layer=1, n_head=1, n_positions=positions, vocab_size=len(tokenizer),
                        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policy = load_policy(PretrainedConfig(model=str(folder), lora=None, device="cpu"), seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.fill_(1.0) if name.endswith("ln_f.weight") else parameter.zero_()
        policy.base.lm_head.weight.copy_(torch.eye(*policy.base.lm_head.weight.shape))
    return policy


def tokens_of(policy: Policy, reply: str) -> list[int]:
    """The tokens of a reply, its marks as tokens, and the end."""
    tokenizer = policy.chat.tokenizer
    return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]


def script(policy: Policy, prompt: int, reply: list[int]) -> None:
    """Let the policy's likeliest reply after ``prompt`` tokens be ``reply``."""
    with torch.no_grad():
        policy.base.transformer.wpe.weight.zero_()
        for place, token in enumerate(reply, prompt - 1):
            policy.base.transformer.wpe.weight[place, token] = 9.0
