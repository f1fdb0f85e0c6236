"""The refusal of a request whose environment raised."""

from __future__ import annotations

import logging

from agent_peft.environments.contract import ContractError
from agent_peft.environments.http import messages
from agent_peft.environments.http.messages import Refusal
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)


def refusal_of(error: BaseException, task: str, *, mistaken: bool = False, acting: bool = False) -> Refusal:
    """Turn an exception of an environment into a refusal.

    Args:
        mistaken: the task came with the request, so the client may have caused the exception.
        acting: the exception came at an action, after the environment had accepted the task, so it is a
            defect of the environment.
    """
    if isinstance(error, InfrastructureError):
        return Refusal(502, messages.INFRASTRUCTURE, str(error) or "the environment failed")
    if isinstance(error, ContractError):
        detail = f"task {task!r}: {error}"
        logger.error("%s", detail)
        return Refusal(
            422 if mistaken or not acting else 500, messages.BROKEN if acting else "mistake", detail
        )
    if isinstance(error, AgentPeftError):
        return Refusal(422, "mistake", str(error))
    detail = f"{type(error).__name__}: {error}"
    if mistaken and not acting:
        return Refusal(422, "mistake", f"task {task!r} cannot be used here ({detail})")
    logger.error("task %r: the environment raised", task, exc_info=error)
    return Refusal(
        422 if mistaken else 500,
        messages.BROKEN,
        f"the environment raised {detail} (task {task!r}; the server's log holds more)",
    )
