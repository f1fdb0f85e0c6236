"""The tool with which an agent trains: JSON in, JSON out, and never an exception. ``serve`` offers it over
the Model Context Protocol.

It reads and writes below one folder only, runs no code that a parameter names, and removes nothing: a
training never overwrites another one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

from agent_peft.agents.datasets import NAMES
from agent_peft.agents.keys import (
    OWN_ATTEMPTS,
    TAKES,
    Parameters,
    check,
    content_of,
    named_reward,
    refuse,
    schema,
)
from agent_peft.files import finite
from agent_peft.lookup import install, needed
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError
from agent_peft.version import __version__

SHOWN_ROWS = 3
_UNSEEN = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


class RLTrainingTool:
    """A tool that trains models, for agents and for programs.

    >>> print(RLTrainingTool().run({"action": "create_reward", "reward": "accuracy"}))
    {
      "status": "success",
      "action": "create_reward",
      "reward": "accuracy",
      "rewards": {
        "correct": 1.0,
        "incorrect": 0.0
      }
    }
    """

    name = "rl_training"
    description = (
        "Trains language models with supervised learning (sft) or from their own graded attempts (grpo, ppo, "
        "...), and measures them. train waits for the end unless background is true; then ask status with "
        "the same output_dir. To continue from an earlier training, give its output_dir as model_name."
    )

    def __init__(self, root: str | os.PathLike[str] = ".") -> None:
        """
        Args:
            root: every path must lie in it. Relative paths are relative to the current folder.
        """
        self._root = Path(root).expanduser().resolve()

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the parameters."""
        return schema()

    def run(self, parameters: Mapping[str, Any] | str) -> str:
        """Carry out a call. Return JSON with ``status``: ``success``, or ``error`` with a ``message`` that
        explains what to do. The parameters of ``schema`` may be a mapping or JSON.
        """
        action: Any = None
        try:
            given = content_of(parameters)
            action = given.get("action", "train")
            checked = check(given)
            result = {"status": "success", "action": action, **_DO[checked.action](self, checked)}
        except AgentPeftError as error:
            result = _failure(action, str(error))
        except (TrustError, InfrastructureError) as error:
            result = _failure(action, f"the training failed: {error}")
        except MemoryError:
            result = _failure(action, "there is not enough memory; take a smaller model or batch_size")
        except OSError as error:
            place = error.filename or "a file"
            result = _failure(action, f"{place}: {error.strerror or error}; name another folder")
        except Exception as error:
            result = _failure(action, f"unforeseen: {type(error).__name__}: {error}")
        return _written(result)

    # -- actions ---------------------------------------------------------------------------------------------

    def _train(self, given: Parameters) -> dict[str, Any]:
        output = self._path("output_dir", given.output_dir)  # first, since torch takes seconds to import
        if output == self._root:
            raise AgentPeftError("output_dir: is the allowed folder itself; name a new folder in it")

        from agent_peft.agents import training

        own = training.report_facts(given.algorithm).on_policy
        if not own:
            place = f"algorithm {given.algorithm}, which learns from what the dataset shows"
            refuse(given, OWN_ATTEMPTS, place)
        model = self._model(given)
        dataset = self._dataset(given, given.split or "train", output.parent / "datasets")
        config = training.config_from(
            given.model_copy(update={"output_dir": self._shown(output)}),
            given.algorithm,
            dataset,
            named_reward(given).rewards if own else None,
            given.kl_coef,
        )
        facts = {
            "algorithm": given.algorithm,
            "model_name": model,
            "dataset": dataset.name,
            "measured_on": _measured(dataset, config.evaluation.num_tasks if config.evaluation else 0),
        }
        return facts | training.carry_out(config, given.background)

    def _load_dataset(self, given: Parameters) -> dict[str, Any]:
        if given.model_name is not None:
            self._model(given)
        dataset = self._dataset(given, given.split or "train", self._root / "datasets")
        return {
            "dataset": dataset.name,
            "format": given.format,
            "split": given.split or "train",
            "dataset_size": len(dataset),
            "sample_keys": dataset.column_names,
            "samples": dataset[:SHOWN_ROWS],
        }

    def _create_reward(self, given: Parameters) -> dict[str, Any]:
        return {"reward": given.reward, "rewards": named_reward(given).rewards}

    def _evaluate(self, given: Parameters) -> dict[str, Any]:
        from agent_peft.agents import training

        model = self._model(given)
        is_file = given.dataset not in NAMES and Path(given.dataset).exists()  # which has train alone
        split = given.split or ("train" if is_file else "test")
        dataset = self._dataset(given, split, self._root / "datasets")
        report = training.measure_run(given, dataset, given.max_samples)
        return {
            "model_name": model,
            "dataset": dataset.name,
            **training.accuracy_of(report),
            "mean_reply_tokens": report.mean_action_tokens,
            "cut_replies": report.cut_actions,
        }

    def _run(self, given: Parameters) -> dict[str, Any]:
        """Status, stop and report."""
        from agent_peft.agents import background, training

        folder = self._path("output_dir", given.output_dir)
        background.stop(folder) if given.action == "stop" else background.state(folder)
        shown = training.report_of if given.action == "report" else training.progress_of
        return shown(Path(self._shown(folder)))

    # -- parameters ------------------------------------------------------------------------------------------

    def _path(self, key: str, text: str) -> Path:
        """The absolute path of a text, without links. Outside of the allowed folder it is an error."""
        try:
            path = Path(text).expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise AgentPeftError(f"{key}: {text!r:.80} is not a path ({error})") from error
        if not path.is_relative_to(self._root):
            raise AgentPeftError(
                f"{key}: {text!r:.80} is outside of {self._root}, the only folder that this tool reads and "
                "writes; name a path in it"
            )
        return path

    def _shown(self, path: Path) -> str:
        """A path as it is written into configurations: relative to the current folder where it lies there."""
        here = Path.cwd()
        return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

    def _model(self, given: Parameters) -> str:
        """The name of a model that is on the hub, bundled, or in the allowed folder."""
        from agent_peft.policies.config import PretrainedConfig
        from agent_peft.policies.models.bundled import BUNDLED
        from agent_peft.policies.models.start import split_run, start_of

        name = given.model_name
        if name is None:
            raise AgentPeftError(
                "model_name: is missing; give a hub id, a folder, a bundled name such as smollm2-135m, or "
                "the output_dir of an earlier training"
            )
        if name in BUNDLED:
            return name
        path = split_run(name)[0]
        on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and ".." not in name
        if not on_hub or not path.parts or Path(path.parts[0]).exists():
            self._path("model_name", str(path))
        if not on_hub and not path.exists():
            raise AgentPeftError(f"model_name: there is no folder {name!r:.80}, and it is not a hub id")
        below = start_of(PretrainedConfig(model=name)).model  # of an adapter: what it was trained on
        if Path(below).exists() and below not in BUNDLED:
            self._path("model_name", below)
        for place in (path, Path(below)):
            if place.is_dir() and str(place) not in BUNDLED:
                for file in place.iterdir():  # which may be links
                    self._path("model_name", str(file))
        return name

    def _dataset(self, given: Parameters, split: str, folder: Path) -> Any:
        from agent_peft.agents.datasets import find_dataset

        name = given.dataset
        if name not in NAMES and (Path(*Path(name).parts[:1]).exists() or ".." in name):
            self._path("dataset", name)
        form = given.format if given.action == "load_dataset" else "sft"
        model = given.model_name if given.action == "load_dataset" else None
        limit = None if given.action == "evaluate" else given.max_samples
        folder = self._path("dataset", str(folder))  # it may be a link
        try:
            return find_dataset(name, split, limit, form, model, Path(self._shown(folder)))
        except ValueError as error:
            raise AgentPeftError(f"split: {error}") from error


_DO: dict[str, Callable[[RLTrainingTool, Parameters], dict[str, Any]]] = {
    "train": RLTrainingTool._train,
    "load_dataset": RLTrainingTool._load_dataset,
    "create_reward": RLTrainingTool._create_reward,
    "evaluate": RLTrainingTool._evaluate,
    **dict.fromkeys(("status", "stop", "report"), RLTrainingTool._run),
}


def _measured(dataset: Any, number: int | None) -> str:
    if dataset.environment["kind"] == "preferences":
        return "nothing (preferences grade no reply; use evaluate)"
    if number == 0:
        return "nothing (eval_samples is 0)"
    if dataset.heldout is None:
        return "the tasks of training"
    from agent_peft.environments import load_environment
    from agent_peft.environments.digests import shared_ids

    with (
        closing(load_environment(dataset.environment)) as training,
        closing(load_environment(dataset.heldout)) as heldout,
    ):
        measured = len(heldout.tasks[:number])
        shared = len(shared_ids(training, heldout, number))
    if shared == measured:
        return "the tasks of training"
    return f"{shared} of {measured} are tasks of training" if shared else "held-out tasks"


def _failure(action: Any, message: str) -> dict[str, Any]:
    known = action if isinstance(action, str) and action in TAKES else None
    return {"status": "error", "action": known, "message": " ".join(message.split())[:2000]}


def _written(result: dict[str, Any]) -> str:
    """JSON as any parser reads it, without characters that would move a terminal's cursor."""
    text = json.dumps(finite(result, str), indent=2, ensure_ascii=False, default=str)
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def serve(root: Path) -> None:
    """Serve the tool over the Model Context Protocol, on standard input and output, until the client leaves.
    Relative paths begin in ``root``. Whatever a training prints is written to standard error.
    """
    with needed(
        "agent-peft mcp needs the SDK of the Model Context Protocol, which is not installed; "
        + install("agents")
    ):
        import anyio
        from mcp.server.stdio import stdio_server
    if not root.is_dir():
        raise AgentPeftError(f"{root}: there is no such folder (seen from {Path.cwd()}); name another")

    async def main() -> None:
        server = _mcp_server(RLTrainingTool())
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    with chdir(root):  # clients start the command in a folder of their choice
        anyio.run(main)


def _mcp_server(tool: RLTrainingTool) -> Any:
    """A server with one tool. Each call has its own thread, so a long training blocks no other call."""
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
            text = await anyio.to_thread.run_sync(tool.run, parameters.arguments or {})
            failed = text.startswith('{\n  "status": "error"')
        content = mcp.types.TextContent(type="text", text=text)
        return mcp.types.CallToolResult(content=[content], is_error=failed)

    return Server("agent-peft", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)
