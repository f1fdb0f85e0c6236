"""Stop strings, which are searched for in the bytes of the sampled tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from transformers.convert_slow_tokenizer import bytes_to_unicode


class StopMatcher:
    """Detects one of the stop strings in the text of the tokens of one action.

    It keeps only as many bytes as the longest stop string has, so a push costs the same however long the
    action grows. It compares bytes, since a stop string or a character may span several tokens.

    >>> matcher = StopMatcher([b"ab"], {0: b"xa", 1: b"bx"}.__getitem__)
    >>> matcher.push(0), matcher.push(1)
    (False, True)
    """

    def __init__(self, stop: Sequence[bytes], token_bytes: Callable[[int], bytes]) -> None:
        self._stop = tuple(stop)
        self._token_bytes = token_bytes
        self._keep = max((len(text) for text in self._stop), default=1) - 1
        self._tail = b""
        self.matched = False

    def push(self, token: int) -> bool:
        """Add one sampled token. Return whether a stop string has appeared so far."""
        if self._stop and not self.matched:
            text = self._tail + self._token_bytes(token)
            self.matched = any(stop in text for stop in self._stop)
            self._tail = text[-self._keep :] if self._keep else b""
        return self.matched


_BYTES: Mapping[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
_BYTE_OF = {character: byte for byte, character in _BYTES.items()}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def spelled_bytes(spelled: str, byte_level: bool) -> bytes:
    """The bytes of a token, from its spelling in the vocabulary: in GPT-2's byte alphabet or
    SentencePiece's.
    """
    if byte_level and all(character in _BYTE_OF for character in spelled):
        return bytes(_BYTE_OF[character] for character in spelled)
    if byte := _BYTE_FALLBACK.fullmatch(spelled):
        return bytes([int(byte.group(1), 16)])
    return spelled.replace("\u2581", " ").encode()  # SentencePiece's mark of a blank
