"""A phrasing grammar as data, and the engine that draws from it.

A grammar's text has rules: a line ``= name``, then one alternative a line (``3* `` before it: three times as
likely). In an alternative, ``<rule>`` stands for another rule, ``{slot}`` for a phrase that is given,
``(a|b)`` for a choice and ``[a]`` for something that may be left out; a backslash makes a sign plain. An
alternative whose slots are not all given is not eligible; an option whose slots are not given is left out.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent_peft.environments.db_bench.generation.english import phrase_lines
from agent_peft.environments.db_bench.generation.schemas import held_out

_TOKEN = re.compile(r"\\.|[\[\]()|]|<\w+>|\{\w+\}|[^\\\[\]()|<>{}]+|[<>]")
_HELD_OUT_SHARE = 0.25
_FEWEST = 4  # a rule of fewer alternatives holds none out
Side = Literal["any", "train", "heldout"]


@dataclass(frozen=True)
class PhrasePart:
    """A piece of an alternative: ``text``, ``rule``, ``slot``, or a ``choice`` between sequences."""

    kind: Literal["text", "rule", "slot", "choice"]
    text: str = ""
    options: tuple[tuple[PhrasePart, ...], ...] = ()


@dataclass(frozen=True)
class Alternative:
    parts: tuple[PhrasePart, ...]
    weight: float
    held_out: bool


Grammar = Mapping[str, tuple[Alternative, ...]]


def parse_grammar(text: str) -> dict[str, tuple[Alternative, ...]]:
    """Read a grammar's text.

    >>> list(parse_grammar("= greeting\\nhello[ there]\\n2* hi {name}"))
    ['greeting']
    """
    rules: dict[str, list[tuple[float, str]]] = {}
    for line in text.splitlines():
        if line.startswith("= "):
            rules[name := line[2:].strip()] = []
        elif line.strip() and not line.startswith("#"):
            weight, _, rest = line.rpartition("* ") if re.match(r"[\d.]+\* ", line) else ("1", "", line)
            rules[name].append((float(weight), rest.strip("\n").strip('"')))
    return {
        name: tuple(
            Alternative(
                _parse(_TOKEN.findall(line))[0],
                weight,
                len(lines) >= _FEWEST and held_out("phrase", f"{name}:{line}", _HELD_OUT_SHARE),
            )
            for weight, line in lines
        )
        for name, lines in rules.items()
    }


def _parse(tokens: list[str], close: str = "") -> tuple[tuple[PhrasePart, ...], list[tuple[PhrasePart, ...]]]:
    """One sequence, and, inside brackets, all sequences between bars."""
    sequences: list[list[PhrasePart]] = [[]]
    while tokens:
        token = tokens.pop(0)
        if token == close:
            break
        if token == "|" and close:
            sequences.append([])
        elif token == "(":
            sequences[-1].append(PhrasePart("choice", options=tuple(_parse(tokens, ")")[1])))
        elif token == "[":
            sequences[-1].append(PhrasePart("choice", options=((), *_parse(tokens, "]")[1])))
        elif token[0] == "<" and len(token) > 1:
            sequences[-1].append(PhrasePart("rule", token[1:-1]))
        elif token[0] == "{":
            sequences[-1].append(PhrasePart("slot", token[1:-1]))
        else:
            sequences[-1].append(PhrasePart("text", token.removeprefix("\\")))
    return tuple(sequences[0]), [tuple(sequence) for sequence in sequences]


@functools.cache
def grammar() -> dict[str, tuple[Alternative, ...]]:
    """The grammar of ``phrases.txt``."""
    return parse_grammar("\n".join(phrase_lines("phrases.txt")))


@dataclass
class Derivation:
    """Draws from a grammar; ``bits`` is minus the base-2 logarithm of the probability of all draws so far.
    ``plain``: it draws nothing, and takes what is likeliest (of equals the first).

    >>> derivation = Derivation(random.Random(0), parse_grammar("= greeting\\nhello\\nhi"))
    >>> derivation.say("greeting") in ("hello", "hi"), derivation.bits
    (True, 1.0)
    """

    rng: random.Random
    rules: Grammar = field(default_factory=grammar)
    side: Side = "any"
    plain: bool = False
    bits: float = 0.0

    def say(self, rule: str, **slots: str | None) -> str:
        """A phrase of the rule. A slot that is None is not given."""
        given = {name: text for name, text in slots.items() if text is not None}
        return self._rule(rule, given)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        if self.plain:
            return probability >= 0.5
        hit = self.rng.random() < probability
        if 0 < probability < 1:
            self.bits -= math.log2(probability if hit else 1 - probability)
        return hit

    def _rule(self, name: str, slots: Mapping[str, str]) -> str:
        eligible = [option for option in self.rules[name] if self._fits(option.parts, slots)]
        if self.side != "any":
            sided = [option for option in eligible if option.held_out == (self.side == "heldout")]
            eligible = sided or eligible
        if not eligible:
            raise LookupError(f"no alternative of {name} can do with {sorted(slots)}")
        weights = [option.weight for option in eligible]
        if self.plain:
            return self._sequence(eligible[weights.index(max(weights))].parts, slots)
        drawn = self.rng.choices(range(len(eligible)), weights)[0]
        self.bits -= math.log2(weights[drawn] / sum(weights))
        return self._sequence(eligible[drawn].parts, slots)

    def _sequence(self, parts: tuple[PhrasePart, ...], slots: Mapping[str, str]) -> str:
        texts = []
        for part in parts:
            if part.kind == "text":
                texts.append(part.text)
            elif part.kind == "slot":
                texts.append(slots[part.text])
            elif part.kind == "rule":
                texts.append(self._rule(part.text, slots))
            else:
                options = [option for option in part.options if self._fits(option, slots)]
                if self.plain:
                    texts.append(self._sequence(options[0], slots))
                    continue
                self.bits += math.log2(len(options))
                texts.append(self._sequence(self.rng.choice(options), slots))
        return "".join(texts)

    def _fits(self, parts: tuple[PhrasePart, ...], slots: Mapping[str, str]) -> bool:
        """Whether all slots of a sequence are given, those of its rules included."""
        for part in parts:
            if part.kind == "slot" and part.text not in slots:
                return False
            if part.kind == "rule" and not any(
                self._fits(option.parts, slots) for option in self.rules[part.text]
            ):
                return False
            if part.kind == "choice" and not any(self._fits(option, slots) for option in part.options):
                return False
        return True
