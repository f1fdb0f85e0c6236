"""What the agent may write, and what it is told where it wrote something else."""

import json
import re
import time
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_peft.environments.os_interaction.protocol import (
    PROTOCOLS,
    Command,
    Finish,
    parse_act,
    parse_tool_call,
)
from agent_peft.environments.tool_calls import MalformedReply, write_tool_call


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Act: bash\n\n```bash\nls /tmp\n```", Command("ls /tmp")),
        ("Think: look first.\n\nAct: bash\n```bash\ncd /srv\nls\n```\n", Command("cd /srv\nls")),
        ("act : BASH\n```\nls\n```", Command("ls")),
        ("**Act: bash**\n```sh\nls\n```", Command("ls")),
        ("Action: bash\n```shell ls```", Command("ls")),
        ("Act: bash\n```\nsh x.sh\n```", Command("sh x.sh")),  # a command, not the block's language
        ("Act: bash\n```bash\necho 'Act: finish'\n```", Command("echo 'Act: finish'")),
        ("Act: bash\n```bash\ncat <<E > f\na\nE\n```", Command("cat <<E > f\na\nE")),
        ("Act: finish", Finish()),
        ("It is done. Act: Finish.", Finish()),
        ("Act: finish\nAct: finish", Finish()),
        ("Act: answer(42)", Finish("42")),
        ("Think: it is f(x).\nAct: answer( f(x) )", Finish("f(x)")),
        ("Act: answer()", Finish("")),
        ("Act: answer(two\nlines)", Finish("two\nlines")),
        ("Act: answer(a (1)\nb (2)\n\nc)", Finish("a (1)\nb (2)\n\nc")),
        ("Act: answer(42)\n\nThat is how many (hidden ones too) there are.", Finish("42")),
        ("Act: answer(\n42\n)\nI counted (twice).", Finish("42")),
        ("Act: answer(1) one, 2) two)\nAs numbered (above).", Finish("1) one, 2) two")),
        ("Act: answer(:( )", Finish(":(")),
    ],
)
def test_act_replies(reply, action):
    assert parse_act(reply) == action


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "No action found"),
        ("ls /tmp", "No action found"),
        ("```bash\nls\n```", "No action found"),
        ("Act: dance", "No action found"),
        ("Act: bashful", "No action found"),
        ("Act: bash", "No bash block found"),
        ("Act: bash\nls", "No bash block found"),
        ("Act: bash\n```bash\nrm -r /srv/a", "not closed"),  # it may have been cut in the middle of a path
        ("Act: bash\n```bash\n \n```", "empty"),
        ("Act: bash\n```bash\nls\n```\n```bash\npwd\n```", "More than one block"),
        ("Act: bash\n```bash\nls\n```\nAct: finish\n", "Two actions"),
        ("Act: finish\nAct: bash\n```bash\nls\n```", "Two actions"),
        ("Act: finish\n```bash\nls\n```", "Two actions"),
        ("Act: answer(1)\nAct: bash\n```bash\nls\n```", "Two actions"),
        ("Act: answer", "No answer found"),
        ("Act: answer 42 (I think)", "No answer found"),
        ("Act: answer )(", "No answer found"),
        ("Act: bash\n```bash\nls \0\n```", "cannot be typed"),
        ("Act: bash\n```bash\nls \ud800\n```", "cannot be typed"),
        ("Act: bash\n```bash\n" + "x" * 40_000 + "\n```", "longer than"),
    ],
)
def test_malformed_acts_say_what_to_write(reply, why):
    with pytest.raises(MalformedReply, match=re.escape(why)) as malformed:
        parse_act(reply)
    assert len(str(malformed.value)) < 200


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls /tmp"}}\n</tool_call>',
            Command("ls /tmp"),
        ),
        ('I look.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call> ', Command("ls")),
        (
            '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}',
            Command("ls"),
        ),  # the closing tag may be a stop word
        ('{"name": "bash", "arguments": {"command": "echo \\"a\\"\\nls"}}', Command('echo "a"\nls')),
        ('```json\n{"name": "bash", "parameters": {"command": "ls"}}\n```', Command("ls")),
        ('{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}', Command("ls")),
        ('{"name": "finish"}', Finish()),
        ('{"name": "finish", "arguments": {}}', Finish()),
        ('{"name": "answer", "arguments": {"text": " 42 "}}', Finish("42")),
        ('{"name": "answer", "arguments": {"answer": 42}}', Finish("42")),
    ],
)
def test_tool_calls(reply, action):
    assert parse_tool_call(reply) == action


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "No tool call found"),
        ("ls", "No tool call found"),
        ("Act: finish", "No tool call found"),
        ("[" * 100_000, "No tool call found"),
        ("9" * 5000, "No tool call found"),
        ('{"name": "bash", "arguments": {"command": "ls"}', "No tool call found"),
        ("[1]", "object with name"),
        ('{"name": 1}', "object with name"),
        ('{"name": "bash"}', "command is missing"),
        ('{"name": "bash", "arguments": {"command": ["ls"]}}', "command is missing"),
        ('{"name": "bash", "arguments": [1]}', "arguments of a tool call are an object"),
        ('{"name": "bash", "arguments": "ls"}', "arguments of a tool call are an object"),
        ('{"name": "bash", "arguments": {"command": " "}}', "empty"),
        ('{"name": "bash", "arguments": {"command": "ls \\u0000"}}', "cannot be typed"),
        ('{"name": "bash", "arguments": {"command": "ls \\ud800"}}', "cannot be typed"),
        ('{"name": "answer", "arguments": {}}', "text is missing"),
        ('{"name": "answer", "arguments": {"text": true}}', "text is missing"),
        ('{"name": "python", "arguments": {}}', "no tool 'python'"),
        ('<tool_call>{"name": "finish"}</tool_call><tool_call>{"name": "finish"}</tool_call>', "Two actions"),
    ],
)
def test_malformed_tool_calls_say_what_to_write(reply, why):
    with pytest.raises(MalformedReply, match=re.escape(why)) as malformed:
        parse_tool_call(reply)
    assert len(str(malformed.value)) < 200


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
@pytest.mark.parametrize(
    "action", [Command("ls -la | grep 'a b'\ncd /x"), Finish(), Finish("4 (four)"), Finish("")]
)
def test_what_is_written_is_read_back(protocol, action):
    assert protocol.parse(protocol.write(action)) == action


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("name", ["act", "json_tool_calls"])  # a template shows the tools of native
def test_the_prompt_says_the_turns_and_each_action(name, answers):
    prompt = PROTOCOLS[name].prompt(7, answers)
    assert "7 turns" in prompt
    assert ("answer" in prompt) == answers
    assert len(prompt.split()) < 90
    for action in (Command("ls /tmp"), Finish(), *([Finish("42")] if answers else [])):
        assert PROTOCOLS[name].write(action) in prompt  # shown as it is to be written


def test_tool_calls_are_json_whatever_the_command_holds():
    command = "echo \"</x>\" \\ \n\t'é'"
    assert (
        json.loads(write_tool_call("bash", command=command).split("\n")[1])["arguments"]["command"] == command
    )


PIECES = st.sampled_from(
    [
        *(
            "Act: ",
            "act:",
            "bash",
            "finish",
            "answer(",
            ")",
            "```",
            "```bash\n",
            "```json",
            "\n",
            "<tool_call>",
            "</tool_call>",
        ),
        *(
            '{"name": ',
            '"bash"',
            '"answer"',
            '"finish"',
            ', "arguments": ',
            '"command": ',
            '"text": ',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            "\\u",
        ),
        *(
            "1e999",
            "-Infinity",
            "NaN",
            "9" * 5_000,
            "\0",
            "\ud800",
            "\x1b",
            "\u202e",
            "null",
            "true",
            "1" * 400 + "." + "1" * 400,
        ),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.text() | st.text('act:nswerbfi \n`sh(){}"', max_size=200) | st.lists(PIECES, max_size=12).map("".join)
)
@example('{"name": "answer", "arguments": {"text": 1e999}}')
@example('{"name": "answer", "arguments": {"text": ' + "9" * 4_000 + "}}")
@example('{"name": "\ud800", "arguments": {}}')
@example('{"name": "bash", "arguments": "' + "[" * 100_000 + '"}')
@example('{"name":' * 50_000)
@example('{"a":' * 900 + "1" + "}" * 900)
@example("Act: answer(" + "(" * 100_000)
def test_any_reply_is_an_action_or_malformed(reply):
    for protocol in PROTOCOLS.values():
        try:
            parsed = protocol.parse(reply)
        except MalformedReply as malformed:
            text = str(malformed)
        else:
            text = parsed.text if isinstance(parsed, Command) else parsed.answer or ""
        text.encode()  # it can be typed, or shown


@pytest.mark.parametrize(
    "piece",
    [
        "act ",
        "act:",
        "Act: bash\n",
        "Act: answer(",
        "`",
        "```",
        "```bash\n",
        " ",
        "*",
        "\n ",
        "<tool_call>",
        "{",
    ],
)
@pytest.mark.parametrize("head", ["", "Act: answer(", "Act: bash\n```bash\n", "<tool_call>"])
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_parsing_takes_linear_time(protocol, head, piece):
    def seconds(length):
        reply = head + piece * (length // len(piece))
        begun = time.process_time()
        with suppress(MalformedReply):
            protocol.parse(reply)
        return time.process_time() - begun

    assert seconds(320_000) < 24 * seconds(40_000) + 0.1  # 8 times as much if linear, 64 times if quadratic
