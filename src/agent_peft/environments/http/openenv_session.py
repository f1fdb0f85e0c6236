"""An OpenEnv client's WebSocket session: ``{"type": "reset" | "step" | "state" | "close", "data": {...}}``,
one episode at a time.

An episode ends with its session, so no request is repeated here, and steps need no index.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

from pydantic import BaseModel, ValidationError

from agent_peft.config import first_error
from agent_peft.environments.http import messages
from agent_peft.environments.http.app import WebSocket, WebSocketDisconnect
from agent_peft.environments.http.episodes import Episodes
from agent_peft.environments.http.messages import Refusal

_CODES = {messages.FULL: "CAPACITY_REACHED", "invalid": "VALIDATION_ERROR", "too_long": "VALIDATION_ERROR"}


class OpenEnvSession:
    """The session of one WebSocket."""

    def __init__(self, socket: WebSocket, episodes: Episodes) -> None:
        self.socket, self.episodes = socket, episodes
        self.client = uuid.uuid4().hex
        self.episode: str | None = None
        self.steps = 0
        self.since: float | None = (
            time.monotonic()
        )  # when it began to wait for its client; None while it does not

    async def answer(self, text: str) -> dict[str, Any] | None:
        """The answer to one message, or None to the last."""
        try:
            message = messages.decode(text)
        except ValueError as error:
            return _error(f"not JSON: {error}", "INVALID_JSON")
        kind = message.get("type") if isinstance(message, dict) else None
        content = message.get("data", {}) if isinstance(message, dict) else {}
        del message
        try:
            match kind:
                case "reset":
                    return _observation(await self.reset(messages.ResetRequest.model_validate(content)))
                case "step":
                    return _observation(await self.step(messages.Action.model_validate(content)))
                case "state":
                    return {"type": "state", "data": self.state()}
                case "close":
                    return None
                case _:
                    return _error(
                        f"there is no message of type {kind!r:.50}; send reset, step, state or close",
                        "UNKNOWN_TYPE",
                    )
        except ValidationError as error:
            return _error(messages.one_line(first_error(error)), "VALIDATION_ERROR")
        except Refusal as refusal:
            return _error(refusal.text, _CODES.get(refusal.code, "EXECUTION_ERROR"))

    async def reset(self, request: messages.ResetRequest) -> messages.ResetResponse:
        await self.end()
        if request.episode_id in self.episodes.open or request.episode_id in self.episodes.ended:
            raise Refusal(409, messages.CONFLICT, f"there is an episode {request.episode_id!r} already")
        response = await self.episodes.reset(request, self.client)
        self.episode, self.steps = response.metadata.episode_id, 0
        return response

    async def step(self, action: messages.Action) -> messages.StepResponse:
        if self.episode is None:
            raise Refusal(409, messages.CONFLICT, "there is no episode: send reset first")
        response = await self.episodes.step(
            messages.StepRequest(episode_id=self.episode, index=self.steps, action=action), self.client
        )
        self.steps += 1
        return response

    def state(self) -> dict[str, Any]:
        if self.episode is None:
            return {"episode_id": None, "step_count": 0}
        return self.episodes.state(self.episode, self.client).model_dump()

    async def end(self) -> None:
        if self.episode is not None:
            name, self.episode = self.episode, None
            await self.episodes.close(name, self.client)


class Sessions:
    """The open sessions: at most half of all connections, so that there is room for requests."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes, self.limits = episodes, episodes.limits
        self.open: set[OpenEnvSession] = set()

    async def converse(self, socket: WebSocket) -> None:
        """Serve one socket until it closes, is idle for too long, or must make room for another."""
        if len(self.open) >= max(1, self.limits.connections // 2) and not await self._make_room():
            await socket.close(1013, "the server holds as many sessions as it may")
            return
        session = OpenEnvSession(socket, self.episodes)
        self.open.add(session)
        try:
            await socket.accept()
            while await self._serve_one(session):
                pass
        except (WebSocketDisconnect, TimeoutError):
            pass
        finally:
            self.open.discard(session)
            await session.end()

    async def _serve_one(self, session: OpenEnvSession) -> bool:
        """One message and its answer. Whether there may be another.

        Raises:
            TimeoutError: the client does not read.
        """
        socket = session.socket
        answer: dict[str, Any] | None
        session.since = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.idle_seconds):
                text = await socket.receive_text()
        except TimeoutError:
            await socket.close(1001, "nothing was asked for too long")
            return False
        except KeyError:  # starlette's, where the message is bytes
            answer = _error("send text, not bytes", "INVALID_JSON")
        else:
            session.since = None
            answer = await session.answer(text)
        if answer is None:
            await socket.close()
            return False
        async with asyncio.timeout(self.limits.answer_seconds):
            await socket.send_text(messages.encode(answer).decode("ascii"))
        return True

    async def _make_room(self) -> bool:
        """Close the session without an episode that has been idle the longest. Whether there is one."""
        idle = [session for session in self.open if session.episode is None and session.since is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda session: session.since or 0.0)
        self.open.discard(oldest)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it closes already
            await oldest.socket.close(1013, "another session needs the room")
        return True


def _observation(response: BaseModel) -> dict[str, Any]:
    return {"type": "observation", "data": response.model_dump()}


def _error(text: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": messages.one_line(text), "code": code}}
