"""The tool over the Model Context Protocol, as the official client sees it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from agent_peft import RLTrainingTool

anyio = pytest.importorskip("anyio")
mcp = pytest.importorskip("mcp")
SRC = Path(__file__).parents[2] / "src"


def server(place, *options):
    """How a client starts the command in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "agent_peft", "mcp", *options], env=environment, cwd=place
    )


async def ask(client, **parameters):
    result = await client.call_tool("rl_training", parameters)
    (content,) = result.content
    told = json.loads(content.text)
    assert result.is_error == (told["status"] == "error")
    return told


def test_a_client_lists_the_tool_and_is_refused_what_is_outside(place):
    async def main():
        async with mcp.Client(server(place)) as client:
            (tool,) = (await client.list_tools()).tools
            assert (tool.name, tool.input_schema) == ("rl_training", RLTrainingTool().schema)
            assert (await ask(client, action="create_reward"))["rewards"] == {
                "correct": 1.0,
                "incorrect": 0.0,
            }
            told = await ask(client, model_name="Qwen/Qwen3-0.6B", output_dir="../run")
            assert "is outside of" in told["message"]
            assert "removes nothing" in (await ask(client, action="delete"))["message"]

    anyio.run(main)


@pytest.mark.slow
def test_relative_paths_begin_in_the_root(place, tmp_path):
    (place / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    async def main():
        async with mcp.Client(server(elsewhere, "--root", str(place))) as client:
            read = await ask(client, action="load_dataset", dataset="rows.jsonl")
            assert (read["status"], read["samples"][0]["prompt"]) == ("success", "1+1="), read

    anyio.run(main)


@pytest.mark.slow
def test_a_client_trains_in_the_background_polls_stops_and_reads_the_report(place, check_numbers):
    model = "Qwen/Qwen3-0.6B"

    async def main():
        async with mcp.Client(server(place)) as client:
            keys = {"model_name": model, "eval_samples": 0, "background": True}
            begun = await ask(client, **keys, num_epochs=9000, output_dir="long")
            assert (begun["status"], begun["state"]) == ("success", "running"), begun
            while (told := await ask(client, action="status", output_dir="long"))["step"] < 2:
                assert told["state"] == "running"
                await anyio.sleep(0.2)
            stopped = await ask(client, action="stop", output_dir="long")
            assert stopped["state"] == "interrupted" and stopped["step"] >= told["step"]
            report = await ask(client, action="report", output_dir="long")
            assert report["course"][-1]["step"] == report["step"] - 1 == stopped["step"] - 1
            whole = await ask(client, model_name=model, output_dir="short")  # waits, and prints on stderr
            check_numbers({"algorithm": "sft"} | whole | {"output_dir": str(place / "short")})

    anyio.run(main)
    assert (
        not (place / "long/.lock").exists()
        or json.loads((place / "long/run.json").read_text())["process"] is None
    )
