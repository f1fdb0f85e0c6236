"""A thought is no action, in every environment."""

from __future__ import annotations

import json

import pytest

from agent_peft.environments import load_environment
from agent_peft.environments.contract import opening_of, result_of
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import UNCLOSED_THOUGHT
from agent_peft.rollout.conversation import EpisodeConversation
from agent_peft.types import Outcome, StopReason

QUESTION = {"question": "What is 2 + 3?", "answer": "5"}
ROWS = {
    "questions": QUESTION,
    "gsm8k": {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"},
    "chat": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
        ]
    },
    "preferences": {"prompt": "hi", "chosen": "hello", "rejected": "no"},
}
SETTINGS = {
    "arithmetic": {"digits": 1, "num_tasks": 2},
    "db_bench": {"generate": {"num_tasks": 2}},
    "db_bench json_tool_calls": {"generate": {"num_tasks": 2}, "protocol": "json_tool_calls"},
    "os_interaction": {"generate": {"num_tasks": 1, "skills": ["mkdir"]}},
    "reasoning_gym": {"dataset": "leg_counting", "num_tasks": 2},
    **{kind: {} for kind in ROWS},
}


@pytest.fixture(params=[(kind, where) for kind in SETTINGS for where in ("here", "over HTTP")], ids=" ".join)
def environment(request, tmp_path):
    name, where = request.param
    kind, settings = name.split()[0], SETTINGS[name]
    if kind == "os_interaction":
        request.getfixturevalue("sandboxed")
    if kind == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    if kind in ROWS:
        path = tmp_path / "tasks.jsonl"
        path.write_text(json.dumps(ROWS[kind]) + "\n")
        settings = {"tasks": str(path)}
    environment = load_environment({"kind": kind, **settings})
    if where == "over HTTP":
        server = request.getfixturevalue("serving")({"train": environment})
        environment = load_environment({"kind": "remote", "url": server.url})
    request.addfinalizer(environment.close)
    return environment


def play(environment, write):
    """The result of a demonstration's replies, each as ``write`` changes it."""
    task = environment.tasks[0]
    episode = environment.episode(task, 0)
    try:
        opening_of(episode)
        for reply in environment.demonstration(task):
            result = result_of(episode, write(reply))
            if result.done:
                break
        return result
    finally:
        episode.close()


def test_the_text_after_a_thought_is_the_action(environment):
    plain, *others = (
        play(environment, write)
        for write in (
            str,
            lambda reply: f"<think>\nhm\n</think>\n\n{reply}",
            lambda reply: f"hm</think>{reply}",
        )
    )
    assert plain.done
    assert all(other == plain for other in others)


@pytest.mark.parametrize(
    "reply", ["<think>{}</think>", "{}</think>hm", "<think>hm</think>hm <think>{}</think>"]
)
def test_an_action_inside_a_thought_is_not_executed(environment, reply):
    result = play(environment, reply.format)
    assert result.outcome is not Outcome.CORRECT
    assert result.stop_reason is not StopReason.FINISHED or result.observation == ""


@pytest.mark.parametrize("reply", ["<think>{}", "{}<think>hm"])
def test_an_unclosed_thought_has_its_own_message(environment, reply):
    result = play(environment, reply.format)
    assert (result.outcome is not Outcome.CORRECT, result.valid) == (True, False)
    assert result.observation in ("", UNCLOSED_THOUGHT)
    assert result.done or result.observation == UNCLOSED_THOUGHT


def test_a_game():
    pytest.importorskip("gymnasium")
    environment = load_environment({"kind": "gymnasium", "id": "FrozenLake-v1"})
    episode = environment.episode(environment.tasks[0], 0)
    opening_of(episode)
    left, right = environment.config.actions or ("0", "2")
    unclosed = result_of(episode, f"<think>{right}")
    assert (unclosed.valid, unclosed.observation) == (False, UNCLOSED_THOUGHT)
    assert result_of(episode, f"<think>{right}</think>").valid is False
    assert result_of(episode, f"<think>{right}</think>{left}").valid
    episode.close()


TEMPLATE = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}a:<think>{% endif %}"""


@pytest.mark.parametrize(
    ("inside", "after", "correct"), [("hm", "5", True), ("5", "7", False), ("5", None, False)]
)
def test_a_thought_that_the_prompt_opens(tmp_path, inside, after, correct):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(QUESTION))
    environment = load_environment({"kind": "questions", "tasks": str(path)})
    tokenizer = character_tokenizer("".join(chr(code) for code in range(32, 127)) + "\n")
    tokenizer.chat_template = TEMPLATE
    chat = ChatTokenizer(tokenizer)
    sampled = inside if after is None else f"{inside}</think>{after}"
    action = tokenizer.encode(sampled, add_special_tokens=False)
    conversation = EpisodeConversation(environment, environment.tasks[0], chat, [])
    assert chat.decode_action(conversation.prompt).endswith("a:<think>")
    conversation.act(action, [0.0] * len(action), room=100)
    assert conversation.trajectory.turns[0].action == tuple(action)
    assert conversation.messages[-1].content == f"<think>{sampled}"
    assert (conversation.outcome is Outcome.CORRECT) is correct
    assert conversation.turns[0].valid is (after is not None)
