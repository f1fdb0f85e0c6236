"""Where a server listens, and who asks: ``mysql://user:password@host:port`` or ``…?unix_socket=PATH``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

_FORM = "write mysql://user:password@host:port, or mysql://user:password@localhost?unix_socket=/path"


@dataclass(frozen=True)
class Address:
    """A server and the account that we use it with.

    >>> Address(host="db", port=3307, user="me").name
    'db:3307'
    """

    user: str
    password: str = ""
    host: str = "localhost"
    port: int = 3306
    socket: str | None = None

    @property
    def name(self) -> str:
        return self.socket or f"{self.host}:{self.port}"


def parse_address(url: str) -> Address:
    """Read an address. The password may also be in the environment variable ``MYSQL_PWD``.

    Raises:
        ValueError: it is not of that form.

    >>> parse_address("mysql://me:p%40ss@db:3307").password
    'p@ss'
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
        query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError as error:
        raise ValueError(f"this is no address of a server ({error}); {_FORM}") from None
    if parts.scheme != "mysql" or not parts.username or not (parts.hostname or "unix_socket" in query):
        raise ValueError(f"this is no address of a server; {_FORM}")
    if parts.path.strip("/") or parts.fragment:
        raise ValueError("name no database: each episode gets one of its own; " + _FORM)
    if set(query) - {"unix_socket"}:
        raise ValueError(f"only unix_socket may be given after the question mark; {_FORM}")
    return Address(
        user=unquote(parts.username),
        password=unquote(parts.password) if parts.password else os.environ.get("MYSQL_PWD", ""),
        host=parts.hostname or "localhost",
        port=port,
        socket=query["unix_socket"][-1] if query else None,
    )
