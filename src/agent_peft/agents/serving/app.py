"""OpenAI's API over the policies of a ``Service``. It needs the extra ``server``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from agent_peft.agents.serving.answers import (
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    Completion,
    Delta,
    ErrorAnswer,
    Model,
    Models,
    Usage,
)
from agent_peft.agents.serving.choices import ChoiceStream, Wish, chat_choice, completion_choice
from agent_peft.agents.serving.draws import Draw
from agent_peft.agents.serving.prompts import chat_prompt, text_prompt
from agent_peft.agents.serving.replies import Replies, finish, problem_of, streamed
from agent_peft.agents.serving.requests import ChatRequest, CompletionRequest
from agent_peft.agents.serving.tools import CLOSE
from agent_peft.config import first_error
from agent_peft.environments.http.messages import Health, Refusal, one_line
from agent_peft.environments.http.transport import (
    JSON,
    FastAPI,
    HTTPException,
    Request,
    RequestValidationError,
    Response,
)
from agent_peft.version import __version__

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 405, 408, 413, 422, 429, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "whole, or as server-sent events"}
}
COMPLETION_TOKENS = 16  # of a continuation, where a request names no limit


def policy_app(replies: Replies) -> FastAPI:
    """The API. ``Guard`` protects it."""
    app = FastAPI(
        title="Agent-PEFT policies",
        description="Chat and text completions, as OpenAI's and vLLM's clients ask for them.",
        version=__version__,
        redirect_slashes=False,
    )
    service, created = replies.service, int(time.time())

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return JSON(problem_of(refusal), refusal.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return JSON(problem_of(Refusal(400, "invalid", one_line(first_error(error)))), 400)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        refusal = Refusal(error.status_code, "http", str(error.detail))
        return JSON(problem_of(refusal), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        text = f"the server made a mistake ({type(error).__name__}); its log holds more"
        return JSON(problem_of(Refusal(500, "broken", text)), 500)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=REFUSALS | STREAM)
    async def chat_completions(request: ChatRequest, http: Request) -> Response:
        """The policy's next message in a conversation."""
        name = replies.name_of(request.model)
        chat, tools = service.policies[name].chat, request.tools or ()
        if request.tool_choice == "none":
            tools = ()
        once = tools and request.parallel_tool_calls is False
        stops = (*request.stops, CLOSE) if once else request.stops
        draws, changed = await replies.begin(
            request,
            name,
            lambda: [chat_prompt(request, tools, chat)],
            request.max_completion_tokens or request.max_tokens,
            request.top_logprobs or 0,
            stops,
        )
        wish = Wish(stops, tuple(tools), bool(request.logprobs), bool(request.return_token_ids))
        head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }
        prompt_ids = list(draws[0].tokens_before) if wish.token_ids else None
        if not request.stream:
            await finish(draws, changed, http)
            choices = [chat_choice(i, draw, chat, wish) for i, draw in enumerate(draws)]
            answer = ChatCompletion(
                **head, choices=choices, usage=_usage(draws, 1), prompt_token_ids=prompt_ids
            )
            return JSON(answer)

        def parts(stream: ChoiceStream, first: bool) -> Sequence[BaseModel]:
            opening = ChatDelta(index=stream.index, delta=Delta(role="assistant", content=""))
            begun = ChatChunk(**head, choices=[opening], prompt_token_ids=prompt_ids)
            chunks = [ChatChunk(**head, choices=[delta]) for delta in stream.chat_deltas()]
            return [begun, *chunks] if first else chunks

        def last() -> BaseModel | None:
            counted = request.stream_options and request.stream_options.include_usage
            return ChatChunk(**head, choices=[], usage=_usage(draws, 1)) if counted else None

        streams = [ChoiceStream(i, draw, chat, wish) for i, draw in enumerate(draws)]
        return streamed(streams, changed, parts, last)

    @app.post("/v1/completions", response_model=Completion, responses=REFUSALS | STREAM)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        """The policy's continuation of texts or tokens, which no chat template frames."""
        name = replies.name_of(request.model)
        policy = service.policies[name]
        draws, changed = await replies.begin(
            request,
            name,
            lambda: [text_prompt(prompt, policy) for prompt in request.prompts],
            request.max_tokens or COMPLETION_TOKENS,
            request.logprobs or 0,
            request.stops,
        )
        wish = Wish(request.stops, (), request.logprobs is not None, bool(request.return_token_ids))
        head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }
        prompts = len(request.prompts)
        if not request.stream:
            await finish(draws, changed, http)
            choices = [completion_choice(i, draw, policy.chat, wish) for i, draw in enumerate(draws)]
            return JSON(Completion(**head, choices=choices, usage=_usage(draws, prompts)))

        def parts(stream: ChoiceStream, first: bool) -> list[BaseModel]:
            return [Completion(**head, choices=[part]) for part in stream.completion_parts()]

        def last() -> BaseModel | None:
            counted = request.stream_options and request.stream_options.include_usage
            return Completion(**head, choices=[], usage=_usage(draws, prompts)) if counted else None

        streams = [ChoiceStream(i, draw, policy.chat, wish) for i, draw in enumerate(draws)]
        return streamed(streams, changed, parts, last)

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
        return Model(id=name, created=created, max_model_len=service.max_tokens[name])

    return app


def _usage(draws: Sequence[Draw], prompts: int) -> Usage:
    """The tokens that were read and drawn; the choices of one prompt read it once."""
    read = sum(len(draw.tokens_before) for draw in draws[:: len(draws) // prompts])
    drawn = sum(len(draw.drawn) for draw in draws)
    return Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn)
