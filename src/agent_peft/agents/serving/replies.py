"""The replies that are under way: how many there may be, and how an answer waits for its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from pydantic import BaseModel

from agent_peft.agents.serving.choices import ChoiceStream
from agent_peft.agents.serving.draws import Draw
from agent_peft.agents.serving.prompts import sampling_of
from agent_peft.agents.serving.requests import MAX_CHOICES, ChatRequest, CompletionRequest
from agent_peft.environments.http.messages import Refusal, encode
from agent_peft.environments.http.transport import Request, StreamingResponse
from agent_peft.policies.engine.service import Service
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def problem_of(refusal: Refusal) -> dict[str, object]:
    """The content of a refusal, as OpenAI's clients read it."""
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.text, "type": kind, "param": None, "code": refusal.code}}


class Replies:
    """The replies that are under way.

    Args:
        most: replies at once, those that wait for a row included.
    """

    def __init__(self, service: Service, most: int) -> None:
        self.service, self.most = service, most
        self.stopping = False
        self.under_way: set[Draw] = set()
        self._seed, self._requests = secrets.randbits(63), 0

    def name_of(self, model: str | None) -> str:
        """The policy that a request means.

        Raises:
            Refusal: there is none of this name.
        """
        names = list(self.service.policies)
        name = names[0] if model is None else model
        if name not in names:
            there = ", ".join(names)
            raise Refusal(404, "model_not_found", f"there is no model {name[:200]!r}; there is: {there}")
        return name

    async def begin(
        self,
        request: ChatRequest | CompletionRequest,
        name: str,
        prompts: Callable[[], Sequence[Sequence[int]]],
        most_new: int | None,
        alternatives: int,
        stops: Sequence[str],
    ) -> tuple[list[Draw], asyncio.Event]:
        """Let the replies of a request join. The event is set when one has ended, and in a stream at each
        token.

        Args:
            prompts: makes the tokens of each prompt, on a thread.

        Raises:
            Refusal: a prompt cannot be read or is too long, or there are too many replies.
        """
        try:
            openings = await asyncio.to_thread(prompts)
        except AgentPeftError as error:
            raise Refusal(400, "invalid", str(error)) from error
        limit, members = self.service.max_tokens[name], range(request.n or 1)
        samplings = [sampling_of(request, len(opening), limit, most_new, stops) for opening in openings]
        if (count := len(openings) * len(members)) > MAX_CHOICES:
            raise Refusal(400, "invalid", f"a request has {MAX_CHOICES} choices at most, this one {count}")
        if self.stopping:
            raise Refusal(503, "stopping", "the server is stopping")
        if (busy := len(self.under_way)) + count > self.most:
            raise Refusal(429, "busy", f"{busy} replies of {self.most} are under way; ask again later")
        self._requests += 1
        seed = derive(self._seed, self._requests) if request.seed is None else request.seed
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell(draw: Draw) -> None:
            if draw.ended:
                self.under_way.discard(draw)
            changed.set()

        def on_change(draw: Draw) -> None:
            try:
                loop.call_soon_threadsafe(tell, draw)
            except RuntimeError:
                logger.debug("a reply has ended after the event loop")

        asked = [pair for pair in zip(openings, samplings, strict=True) for _ in members]
        draws = [
            Draw(
                opening,
                seed if choice == 0 else derive(seed, "choice", choice),
                sampling,
                on_change,
                alternatives,
                request.stream,
            )
            for choice, (opening, sampling) in enumerate(asked)
        ]
        self.under_way.update(draws)
        for draw in draws:
            self.service.submit(name, draw)
        return draws, changed

    def stop(self) -> None:
        """Refuse new requests, and cut those that are under way."""
        self.stopping = True
        for draw in list(self.under_way):
            draw.fail(InfrastructureError("the server is stopping"))


async def finish(draws: Sequence[Draw], changed: asyncio.Event, http: Request) -> None:
    """Wait until all have ended. If the client hangs up, their rows become free.

    Raises:
        Refusal: one has failed.
    """
    gone = asyncio.ensure_future(_hung_up(http))
    gone.add_done_callback(lambda _: changed.set())
    try:
        while not all(draw.ended for draw in draws):
            changed.clear()
            await changed.wait()
            if gone.done():
                raise Refusal(499, "hung_up", "the client has hung up")  # which nobody reads
    finally:
        gone.cancel()
        _cancel(draws)
    _check(draws)


def streamed(
    choices: Sequence[ChoiceStream],
    changed: asyncio.Event,
    parts: Callable[[ChoiceStream, bool], Iterable[BaseModel]],
    last: Callable[[], BaseModel | None],
) -> StreamingResponse:
    """Server-sent events, as the tokens come. If the client hangs up, the rows become free.

    Args:
        parts: of a choice, those that are new; the flag marks the first call for it.
        last: comes after all choices.
    """

    async def events() -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            while not all(choice.over for choice in choices):
                _check([choice.draw for choice in choices])
                for choice in choices:
                    if choice.over or not (choice.draw.drawn or choice.draw.ended):
                        continue
                    for part in parts(choice, choice.index not in begun):
                        yield _event(part)
                    begun.add(choice.index)
                if not all(choice.over for choice in choices):
                    await changed.wait()
                    changed.clear()
            if (end := last()) is not None:
                yield _event(end)
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            yield b"data: " + encode(problem_of(refusal)) + b"\n\n"
        finally:
            _cancel([choice.draw for choice in choices])

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _event(part: BaseModel) -> bytes:
    return b"data: " + encode(part) + b"\n\n"


def _check(draws: Sequence[Draw]) -> None:
    """
    Raises:
        Refusal: one has failed.
    """
    for draw in draws:
        if isinstance(draw.error, AgentPeftError | InfrastructureError):  # out of memory, or stopping
            raise Refusal(503, "unavailable", str(draw.error))
        if draw.error is not None:
            logger.error("the sampler has failed", exc_info=draw.error)
            text = f"the sampler has failed ({type(draw.error).__name__}); the server's log holds more"
            raise Refusal(500, "broken", text)


def _cancel(draws: Sequence[Draw]) -> None:
    for draw in draws:
        draw.cancelled = True


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
