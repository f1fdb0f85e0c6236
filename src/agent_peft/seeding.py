"""All randomness is ``derive(seed, …)``: a number that depends on what is drawn, never on what was drawn
before it.
"""

from __future__ import annotations

import hashlib
import random


def derive(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for the thing named by ``parts``: the same on every machine, process and Python version.

    >>> derive(0, "episode", 3) == derive(0, "episode", 3) != derive(0, "episode", 4)
    True
    """
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *parts: int | str) -> random.Random:
    """A ``random.Random`` of its own for the thing named by ``parts``.

    >>> generator(0, "tasks").random() == generator(0, "tasks").random()
    True
    """
    return random.Random(derive(seed, *parts))
