"""How the agent writes: ``Act: bash`` and one block of commands, ``Act: finish``, ``Act: answer(...)``; or
the same as JSON tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from agent_peft.environments.os_interaction.problems import is_typable
from agent_peft.environments.templates import fill
from agent_peft.environments.tool_calls import (
    TWO_ACTIONS,
    MalformedReply,
    declare,
    read_call,
    read_tool_call,
    write_call,
    write_tool_call,
)

MAX_COMMAND = 32_768  # characters

_ACT = re.compile(r"\bact(?:ion)?\s*+:[\s*`]*+(bash|finish|answer)\b", re.IGNORECASE)
_LANGUAGE = re.compile(r"(?:bash|shell|sh|console)(?=\s|$)", re.IGNORECASE)

BASH_FORMAT = "Act: bash\n\n```bash\n{command}\n```"
FINISH_FORMAT = "Act: finish"
ANSWER_FORMAT = "Act: answer({text})"


@dataclass(frozen=True)
class Command:
    """The agent wants to run ``text`` in its shell.

    >>> Command("ls /").text
    'ls /'
    """

    text: str


@dataclass(frozen=True)
class Finish:
    """The agent is done; ``answer`` is what it says, None where it says nothing.

    >>> Finish().answer is None
    True
    """

    answer: str | None = None


Reply = Command | Finish


def parse_act(reply: str) -> Reply:
    """Understand a reply of the ``act`` protocol. Case, white space and text around the action do not matter.

    Takes time linear in the reply. Raises `MalformedReply`.

    >>> parse_act("Act: bash\\n\\n```bash\\nls /tmp\\n```")
    Command(text='ls /tmp')
    >>> parse_act("Think: it is done.\\nact: finish")
    Finish(answer=None)
    >>> parse_act("Act: answer(42)")
    Finish(answer='42')
    """
    parts = reply.split("```")
    acts = [act.lower() for act in _ACT.findall("\0".join(parts[::2]))]  # those outside the blocks
    if not acts:
        raise MalformedReply(
            f"No action found. Write either\n{BASH_FORMAT.format(command='<commands>')}\nor\n{FINISH_FORMAT}"
        )
    act = acts[0]
    if len(acts) > 1 and set(acts) != {"finish"}:
        raise MalformedReply(TWO_ACTIONS)
    if act == "answer":  # whatever stands in its parentheses is the answer
        i, found = next((i, match) for i in range(0, len(parts), 2) if (match := _ACT.search(parts[i])))
        rest = "```".join([parts[i][found.end() :], *parts[i + 1 :]])
        opening, closing = rest.find("("), _end_of_answer(rest)
        if opening < 0 or closing < opening or rest[:opening].strip():
            raise MalformedReply(f"No answer found. Write\n{ANSWER_FORMAT.format(text='<your answer>')}")
        return _finish(rest[opening + 1 : closing])
    if act == "finish":
        if len(parts) > 1:
            raise MalformedReply(TWO_ACTIONS)
        return Finish()
    if len(parts) < 3:
        why = "The ```bash block is not closed." if len(parts) == 2 else "No bash block found."
        raise MalformedReply(f"{why} Write\n{BASH_FORMAT.format(command='<commands>')}")
    if len(parts) > 3:
        raise MalformedReply("More than one block found. Write all commands in one ```bash block.")
    block = parts[1]
    if language := _LANGUAGE.match(block):
        block = block[language.end() :]
    return _command(block, "The bash block is empty.")


def _end_of_answer(text: str) -> int:
    """The last parenthesis of the first line at whose end all are closed; an explanation may follow."""
    place = depth = 0
    for line in text.splitlines(keepends=True):
        place, depth = place + len(line), depth + line.count("(") - line.count(")")
        if depth <= 0 and ")" in line:
            break
    return text.rfind(")", 0, place)


def parse_tool_call(reply: str) -> Reply:
    """Understand a reply of the ``json_tool_calls`` protocol: one call, in ``<tool_call>`` tags, in a ```json
    block, or plain. Raises `MalformedReply`.

    >>> parse_tool_call('<tool_call>{"name": "bash", "arguments": {"command": "ls /tmp"}}</tool_call>')
    Command(text='ls /tmp')
    >>> parse_tool_call('{"name": "finish", "arguments": {}}')
    Finish(answer=None)
    """
    call = read_tool_call(reply, example=write_tool_call("bash", command="<commands>"))
    return _call(
        call.name, call.arguments, lambda *call, **values: f"Write\n{write_tool_call(*call, **values)}"
    )


def parse_native(reply: str) -> Reply:
    """Understand a call that the model has written in its own form. Raises `MalformedReply`."""
    call = read_call(reply)
    return _call(call.name, call.arguments, lambda name, **values: f"Call {name} with {', '.join(values)}.")


def write_act(action: Command | Finish) -> str:
    """The reply of the ``act`` protocol that does this.

    >>> write_act(Finish("42"))
    'Act: answer(42)'
    """
    if isinstance(action, Command):
        return BASH_FORMAT.format(command=action.text)
    return FINISH_FORMAT if action.answer is None else ANSWER_FORMAT.format(text=action.answer)


def write_json(action: Command | Finish, write: Callable[..., str] = write_tool_call) -> str:
    """The reply of the ``json_tool_calls`` protocol that does this."""
    if isinstance(action, Command):
        return write("bash", command=action.text)
    return write("finish") if action.answer is None else write("answer", text=action.answer)


def _call(name: str, arguments: Mapping[str, Any], example: Callable[..., str]) -> Reply:
    if name == "bash":
        command = arguments.get("command")
        if not isinstance(command, str):
            raise MalformedReply(f"The command is missing. {example('bash', command='<commands>')}")
        return _command(command, "The command is empty.")
    if name == "finish":
        return Finish()
    if name == "answer":
        text = arguments.get("text", arguments.get("answer"))
        if isinstance(text, int | float) and not isinstance(text, bool):
            text = str(text)
        if not isinstance(text, str):
            raise MalformedReply(f"The answer's text is missing. {example('answer', text='<your answer>')}")
        return _finish(text)
    raise MalformedReply(f"There is no tool {name[:40]!r}; call bash, finish or answer.")


def _command(text: str, empty: str) -> Reply:
    text = text.strip()
    if not text:
        raise MalformedReply(empty)
    if len(text) > MAX_COMMAND:
        raise MalformedReply(f"The command is longer than {MAX_COMMAND} characters.")
    if not is_typable(text):
        raise MalformedReply("The command holds a character that cannot be typed.")
    return Command(text)


def _finish(answer: str) -> Reply:
    if not is_typable(answer):
        raise MalformedReply("The answer holds a character that cannot be typed.")
    return Finish(answer.strip())


# Short on purpose: the agent reads it in every episode.
_ACT_PROMPT = """\
You work in a bash shell on Linux, as root. Reply in one of {ways} ways.
To run commands and see their output:
Act: bash

```bash
ls /tmp
```
To end, when the task is done:
Act: finish
{answer}You have {max_turns} turns, the last one included."""
_ACT_ANSWER = "To end with the answer to a question:\nAct: answer(42)\n"

_JSON_PROMPT = f"""\
You work in a bash shell on Linux, as root. Each reply is one tool call.
To run commands and see their output:
{write_tool_call("bash", command="ls /tmp")}
To end, when the task is done:
{write_tool_call("finish")}
{{answer}}You have {{max_turns}} turns, the last one included."""
_JSON_ANSWER = f"To end with the answer to a question:\n{write_tool_call('answer', text='42')}\n"

# the model's chat template shows the tools
_NATIVE_PROMPT = """\
You work in a bash shell on Linux, as root. Each reply is one call of a tool.
You have {max_turns} turns, the last one included."""
_TOOLS = (
    declare("bash", "Run commands and see their output.", command={"type": "string"}),
    declare("finish", "End, when the task is done."),
    declare("answer", "End with the answer to a question.", text={"type": "string"}),
)

PROMPT_PLACEHOLDERS = ("max_turns", "ways", "answer")


@dataclass(frozen=True)
class Protocol:
    """A way to write actions: how they are read, written and explained. ``tools`` are those that the model's
    chat template shows; the last one is for tasks with an answer.
    """

    parse: Callable[[str], Reply]
    write: Callable[[Command | Finish], str]
    system_prompt: str
    answer: str = ""  # how to end with an answer
    tools: Sequence[Mapping[str, Any]] = ()

    def prompt(self, max_turns: int, answers: bool, system_prompt: str | None = None) -> str:
        """The system message. ``system_prompt`` replaces the protocol's text, with its placeholders."""
        values = {
            "max_turns": max_turns,
            "ways": "three" if answers else "two",
            "answer": self.answer if answers else "",
        }
        return fill(self.system_prompt if system_prompt is None else system_prompt, values)


ProtocolName = Literal["act", "json_tool_calls", "native"]
PROTOCOLS: dict[ProtocolName, Protocol] = {
    "act": Protocol(parse_act, write_act, _ACT_PROMPT, _ACT_ANSWER),
    "json_tool_calls": Protocol(parse_tool_call, write_json, _JSON_PROMPT, _JSON_ANSWER),
    "native": Protocol(parse_native, partial(write_json, write=write_call), _NATIVE_PROMPT, tools=_TOOLS),
}
