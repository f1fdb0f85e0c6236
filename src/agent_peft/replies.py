"""The parts of a sampled reply: its thoughts, the text that acts, and its calls of tools."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_PYTHON = 32_768  # characters of a list of calls; Python's parser has no other bound

# how thoughts open and close: of most models, Mistral's, Seed's and Gemma 4's
THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
}
_MARK = re.compile("|".join(re.escape(mark) for pair in THOUGHTS.items() for mark in pair))
_DECODER = json.JSONDecoder(strict=False)
_BLANKS = re.compile(r"\s*")
# tags that open something: the first of a line, or next to another tag
_FUNCTION_TAG = re.compile(r"(?:\n[ \t]*+|</?tool_call>\s*+|</function>\s*+)<function=")
_PARAMETER_TAG = re.compile(r"(?:\n[ \t]*+|</parameter>\s*+|\A\s*+)<parameter=")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_MARKS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_PYTHON_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")

PYTHON_FAULT = "The tool calls are not a Python list of calls with named literals, as [name(key=1)]."
UNCLOSED_THOUGHT = (
    "The reply ends inside its thought, so it has no action. Close the thought, then write the action."
)


@dataclass(frozen=True)
class Reply:
    """A reply in parts.

    Attributes:
        thought: what the reply's thoughts hold; None where it has none.
        text: the reply without its thoughts; empty where a thought is not closed.
        closed: whether every thought is closed.
    """

    thought: str | None
    text: str
    closed: bool = True


def read_reply(reply: str) -> Reply:
    """Split a reply. Text before a closing mark that nothing opens is a thought, which the prompt opened.

    Takes time linear in the reply, and never raises.

    >>> read_reply("<think>\\nfirst ls\\n</think>\\n\\nAct: finish")
    Reply(thought='\\nfirst ls\\n', text='Act: finish', closed=True)
    >>> read_reply("<think> Act: finish")
    Reply(thought=' Act: finish', text='', closed=False)
    """
    thoughts: list[str] = []
    texts: list[str] = []
    closing, place = None, 0
    for mark in _MARK.finditer(reply):
        if closing not in (None, mark[0]):
            continue
        part = reply[place : mark.start()]
        if closing is None and mark[0] in THOUGHTS:
            texts.append(part)
            closing = THOUGHTS[mark[0]]
        elif closing is None:
            thoughts += [*texts, part]
            texts.clear()
        else:
            thoughts.append(part)
            closing = None
        place = mark.end()
    if closing is not None:
        return Reply("".join([*thoughts, reply[place:]]), "", closed=False)
    if place == 0:
        return Reply(None, reply)
    return Reply("".join(thoughts), "".join([*texts, reply[place:]]).strip())


class ThoughtSplitter:
    """Splits a reply that is still growing, at the marks of `read_reply`, of which each part of the result
    depends on nothing later: a closing mark that nothing opens is text.

    Args:
        opened: how the prompt opens a thought (`open_thought`).
        written: how the text writes a mark.

    >>> splitter = ThoughtSplitter("<think>")
    >>> splitter.push("first ls</th"), splitter.push("ink> Act: finish"), splitter.finish()
    (('first ls', ''), ('', ' Act: finish'), ('', ''))
    """

    def __init__(self, opened: str = "", written: Callable[[str], str] = str) -> None:
        self._closings = {written(mark): written(closing) for mark, closing in THOUGHTS.items()}
        self._texts = {written(closing): closing for closing in THOUGHTS.values()}
        mark = _MARK.match(opened)
        self._closing = written(THOUGHTS[mark[0]]) if mark else None
        self._held = ""
        self.thinks = mark is not None  # whether there was a thought, which may be empty

    @property
    def closed(self) -> bool:
        """Whether no thought is open."""
        return self._closing is None

    @property
    def closing(self) -> str:
        """The mark that closes the open thought; empty where none is open."""
        return self._texts[self._closing] if self._closing else ""

    def push(self, text: str) -> tuple[str, str]:
        """The thought and the text that are certain since the last call."""
        text, parts = self._held + text, ["", ""]
        while True:
            marks = [self._closing] if self._closing else [*self._closings]
            place, mark = min(
                ((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=(-1, "")
            )
            if place < 0:
                certain = len(text) - held_length(text, marks)
                parts[self._closing is None] += text[:certain]
                self._held = text[certain:]
                return parts[0], parts[1]
            parts[self._closing is None] += text[:place]
            self._closing = None if self._closing else self._closings[mark]
            self.thinks = True
            text = text[place + len(mark) :]

    def finish(self) -> tuple[str, str]:
        """The rest."""
        rest, self._held = self._held, ""
        return ("", rest) if self._closing is None else (rest, "")


def held_length(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of ``text`` with which one of ``marks`` begins, itself not included.

    >>> held_length("see <tool", ["<tool_call>"])
    5
    """
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = (text[-length:] for length in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)


def open_thought(prompt: str) -> str:
    """The end of a prompt that opens a thought: from the opening mark on; empty where none is open.

    >>> open_thought("<|im_start|>assistant\\n<think>\\n"), open_thought("<think></think>")
    ('<think>\\n', '')
    """
    last = max(_MARK.finditer(prompt), key=lambda mark: mark.start(), default=None)
    return prompt[last.start() :] if last is not None and last[0] in THOUGHTS else ""


@dataclass(frozen=True)
class Call:
    """A call of a tool. ``fault`` is empty, or a sentence for the model: what is wrong."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    fault: str = ""


def read_calls(text: str, dialect: str) -> tuple[str, tuple[Call, ...]]:
    """The text without its calls, and the calls, in a dialect named as vLLM names its parsers (``DIALECTS``).
    Thoughts must be gone (`read_reply`). Takes time linear in the text, and never raises.

    >>> read_calls('Look: <tool_call>{"name": "ls", "arguments": {"path": "/"}}</tool_call>', "hermes")
    ('Look:', (Call(name='ls', arguments={'path': '/'}, id=None, fault=''),))
    """
    before, calls = DIALECTS[dialect](text)
    return before.strip(), tuple(calls)


def call_of(content: Any) -> Call:
    """The call that JSON describes: an object with a name and arguments, or a list of one."""
    if isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict) or not isinstance(content.get("name"), str) or not content["name"]:
        return Call(fault="A tool call is one JSON object with name and arguments.")
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as a text of JSON
        arguments = _json(arguments)[0]
    name, ident = content["name"], content.get("id")
    if not isinstance(arguments, dict):
        return Call(name, fault="The arguments of a tool call are a JSON object.")
    return Call(name, arguments, ident if isinstance(ident, str) else None)


def cast(call: Call, parameters: Mapping[str, Any]) -> Call:
    """The call with values that its dialect writes as texts, read as the JSON schema ``parameters`` types
    them.

    >>> cast(Call("head", {"n": "3"}), {"properties": {"n": {"type": "integer"}}}).arguments
    {'n': 3}
    """
    schemas = parameters.get("properties")
    values = dict(call.arguments)
    for key, value in values.items():
        kinds = _kinds(schemas.get(key) if isinstance(schemas, dict) else None)
        if not isinstance(value, str):
            continue
        text = _PYTHON_WORDS.get(value.strip(), value)
        if "null" in kinds and text.strip() == "null":
            values[key] = None
        elif "string" not in kinds:
            content, end = _json(text)
            if not text[end:].strip() and (content is not None or text.strip() == "null"):
                values[key] = content
    return replace(call, arguments=values)


def _kinds(schema: Any) -> set[str]:
    """The types of a JSON schema, and of its alternatives; without one, a text."""
    if not isinstance(schema, dict):
        return {"string"}
    schemas = [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    types = [one["type"] for one in schemas if isinstance(one, dict) and one.get("type")]
    kinds = {str(kind) for named in types for kind in (named if isinstance(named, list) else [named])}
    return kinds or {"string"}


def _json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at ``start`` and where it ends; None and ``start`` where there is none. Strings may hold
    newlines.
    """
    try:
        start = _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # it matches anywhere
        content, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return content, end


class _Blocks:
    """Where the text behind each mark starts, and where the next mark begins. The reader of a block sets
    ``end`` to where its JSON ends: marks before it are text.
    """

    def __init__(self, text: str, mark: str) -> None:
        self.text, self.mark, self.end = text, mark, 0
        self.before = text.partition(mark)[0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while (place := self.text.find(self.mark, self.end)) >= 0:
            self.end = place + len(self.mark)
            stop = self.text.find(self.mark, self.end)
            yield self.end, len(self.text) if stop < 0 else stop


def _hermes(text: str) -> tuple[str, list[Call]]:
    """Qwen 2.5 and 3, Granite 4, Hermes: JSON in tags. A tag in a string is text."""
    blocks, calls = _Blocks(text, "<tool_call>"), []
    for start, _ in blocks:
        content, blocks.end = _json(text, start)
        calls.append(Call(fault="The tool call is not JSON.") if content is None else call_of(content))
    return blocks.before, calls


def _qwen3_coder(text: str) -> tuple[str, list[Call]]:
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3: a tag for the function and each parameter. The values are
    texts, without the newline next to each tag. In a line of a value a tag opens nothing.
    """
    before, mark, rest = text.partition("<function=")
    blocks = _FUNCTION_TAG.split(rest) if mark else []
    return before.replace("<tool_call>", ""), [_function(block) for block in blocks]


def _function(block: str) -> Call:
    name, mark, body = block.partition(">")
    name = name.strip()
    if not mark or not name or "\n" in name:
        return Call(fault="The tag <function=NAME> has no name.")
    end = body.rfind("</function>")
    if end < 0:
        return Call(name, fault="The tag </function> is missing.")
    arguments = {}
    for part in _PARAMETER_TAG.split(body[:end])[1:]:
        key, mark, value = part.partition(">")
        if not mark:
            return Call(name, fault=f"The tag <parameter={key.strip()[:40]}> is not closed.")
        close = value.rfind("</parameter>")  # the next tag closes a value as well
        value = value if close < 0 or value[close + len("</parameter>") :].strip() else value[:close]
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return Call(name, arguments)


def _llama3_json(text: str) -> tuple[str, list[Call]]:
    """Llama 3: the whole reply is JSON with a name, or what follows ``<|python_tag|>``; a semicolon between
    calls.
    """
    bare = text.lstrip().startswith("{")
    before, mark, rest = ("", "", text) if bare else text.partition("<|python_tag|>")
    if not mark and not bare:
        return text, []
    calls: list[Call] = []
    place = 0
    while True:
        content, end = _json(rest, place)
        if content is None:
            return before, [*calls, Call(fault="The tool call is not JSON.")]
        if bare and not calls and "name" not in content:
            return text, []
        calls.append(call_of(content))
        after = rest[end : end + 64].lstrip()
        if not after.startswith(";"):
            return before, calls
        place = rest.index(";", end) + 1


def _mistral(text: str) -> tuple[str, list[Call]]:
    """Mistral: ``[TOOL_CALLS]`` before a JSON list, or before each ``NAME[CALL_ID]ID[ARGS]{…}``. In JSON the
    mark is text.
    """
    blocks, calls = _Blocks(text, "[TOOL_CALLS]"), list[Call]()
    for start, stop in blocks:
        head = text[start:stop]
        if head.lstrip().startswith(("[{", "{")):
            content, blocks.end = _json(text, start)
            if content is None:
                calls.append(Call(fault="The tool call is not JSON."))
            else:
                calls += [call_of(one) for one in (content if isinstance(content, list) else [content])]
            continue
        name, mark, _ = head.partition("[ARGS]")
        if not mark:
            name = head.partition("{")[0]
        arguments, blocks.end = _json(text, start + len(name) + len(mark))
        name, _, ident = name.partition("[CALL_ID]")
        calls.append(call_of({"name": name.strip(), "arguments": arguments, "id": ident.strip() or None}))
    return blocks.before, calls


def _deepseek_v3(text: str) -> tuple[str, list[Call]]:
    """DeepSeek V3.1: ``NAME<｜tool▁sep｜>{…}``; V3, R1: ``function<｜tool▁sep｜>NAME``, a block. In JSON the
    marks are text.
    """
    blocks, calls = _Blocks(text, "<｜tool▁call▁begin｜>"), []
    for start, stop in blocks:
        name, mark, rest = text[start:stop].partition("<｜tool▁sep｜>")
        start += len(name) + len(mark)
        if rest and not rest.lstrip().startswith("{"):
            name, mark, _ = rest.partition("```json")
            start += len(name) + len(mark)
        arguments, blocks.end = _json(text, start)
        calls.append(call_of({"name": name.strip(), "arguments": arguments}))
    return blocks.before.replace("<｜tool▁calls▁begin｜>", ""), calls


def _pythonic(text: str) -> tuple[str, list[Call]]:
    """LFM2, Llama 4, Olmo 3: a Python list of calls, whose arguments are named literals."""
    mark = next((mark for mark in _PYTHON_MARKS if mark in text), "")
    before, _, rest = text.partition(mark) if mark else ("", "", text)
    code = (rest.partition(_PYTHON_MARKS[mark])[0] if mark else text).strip()
    if not mark and not _PYTHON_CALL.match(code):
        return text, []
    try:
        tree = ast.parse(code[:MAX_PYTHON], mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = []
        for node in nodes:
            assert isinstance(node, ast.Call) and not node.args
            values = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            json.dumps(values, allow_nan=False)
            calls.append(Call(ast.unparse(node.func), values))
    except (AssertionError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        calls = [Call(fault=PYTHON_FAULT)]
    return before if mark else "", calls


DIALECTS: Mapping[str, Callable[[str], tuple[str, list[Call]]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
}

# how calls begin; a text that begins with one of BARE may be a call as a whole
CALL_MARKS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": tuple(_PYTHON_MARKS),
}
BARE: Mapping[str, str] = {"llama3_json": "{", "pythonic": "["}
