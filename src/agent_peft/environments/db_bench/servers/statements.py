"""Which statements a server is asked to run at all. It refuses the most by the rights that a user lacks; here
is what needs no right, and would reach another episode or outlive the statement.
"""

from __future__ import annotations

import re

# Strings and comments as MySQL reads them, then words (bare or quoted), and any other character.
_TOKEN = re.compile(
    r"""(?P<executable>/\*M?!)
    |(?P<space>\s+|\#[^\n]*|--(?=[\s\x00-\x1f]|$)[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/|$))
    |(?P<string>'(?:[^'\\]|\\.|'')*+'?|"(?:[^"\\]|\\.|"")*+"?)
    |`(?P<quoted>(?:[^`]|``)*+)`?
    |(?P<word>[\w$]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ALLOWED = frozenset(
    {
        "select",
        "with",
        "values",
        "table",
        "insert",
        "replace",
        "update",
        "delete",
        "create",
        "alter",
        "drop",
        "truncate",
        "rename",
        "show",
        "describe",
        "desc",
        "explain",
    }
)
_NAMES = {"begin": "a transaction", "start": "a transaction", "commit": "a transaction"}
_NAMES |= {"rollback": "a transaction", "xa": "a transaction", "savepoint": "a savepoint"}
# locks of the whole server, by which one episode could hold up another, or tell it something
_REFUSED_FUNCTIONS = frozenset(
    {
        "get_lock",
        "release_lock",
        "release_all_locks",
        "is_free_lock",
        "is_used_lock",
        "service_get_read_locks",
        "service_get_write_locks",
        "service_release_locks",
    }
)


def bare_statement(sql: str) -> str:
    """The text without the comments and semicolons before and after its statements.

    >>> bare_statement("; SELECT 1 ;; -- one"), bare_statement("# none")
    ('SELECT 1', '')
    """
    places = [
        match.span() for match in _TOKEN.finditer(sql) if match.lastgroup != "space" and match[0] != ";"
    ]
    return sql[places[0][0] : places[-1][1]] if places else ""


def refusal_of(sql: str) -> str | None:
    """Why a statement is not run, or None.

    >>> refusal_of("SET autocommit = 0"), refusal_of("SELECT GET_LOCK('a', 9)")
    ('SET is not allowed here', 'the function get_lock is not allowed here')
    >>> refusal_of("SELECT 'get_lock(1)' -- one"), refusal_of("SELECT 1; SELECT 2")
    (None, 'write one statement at a time')
    """
    tokens: list[tuple[str, str]] = []
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup or ""
        if kind == "executable":
            return "a comment that is executed is not allowed here"
        if kind != "space":
            tokens.append((kind, (match[kind] or "").lower()))
    words = [(kind, text) for kind, text in tokens if not (kind == "other" and text == "(")]
    if not words or words[0][0] != "word" or words[0][1] not in _ALLOWED:
        return None if not words or words[0][0] != "word" else _refused(words[0][1])
    for (kind, text), following in zip(tokens, [*tokens[1:], ("", "")], strict=True):
        if kind in ("word", "quoted") and text in _REFUSED_FUNCTIONS and following == ("other", "("):
            return f"the function {text} is not allowed here"
        if (kind, text) == ("other", ";") and following[0]:
            return "write one statement at a time"
    return None


def _refused(word: str) -> str | None:
    if not word.isalpha():
        return None  # no statement begins so: the server says it better
    return f"{_NAMES.get(word, word.upper())} is not allowed here"
