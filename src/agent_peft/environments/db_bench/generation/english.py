"""English as far as requests need it: plurals, agreement, articles, ordinals."""

from __future__ import annotations

import functools
import re
from importlib.resources import files

_ORDINALS = (
    *("zeroth", "first", "second", "third", "fourth", "fifth"),
    *("sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"),
)


def plural(phrase: str) -> str:
    """The plural of a noun phrase, by rule.

    >>> plural("delivery status"), plural("category"), plural("fuel used"), plural("units sold")
    ('delivery statuses', 'categories', 'fuel used', 'units sold')
    """
    if " of " in phrase:
        first, _, rest = phrase.partition(" of ")
        return f"{plural(first)} of {rest}"
    head, _, word = phrase.rpartition(" ")
    exceptions, plurals = _plurals()
    if word in exceptions:
        word = exceptions[word]
    elif word in plurals:
        pass
    elif word.endswith(("s", "x", "z", "ch", "sh")):
        word += "es"
    elif word.endswith("y") and word[-2:-1] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return f"{head} {word}".strip()


def is_plural(phrase: str) -> bool:
    """Whether a column's name speaks of several things.

    >>> is_plural("units sold"), is_plural("number of units sold"), is_plural("price")
    (True, False, False)
    """
    words = phrase.split()
    if words[1:2] == ["of"]:
        return words[0] in _plurals()[1]
    return not _plurals()[1].isdisjoint(words)


@functools.cache
def _plurals() -> tuple[dict[str, str], frozenset[str]]:
    """The plurals that the rules do not give, and the words that are plurals themselves."""
    lines = phrase_lines("plurals.txt")
    pairs = [line.partition(" ") for line in lines if not line.startswith("+")]
    exceptions = {word: many or word for word, _, many in pairs}
    return exceptions, frozenset(line[1:] for line in lines if line.startswith("+"))


def agreeing(clause: str, subject: str) -> str:
    """The verb after a subject in the plural.

    >>> agreeing("the units sold is above 5", "the units sold")
    'the units sold are above 5'
    """
    if not clause.startswith(subject):
        return clause
    return subject + _VERB.sub(lambda match: _VERBS[match[0]], clause.removeprefix(subject), count=1)


_VERBS = {"is": "are", "does": "do", "goes": "go", "surpasses": "surpass", "matches": "match"} | {
    f"{verb}s": verb for verb in ("exceed", "stay", "fall", "equal", "lie", "belong")
}
_VERB = re.compile(rf"(?<=^ )({'|'.join(_VERBS)})\b")


def ordinal(number: int, words: bool) -> str:
    if words and number < len(_ORDINALS):
        return _ORDINALS[number]
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


# "a" before a vowel that is heard: an order, an ID, an hour; a unit, a user, a European
_ARTICLE = re.compile(r"\ba (?=[aeioAEIO](?!ne\b|u)|u(?!ni[tvq]|s[aeu])|hour|honor)")


def with_articles(text: str) -> str:
    """``an`` in place of ``a`` where it sounds so.

    >>> with_articles("a order with a unit price")
    'an order with a unit price'
    """
    return _ARTICLE.sub("an ", text)


def finished(text: str) -> str:
    """Sentences with their capitals, and ``a`` or ``an`` as it sounds.

    >>> finished("list the order IDs with a amount of 5. sort by it.")
    'List the order IDs with an amount of 5. Sort by it.'
    """
    text = re.sub(r"  +", " ", with_articles(text))
    text = re.sub(r"(?i)\b((?:can|could) you [^.?]*)\.(?= |$)", r"\1?", text)
    text = re.sub(r"([.?!]) ([a-z])", lambda match: f"{match[1]} {match[2].upper()}", text)
    return text[0].upper() + text[1:]


def phrase_lines(name: str) -> list[str]:
    """The lines of a file here without comments. One that begins with a blank continues the one before it."""
    text = files(__package__).joinpath(name).read_text("utf-8").replace("\n  ", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
