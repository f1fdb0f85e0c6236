"""An OpenEnv client's WebSocket session: ``{"type": "reset" | "step" | "state" | "close", "data": {...}}``, one episode at a time.

A session's episode ends with it, so nothing is ever sent twice here, and steps need no index.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from pydantic import BaseModel, ValidationError

from agent_peft.environments.http import wire
from agent_peft.environments.http.hosting import Episodes
from agent_peft.environments.http.web import WebSocket, WebSocketDisconnect
from agent_peft.environments.http.wire import Refusal

_CODES = {wire.FULL: "CAPACITY_REACHED", "invalid": "VALIDATION_ERROR", "too_long": "VALIDATION_ERROR"}


class Session:
    """What one socket has asked for so far."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes
        self.client = uuid.uuid4().hex
        self.episode: str | None = None
        self.steps = 0

    async def answer(self, text: str) -> dict[str, Any] | None:
        """The answer to one message, or None to the last."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            return _error(f"not JSON: {error}", "INVALID_JSON")
        kind = message.get("type") if isinstance(message, dict) else None
        content = message.get("data", {}) if isinstance(message, dict) else {}
        try:
            match kind:
                case "reset":
                    return _observation(await self.reset(wire.ResetRequest.model_validate(content)))
                case "step":
                    return _observation(await self.step(wire.Action.model_validate(content)))
                case "state":
                    return {"type": "state", "data": self.state()}
                case "close":
                    return None
                case _:
                    return _error(f"there is no message of type {kind!r}; send reset, step, state or close", "UNKNOWN_TYPE")
        except ValidationError as error:
            first = error.errors()[0]
            return _error(f"{'.'.join(map(str, first['loc'])) or kind}: {first['msg']}", "VALIDATION_ERROR")
        except Refusal as refusal:
            return _error(refusal.text, _CODES.get(refusal.code, "EXECUTION_ERROR"))

    async def reset(self, request: wire.ResetRequest) -> wire.ResetResponse:
        await self.end()
        if request.episode_id in self.episodes.open or request.episode_id in self.episodes.ended:
            raise Refusal(409, wire.CONFLICT, f"there is an episode {request.episode_id!r} already")
        response = await self.episodes.reset(request, self.client)
        self.episode, self.steps = response.metadata.episode_id, 0
        return response

    async def step(self, action: wire.Action) -> wire.StepResponse:
        if self.episode is None:
            raise Refusal(409, wire.CONFLICT, "there is no episode: send reset first")
        response = await self.episodes.step(wire.StepRequest(episode_id=self.episode, index=self.steps, action=action), self.client)
        self.steps += 1
        return response

    def state(self) -> dict[str, Any]:
        if self.episode is None:
            return {"episode_id": None, "step_count": 0}
        return self.episodes.state(self.episode).model_dump()

    async def end(self) -> None:
        if self.episode is not None:
            await self.episodes.close(self.episode)
            self.episode = None


async def converse(socket: WebSocket, episodes: Episodes) -> None:
    """Serve one socket until it closes."""
    session = Session(episodes)
    await socket.accept()
    try:
        while True:
            try:
                answer = await session.answer(await socket.receive_text())
            except KeyError:  # starlette's, where the message is bytes
                answer = _error("send text, not bytes", "INVALID_JSON")
            if answer is None:
                await socket.close()
                break
            await socket.send_text(wire.encode(answer).decode("ascii"))
    except WebSocketDisconnect:
        pass
    finally:
        await session.end()


def _observation(response: BaseModel) -> dict[str, Any]:
    return {"type": "observation", "data": response.model_dump()}


def _error(text: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": " ".join(text.split()), "code": code}}
