"""The agent: at an endpoint that follows a script, and with a policy of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import agent_peft as ap
from agent_peft import AgentPeftError, LLMConfig, RLTrainingTool, SimpleAgent
from agent_peft.agents.serving.conversation import ChatMessage, Tool, plain_messages
from agent_peft.environments.graders import Grade, QuestionEpisode
from agent_peft.environments.tool_calls import write_tool_call

MODEL = "Qwen/Qwen3-0.6B"


class Adder:
    """A small tool."""

    name, description = "add", "Adds."
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self):
        self.calls = []

    def run(self, parameters):
        self.calls.append(parameters)
        return "4"


def test_train_with_sft_three_epochs_then_tell_me_the_accuracy(place, endpoint, calling, check_numbers):
    def answer(request):
        told = json.loads(request["messages"][-1]["content"])
        return {"content": f"The accuracy is {told['accuracy']} after {told['steps']} steps."}

    train = calling("rl_training", algorithm="sft", model_name=MODEL, num_epochs=3, output_dir="out")
    requests = endpoint([train, answer])
    tool = RLTrainingTool()
    agent = SimpleAgent("TrainingAgent", LLMConfig(model="gpt-4o-mini"), [tool])
    said = agent.run(f"Train {MODEL} with SFT, three epochs, then tell me the accuracy")
    report = json.loads((place / "out/evaluations/step_000003.json").read_text())
    assert said == f"The accuracy is {report['success']['value']} after 3 steps."
    assert "num_epochs" in requests[0]["tools"][0]["function"]["parameters"]["properties"]
    check_numbers(json.loads(agent.messages[3]["content"]))
    assert [message["role"] for message in agent.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_what_the_tool_refuses_the_agent_reads(place, endpoint, calling):
    (place / "output").mkdir()
    (place / "output/metrics.jsonl").write_text("mine\n")
    script = [
        calling("rl_training", action="delete", output_dir="output"),
        calling("bash", command="rm -rf output"),
        lambda request: {
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "rl_training", "arguments": "{no JSON"}}
            ]
        },
        calling("rl_training", model_name=MODEL, output_dir="output", eval_samples=0),
        lambda request: {"content": "I cannot."},
    ]
    requests = endpoint(script)
    agent = SimpleAgent(llm_config=LLMConfig(model="m", temperature=0), tools=[RLTrainingTool()])
    assert agent.run("Delete the run in output, and everything next to it") == "I cannot."
    results = [json.loads(one["content"])["message"] for one in agent.messages if one["role"] == "tool"]
    assert "this tool removes nothing" in results[0] and "there is no tool 'bash'" in results[1]
    assert "are no JSON" in results[2] and "is not a run directory" in results[3]
    assert (place / "output/metrics.jsonl").read_text() == "mine\n"
    assert all(request["temperature"] == 0 for request in requests)


def test_it_stops_at_its_limit_and_says_so(endpoint, calling):
    adder = Adder()
    requests = endpoint([calling("add", a=1)])
    said = SimpleAgent(llm_config=LLMConfig(model="m"), tools=[adder], max_steps=3).run("Go on for ever")
    assert said == "Stopped after 3 replies without an answer. The last result of a tool: 4"
    assert len(requests) == len(adder.calls) == 3


def test_an_endpoint_that_is_not_there_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    agent = SimpleAgent(llm_config=LLMConfig(model="m", base_url="http://127.0.0.1:9/v1", timeout=1))
    with pytest.raises(AgentPeftError, match=r"^http://127\.0\.0\.1:9/v1/: APIConnectionError: "):
        agent.run("Hello")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(AgentPeftError, match="OPENAI_API_KEY"):
        SimpleAgent(llm_config=LLMConfig(model="m")).run("Hello")


def test_a_local_policy_answers_within_what_it_reads(tiny):
    """Also where ``max_tokens`` is more than the room that is left."""
    agent = SimpleAgent(llm_config=LLMConfig(model=str(tiny), local=True, max_tokens=4096), tools=[Adder()])
    assert isinstance(agent.run("2 + 2?"), str)
    with pytest.raises(
        AgentPeftError, match=r"^SimpleAgent: the conversation has \d+ tokens, and .* reads 4096"
    ):
        agent.run("2" * 4096)


@pytest.mark.parametrize("part", ["name", "description", "schema", "run"])
def test_a_tool_without_one_of_its_parts_is_one_line(part):
    parts = {"name": "add", "description": "Adds.", "schema": {}, "run": lambda self, parameters: "4"}
    tool = type("Own", (), {name: value for name, value in parts.items() if name != part})()
    with pytest.raises(
        AgentPeftError, match=rf"^SimpleAgent: the tool .* has no {part}; a tool has name, desc"
    ):
        SimpleAgent(tools=[tool])


def test_the_key_is_not_shown():
    assert "secret" not in repr(LLMConfig(model="m", api_key="secret"))


class Conversations(ap.Environment):
    """What an agent with an adder reads, and what it should write."""

    def __init__(self, config=None):
        user = {"role": "user", "content": "2 + 2?"}
        function = {"name": "add", "arguments": '{"a": 2}'}
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "", "function": function}]}
        result = {"role": "tool", "tool_call_id": "", "content": "4"}
        system = {"role": "system", "content": "Add."}
        described = {"name": "add", "description": "Adds.", "parameters": Adder.schema}
        tools = [Tool.model_validate({"type": "function", "function": described})]
        self.openings = [
            plain_messages([ChatMessage.model_validate(one) for one in messages], tools)
            for messages in ([system, user], [system, user, call, result])
        ]
        self.replies = [write_tool_call("add", a=2), "It is 4."]

    @property
    def tasks(self):
        return [ap.Task("0"), ap.Task("1")]

    def episode(self, task, seed):
        gold = self.replies[int(task.id)]
        return QuestionEpisode(self.openings[int(task.id)], lambda reply: Grade(reply == gold))

    def demonstration(self, task):
        return [self.replies[int(task.id)]]


@pytest.mark.slow
def test_a_policy_of_ours_calls_the_tool_that_it_learnt_to_call(tiny, tmp_path):
    """In this process, and served to OpenAI's client."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 2048, "initializer_range": 0.02}
    config = GPT2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    policy = ap.load_policy(str(tmp_path / "start"), lora=None, dtype="float32")
    stage = ap.Stage(
        algorithm="sft",
        steps=80,
        tasks_per_step=2,
        sampling={"max_tokens": 2048},
        optimizer={"learning_rate": 3e-3},
    )
    for step in ap.Trainer(policy, Conversations(), stage):
        if step.metrics["loss"] < 0.01:
            break
    policy.save(str(tmp_path / "learned"))
    adder = Adder()
    llm = LLMConfig(model=str(tmp_path / "learned"), local=True, max_tokens=120)
    agent = SimpleAgent(llm_config=llm, tools=[adder], system_prompt="Add.", max_steps=3)
    assert agent.run("2 + 2?") == "It is 4."
    assert adder.calls == ['{"a": 2}']

    command = [sys.executable, "-m", "agent_peft", "serve-policy", "learned", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            url = process.stdout.readline().split(" on ")[1].split()[0]
            llm = LLMConfig(model="learned", base_url=url, api_key="none", temperature=0, max_tokens=120)
            agent = SimpleAgent(llm_config=llm, tools=[adder], system_prompt="Add.", max_steps=3)
            assert agent.run("2 + 2?") == "It is 4."
        finally:
            process.terminate()
    assert adder.calls == ['{"a": 2}'] * 2 and process.returncode == 0
