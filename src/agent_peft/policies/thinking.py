"""A budget of tokens for the thoughts of a reply: once it is used up, an open thought is closed by force."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agent_peft.policies.marks import CUT
from agent_peft.policies.reply_text import as_token
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.replies import THOUGHTS, ThoughtSplitter
from agent_peft.types import AgentPeftError, TrustError

_END = 16  # tokens of a prompt that hold an opening mark at its end, and blanks


class ThinkingBudget:
    """Follows one reply, token by token. Its thoughts have ``limit`` tokens together, marks not counted.

    Args:
        before: the tokens before the reply, or at least their end, which may open a thought.
    """

    def __init__(self, chat: ChatTokenizer, limit: int, before: Sequence[int]) -> None:
        self._chat, self._left = chat, limit
        end, written = self._text(before[-_END:]).rstrip(), partial(as_token, chat)
        opened = next((mark for mark in THOUGHTS if end.endswith(written(mark))), "")
        self._splitter = ThoughtSplitter(opened, written)
        self._closing: list[int] = []
        self._count(inside=False)

    @property
    def open(self) -> bool:
        """Whether the reply is inside a thought."""
        return not self._splitter.closed

    @property
    def forced(self) -> int | None:
        """The next token, where it closes a thought by force; None where the policy draws it."""
        return self._closing[0] if self._closing else None

    def push(self, token: int) -> None:
        """Read the next token of the reply."""
        inside = self.open
        self._splitter.push(self._text([token]))
        if self._closing:
            self._closing.pop(0)
        else:
            self._count(inside)

    def _count(self, inside: bool) -> None:
        if self._splitter.closed:
            return
        self._left -= inside
        if self._left <= 0:
            self._closing = self._chat.encode_rendered(self._splitter.closing)

    def _text(self, tokens: Sequence[int]) -> str:
        """The tokens' bytes as characters. Marks are ASCII, and each one that is a token follows a cut."""
        chat = self._chat
        texts = (chat.token_bytes(token).decode("latin-1") for token in tokens)
        return "".join(
            CUT * bool(chat.marks.text(token)) + text for token, text in zip(tokens, texts, strict=True)
        )


def forced_places(
    chat: ChatTokenizer, limit: int, before: Sequence[int], action: Sequence[int]
) -> tuple[int, ...]:
    """The places of an action whose tokens a budget of ``limit`` has forced."""
    budget, places = ThinkingBudget(chat, limit, before), list[int]()
    for place, token in enumerate(action):
        if budget.forced is not None and token != budget.forced:
            raise TrustError(
                f"a thought is longer than sampling.max_thinking_tokens: {limit}: the sampler does not close "
                "it; engine.kind: server needs agent-peft serve-policy of this version"
            )
        if budget.forced is not None:
            places.append(place)
        budget.push(token)
    return tuple(places)


def check_thinking(chat: ChatTokenizer, limit: int | None) -> None:
    """Refuse a ``limit`` of thoughts where the model has no mark that opens a thought."""
    texts = (chat.open_thought, str(chat.template), *chat.marks.tokens)
    if limit is None or any(mark in text for mark in THOUGHTS for text in texts):
        return
    raise AgentPeftError(
        "sampling.max_thinking_tokens: neither the model's chat template nor its tokenizer has a mark that "
        f"opens a thought ({', '.join(THOUGHTS)}); remove the key"
    )
