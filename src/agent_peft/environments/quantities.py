"""Numbers in replies: the last one of a text is read whole or refused, so that no part of a number is taken
for the number.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_DIGITS = 400  # characters of a number; more are no number

_DIGITS = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,9}+|[0-9]++)(?:\.[0-9]*+)?|\.[0-9]++)"
NUMBER = rf"(?:[-+−]\ ?\$?\ ?|\$\ ?[-+−]?)?{_DIGITS}"  # a number with its sign, for patterns; group-free
_WHOLE = re.compile(NUMBER)

# The other patterns read a text of `_simplified`. A run is digits with all that may group them.
_RUN = r"(?:[0-9]|(?<![0-9.])\.(?=[0-9]))(?:[0-9]|[.,'_](?=[0-9])|\ (?=[0-9]{3}(?![0-9])))*+"
_SIGN = r"(?:(?<![^\W_])(?<![)\]}%$])[-+]\$?|\$[-+]?)?"  # in 5-3, the minus is not a sign
_POWER = r"\ ?\^\ ?(?:\{{\ ?(?P<{0}1>-?[0-9]++)\ ?\}}|\((?P<{0}2>-?[0-9]++)\)|(?P<{0}3>-?[0-9]++))"
_EXPRESSION = re.compile(
    rf"""(?P<sign>{_SIGN})(?P<run>{_RUN})
    (?:[eE](?P<e1>[-+]?[0-9]++)|\ ?[*xX]\ ?10{_POWER.format("ten")}|{_POWER.format("power")})?
    (?:(?:\ (?P<over>[0-9]++))?\ ?/\ ?(?P<under>[0-9]{{1,3}}(?:,[0-9]{{3}})++|[0-9]++(?:\.[0-9]++)?))?
    (?P<percent>\ ?%|\ per\ ?cent\b)?""",
    re.VERBOSE,
)
_GROUPED = re.compile(
    r"[1-9][0-9]{0,2}([,' _])[0-9]{3}(?:\1[0-9]{3})*+(?:\.[0-9]++)?|[0-9]++(?:\.[0-9]++)?|\.[0-9]++"
)
_EUROPEAN = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")  # or a list of two numbers
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\ ({'|'.join(_SCALES)})s?\b", re.IGNORECASE)
_FUNCTIONS = "sqrt|cbrt|log|ln|exp|sin|cos|tan|abs|floor|ceil|factorial|frac|binom|root(?: of)?"
# what a number is only a part of
_BEFORE = re.compile(
    rf"""(?:(?:[\^√∛∜±\ufffd]|[A-Za-z0-9}})]_)\ ?[({{]?  # a power, a root, an index
    |(?:[-+]|\bminus\ )\ ?(?:\\[a-z]+)?\ ?[({{]\$?|\bminus\   # a sign of a bracket
    |\\(?!f?boxed\b|underline\b)[a-zA-Z]+(?:\[[^\]]*\])?\ ?\{{[^{{}}]*|[}}\]]\{{  # an argument in LaTeX
    |(?<![A-Za-z])(?:{_FUNCTIONS.replace(" ", chr(92) + " ")})(?:_?\{{?\w?\}}?)\ ?\(?
    |[A-Za-z)}}\]]\ ?/\ ?[({{]?|[0-9]\ ?/\ ?[({{]|[)}}\]]\ ?[*xX]\ ?  # a denominator, a factor
    |[0-9]:|[0-9]\ :\ |[0-9]-[0-9]{{1,4}}-|[0-9]\.\(  # a time or a ratio, a date, a period
    |[0-9](?:[.,'_]|[eE][-+]?)|[0-9]\ (?:\\?over|out\ of|to\ the\ power(?:\ of)?)\ #
    |(?:{"|".join(_SCALES)})\ (?:and\ )?
    |(?<![0-9A-Za-z])0[xXbBoO][0-9a-fA-F]*)\Z""",
    re.VERBOSE,
)
_AFTER = re.compile(
    r"""\ ?\^|[.,'_]?[0-9]|[eE][-+]?[0-9]|[xX][0-9a-fA-F]|!!|\ ?\\?[π∞√‰±]|\ ?\\(?:pi|sqrt)
    |[kKMB]\b|[bm]n\b|\ ?[千万萬億亿]|[\u0300-\u036f₀-₉]|\ (?:ten|hundred|thousand|million)ths?\b""",
    re.VERBOSE,
)
_LATEX = dict.fromkeys([r"\,", r"\;", r"\:", "\\ ", "~"], " ") | dict.fromkeys([r"\times", r"\cdot"], "*")
_LATEX |= dict.fromkeys([r"^\circ", r"^{\circ}", r"\left", r"\right", r"\!"], "")
_LATEX |= {r"\$": "$", r"\%": "%", "{,}": ",", r"\pm": "±"}
_LATEX |= dict.fromkeys([r"\dfrac", r"\tfrac", r"\cfrac"], r"\frac")
_MARKUP = re.compile("|".join(map(re.escape, _LATEX)))
_TEXT = re.compile(r"\\(?:text\w*|math\w+|mbox)\ ?\{([^{}]*)\}")
_FRACTION = re.compile(r"([0-9]?)\ ?\\frac\ ?(?:\{([^{}]*)\}|([0-9]))\ ?(?:\{([^{}]*)\}|([0-9]))")
_PART = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_UNIT_POWER = re.compile(r"(?:(?<=[A-Za-z]{2})|(?<=[0-9\ ]m))\ ?\^\ ?(?:\{[0-9]\}|[0-9])")  # square metres
_STARS = re.compile(r"(?<=[0-9])(?:\*\*|\ \*\*\ )(?=[-({]?[0-9])")  # a power in Python; bold in Markdown
_ALIKE = dict.fromkeys("−–﹣‐‑", "-") | dict.fromkeys("×·⋅∙", "*") | dict.fromkeys("’ʼ‘", "'")
_ALIKE |= {
    "٫": ".",
    "٬": ",",
    "⁄": "/",
    "∕": "/",
    "…": "...",
    "﹪": "%",
    "٪": "%",
    "\ufe0f": "",
    "\u20e3": "",
}
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")


def parse_number(text: str) -> Decimal | None:
    """The exact number that a text spells, or None.

    >>> parse_number("-$1,234.50"), parse_number("72."), parse_number("1,23"), parse_number("7 apples")
    (Decimal('-1234.50'), Decimal('72'), None, None)
    """
    text = text.strip()
    return Decimal(re.sub(r"[+$, ]", "", text).replace("−", "-")) if _WHOLE.fullmatch(text) else None


@dataclass(frozen=True)
class Quantity:
    """A number as it is written, with or without a percent sign, which may be left out or worked out.

    >>> Quantity(Fraction(75), True).equals(Quantity(Fraction(3, 4), False))
    True
    """

    value: Fraction
    percent: bool

    def equals(self, other: Quantity) -> bool:
        if self.percent == other.percent or self.value == other.value:
            return self.value == other.value
        with_sign, without = (self, other) if self.percent else (other, self)
        return with_sign.value == 100 * without.value


def last_quantity(text: str) -> Quantity | None:
    """The last number in a text, or None where that number cannot be read in exactly one way.

    >>> last_quantity("a share of 3/4"), last_quantity("1 1/2 hours"), last_quantity("It is 12.5 %.")
    (Quantity(value=Fraction(3, 4), percent=False), Quantity(value=Fraction(3, 2), percent=False), \
Quantity(value=Fraction(25, 2), percent=True))
    >>> last_quantity(r"\\frac{3}{4}").value, last_quantity("3 x 10^5").value, last_quantity("1,5")
    (Fraction(3, 4), Fraction(300000, 1), None)
    >>> last_quantity("so it is 48/2 = 24 apples.").value, last_quantity("5-3").value, last_quantity("none")
    (Fraction(24, 1), Fraction(3, 1), None)
    """
    if (number := parse_number(text)) is not None:
        return Quantity(Fraction(number), False) if len(text) <= MAX_DIGITS else None
    text, last = _simplified(text), None
    for last in _EXPRESSION.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    if last is None or len(last[0]) > MAX_DIGITS:
        return None
    before, after = text[max(last.start() - 40, 0) : last.start()], text[last.end() : last.end() + 80]
    sign, run = last["sign"], last["run"]
    if (
        _BEFORE.search(before)
        or _AFTER.match(after)
        or (sign[:1] in ("-", "+") and before[-1:] in ("-", "+"))
        or ("." in run and after.startswith(".."))  # 0.333...
        or (run[:1] == "0" and run[1:2].isdigit() and re.search(r"[0-9][ ,.]{1,3}\Z", before))
        or (after.startswith("!") and not re.search(r"[A-Za-z] [*_({[]*\Z", before))  # a factorial
    ):
        return None
    value, part = _value_of_run(run, before, after)
    value = None if value is None else _worked_out(value, last)
    if value is None:
        return None
    while scale := _SCALE.match(after):
        value, after = value * 10 ** _SCALES[scale[1].lower()], after[scale.end() :]
    negative = "-" in sign or (not sign and re.search(r"[=:(]\ *-\ \Z|\bnegative\ \Z", before))
    return Quantity(-value if negative and not part else value, last["percent"] is not None)


def _value_of_run(run: str, before: str, after: str) -> tuple[Fraction | None, bool]:
    """The value of digits with their marks, and whether it is the last of a list. None: nobody can say."""
    if " " in run and re.search(r"[0-9],?\ \Z", before):
        run, part = run.rpartition(" ")[2], True
    else:
        part = False
    if _GROUPED.fullmatch(run):
        return Fraction(re.sub("[,' _]", "", run)), part
    pieces = run.split(",")
    if len(pieces) == 1 or not all(re.fullmatch(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+", piece) for piece in pieces):
        return None, False
    in_brackets = before[-1:] in ("[", "(") and after[:1] in ("]", ")")
    if "." in run:
        listed = in_brackets or not _EUROPEAN.fullmatch(run)
    else:
        listed = len(pieces[-1]) != 3 and (in_brackets or (len(pieces) > 2 and max(map(len, pieces)) < 3))
    return (Fraction(pieces[-1]), True) if listed else (None, False)


def _worked_out(value: Fraction, match: re.Match[str]) -> Fraction | None:
    """The value with its exponent, its power, or as a part of a fraction. None: it is too large, or none."""
    groups = match.groupdict()
    ten, power = (
        next((int(digits) for i in (1, 2, 3) if (digits := groups.get(f"{name}{i}"))), None)
        for name in ("ten", "power")
    )
    ten = int(groups["e1"]) if groups["e1"] else ten
    if ten is not None:
        if abs(ten) > MAX_DIGITS:
            return None
        value *= Fraction(10) ** ten
    elif power is not None:
        if len(match["run"]) * abs(power) > MAX_DIGITS or (value == 0 and power <= 0):
            return None
        value = Fraction(value**power)
    if groups["under"] is None:
        return value
    under = Fraction(groups["under"].replace(",", ""))
    if under == 0 or " " in match["run"]:
        return None
    if groups["over"] is None:
        return value / under
    return value + int(groups["over"]) / under if value.denominator == 1 and ten is power is None else None


def _simplified(text: str) -> str:
    """A text whose digits, signs and blanks are those of ASCII, with less LaTeX."""
    if not text.isascii():
        text = _RAISED.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
        text = text.translate({ord(letter): _ascii(letter) for letter in set(text)})
    if "\\" in text or "{" in text or "~" in text:
        text = _TEXT.sub(r"\1", _MARKUP.sub(lambda match: _LATEX[match[0]], text))
        text = _FRACTION.sub(_division, text)
    return _STARS.sub("^", _UNIT_POWER.sub("", text))


def _division(match: re.Match[str]) -> str:
    """A fraction in LaTeX with a slash; one that cannot be read is a number that is refused."""
    digit, over, under = match[1], match[2] or match[3] or "", match[4] or match[5] or ""
    over, under = over.strip(), under.strip()
    mixed = not digit or (over.isdigit() and len(over) != 3)  # 2 100/3 could be 2100/3
    if not mixed or not _PART.fullmatch(over) or not _PART.fullmatch(under) or under.startswith("-"):
        return f"{digit} \ufffd0"
    return f"{digit} {over}/{under}" if digit else f"{over}/{under}"


def _ascii(letter: str) -> str:
    category = unicodedata.category(letter)
    if letter in _ALIKE:
        return _ALIKE[letter]
    if category == "Nd":
        return str(unicodedata.digit(letter))
    if category == "No" and "⁄" in (plain := unicodedata.normalize("NFKC", letter)):
        over, _, under = plain.partition("⁄")
        return rf"\frac{{{over}}}{{{under}}}"
    if category in ("Zs", "Cf", "Sc"):
        return {"Zs": " ", "Cf": "", "Sc": "$"}[category]
    return chr(ord(letter) - 0xFEE0) if "\uff01" <= letter <= "\uff5e" else letter
