"""The basis of the FastAPI application: answers in ASCII JSON, refusals in one line, and the ping. It needs
the extra ``server``.
"""

from __future__ import annotations

from typing import Any

from agent_peft.config import first_error
from agent_peft.environments.http import messages
from agent_peft.environments.http.messages import Refusal
from agent_peft.version import __version__

try:  # the one place where the server's packages are imported
    import uvicorn
    from fastapi import FastAPI, Header, Query, Request, Response, WebSocket, WebSocketDisconnect
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise messages.missing_extra(error.name or "fastapi") from error

__all__ = [
    "JSON",
    "FastAPI",
    "HTTPException",
    "Header",
    "Query",
    "Request",
    "RequestValidationError",
    "Response",
    "StreamingResponse",
    "WebSocket",
    "WebSocketDisconnect",
    "new_app",
    "uvicorn",
]


class JSON(Response):
    """An answer of ours. FastAPI's own would refuse lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return messages.encode(content)


def new_app(title: str, description: str) -> FastAPI:
    """An application whose errors are ``{"detail", "code"}``, and that answers ``POST /api/ping``."""
    app = FastAPI(title=title, description=description, version=__version__, redirect_slashes=False)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return problem(refusal.status, refusal.code, refusal.text)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return problem(422, "invalid", messages.one_line(first_error(error)))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, "http", str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return problem(
            500, messages.BROKEN, f"the server made a mistake ({type(error).__name__}); its log holds more"
        )

    @app.post("/api/ping", response_model=messages.Pong)
    async def ping() -> Response:
        """Whether the server answers."""
        return JSON(messages.Pong())

    return app


def problem(status: int, code: str, text: str, headers: Any = None) -> Response:
    return JSON({"detail": text, "code": code}, status, headers=headers)
