"""Episodes whose tools the chat template declares: DB Bench and OS interaction with ``protocol: native``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.environments.os_interaction.config import OSInteractionConfig
from agent_peft.environments.os_interaction.episode import OSEpisode
from agent_peft.environments.os_interaction.problems import Matches, ShellProblem
from agent_peft.environments.os_interaction.protocol import PROTOCOLS, Command, Finish
from agent_peft.environments.tool_calls import TWO_ACTIONS, MalformedReply, write_call
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.native import as_template
from agent_peft.replies import UNCLOSED_THOUGHT
from agent_peft.rollout.collector import trajectory_from_json, trajectory_to_json
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError, Message, Outcome, StopReason, ToolCall
from tests.agents.serving.templates import HERMES, QWEN, policy_of
from tests.policies.test_native import CALLS, chat_of, of_dialect

TEMPLATE = QWEN.replace("CALL", HERMES)


@pytest.fixture(scope="module")
def environment() -> Environment:
    generate = {"num_tasks": 1, "skills": ["insert"], "plain": True, "combined": 0}
    return load_environment("db_bench", generate=generate, protocol="native", max_turns=4)


@pytest.fixture
def conversation(environment: Environment) -> Iterator[EpisodeConversation]:
    made = EpisodeConversation(environment, environment.tasks[0], chat_of(TEMPLATE), [])
    assert made.prompt is not None
    yield made
    made.close()


def write(conversation: EpisodeConversation, text: str) -> list[int]:
    tokenizer = conversation.chat.tokenizer
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def act(conversation: EpisodeConversation, text: str, room: int = 9999) -> str | None:
    action = write(conversation, text)
    news = conversation.act(action, [-0.5] * len(action), room)
    return None if news is None else conversation.chat.tokenizer.decode(news)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("dialect", CALLS)
def test_a_demonstration_is_the_templates_own_text(environment: Environment, dialect: str) -> None:
    chat = chat_of(of_dialect(dialect))
    for task in environment.tasks:
        trajectory = demonstrate(environment, task, chat, RewardConfig(), seed=0)
        assert trajectory.outcome is Outcome.CORRECT and not trajectory.num_invalid
        assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
        (tool,) = trajectory.messages[2].tool_calls
        assert tool.name == "execute_sql" and tool.arguments["query"].startswith("INSERT")
        tools = environment.episode(task, 0).tools
        own = chat.render(as_template(trajectory.messages), False, tools=tools)
        assert chat.tokenizer.decode(trajectory.tokens) == own.rstrip("\n")
        assert (
            trajectory_from_json(task, json.loads(json.dumps(trajectory_to_json(trajectory)))) == trajectory
        )


SELECT = call("execute_sql", query="SELECT 1")


@pytest.mark.parametrize(
    ("reply", "observation"),
    [
        ("Action: Answer\nFinal Answer: 3", "No tool call found. Call execute_sql or commit_final_answer."),
        (SELECT + SELECT, TWO_ACTIONS),
        ("<tool_call>\n{'name'}", "The tool call is not JSON."),
        (
            '<tool_call>\n{"name": "execute_sql", "arguments": 3}',
            "The arguments of a tool call are a JSON obj",
        ),
        (f"<think>\n{SELECT}", UNCLOSED_THOUGHT),
        (f"<think>\n{SELECT}</think>done", "No tool call found. Call execute_sql or commit_final_answer."),
    ],
)
def test_what_is_not_one_call_is_an_invalid_action(
    conversation: EpisodeConversation, reply: str, observation: str
) -> None:
    news = act(conversation, reply)
    assert not conversation.turns[0].valid and not conversation.over
    assert [message.role for message in conversation.messages[-2:]] == ["assistant", "user"]
    assert conversation.messages[-2].content == reply and conversation.messages[-1].content.startswith(
        observation
    )
    assert news is not None and f"user\n{observation}" in news
    assert "[[1]]" in (act(conversation, SELECT) or "")  # the world has not moved


@pytest.mark.parametrize(
    ("reply", "observation"),
    [
        (call("drop"), "There is no tool 'drop'; call execute_sql or commit_final_answer."),
        (call("execute_sql", sql="SELECT 1", x=2), "The query is missing. Call execute_sql with query."),
        (call("execute_sql", query=" "), "The query is empty."),
    ],
)
def test_a_wrong_call_gets_a_result(conversation: EpisodeConversation, reply: str, observation: str) -> None:
    assert f"<tool_response>\n{observation}\n</tool_response>" in (act(conversation, reply) or "")
    assert not conversation.turns[0].valid and conversation.messages[-1] == Message("tool", observation)


def test_a_failed_world_is_opened_again_with_the_same_calls(conversation: EpisodeConversation) -> None:
    act(conversation, f"<think>\nhm\n</think>\n\nI look. {SELECT}")
    act(conversation, "no call")
    before = list(conversation.messages)
    assert before[2] == Message(
        "assistant", "I look.", (ToolCall("execute_sql", {"query": "SELECT 1"}, "call00002"),), "hm"
    )
    conversation.close()
    conversation.turns.append(conversation.turns[-1])
    conversation._replies.append(conversation._replies[0])
    conversation.messages.append(before[2])
    assert conversation.prompt is not None
    assert conversation.messages[:-1] == [*before, before[2]] and conversation.messages[-1] == before[3]


def test_reinforcement_over_three_turns_trains_what_was_sampled(
    environment: Environment, tmp_path: Path
) -> None:
    policy = policy_of(tmp_path, TEMPLATE)
    conversation = EpisodeConversation(environment, environment.tasks[0], policy.chat, [])
    assert conversation.prompt is not None
    replies = [f"<think>\nfirst\n</think>\n\n{SELECT}", "oh", call("commit_final_answer", answers=["done"])]
    with torch.no_grad():  # the likeliest reply at each place is the scripted one
        for reply in replies:
            start = len(conversation.trajectory.tokens) + len(conversation._observation)
            action = write(conversation, reply)
            for place, token in enumerate(action, start - 1):
                policy.base.transformer.wpe.weight[place, token] = 30.0
            conversation.act(action, [0.0] * len(action), 9999)
    stage = StageConfig.model_validate(
        {
            "algorithm": {"kind": "reinforce", "baseline_momentum": None},
            "steps": 2,
            "tasks_per_step": 1,
            "group_size": 1,
            "sampling": {"max_new_tokens": 200, "max_tokens": 3000},
            "rewards": {"incorrect": -1.0, "invalid_action": -0.5},
            "optimizer": {"learning_rate": 1e-5},
        }
    )
    trainer = Trainer(policy, environment, stage, load_sampler(policy, EngineConfig()), 0)
    for step in trainer:
        (group,) = step.collection.groups
        for trajectory in group.trajectories:
            assert trajectory.tokens == conversation.trajectory.tokens
            assert trajectory.messages == conversation.trajectory.messages
            assert [turn.valid for turn in trajectory.turns] == [True, False, True]
            assert trajectory.stop_reason is StopReason.FINISHED
        assert step.metrics["mismatch_max"] < 1e-4


def test_a_model_without_tools_is_one_line(environment: Environment) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(AgentPeftError, match="the model's chat template does not write call, tools; set pol"):
        demonstrate(environment, environment.tasks[0], chat_of(plain), RewardConfig(), seed=0)


# -- OS interaction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "reply"),
    [
        (write_call("bash", command="echo '<tool_call>'"), Command("echo '<tool_call>'")),
        (write_call("finish"), Finish()),
        (write_call("answer", text="42"), Finish("42")),
    ],
)
def test_calls_in_a_shell(action: str, reply: object) -> None:
    assert PROTOCOLS["native"].parse(action) == reply
    assert PROTOCOLS["native"].write(reply) == action


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (write_call("bash"), "The command is missing. Call bash with command."),
        (write_call("answer"), "The answer's text is missing. Call answer with text."),
        ("", "No tool call found."),
    ],
)
def test_a_malformed_call_in_a_shell_says_what_to_write(action: str, why: str) -> None:
    with pytest.raises(MalformedReply, match=f"^{re.escape(why)}$"):
        PROTOCOLS["native"].parse(action)


def test_the_tool_answer_is_there_where_a_task_asks_for_one() -> None:
    config = OSInteractionConfig(generate={"num_tasks": 1}, protocol="native")
    for answers, names in ((True, ["bash", "finish", "answer"]), (False, ["bash", "finish"])):
        episode = OSEpisode(ShellProblem("How many?", Matches("3"), answers=answers), config, 0)
        assert [tool["function"]["name"] for tool in episode.tools] == names
