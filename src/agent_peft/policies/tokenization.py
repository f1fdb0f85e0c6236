"""Conversations to tokens, append-only: tokens in, tokens out.

A conversation is encoded once, as it grows. The prompt of turn n+1 is the prompt of turn n, then the tokens
sampled in turn n exactly as they were sampled, then ``following(…)``. Sampled tokens are never decoded and
encoded again, so the trained tokens are the sampled ones.

The text that the chat template writes *around* contents is called its frames. They are found by rendering
conversations of sentinel words and cutting at the sentinels. Control tokens come from frames only: contents
are encoded with special tokens switched off, so an observation that holds the text ``<|im_end|>`` stays
text.

Contents are kept verbatim, with one exception: where the template trims the contents of a role (Gemma and
Llama 3 do), ``opening`` trims them too, since the model was tuned on trimmed contents. ``following`` never
trims.

Some templates are not append-only: in a longer conversation they rewrite earlier turns (Qwen3 drops the
thoughts of earlier assistant turns; Mistral moves the system message to the last user message).
``rewriting`` then states how. An episode follows the template: a rewritten history is another prompt
(`NativeFormat.next_prompt`). Where it cannot, or should not (``thoughts: keep``), ``following`` keeps earlier
turns as they were sampled, and logs a warning the first time.

Some templates write today's date (Llama 3.2). Here it is always ``models.tokenizer.DATE``, so that the same
conversation has the same tokens tomorrow.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from agent_peft.policies.marks import CUT, Marks
from agent_peft.policies.models.chat_template import fold, reads_replies, rewriting
from agent_peft.policies.models.tokenizer import PLAIN_TEMPLATE, spelled_bytes, undated
from agent_peft.replies import open_thought
from agent_peft.types import AgentPeftError, Message, Role

logger = logging.getLogger(__name__)

_WORD = "xsentinel{}x"  # plain letters and a number: no template and no tokenizer treats it specially
_SENTINEL = re.compile(r"xsentinel(\d+)x")


class ChatTokenizer:
    """Turns conversations into tokens for one tokenizer, and sampled tokens into text.

    Args:
        ends: further token ids that end a turn: those of the model's generation configuration.
        dialect: of calls of tools, one of `replies`; "auto" is the one that reads the template's own calls.

    Attributes:
        end_of_turn: token ids that end an assistant's turn: ``ends``, the tokenizer's eos, and the token that
            the template writes after an assistant message.
        marks: the tokens that the tokenizer adds to its vocabulary.
        template: the chat template that is used where it is not the tokenizer's own.
        open_thought: how the generation prompt opens a thought; empty where it opens none.
        closed_by: token ids that may end an action in place of the one that the template writes.
        rewriting: how one more turn changes the earlier turns of the template's text; None where it does not.
        thoughts: whether an episode follows a template that rewrites, or keeps its turns as sampled.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int] = (), dialect: str = "auto"
    ) -> None:
        self.tokenizer, self.dialect = tokenizer, dialect
        # whether special tokens are split is a state of the tokenizer, which calls on other threads change
        self.encoding = threading.Lock()
        self.template = (
            undated(tokenizer.chat_template) if tokenizer.chat_template else self._plain_template()
        )
        self.marks = Marks(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._verbatim = frozenset(tokenizer.added_tokens_decoder)
        self._byte_level = "ByteLevel" in repr(
            getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        )

        frames = self._turn_frames()
        framing = frozenset(text for text in self.marks.tokens if any(text in frame for frame in frames))
        self._controls = frozenset(
            i for text, i in self.marks.tokens.items() if i in self.marks.special or text in framing
        )
        self._trimmed = frozenset(role for role in get_args(Role) if self._trims(role))
        self._closing, self._after_closing = self._split_closing(frames[4])
        self._generate = frames[5]
        self.open_thought = open_thought(self._generate)
        lead = frames[3].removeprefix(frames[5])
        # a blank before the reply that the generation prompt lacks, so that the policy has to write it
        self._lead = "" if lead.strip() else lead
        eos = tokenizer.eos_token_id
        self._ending = self._closing or ([] if eos is None else [int(eos)]) or sorted(ends)[:1]
        if not self._ending:
            raise AgentPeftError(
                "the tokenizer has no end-of-sequence token and its chat template ends no turn: "
                "set tokenizer.eos_token"
            )
        self.end_of_turn: frozenset[int] = frozenset(
            [*self._ending[-1:], *ends, *([] if eos is None else [int(eos)])]
        )
        # Any end may replace the one that the template writes, except where that one begins the next message.
        self.closed_by = self.end_of_turn if self._closes_the_last() else frozenset(self._closing[-1:])
        self.thoughts: Literal["template", "keep"] = "template"
        self.rewriting = rewriting(self.render, self._lead)
        self._reads_replies = reads_replies(self.render, self.open_thought)
        self._warnings = [] if self.rewriting is None else [self.rewriting]
        if self.rewriting is None and tokenizer.chat_template and not self._agrees_with_template():
            warnings.warn(
                "message by message, the tokens differ from those of the whole chat template (a prefix "
                "space?)",
                stacklevel=2,
            )

    @property
    def follows_template(self) -> bool:
        """Whether an episode gets another row where the template rewrites its history. It needs a template
        that writes a reply, without its thought, as the policy does.
        """
        return self.thoughts == "template" and self._reads_replies

    @property
    def rewrites(self) -> bool:
        """Whether that happens at a message of the user."""
        return self.follows_template and self.rewriting is not None

    @property
    def history(self) -> str:
        """What becomes of the earlier turns of an episode."""
        if self.rewriting is None:
            return "an episode is one row, since the template only appends"
        if self.rewrites:
            return f"an episode has another row wherever {self.rewriting}"
        return f"an episode is one row, whose turns stay as sampled, although {self.rewriting}"

    def opening(self, messages: Sequence[Message], typed: bool = False) -> list[int]:
        """The tokens of the conversation so far and the generation prompt: the policy acts next. With
        ``typed``, no mark in a message of another than the assistant is a token.

        Where the template has no system role or wants alternating roles, the system message is put before the
        first user message and neighbours of one role are joined, a blank line between.
        """
        if not messages:
            raise AgentPeftError("a conversation needs at least one message")
        if unknown := [m.role for m in messages if m.role not in get_args(Role)]:
            raise AgentPeftError(
                f"a message has the role {unknown[0]!r}; the roles are {', '.join(get_args(Role))}"
            )
        try:
            frames, order = self._frames([m.role for m in messages])
        except TemplateError:
            folded = fold(messages)
            try:
                frames, order = self._frames([m.role for m in folded])
            except TemplateError as error:
                roles = ", ".join(m.role for m in messages)
                raise AgentPeftError(
                    f"the chat template refuses the conversation ({roles}): {error}"
                ) from error
            messages = folded
        contents = [m.content.strip() if m.role in self._trimmed else m.content for m in messages]
        if typed:
            contents = [
                self.cut(content, message.role == "assistant")
                for content, message in zip(contents, messages, strict=True)
            ]
            return self._encode(frames, [contents[i] for i in order], self._encode_cut)
        return self._encode(frames, [contents[i] for i in order])

    def following(self, observation: str, last_action: Sequence[int]) -> list[int]:
        """The tokens to append after the sampled ``last_action`` so that the policy can act on
        ``observation``.

        They are the end of the assistant message (without its end-of-turn token if the action ends with
        one; a cut action gets it here, as a token that was not sampled), the user message and the
        generation prompt.
        """
        with suppress(IndexError):  # one of the threads that call this warns, once
            logger.warning(
                "with the model's chat template %s; an episode keeps its turns as they were sampled, and the "
                "policy learns to act after those: serve it with a template that keeps them too, or choose "
                "an environment of one turn",
                self._warnings.pop(),
            )
        ended = bool(last_action) and last_action[-1] in self.closed_by
        return ([] if ended else list(self._closing)) + self._encode(
            [self._after_closing, self._generate], [observation]
        )

    def action_tokens(self, text: str) -> list[int]:
        """The tokens of an assistant's reply as if the policy had written it, end-of-turn token included:
        for demonstrations.
        """
        return self._encode_plain(self._lead + text, guarded=False) + self._ending

    def decode_action(self, tokens: Sequence[int]) -> str:
        """The text of an action. Special tokens are dropped at its end and shown elsewhere; invalid UTF-8
        becomes U+FFFD.
        """
        dropped = self.end_of_turn.union(self.tokenizer.all_special_ids)
        end = len(tokens)
        while end and tokens[end - 1] in dropped:
            end -= 1
        text = self.tokenizer.decode(
            list(tokens[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text."""
        if (text := self._bytes.get(token)) is None:
            spelled = self.tokenizer.convert_ids_to_tokens(token)
            if spelled is None:  # an id beyond the vocabulary (padded embeddings) adds nothing
                text = b""
            elif token in self._verbatim:
                text = str(spelled).encode()
            else:
                text = spelled_bytes(str(spelled), self._byte_level)
            self._bytes[token] = text
        return text

    def cut(self, text: str, controls: bool = False) -> str:
        """``text`` without marks for `encode_rendered` (with ``controls``, without those of frames)."""
        return self.marks.cut(text, self._controls if controls else None)

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a text that the template has written around contents with cut marks."""
        return self._encode([text], [], self._encode_cut)

    # Encoding: frames with special tokens on, contents with them off.

    def _encode(
        self,
        frames: Sequence[str],
        contents: Sequence[str],
        encode_plain: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """frames[0] contents[0] frames[1] …; plain text between control tokens is encoded in one piece."""
        encode_plain = encode_plain or self._encode_plain
        tokens: list[int] = []
        plain = ""
        for i, frame in enumerate(frames):
            parts = self.marks.pattern.split(frame)  # text, token, text, token, …, text
            for j, part in enumerate(parts):
                if j % 2:
                    tokens += [*encode_plain(plain), self.marks.tokens[part]]
                    plain = ""
                    continue
                if j and parts[j - 1] in self.marks.swallow_right:
                    part = part.lstrip()
                if j + 1 < len(parts) and parts[j + 1] in self.marks.swallow_left:
                    part = part.rstrip()
                plain += part
            if i < len(contents):
                plain += contents[i]
        return tokens + encode_plain(plain)

    def _encode_cut(self, text: str) -> list[int]:
        return [token for piece in text.split(CUT) for token in self._without_special(piece)]

    def _encode_plain(self, text: str, guarded: bool = True) -> list[int]:
        """The tokens of ``text``, which is cut inside control tokens, so that it has none."""
        tokens = self._without_special(text)
        if not guarded or self._controls.isdisjoint(tokens):
            return tokens
        tokens = []
        for part in self.marks.pattern.split(text):
            for piece in (part[:1], part[1:]) if self.marks.tokens.get(part) in self._controls else (part,):
                tokens += self._without_special(piece)
        return tokens

    def _without_special(self, text: str) -> list[int]:
        # replaces halves of characters, which no tokenizer accepts
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            with self.encoding:
                return (
                    list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
                    if text
                    else []
                )
        except Exception as error:  # the tokenizers library raises bare exceptions
            known = self.tokenizer.get_vocab() if "[UNK]" in str(error) else text
            unknown = "".join(sorted(set(text).difference(known)))
            lacks = f"policy.alphabet lacks the characters {unknown!r}; add them"
            reason = lacks if unknown else str(error)
            raise AgentPeftError(f"the tokenizer cannot encode {text[:80]!r}: {reason}") from error

    # Frames: the text that the template writes around contents.

    def _render(self, messages: Sequence[Message], generate: bool = True) -> str:
        return self.render([{"role": m.role, "content": m.content} for m in messages], generate)

    def render(self, messages: list[dict[str, Any]], generate: bool = True, /, **keys: Any) -> str:
        """The template's text of messages as templates read them. All that it raises is a `TemplateError`."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=generate, **keys
            )
        except TemplateError:
            raise
        except Exception as error:  # a template is a program, and may fail as one
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text

    def _frames(self, roles: Sequence[Role]) -> tuple[list[str], list[int]]:
        """The text around each content, and the message of each. A refused role is a TemplateError."""
        text = self._render([Message(role, _WORD.format(i)) for i, role in enumerate(roles)])
        parts = _SENTINEL.split(text)
        order = [int(i) for i in parts[1::2]]
        if sorted(set(order)) != list(range(len(roles))):
            missing = next(role for i, role in enumerate(roles) if i not in order)
            raise TemplateError(f"it leaves out a {missing} message")
        return parts[0::2], order

    def _turn_frames(self) -> list[str]:
        """The frames of five turns. [4] is between an assistant's and a user's content, and [5] after it."""
        try:
            frames, order = self._frames(["user", "assistant", "user", "assistant", "user"])
        except TemplateSyntaxError as error:
            raise AgentPeftError(
                f"the chat template is broken: line {error.lineno}: {error.message}; repair it"
            ) from error
        except TemplateError as error:
            raise AgentPeftError(f"the chat template cannot show several turns: {error}") from error
        if order != list(range(5)) or frames[2] != frames[4]:
            raise AgentPeftError(
                "the chat template frames each turn differently (numbered rounds?): set another "
                "tokenizer.chat_template"
            )
        try:
            return frames + self._frames(["system", "user"])[0]
        except TemplateError:
            return frames

    def _split_closing(self, frame: str) -> tuple[list[int], str]:
        """The tokens that close an assistant message, and the rest of the frame."""
        mark = self.marks.pattern.search(frame)
        if mark is None or frame[: mark.start()].strip():
            return [], frame  # the template closes assistant messages with plain text only
        rest = frame[mark.end() :]
        closing = self._encode([frame[: mark.end()]], [])
        return closing, rest.lstrip() if mark.group() in self.marks.swallow_right else rest

    def _closes_the_last(self) -> bool:
        """Whether an assistant message is closed where nothing follows. GLM's is not."""
        reply = _WORD.format(1)
        try:
            tail = self._render(
                [Message("user", _WORD.format(0)), Message("assistant", reply)], generate=False
            ).rpartition(reply)[2]
        except TemplateError:
            return True
        return bool(tail.strip()) or not self._closing

    def _trims(self, role: Role) -> bool:
        """Whether the template trims the contents of a role."""
        before = [Message("user", "x")] if role == "assistant" else []
        after = [Message("user", "x")] if role == "system" else []
        word = _WORD.format(0)
        try:
            plain, blanks = (
                self._render([*before, Message(role, text), *after]) for text in (word, f"\n {word} \n")
            )
        except TemplateError:
            return False
        return plain == blanks

    def _agrees_with_template(self) -> bool:
        """Whether our tokens of a conversation are those of the template's own text."""
        messages = [
            Message("user", "Hello there. What is 1 + 1?"),
            Message("assistant", "It is 2."),
            Message("user", "Thank you!"),
        ]
        try:
            action = self.action_tokens(messages[1].content)
            ours = self.opening(messages[:1]) + action + self.following(messages[2].content, action)
        except AgentPeftError:  # not in its alphabet
            return True
        return bool(ours == self.tokenizer.encode(self._render(messages), add_special_tokens=False))

    def _plain_template(self) -> str:
        bos = self.tokenizer.bos_token
        writes_bos = bos is not None and self.tokenizer.encode("x")[:1] == [self.tokenizer.bos_token_id]
        return ("{{ bos_token }}" if writes_bos else "") + PLAIN_TEMPLATE
