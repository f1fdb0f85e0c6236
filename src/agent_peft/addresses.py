"""The addresses of servers, and the tokens that they ask for."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from agent_peft.types import AgentPeftError


def checked_url(url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ValueError: it is not the URL of a server.

    >>> checked_url("http://127.0.0.1:8000/")
    'http://127.0.0.1:8000'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the URL of a server; write it as http://HOST:PORT")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(variable: str) -> str:
    """Return the token that an environment variable holds."""
    token = os.environ.get(variable, "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        wrong = "is not set" if not token else "holds spaces, or characters that are not printable ASCII"
        raise AgentPeftError(
            f"token: the environment variable {variable!r} {wrong}; put the server's token there"
        )
    return token
