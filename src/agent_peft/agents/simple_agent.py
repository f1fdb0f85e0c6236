"""An agent that plans calls of tools and reports, on any OpenAI-compatible endpoint or a local policy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

from pydantic import Field

from agent_peft.config import PublicConfig
from agent_peft.lookup import install, needed
from agent_peft.types import AgentPeftError

_Json = dict[str, Any]
_Model = Callable[[list[_Json], list[_Json]], _Json]  # (messages, functions) -> the next message
MAX_RESULT = 20_000  # characters of a tool's result that the model reads
SYSTEM_PROMPT = (
    "You are {name}. You may call tools. Call one when the request needs it, read its result, and then "
    "answer with what the result says. Never report a number that no tool has told you."
)


TOOL_PARTS = ("name", "description", "schema", "run")


class AgentTool(Protocol):
    """What an agent needs of a tool. ``run`` returns a text and raises nothing."""

    name: str
    description: str

    @property
    def schema(self) -> dict[str, Any]: ...

    def run(self, parameters: Mapping[str, Any] | str) -> str: ...


class LLMConfig(PublicConfig):
    """The model that an agent thinks with.

    >>> LLMConfig(model="runs/mine", local=True).local
    True
    """

    model: str = Field(
        min_length=1, description="its name at the endpoint; or with local a run, an adapter or a model"
    )
    local: bool = Field(default=False, description="load the model in this process, with our engine")
    base_url: str | None = Field(
        default=None, description="of the endpoint; null takes OPENAI_BASE_URL, and else OpenAI's"
    )
    api_key: str | None = Field(default=None, repr=False, description="null takes OPENAI_API_KEY")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="null leaves it to the endpoint; a local policy is greedy"
    )
    max_tokens: int = Field(default=1024, ge=1, le=32_768, description="maximum tokens of a reply")
    timeout: float = Field(default=120.0, gt=0, description="seconds to wait for the endpoint")


class SimpleAgent:
    """An agent that calls its tools until it has an answer, at most ``max_steps`` times.

    Attributes:
        messages: the conversation of the last ``run``, in the form of OpenAI's API.
    """

    def __init__(
        self,
        name: str = "Agent",
        llm_config: LLMConfig | None = None,
        tools: Sequence[AgentTool] = (),
        system_prompt: str | None = None,
        max_steps: int = 10,
    ) -> None:
        """
        Args:
            llm_config: the model; None takes gpt-4o-mini at the endpoint of the environment.
            max_steps: replies of the model in one ``run``.
        """
        self.name, self.max_steps = name, max_steps
        self.llm_config = llm_config or LLMConfig(model="gpt-4o-mini")
        for tool in tools:
            if missing := [part for part in TOOL_PARTS if not hasattr(tool, part)]:
                raise AgentPeftError(
                    f"SimpleAgent: the tool {tool!r:.60} has no {missing[0]}; a tool has "
                    + ", ".join(TOOL_PARTS)
                )
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools) or max_steps < 1:
            raise AgentPeftError("SimpleAgent: needs tools with different names, and max_steps of at least 1")
        self.system_prompt = SYSTEM_PROMPT.format(name=name) if system_prompt is None else system_prompt
        self.messages: list[dict[str, Any]] = []

    def run(self, text: str) -> str:
        """Carry out a request, and return the answer; at the limit of replies, the last result of a tool."""
        self.messages = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": text}]
        last = "none"
        for _ in range(self.max_steps):
            message = self._reply(self.messages, self._functions)
            self.messages.append(message)
            if not message.get("tool_calls"):
                return str(message.get("content") or "")
            for call in message["tool_calls"]:
                last = self._call(call["function"]["name"], call["function"]["arguments"])
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": last})
        return f"Stopped after {self.max_steps} replies without an answer. The last result of a tool: {last}"

    @cached_property
    def _functions(self) -> list[_Json]:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema},
            }
            for tool in self.tools.values()
        ]

    @cached_property
    def _reply(self) -> _Model:
        return _local(self.llm_config) if self.llm_config.local else _endpoint(self.llm_config)

    def _call(self, name: str, arguments: str) -> str:
        if name not in self.tools:
            known = ", ".join(self.tools) or "none"
            return json.dumps(
                {"status": "error", "message": f"there is no tool {name!r:.80}; there is: {known}"}
            )
        return self.tools[name].run(arguments)[:MAX_RESULT]


def _endpoint(config: LLMConfig) -> _Model:
    with needed(
        f"SimpleAgent: needs the openai client, which is not installed; {install('agents')}, "
        "or use a local policy with LLMConfig(model=..., local=True)"
    ):
        import openai
    try:
        client = openai.OpenAI(base_url=config.base_url, api_key=config.api_key, timeout=config.timeout)
    except openai.OpenAIError as error:
        raise AgentPeftError(f"LLMConfig: {_line(error)}") from error

    def reply(messages: list[_Json], functions: list[_Json]) -> _Json:
        keys: dict[str, Any] = {"tools": functions} if functions else {}
        if config.temperature is not None:
            keys["temperature"] = config.temperature
        try:
            answer = client.chat.completions.create(
                model=config.model, messages=cast(Any, messages), max_tokens=config.max_tokens, **keys
            )
        except openai.OpenAIError as error:
            raise AgentPeftError(f"{client.base_url}: {type(error).__name__}: {_line(error)}") from error
        if not answer.choices:
            raise AgentPeftError(f"{client.base_url}: answered without a choice; is it a chat model?")
        message = answer.choices[0].message
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": call.function.model_dump(include={"name", "arguments"}),
            }
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
        return _message(message.content, calls)

    return reply


def _local(config: LLMConfig) -> _Model:
    """A policy in this process, which reads and writes calls as ``serve-policy`` does."""
    from agent_peft.agents.serving.choices import written
    from agent_peft.agents.serving.conversation import ChatMessage, Tool, plain_messages, split_calls
    from agent_peft.agents.serving.models import load_target
    from agent_peft.policies.engine import load_sampler
    from agent_peft.policies.generation import generate

    policy = load_target(config.model)
    sampler = load_sampler(policy)
    limits = {"temperature": config.temperature or 0.0, "max_new_tokens": config.max_tokens}

    def reply(messages: list[_Json], functions: list[_Json]) -> _Json:
        tools = [Tool.model_validate(function) for function in functions]
        plain = plain_messages([ChatMessage.model_validate(message) for message in messages], tools)
        tokens = len(sampler.chat.opening(plain))
        most = math.inf if policy.bound is None else policy.bound.positions
        if tokens >= most:
            raise AgentPeftError(
                f"SimpleAgent: the conversation has {tokens} tokens, and {config.model} reads {most}; begin "
                "another one with a new agent, give it fewer tools, or take another model"
            )
        room = min(tokens + config.max_tokens, most)
        (text,) = generate(sampler, [plain], limits | {"max_tokens": room}, seed=len(messages))
        content, calls = split_calls(text, tools)
        return _message(content, [call.model_dump() for call in written(calls)])

    return reply


def _message(content: str | None, calls: list[_Json]) -> _Json:
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
