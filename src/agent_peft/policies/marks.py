"""The marks of a tokenizer: the tokens that it adds to its vocabulary, as ``<|im_end|>`` and ``<think>``."""

from __future__ import annotations

import re
from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

CUT = "\udc00"  # in a text: encode what follows apart. Half a character, which no other text holds


class Marks:
    """The marks of one tokenizer.

    Attributes:
        tokens: the token of each text.
        pattern: matches a text.
        special: the tokens that the tokenizer calls special.
        swallow_left, swallow_right: texts that swallow the blanks next to them (Phi-3 has some).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {
            token_id: token
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if str(token).strip()
        }
        self.tokens = {str(token): token_id for token_id, token in added.items()}
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.swallow_left = frozenset(str(token) for token in added.values() if token.lstrip)
        self.swallow_right = frozenset(str(token) for token in added.values() if token.rstrip)
        alternatives = "|".join(re.escape(text) for text in sorted(self.tokens, key=len, reverse=True))
        self.pattern = re.compile(f"({alternatives})" if alternatives else "((?!))")
        self._texts = {token_id: text for text, token_id in self.tokens.items()}

    def text(self, token: int) -> str:
        """The text of a mark; empty for other tokens."""
        return self._texts.get(token, "")

    def at_start(self, text: str) -> str:
        """The mark with which ``text`` begins; empty where it begins with none."""
        mark = self.pattern.match(text)
        return mark[0] if mark else ""

    def cut(self, text: str, tokens: Collection[int] | None = None) -> str:
        """``text`` with a ``CUT`` in each mark (with ``tokens``, in each of these), so that it has none."""
        return self.pattern.sub(
            lambda mark: (
                mark[0]
                if tokens is not None and self.tokens[mark[0]] not in tokens
                else mark[0][:1] + CUT + mark[0][1:]
            ),
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
        )
