"""The parts of a reply that is still growing: its thought, its content and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent_peft.agents.serving.conversation import OPEN, PLAIN, Tool, may_be_call, split_calls
from agent_peft.policies.marks import CUT
from agent_peft.policies.reply_text import as_token, marked_calls
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import BARE, CALL_MARKS, ThoughtSplitter, held_length
from agent_peft.types import ToolCall


class Parts(NamedTuple):
    """What is new of a reply."""

    thought: str = ""
    content: str = ""
    calls: Sequence[ToolCall] = ()


class ReplyReader:
    """Sorts the text of a reply, each part as soon as it is certain; calls come whole, at the end. Where the
    tokenizer has a mark as a token, only that token is the mark: its text, spelled in other tokens, is text.

    Args:
        opened: how the prompt opens a thought.
        dialect: of calls: one of `replies`, or ``PLAIN``.
        tools: those that may be called.
        single: read only the first call.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        opened: str = "",
        dialect: str = PLAIN,
        tools: Sequence[Tool] = (),
        single: bool = False,
    ) -> None:
        self._chat, self._dialect, self._tools, self._single = chat, dialect, tools, single
        self._thoughts = ThoughtSplitter(opened, self._written)
        self._strips = bool(dialect != PLAIN and tools)  # the content
        self._marks = (OPEN,) if dialect == PLAIN else tuple(map(self._written, CALL_MARKS[dialect]))
        self._begun = [False, False]  # whether the thought, and the content, has more than blanks
        self._blanks = ""  # at the end of the thought, so far
        self._text = ""  # the content with calls, where there are tools
        self._sent = 0  # characters of it

    def push(self, text: str, marks: Sequence[int] = ()) -> Parts:
        """The parts that are certain with ``text``, in which real marks begin at the places ``marks``."""
        for place in reversed(marks):
            text = text[:place] + CUT + text[place:]
        return self._sort(*self._thoughts.push(text))

    def finish(self) -> Parts:
        """The rest."""
        new = self._sort(*self._thoughts.finish())
        if not self._tools:
            return new
        if self._dialect == PLAIN:
            text, calls = split_calls(self._text.replace(CUT, ""), self._tools)
        else:
            text, calls = self._read(self._text)
        rest = (text.strip() if self._strips else text)[self._sent :]
        return Parts(new.thought, new.content + rest, tuple(calls[: 1 if self._single else None]))

    def _sort(self, thought: str, text: str) -> Parts:
        thought = self._blanks + thought.replace(CUT, "")
        if not self._begun[0]:
            thought = thought.lstrip()
        self._begun[0] |= bool(thought)
        shown = thought.rstrip()
        self._blanks = thought[len(shown) :]
        if not self._begun[1] and (self._thoughts.thinks or self._strips):
            text = text.lstrip()
        self._begun[1] |= bool(text)
        if not self._tools:
            return Parts(shown, text.replace(CUT, ""))
        self._text += text
        new = self._certain().replace(CUT, "")[self._sent :]
        self._sent += len(new)
        return Parts(shown, new)

    def _certain(self) -> str:
        """The beginning of the text that cannot be a call."""
        text = self._text
        if self._dialect == PLAIN:
            whole = not self._sent and may_be_call(text)
        else:
            whole = text[:1] in tuple(BARE.get(self._dialect, ""))
        if whole:
            return ""
        places = [place for mark in self._marks if (place := text.find(mark)) >= 0]
        end = min(places, default=len(text) - held_length(text, self._marks))
        return text[:end].rstrip() if self._strips else text[:end]

    def _read(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. If one of them cannot be read, all is text."""
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self._tools}
        before, calls = marked_calls(self._chat, text, self._dialect, schemas)
        bare = text[:1] in tuple(BARE.get(self._dialect, ""))
        if not calls or any(call.fault or (bare and call.name not in schemas) for call in calls):
            return text.replace(CUT, ""), []
        return before, [ToolCall(call.name, call.arguments) for call in calls]

    def _written(self, mark: str) -> str:
        return as_token(self._chat, mark)
