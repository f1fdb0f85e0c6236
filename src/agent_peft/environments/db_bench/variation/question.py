"""The words of a question, in which names and values are replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial

from agent_peft.environments.db_bench.generation.english import plural, with_articles

_FIRST_MARK, _LAST_MARK = 0xE000, 0xEFFF  # characters for private use mark what is replaced
MARKS = f"{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}"
DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])-[0-9]{2}")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


class Question:
    """A question of which each part is replaced once: marks hold the places of the new words.

    >>> question = Question("orders by unit price")
    >>> question.rename("unit_price", "weight"), question.rename("weight", "price")
    (True, False)
    >>> question.finished()
    'orders by weight'
    """

    def __init__(self, text: str) -> None:
        self.text, self._new = text, list[str]()

    def rename(self, old: str, new: str) -> bool:
        """Replace a column's name, wherever and however it is written: with underscores, in the plural, with
        capitals. Whether it is there.
        """
        return self._replace(_phrase(old), partial(_like, old=old, new=new))

    def keep(self, name: str, new: str) -> None:
        """Replace a name as it is written, before parts of it are replaced."""
        self._replace(re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), lambda _: new)

    def move_table(self, old: str, new: str) -> None:
        """Replace a table's name, and the noun at its end."""
        self._replace(_phrase(old), lambda words: new if "_" in words else new.replace("_", " "))
        noun, other = old.split("_")[-1], new.split("_")[-1]
        one = singular(noun)
        pattern = re.compile(rf"(?<!\w)({re.escape(noun)}|{re.escape(one)})(?!\w)", re.IGNORECASE)
        self._replace(pattern, lambda word: singular(other) if word.lower() == one else other)

    def replace_value(self, old: str, new: str) -> bool:
        """Replace a value, also 1,000 for 1000, and January 5, 2023 for 2023-01-05. Whether it is there."""
        forms = {old: new}
        if old.isdecimal() and new.isdecimal():
            forms[f"{int(old):,}"] = f"{int(new):,}"
        if DATE.fullmatch(old) and DATE.fullmatch(new):
            forms[_in_words(old)] = _in_words(new)
        patterns = [rf"(?<![\w.]){re.escape(form)}(?!\w|\.\d|,\d)" for form in forms]
        return any([self._replace(re.compile(pattern), forms.__getitem__) for pattern in patterns])

    def swap(self, words: Mapping[str, str]) -> None:
        """Replace words by others, all at once."""
        pattern = re.compile(rf"\b({'|'.join(words)})\b")
        self.text = pattern.sub(lambda match: words[match[0]], self.text)

    def words_left(self) -> set[str]:
        """The words that are not replaced, in the singular."""
        return set(map(singular, re.findall("[a-z]+", self.text.lower())))

    def finished(self) -> str:
        def new(mark: str) -> str:
            return self._new[ord(mark) - _FIRST_MARK]

        def once(pair: re.Match[str]) -> str:
            """``hours worked worked``: a new name may end with the word that follows."""
            return pair[1] if singular(new(pair[1]).split(" ")[-1]) == singular(pair[2]) else pair[0]

        text = re.sub(rf"([{MARKS}]) ([A-Za-z]+)\b", once, self.text)
        return with_articles(re.sub(f"[{MARKS}]", lambda mark: new(mark[0]), text))

    def _replace(self, pattern: re.Pattern[str], new: Callable[[str], str]) -> bool:
        def marked(match: re.Match[str]) -> str:
            self._new.append(new(match[0]))
            return chr(_FIRST_MARK + len(self._new) - 1)

        self.text, number = pattern.subn(marked, self.text)
        return number > 0


def singular(word: str) -> str:
    """A noun in the singular, by rule.

    >>> singular("categories"), singular("prices"), singular("class"), singular("boxes")
    ('category', 'price', 'class', 'box')
    """
    word = word.lower()
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def _in_words(date: str) -> str:
    year, month, day = map(int, date.split("-"))
    return f"{_MONTHS[month - 1]} {day}, {year}"


@cache
def _phrase(name: str) -> re.Pattern[str]:
    """A column's or table's name as a question has it: ``order_id``, order ID, order IDs."""
    *first, last = name.split("_")
    forms = sorted({last, plural(last.lower()), f"{last}s", singular(last)}, key=len, reverse=True)
    words = "".join(f"{re.escape(word)}[ _]" for word in first)
    return re.compile(rf"(?<!\w){words}({'|'.join(map(re.escape, forms))})(?!\w)", re.IGNORECASE)


def _like(words: str, old: str, new: str) -> str:
    """A name in place of ``words``, which stand for ``old``: with underscores, in the plural, with a capital,
    as they are.

    >>> _like("Order IDs", "order_id", "unit_price"), _like("order_id", "order_id", "unit_price")
    ('Unit prices', 'unit_price')
    """
    if old == new:
        return words
    if "_" in words:
        return new
    phrase = new.replace("_", " ").lower()
    if len(words) > len(old):
        phrase = phrase if phrase.endswith("s") else plural(phrase)
    phrase = re.sub(r"\bid(s?)$", r"ID\1", phrase)
    return phrase[0].upper() + phrase[1:] if words[0].isupper() and not words.startswith("ID") else phrase
