"""The training tool over the Model Context Protocol, on standard input and output."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from agent_peft.agents.tool import RLTrainingTool
from agent_peft.types import AgentPeftError
from agent_peft.version import __version__


def serve(root: Path) -> None:
    """Serve the tool until the client leaves. Whatever a training prints goes to standard error.

    Args:
        root: the folder that every path must lie in.

    Raises:
        AgentPeftError: the SDK is not installed, or there is no such folder.
    """
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ImportError as error:
        raise AgentPeftError(
            "agent-peft mcp needs the SDK of the Model Context Protocol, which is not installed; pip install "
            "'agent-peft[agents]'"
        ) from error
    if not root.is_dir():
        raise AgentPeftError(f"{root}: there is no such folder (seen from {Path.cwd()}); name another")
    server = build_server(RLTrainingTool(root))

    async def main() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(main)


def build_server(tool: RLTrainingTool) -> Any:
    """A server of the official SDK with one tool. Calls run on a thread each, so that a long training leaves
    the others answered.
    """
    import anyio.to_thread
    import mcp
    from mcp.server.lowlevel import Server

    described = mcp.Tool(name=tool.name, description=tool.description, input_schema=tool.schema)

    async def list_tools(context: Any, parameters: Any) -> Any:
        return mcp.ListToolsResult(tools=[described])

    async def call_tool(context: Any, parameters: Any) -> Any:
        if parameters.name != tool.name:
            text, failed = f"there is no tool {parameters.name!r:.80}; call {tool.name}", True
        else:
            text = await anyio.to_thread.run_sync(partial(tool.run, parameters.arguments or {}))
            failed = text.startswith('{\n  "status": "error"')
        content = mcp.types.TextContent(type="text", text=text)
        return mcp.types.CallToolResult(content=[content], is_error=failed)

    return Server("agent-peft", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
