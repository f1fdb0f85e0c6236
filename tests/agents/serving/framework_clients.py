"""One conversation that uses a tool with each agent framework that this Python has. Prints, as JSON, the
version of each and what it answered.
"""

import asyncio
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

QUESTION = "How many are 2 and 2? Use the tool."
TOKENS = 400  # of a reply


def openai_agents(url: str) -> str:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model="tiny", openai_client=client)
    settings = ModelSettings(temperature=0, max_tokens=TOKENS)
    agent = Agent(name="a", instructions="Help.", model=model, tools=[add], model_settings=settings)
    return str(asyncio.run(Runner.run(agent, QUESTION)).final_output)


def langchain_openai(url: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Total(BaseModel):
        total: int

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    chat = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS, max_retries=0
    )
    messages = [HumanMessage(QUESTION)]
    for choice in ("any", "auto"):
        reply = chat.bind_tools([add], tool_choice=choice).invoke(messages)
        results = [
            ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in reply.tool_calls
        ]
        messages += [reply, *results]
    totals = [
        chat.with_structured_output(Total, method=method).invoke("Return a total as json.").total
        for method in ("json_schema", "function_calling")
    ]
    assert totals == [4, 4], totals
    return str(messages[-1].content)


def langgraph(url: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    chat = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS, max_retries=0
    )
    return str(
        create_react_agent(chat, [add]).invoke({"messages": [("user", QUESTION)]})["messages"][-1].content
    )


def smolagents(url: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: one.
            b: another.
        """
        return a + b

    model = OpenAIServerModel("tiny", f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS)
    return str(ToolCallingAgent([add], model, max_steps=3, verbosity_level=0).run(QUESTION))


def litellm(url: str) -> str:
    import litellm

    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}  # fmt: skip
    keys = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0,
            "tools": [{"type": "function", "function": tool}], "max_tokens": TOKENS}  # fmt: skip
    messages = [{"role": "user", "content": QUESTION}]
    reply = litellm.completion(messages=messages, tool_choice="required", **keys).choices[0].message
    (call,) = reply.tool_calls
    total = sum(json.loads(call.function.arguments).values())
    messages += [reply.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
    return str(litellm.completion(messages=messages, **keys).choices[0].message.content)


def pydantic_ai(url: str) -> str:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Total(BaseModel):
        total: int

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"temperature": 0, "max_tokens": TOKENS}
    texts, forms = (
        Agent(model, model_settings=settings),
        Agent(model, model_settings=settings, output_type=Total),
    )
    for agent in (texts, forms):
        agent.tool_plain(_add)
    assert forms.run_sync(QUESTION).output.total == 4
    return str(texts.run_sync(QUESTION).output)


def _add(a: int, b: int) -> int:
    """Adds."""
    return a + b


_add.__name__ = "add"


def inspect_ai(url: str) -> str:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import tool

    @tool
    def add():
        async def execute(a: int, b: int) -> int:
            """Adds.

            Args:
                a: one.
                b: another.
            """
            return a + b

        return execute

    config = GenerateConfig(temperature=0, max_tokens=TOKENS, max_retries=0)
    model = get_model("openai-api/local/tiny", base_url=f"{url}/v1", api_key="none", config=config)

    async def loop() -> str:
        _, output = await model.generate_loop([ChatMessageUser(content=QUESTION)], tools=[add()])
        return output.completion

    return asyncio.run(loop())


def minisweagent(url: str) -> str:
    os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    keys = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": TOKENS}
    observations = {k: v for k, v in config["model"].items() if k.endswith("_template")}
    model = LitellmModel(model_name="openai/tiny", model_kwargs=keys, **observations)
    texts = {key: config["agent"][key] for key in ("system_template", "instance_template")}
    result = DefaultAgent(model, LocalEnvironment(), step_limit=3, cost_limit=0, **texts).run(QUESTION)
    return str(result["submission"]).strip()


CLIENTS = {
    "openai-agents": openai_agents,
    "langchain-openai": langchain_openai,
    "langgraph": langgraph,
    "smolagents": smolagents,
    "litellm": litellm,
    "pydantic-ai-slim": pydantic_ai,
    "inspect-ai": inspect_ai,
    "mini-swe-agent": minisweagent,
}


def main(url: str, names: list[str]) -> None:
    answers = {}
    for name in names or CLIENTS:
        try:
            answers[name] = [version(name), CLIENTS[name](url)]
        except PackageNotFoundError:
            continue
        except Exception as error:
            answers[name] = [version(name), f"{type(error).__name__}: {error}"[:800]]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
