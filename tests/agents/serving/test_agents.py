"""An agent that thinks with a policy that is served, on a loopback port."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from agent_peft import LLMConfig, RLTrainingTool, SimpleAgent
from agent_peft.agents.serving.conversation import ChatMessage, Tool, plain_messages
from agent_peft.environments.tool_calls import write_tool_call
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy

pytest.importorskip("openai")

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
WIDTH, POSITIONS = 128, 8192


class BriefTool(RLTrainingTool):
    """With a short description, since each of its characters is a token."""

    description = "Trains."
    schema = {"type": "object", "properties": {}}  # noqa: RUF012


def policy_of_positions(system: str, user: str, call: str, answer: str) -> Policy:
    """A model that reads where it is in the text, and not the text. After the first message of the user it
    writes the call, and anywhere later the answer, whose characters differ.
    """
    architecture = {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": 1, "n_head": 1,
                    "n_positions": POSITIONS, "tie_word_embeddings": False}  # fmt: skip
    policy = load_policy(
        {"kind": "scratch", "alphabet": ALPHABET, "architecture": architecture, "device": "cpu"}, lora=None
    )
    told = {"name": BriefTool.name, "description": BriefTool.description, "parameters": BriefTool.schema}
    messages = [ChatMessage(role="system", content=system), ChatMessage(role="user", content=user)]
    tools = [Tool.model_validate({"type": "function", "function": told})]
    first = len(policy.chat.opening(plain_messages(messages, tools))) - 1
    called, answered = ([*policy.chat.action_tokens(text)] for text in (call, answer))
    assert len(set(answered)) == len(answered)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.fill_(1.0) if name.endswith("ln_f.weight") else parameter.zero_()
        network = policy.base.transformer
        policy.base.lm_head.weight.copy_(torch.eye(*policy.base.lm_head.weight.shape))
        for token, following in pairwise(answered):
            network.wte.weight[token, following] = 2.0
        network.wpe.weight[first + len(called) :, answered[0]] = 1.0
        for place, token in enumerate(called, first):
            network.wpe.weight[place, token] = 9.0  # whatever the token before
    return policy


def test_train_with_sft_three_epochs_with_a_policy_that_is_served(place, serving, check_numbers):
    user, model = "Train with SFT, three epochs, then tell me.", "Qwen/Qwen3-0.6B"
    parameters = {"algorithm": "sft", "model_name": model, "num_epochs": 3, "output_dir": "out"}
    policy = policy_of_positions("Train.", user, write_tool_call("rl_training", **parameters), "Done, 3.")
    running = serving(max_tokens=POSITIONS, scripted=policy)
    config = LLMConfig(
        model="scripted", base_url=f"{running.url}/v1", api_key="none", temperature=0, max_tokens=400
    )
    agent = SimpleAgent("TrainingAgent", config, [BriefTool()], system_prompt="Train.")
    assert agent.run(user) == "Done, 3."
    roles = [message["role"] for message in agent.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = agent.messages[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == parameters
    told = json.loads(agent.messages[3]["content"])
    assert told["steps"] == 3
    check_numbers(told)
