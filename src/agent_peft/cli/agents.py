"""The commands for agents of other programs: mcp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mcp(
    root: Annotated[Path, typer.Option(help="the only folder that the tool reads and writes")] = Path("."),
) -> None:
    """Serve the training tool to an agent, over the Model Context Protocol on standard input and output."""
    from agent_peft.agents.tool import serve

    serve(root)
