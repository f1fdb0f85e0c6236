"""Prompt lookup (Saxena 2023): speculative decoding whose drafts are copied from the conversation itself.

A few rows leave a decode step waiting for the weights, so reading some drafted tokens with them costs little.
The uniform at each position is fixed, so a draft is accepted if it equals the token that is drawn there: the
tokens and log-probabilities are those of plain decoding, except for rounding (other shapes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

LONGEST = 3  # tokens of an n-gram
# Tokens that all rows read in one forward, drafts included: 7 drafts for a row alone, 1 for each of 4 rows.
# Text that repeats nothing loses a tenth at 4 rows by it, and would lose more with longer drafts.
PLACES = 8


class PromptLookup:
    """The n-grams of one conversation, and where each of them last continued. With ``longest`` 0 it never
    drafts.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def draft(self, tokens: Sequence[int], action: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that followed the last occurrence of the longest n-gram at the end.

        The longer the n-gram, the more often the draft is right, so it has at most 2 n tokens.

        Args:
            tokens: all tokens before ``action``. Together they grow from call to call, except after an out of
                memory, where drafts are wrong until as many tokens were drawn again.

        >>> PromptLookup().draft([5, 6, 7, 8, 9], [3, 5, 6], most=7)
        [7, 8, 9, 3]
        """
        if most < 1 or not self._longest:
            return []
        known = self._tokens
        for token in islice(chain(tokens, action), len(known), None):
            for n in range(1, min(self._longest, len(known)) + 1):
                self._ends[tuple(known[-n:])] = len(known)
            known.append(token)
        for n in range(self._longest, 0, -1):
            begin = self._ends.get(tuple(known[-n:]))
            if begin is not None:
                return known[begin : begin + min(2 * n, most)]
        return []
