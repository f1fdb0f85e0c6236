"""Prompts of a configuration: texts with placeholders.

``{name}`` is replaced by a value, and ``{{name}}`` is the text ``{name}``. All other braces stay as they are,
so JSON and LaTeX need no care.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pydantic import AfterValidator

from agent_peft.lookup import alike

_NAME = r"[^\W\d]\w*"
# three braces are a placeholder in braces; two are a literal name
_PLACEHOLDER = re.compile(rf"\{{\{{\{{({_NAME})\}}\}}\}}|\{{\{{({_NAME})\}}\}}|\{{({_NAME})\}}")


def fill(template: str, values: Mapping[str, object]) -> str:
    """The template with values in place of its placeholders. Braces in a value stay as they are.

    >>> fill('{n} rows, {{n}}, {{{n}}} and {"a": {"b": 1}}', {"n": 3})
    '3 rows, {n}, {3} and {"a": {"b": 1}}'
    """

    def text(match: re.Match[str]) -> str:
        inside, literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        return f"{{{values[inside]}}}" if inside is not None else str(values[name])

    return _PLACEHOLDER.sub(text, template)


def placeholders_of(template: str) -> list[str]:
    """The names that a template has values in place of, in their order.

    >>> placeholders_of("{question} {{literal}} {1} {}")
    ['question']
    """
    return [match[1] or match[3] for match in _PLACEHOLDER.finditer(template) if match[2] is None]


def check_placeholders(template: str, names: Collection[str]) -> str:
    """Return the template; raise ValueError if it has other placeholders, with the nearest one that there is.

    >>> check_placeholders("{max_turn} turns", ["max_turns"])
    Traceback (most recent call last):
    ValueError: there is no placeholder {max_turn}; did you mean {max_turns}? ({{max_turn}} is the text ...)
    """
    for name in placeholders_of(template):
        if name not in names:
            nearest = alike(name, names)
            advice = f"did you mean {{{nearest}}}? " if nearest else f"{_list(names)} "
            raise ValueError(f"there is no placeholder {{{name}}}; {advice}({{{{{name}}}}} is the text ...)")
    return template


def with_placeholders(*names: str, needs: str | None = None) -> AfterValidator:
    """The check of a configuration's key, for ``Annotated[str, with_placeholders("max_turns")]``. Without the
    placeholder ``needs``, all tasks would read alike.
    """

    def check(template: str) -> str:
        if needs is not None and needs not in placeholders_of(check_placeholders(template, names)):
            raise ValueError(f"has no {{{needs}}}, so it would be the same for every task; put it in")
        return check_placeholders(template, names)

    return AfterValidator(check)


def _list(names: Collection[str]) -> str:
    return f"give one of {', '.join(f'{{{name}}}' for name in names)}" if names else "this text takes none"
