"""Access to the Hugging Face hub: one short question whether it answers, instead of minutes of retries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agent_peft.printable import cause_of

SECONDS = 3.0  # in which the hub must answer
OFFLINE = (502, 503, 504)  # as proxies answer that do not reach it


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Inside, the libraries take only what is in the hub's cache, unless the hub answers."""
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before:
        try:
            answer = get_session().head(constants.ENDPOINT, timeout=SECONDS)
            constants.HF_HUB_OFFLINE = answer.status_code in OFFLINE
        except Exception:  # the client lets through those of its transport, too
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def why_not_given(error: BaseException) -> str:
    """The reason why the hub does not give something, in one line."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if any(isinstance(one, OfflineModeIsEnabled) or "offline" in str(one).lower() for one in causes):
        return "it is not in the cache of this machine, and the hub is not reached; check the network"
    return f"{type(error).__name__}: {cause_of(error)}"
