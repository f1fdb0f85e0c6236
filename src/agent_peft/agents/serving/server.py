"""The server of ``agent-peft serve-policy``: OpenAI's API over the policies of a ``Service``. It needs the
extra ``server``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_peft.addresses import is_loopback
from agent_peft.agents.serving.adapters import Adapters
from agent_peft.agents.serving.answers import CompletionBody, ErrorBody, Model, Models, problem_of
from agent_peft.agents.serving.anthropic_messages import MessagesRequest, MessagesWriter
from agent_peft.agents.serving.choices import ChoiceStream, Draw, usage_of, whole_choices
from agent_peft.agents.serving.conversation import text_prompt
from agent_peft.agents.serving.openai_responses import ResponsesRequest, ResponsesWriter
from agent_peft.agents.serving.other_apis import Writer
from agent_peft.agents.serving.prompts import Prompt, chat_prompt
from agent_peft.agents.serving.requests import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    check_stops,
    sampling_of,
)
from agent_peft.config import first_error
from agent_peft.environments.http.guard import Guard, Limits, throttled
from agent_peft.environments.http.messages import Health, Refusal, one_line
from agent_peft.environments.http.transport import (
    JSON,
    Address,
    FastAPI,
    HTTPException,
    Request,
    RequestValidationError,
    Response,
    Server,
    StreamingResponse,
    listen,
    within_descriptors,
)
from agent_peft.policies.engine.service import Service
from agent_peft.policies.thinking import check_thinking
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError
from agent_peft.version import __version__

logger = logging.getLogger(__name__)

LOGGERS = (
    "uvicorn.error",
    "asyncio",
    __name__,
    "agent_peft.policies.engine.service",
    "agent_peft.environments.http.transport",
)
GRACE = 10.0  # seconds that replies get to end when the server stops
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 408, 413, 422, 429, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "whole, or as server-sent events"}
}


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
        """The name of the policy that a request means."""
        names = list(self.service.policies)
        name = names[0] if model is None else model
        if name not in names:
            there = ", ".join(names)
            raise Refusal(404, "model_not_found", f"there is no model {name[:200]!r}; there is: {there}")
        return name

    async def answer(
        self,
        request: ChatRequest | CompletionRequest,
        http: Request,
        prompts: Callable[[], Sequence[Prompt]],
        writer: Writer | None = None,
    ) -> Response:
        """Draw the replies of a request, and answer with all of them, or with a stream.

        Args:
            prompts: makes the tokens of each prompt, on a thread.
            writer: writes the answer in the words of another API.
        """
        writer = writer or Writer()
        name, is_chat = self.name_of(request.model), isinstance(request, ChatRequest)
        chat = self.service.policies[name].chat
        check_stops(request, chat.end_of_turn)
        draws, openings, changed = await self._begin(request, name, prompts)
        choices = [
            ChoiceStream(number, draw, chat, request, opening)
            for number, (draw, opening) in enumerate(zip(draws, openings, strict=True))
        ]
        kind = "chat.completion" + ".chunk" * request.stream if is_chat else "text_completion"
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        head: dict[str, Any] = {"id": id, "object": kind, "created": int(time.time()), "model": name}
        prompt: dict[str, Any] = {}
        if is_chat and request.return_token_ids:
            prompt["prompt_token_ids"] = list(draws[0].tokens_before)
        if not request.stream:
            await _finish(draws, changed, http)
            usage, whole = usage_of(draws, request.n), await whole_choices(choices, self.service, name)
            return JSON(writer.whole(CompletionBody(**head, choices=whole, usage=usage, **prompt)))

        async def events() -> AsyncIterator[bytes]:
            try:
                while not all(choice.over for choice in choices):
                    _check(draws)
                    for choice in choices:
                        if choice.over or not (choice.draw.drawn or choice.draw.ended):
                            continue
                        for part in choice.parts():
                            first = prompt if part.delta is not None and part.delta.role else {}
                            yield writer.part(CompletionBody(**head, choices=[part], **first))
                    if not all(choice.over for choice in choices):
                        await changed.wait()
                        changed.clear()
                if request.has_usage:
                    last = CompletionBody(**head, choices=[], usage=usage_of(draws, request.n))
                    yield writer.part(last)
                yield writer.end()
            except Refusal as refusal:
                yield writer.problem(refusal)
            finally:  # also if the client hangs up: its rows become free
                _cancel(draws)

        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    async def _begin(
        self,
        request: ChatRequest | CompletionRequest,
        name: str,
        prompts: Callable[[], Sequence[Prompt]],
    ) -> tuple[list[Draw], list[Prompt], asyncio.Event]:
        """Let the replies of a request join, each with its prompt. The event is set when one has ended, and
        in a stream at each token.
        """
        try:
            check_thinking(self.service.policies[name].chat, request.max_thinking_tokens)
            openings = await asyncio.to_thread(prompts)
        except AgentPeftError as error:
            raise Refusal(400, "invalid", str(error)) from error
        limit, members = self.service.max_tokens[name], range(request.n or 1)
        samplings = [sampling_of(request, len(opening.tokens), limit) for opening in openings]
        if (count := len(openings) * len(members)) > MAX_CHOICES:
            raise Refusal(400, "invalid", f"a request has {MAX_CHOICES} choices at most, this one {count}")
        if self.stopping:
            raise Refusal(503, "stopping", "the server is stopping")
        if (busy := len(self.under_way)) + count > self.most:
            raise Refusal(429, "busy", f"{busy} replies of {self.most} are under way; ask again later")
        self._requests += 1
        seed = derive(self._seed, self._requests) if request.seed is None else request.seed
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake(draw: Draw) -> None:
            if draw.ended:
                self.under_way.discard(draw)
            changed.set()

        def on_change(draw: Draw) -> None:
            with suppress(RuntimeError):  # a reply has ended after the event loop
                loop.call_soon_threadsafe(wake, draw)

        pairs = [pair for pair in zip(openings, samplings, strict=True) for _ in members]
        seeds = [seed, *(derive(seed, "choice", choice) for choice in range(1, count))]
        draws = [
            Draw(opening, each, sampling, on_change, request.alternatives, request.stream)
            for (opening, sampling), each in zip(pairs, seeds, strict=True)
        ]
        for draw in draws:
            draw.ended = request.most_new == 0
        for draw in (draw for draw in draws if not draw.ended):
            self.under_way.add(draw)
            self.service.submit(name, draw)
        return draws, [opening for opening, _ in pairs], changed

    def stop(self) -> None:
        """Refuse new requests, and cut those that are under way."""
        self.stopping = True
        for draw in list(self.under_way):
            draw.fail(InfrastructureError("the server is stopping"))


async def _finish(draws: Sequence[Draw], changed: asyncio.Event, http: Request) -> None:
    """Wait until all have ended. If the client hangs up, their rows become free."""
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


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _check(draws: Sequence[Draw]) -> None:
    """Refuse a request of which a reply has failed."""
    for draw in draws:
        if isinstance(draw.error, AgentPeftError | InfrastructureError):  # out of memory, or stopping
            raise Refusal(503, "unavailable", str(draw.error))
        if draw.error is not None:
            logger.error("the sampler has failed", exc_info=draw.error)
            text = f"the sampler has failed ({type(draw.error).__name__}); see the server's log"
            raise Refusal(500, "broken", text)


def _cancel(draws: Sequence[Draw]) -> None:
    for draw in draws:
        draw.cancelled = True


def policy_app(replies: Replies, adapters: Adapters | None = None) -> FastAPI:
    """The API. ``Guard`` protects it."""
    app = FastAPI(
        title="Agent-PEFT policies",
        description="Chat and text completions, as OpenAI's and vLLM's clients ask for them.",
        version=__version__,
        redirect_slashes=False,
    )
    service, created = replies.service, int(time.time())

    def refuse(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
        return JSON(problem_of(refusal), refusal.status, headers=headers)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return refuse(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return refuse(Refusal(400, "invalid", one_line(first_error(error))))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return refuse(Refusal(error.status_code, "http", str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return refuse(
            Refusal(500, "broken", f"internal error ({type(error).__name__}); see the server's log")
        )

    @app.post("/v1/chat/completions", response_model=CompletionBody, responses=REFUSALS | STREAM)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        """The policy's next message in a conversation."""
        return await converse(request, http)

    async def converse(request: ChatRequest, http: Request, writer: Writer | None = None) -> Response:
        chat = service.policies[replies.name_of(request.model)].chat
        return await replies.answer(request, http, lambda: [chat_prompt(chat, request)], writer)

    @app.post("/v1/responses", responses=REFUSALS | STREAM)
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """The policy's next items in a conversation."""
        return await converse(request.as_chat(), http, ResponsesWriter(request))

    @app.post("/v1/messages", responses=REFUSALS | STREAM)
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """The policy's next message in a conversation, in the words of Anthropic's API."""
        return await converse(request.as_chat(), http, MessagesWriter())

    @app.post("/v1/completions", response_model=CompletionBody, responses=REFUSALS | STREAM)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """The policy's continuation of texts or tokens, which no chat template frames."""
        policy = service.policies[replies.name_of(request.model)]
        return await replies.answer(
            request, http, lambda: [Prompt(text_prompt(prompt, policy)) for prompt in request.prompts]
        )

    @app.get("/v1/models", response_model=Models, responses=REFUSALS)
    async def models() -> Response:
        """The names that a request may give as ``model``."""
        return JSON(Models(data=[model_of(name) for name in service.policies]))

    @app.get("/v1/models/{model:path}", response_model=Model, responses=REFUSALS)
    async def model(model: str) -> Response:
        """One model."""
        return JSON(model_of(replies.name_of(model)))

    @app.get("/health", response_model=Health)
    async def health() -> Response:
        """Whether the server runs."""
        return JSON(Health())

    def model_of(name: str) -> Model:
        card = Model(id=name, created=created, max_model_len=service.max_tokens[name])
        if adapters is not None and service.policies[name].has_adapter:
            card.root, card.parent = adapters.loaded.get(name, (None,))[0], adapters.base
        return card

    if adapters is not None:
        adapters.add_routes(app)
    return app


class PolicyHost:
    """A server of policies and its listening socket.

    Args:
        most: replies at once, those that wait for a row included.
        adapters: clients may load the adapters below this folder, which takes a token.
    """

    def __init__(
        self,
        service: Service,
        address: Address,
        most: int,
        token: str | None = None,
        grace: float = GRACE,
        adapters: Path | None = None,
    ) -> None:
        if token is None and adapters is not None:
            raise AgentPeftError("--adapters: clients that load adapters need a token; add --token")
        if token is None and not is_loopback(address.host):
            raise AgentPeftError(
                f"{address.host} can be reached from other machines, so a token is needed: put one into an "
                "environment variable and name it with --token"
            )
        limits = replace(within_descriptors(Limits()), shutdown_seconds=grace)
        self.service, self.replies, self._grace = service, Replies(service, most), grace
        self._socket = listen(address)
        app = policy_app(self.replies, None if adapters is None else Adapters(service, adapters))
        self._server = Server(Guard(app, limits, token, problem_of), limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until ``stop``. Then replies get some seconds to end; what is left is cut."""
        self._loop = asyncio.get_running_loop()
        if ready is not None:
            ready()
        with throttled(LOGGERS):
            await self._server.serve([self._socket])

    def stop(self) -> None:
        """Stop serving. Signal handlers and other threads may call this; a second call cuts at once."""
        hurried = self._server.should_exit
        self._server.should_exit = self.replies.stopping = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(
                    self._loop.call_later, 0.0 if hurried else self._grace, self.replies.stop
                )


def serve(service: Service, address: Address, most: int, token: str | None, adapters: Path | None) -> None:
    """Serve until SIGTERM or SIGINT, and end the service. Print one line when the server listens."""
    try:
        host = PolicyHost(service, address, most, token, adapters=adapters)

        def ready() -> None:
            names = ", ".join(service.policies)
            print(f"serving {names} on {host.url}/v1 (its API: {host.url}/docs)", flush=True)

        async def until_signalled() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, host.stop)
            await host.run(ready)

        asyncio.run(until_signalled())
    finally:
        service.close()
