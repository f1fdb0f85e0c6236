"""Conversations and preferences of one's own: what is read, what is refused, and what is learned."""

import csv
import json

import pytest
from pydantic import ValidationError

from agent_peft.configuration.load import read_config
from agent_peft.environments.chat import Chat, ChatConfig
from agent_peft.environments.preferences import Preferences, PreferencesConfig
from agent_peft.environments.task_commands import validate_tasks
from agent_peft.policies.native import as_template
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.run import train
from agent_peft.types import AgentPeftError, Message, Outcome, Task, ToolCall
from tests.agents.serving.templates import HERMES, QWEN
from tests.policies.test_native import chat_of


def said(*contents, system=None):
    """A conversation of user and assistant, in turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[place % 2], "content": content}
        for place, content in enumerate(contents)
    ]


@pytest.fixture
def table(tmp_path):
    def written(*rows):
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "own.jsonl"

    return written


def chat(tasks, **keys):
    return Chat(ChatConfig(tasks=tasks, **keys))


def preferences(tasks, **keys):
    return Preferences(PreferencesConfig(tasks=tasks, **keys))


def play(environment, task, actions):
    episode = environment.episode(task, seed=0)
    opening = list(episode.start())
    return opening, [episode.step(action) for action in actions]


# -- chat ----------------------------------------------------------------------------------------------------

LONG = said("hello", "good day", "bye", "see you", system="Be polite.")


def test_every_assistant_message_is_an_action(table):
    environment = chat(table({"messages": LONG}))
    (task,) = environment.tasks
    assert task == Task("own:1", content={"messages": LONG})
    assert environment.demonstration(task) == ["good day", "see you"]
    opening, results = play(environment, task, ["good day", "see you"])
    assert opening == [Message("system", "Be polite."), Message("user", "hello")]
    assert [(result.observation, result.done) for result in results] == [("bye", False), ("", True)]
    assert results[-1].outcome is Outcome.CORRECT


def test_only_the_last_one_is_an_action_if_asked(table):
    environment = chat(table({"messages": LONG}), turns="last")
    (task,) = environment.tasks
    assert environment.demonstration(task) == ["see you"]
    opening, results = play(environment, task, ["see you"])
    assert [message.content for message in opening] == ["Be polite.", "hello", "good day", "bye"]
    assert [result.outcome for result in results] == [Outcome.CORRECT]


def test_other_words_are_not_graded(table):
    environment = chat(table({"messages": LONG}))
    for actions, outcome in [
        (["good day", "see  you\n"], Outcome.CORRECT),  # some tokenizers change white space
        (["good day", "see you!"], Outcome.UNKNOWN),
        (["hi", "see you"], Outcome.UNKNOWN),
    ]:
        assert play(environment, environment.tasks[0], actions)[1][-1].outcome is outcome


REPLY = said("", "good day")[1:]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "hello", "completion": "good day"}, {"prompt": "prompt", "completion": "completion"}),
        ({"prompt": "hello", "answer": "good day"}, {"prompt": "prompt", "completion": "answer"}),
        ({"prompt": said("hello"), "answer": REPLY}, {"prompt": "prompt", "completion": "answer"}),
        ({"talk": said("hello", "good day")}, {"messages": "talk"}),
    ],
)
def test_other_columns(table, row, keys):
    assert chat(table(row), **keys).tasks[0].content == {"messages": said("hello", "good day")}


CALL = {"role": "assistant", "tool_calls": [{}]}
LS = {"name": "ls", "description": "Lists.", "parameters": {"type": "object", "properties": {"n": {}}}}
ANSWERS = [{"role": "tool", "tool_call_id": f"call0000{n}", "content": f"<{n}>"} for n in (1, 2)]
TOOL_LOOP = [
    {"role": "user", "content": "How many?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look.",
        "tool_calls": [
            {"id": f"call0000{n}", "function": {"name": "ls", "arguments": json.dumps({"n": n})}}
            for n in (1, 2)
        ],
    },
    *ANSWERS,
    {"role": "assistant", "content": "Two."},
]
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
LABELED = {"prompt": "p", "completion": "a"}


@pytest.mark.parametrize(
    ("kind", "keys", "row", "message"),
    [
        (chat, {}, {"message": LONG}, "there is no column 'messages' for messages; it has message; did you"),
        (chat, {}, {"messages": "hello"}, "line 1: messages must be a list of {role, content}, not 'hello'"),
        (chat, {}, {"messages": []}, "line 1: messages is empty"),
        (chat, {}, {"messages": [{"from": "human", "value": "x"}]}, "line 1: messages: message 1 is {'from'"),
        (chat, {}, {"messages": [*said("x"), {"role": "tool", "content": "3"}]}, "a result without a call"),
        (
            chat,
            {},
            {"messages": [*said("x"), {**CALL, "content": "y"}]},
            "message 2: A tool call is one",
        ),
        (chat, {}, {"messages": [*said("x"), {"role": "assistant"}]}, "message 2 has no text as its content"),
        (chat, {}, {"messages": [*TOOL_LOOP[:2], *said("x")]}, "message 3 is the user's where the tool's"),
        (chat, {}, {"messages": [*TOOL_LOOP[:2], ANSWERS[1]]}, "message 3 is a result without a call"),
        (
            chat,
            {},
            {"messages": LONG, "tools": ["ls"]},
            "line 1: tools holds 'ls'; give a list of {name, des",
        ),
        (chat, {"tools": "f"}, {"messages": LONG}, "there is no column 'f' for tools"),
        (preferences, {}, {**PAIR, "prompt": TOOL_LOOP[:4]}, "message 2 has no text"),
        (chat, {}, {"messages": said("x", " ")}, "message 2 has no text as its content"),
        (chat, {}, {"messages": said("x", "y", "z")}, "the last message is not the assistant's"),
        (chat, {}, {"messages": said("x", "y")[1:]}, "message 1 is the assistant's where the user's is"),
        (chat, {}, {"messages": [*said("x"), *said("x", "y")]}, "message 2 is the user's where the assist"),
        (chat, {}, {"messages": [*said("x", "y"), *LONG]}, "message 3 is the system's where the user's is"),
        (preferences, {}, {"prompt": "p", "chosen": "a"}, "there is no column 'rejected' for rejected"),
        (preferences, {}, {**PAIR, "rejected": ""}, "line 1: rejected is empty"),
        (preferences, {}, {**PAIR, "rejected": " a "}, "line 1: chosen and rejected are the same"),
        (preferences, {}, {**PAIR, "chosen": said("other", "a")}, "chosen holds 2 messages that are not"),
        (preferences, {}, {**PAIR, "prompt": said("p", "q")}, "chosen: message 3 is the assistant's where"),
        (preferences, {}, {**PAIR, "prompt": None}, "line 1: prompt is empty"),
        (preferences, {"label": "good"}, LABELED, "there is no column 'good' for label"),
        (preferences, {"label": "good"}, {**LABELED, "good": "maybe"}, "good is 'maybe'; a label is true or"),
        (
            preferences,
            {"prompt": None},
            {"chosen": said("p", "a"), "rejected": said("q", "b")},
            "chosen and rejected differ before their last message",
        ),
        (preferences, {"prompt": None}, PAIR, "chosen must be a list of {role, content}, not 'a'"),
    ],
)
def test_a_wrong_row_is_one_line(table, kind, keys, row, message):
    path = table(row)
    with pytest.raises(AgentPeftError) as raised:
        kind(path, **keys)
    assert str(raised.value).startswith(f"{path}: ") and message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("listed", [[LS], json.dumps([{"type": "function", "function": LS}])])
def test_calls_results_and_thoughts_are_the_templates_own_text(table, listed):
    environment = chat(table({"messages": TOOL_LOOP, "tools": listed}))
    (task,) = environment.tasks
    tokenizer = chat_of(QWEN.replace("CALL", HERMES))
    trajectory = demonstrate(environment, task, tokenizer, RewardConfig(), seed=0)
    assert trajectory.outcome is Outcome.CORRECT and len(trajectory.turns) == 2
    calls = tuple(ToolCall("ls", {"n": n}, f"call0000{n}") for n in (1, 2))
    assert trajectory.messages[1] == Message("assistant", "", calls, "I look.")
    own = tokenizer.render(
        as_template(trajectory.messages), False, tools=[{"type": "function", "function": LS}]
    )
    assert tokenizer.tokenizer.decode(trajectory.tokens) == own.rstrip("\n")
    assert "I look." in own and own.count("<tool_call>") == 2 and '"description": "Lists."' in own


def test_a_conversation_that_the_template_rewrites_shows_both_texts(table):
    tokenizer = chat_of(QWEN.replace("CALL", HERMES))
    later = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No more."}]
    path = table({"messages": [*TOOL_LOOP, *later], "tools": [LS]})
    with pytest.raises(AgentPeftError, match=r"<think>\\nI look.* becomes '.*<tool_call>.*turns: last of"):
        demonstrate(chat(path), chat(path).tasks[0], tokenizer, RewardConfig(), seed=0)
    last = chat(path, turns="last")
    trajectory = demonstrate(last, last.tasks[0], tokenizer, RewardConfig(), seed=0)
    assert "I look." not in tokenizer.tokenizer.decode(trajectory.tokens)
    assert tokenizer.tokenizer.decode(trajectory.turns[0].action) == "No more.<|im_end|>"


def test_an_empty_table_is_one_line(table):
    for kind in (chat, preferences):
        with pytest.raises(AgentPeftError, match="holds no rows; give a file of rows"):
            kind(table())


@pytest.mark.parametrize(
    ("config_class", "keys", "message"),
    [
        (ChatConfig, {"prompt": "p"}, "completion is missing: prompt names a column"),
        (ChatConfig, {"completion": "p"}, "prompt is missing: completion names a column"),
        (
            ChatConfig,
            {"prompt": "p", "completion": "c", "messages": "m"},
            "messages has no effect with prompt",
        ),
        (PreferencesConfig, {"completion": "c"}, "completion has no effect without label"),
        (PreferencesConfig, {"label": "good", "chosen": "c"}, "chosen has no effect with label"),
        (PreferencesConfig, {"label": "good", "rejected": "c"}, "rejected has no effect with label"),
    ],
)
def test_keys_that_do_not_go_together(config_class, keys, message):
    with pytest.raises(ValidationError, match=message):
        config_class(tasks="x.jsonl", **keys)


def test_parts_and_limits(table):
    path = table(*({"messages": said(f"{n}", "y")} for n in range(10)))
    assert [task.id for task in chat(path, split="train[50%:]", limit=2).tasks] == ["own:6", "own:7"]


# -- preferences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": said("1+1="), "chosen": said("", "2")[1:], "rejected": said("", "3")[1:]},
        # replies that repeat the prompt
        {"prompt": "1+1=", "chosen": said("1+1=", "2"), "rejected": said("1+1=", "3")},
    ],
)
def test_a_pair_in_every_form(table, row):
    environment = preferences(table(row))
    (task,) = environment.tasks
    assert task.content == {"prompt": said("1+1="), "chosen": "2", "rejected": "3"}
    assert (environment.demonstration(task), environment.rejection(task)) == (["2"], ["3"])
    outcomes = {reply: play(environment, task, [reply])[1][-1].outcome for reply in ("2", "3", "4")}
    assert outcomes == {"2": Outcome.CORRECT, "3": Outcome.INCORRECT, "4": Outcome.UNKNOWN}


def test_a_prompt_may_be_a_conversation(table):
    prompt = said("1+1=", "2", "2+1=", system="Add.")
    path = table({"q": prompt, "good": "3", "bad": "4"})
    environment = preferences(path, prompt="q", chosen="good", rejected="bad")
    opening, _ = play(environment, environment.tasks[0], ["3"])
    assert [message.role for message in opening] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("label", [True, "true", 1, "1", " True "])
@pytest.mark.parametrize("form", ["columns", "conversation"])
def test_a_label_makes_one_reply_good_or_bad(table, label, form):
    if form == "columns":
        rows, keys = [{"prompt": "1+1=", "completion": "2", "good": label}], {}
        rows.append({"prompt": "1+1=", "completion": "3", "good": "false"})
    else:
        rows, keys = [{"messages": said("1+1=", "2"), "good": label}], {"prompt": None}
        rows.append({"messages": said("1+1=", "3"), "good": 0})
    good, bad = (environment := preferences(table(*rows), label="good", **keys)).tasks
    assert good.content == {"prompt": said("1+1="), "chosen": "2"}
    assert bad.content == {"prompt": said("1+1="), "rejected": "3"}
    assert (environment.demonstration(good), environment.rejection(good)) == (["2"], None)
    assert (environment.demonstration(bad), environment.rejection(bad)) == (None, ["3"])
    assert play(environment, good, ["2"])[1][-1].outcome is Outcome.CORRECT
    assert play(environment, bad, ["3"])[1][-1].outcome is Outcome.INCORRECT
    assert play(environment, bad, ["2"])[1][-1].outcome is Outcome.UNKNOWN


def test_whole_conversations_share_their_prompt(table):
    row = {"chosen": said("1+1=", "2", "2+1=", "3"), "rejected": said("1+1=", "2", "2+1=", "4")}
    (task,) = preferences(table(row), prompt=None).tasks
    assert task.content == {"prompt": said("1+1=", "2", "2+1="), "chosen": "3", "rejected": "4"}


# -- what may learn from them --------------------------------------------------------------------------------

SUMS = [(f"{n}+1=", str(n + 1), str(n)) for n in range(8)]
ROWS = {
    "chat": [{"messages": said(question, answer)} for question, answer, _ in SUMS],
    "preferences": [{"prompt": p, "chosen": chosen, "rejected": rejected} for p, chosen, rejected in SUMS],
}
CONFIG = """\
run_dir: {folder}/run
policy:
  kind: scratch
  alphabet: "0123456789+-*= "
  architecture: {{model_type: gpt2, n_layer: 1, n_head: 1, n_embd: 16, n_positions: 64}}
environment: {{kind: {kind}, tasks: {tasks}}}
sampling: {{max_new_tokens: 4}}
algorithm: {algorithm}
steps: 2
tasks_per_step: 4
"""


def configured(table, tmp_path, kind, algorithm, more=""):
    text = CONFIG.format(folder=tmp_path, kind=kind, tasks=table(*ROWS[kind]), algorithm=algorithm)
    (tmp_path / "c.yaml").write_text(text + more)
    return read_config(tmp_path / "c.yaml")[0]


@pytest.mark.parametrize("kind", ROWS)
def test_a_supervised_stage_learns_from_them(table, tmp_path, kind, caplog):
    train(configured(table, tmp_path, kind, "sft"))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["demonstrations_incorrect"] for step in steps] == [0.0, 0.0]
    assert not [record for record in caplog.records if record.name.startswith("agent_peft")]


@pytest.mark.parametrize("kind", ROWS)
def test_there_is_no_outcome_to_reward(table, tmp_path, kind):
    with pytest.raises(
        AgentPeftError, match=rf"c.yaml:6: environment: {kind} has no outcome to grade, so grpo has no reward"
    ) as raised:
        configured(table, tmp_path, kind, "grpo")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "orpo", "simpo", "rloo"])
def test_rows_with_a_label_are_for_kto_alone(tmp_path, algorithm):
    rows, file = tmp_path / "rows.jsonl", tmp_path / "c.yaml"
    rows.write_text("".join(json.dumps(LABELED | {"good": n % 2}) + "\n" for n in range(4)))
    keys = {"folder": tmp_path, "kind": "preferences", "tasks": f"{rows}, label: good"}
    file.write_text(CONFIG.format(**keys, algorithm=algorithm))
    with pytest.raises(AgentPeftError, match=rf"one reply, good or bad, and {algorithm} does not learn from"):
        read_config(file)
    file.write_text(CONFIG.format(**keys, algorithm="kto"))
    assert read_config(file)[0].stages[0].algorithm.kind == "kto"


def test_nor_from_python(table, policy_config):
    from agent_peft.policies.loading import load_policy
    from agent_peft.training.trainer import Trainer

    policy = load_policy(policy_config, seed=0)
    environment = chat(table(*ROWS["chat"]))
    with pytest.raises(AgentPeftError, match="Chat has no outcome to grade, so its episodes cannot be rew"):
        Trainer(policy, environment, {"algorithm": "rloo", "steps": 1})


@pytest.mark.parametrize("kind", ROWS)
def test_validation_knows_them(table, kind):
    report = validate_tasks(kind, tasks=table(*ROWS[kind]))
    assert (report["tasks"], report["gold_correct"], report["rejected"]) == (8, 8, [])


@pytest.mark.parametrize("spelled", [json.dumps, str], ids=["JSON", "Python"])
def test_messages_in_a_cell_of_csv_are_messages(tmp_path, spelled):
    path, prompt = tmp_path / "t.csv", said("hello", "good day", "bye")
    cells = {"prompt": spelled(prompt), "chosen": "see you", "rejected": spelled(said("", "no")[1:])}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([cells.keys(), cells.values()])
    opening = [Message(**message) for message in prompt]
    environment = preferences(path)
    assert list(environment.episode(environment.tasks[0], seed=0).start()) == opening
    assert environment.rejection(environment.tasks[0]) == ["no"]
    environment = chat(path, prompt="prompt", completion="chosen", turns="last")
    assert list(environment.episode(environment.tasks[0], seed=0).start()) == opening
    path.write_text('messages\n"[{""role"": ""user""]"\n')
    with pytest.raises(
        AgentPeftError, match="line 2: messages begins as a list of messages, and is not JSON"
    ):
        chat(path)
