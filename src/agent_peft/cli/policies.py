"""The commands that let others talk to a policy or to the training tool: serve-policy, chat, mcp."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_peft.cli.app import Host, Port, Token
from agent_peft.printable import printable
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.policies.policy import Policy

Device = Annotated[str | None, typer.Option(help="where the model computes, such as cpu or cuda:0")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or another dtype of policy.dtype")]
MaxTokens = Annotated[
    int,
    typer.Option(min=2, help="most tokens of a prompt and its reply together, if the model reads so many"),
]


def serve_policy(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="run directories (RUN, RUN:best, RUN:step_000012), adapters, models; NAME=TARGET names one",
            metavar="RUN|MODEL...",
        ),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="clients may load the adapters below this folder, by vLLM's requests; needs --token"
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="replies of one policy that decode at once")] = 32,
    max_tokens: MaxTokens = 4096,
    max_requests: Annotated[
        int, typer.Option(min=1, help="replies at once, those that wait for a row included")
    ] = 256,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Serve policies as OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models), until SIGTERM or
    SIGINT. A request names a policy as its model; base is the model under the first adapter.
    """
    from agent_peft.addresses import read_token
    from agent_peft.agents.serving.server import serve
    from agent_peft.environments.http.transport import Address
    from agent_peft.policies.engine.base import EngineConfig
    from agent_peft.policies.engine.service import Service

    secret = read_token(token) if token else None
    service = Service(_policies(targets, device, dtype), EngineConfig(rows=rows), max_tokens)
    serve(service, Address(host, port), max_requests, secret, adapters)


def chat(
    target: Annotated[
        str,
        typer.Argument(
            help="run directory (RUN, RUN:best, RUN:step_000012), adapter or model; with --play a "
            "configuration or a run directory",
            metavar="RUN|MODEL|CONFIG",
        ),
    ],
    play: Annotated[
        bool, typer.Option("--play", help="play the policy's part in an episode of CONFIG's environment")
    ] = False,
    task: Annotated[str | None, typer.Option(help="id of the task to play; default: the first")] = None,
    system: Annotated[str | None, typer.Option(help="system message of the conversation")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, help="of the replies; 0 is greedy; default: 0.7")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="most tokens of one reply; default: 512")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="decides what is drawn; default: 0")] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Talk to a policy, or play its part with --play. Each line is a message; a backslash at its end
    continues it in the next line. /clear begins another conversation, /exit or the end of the input ends it.
    """
    of_policies = {
        "--system": system,
        "--temperature": temperature,
        "--max-new-tokens": max_new_tokens,
        "--seed": seed,
        "--device": device,
        "--dtype": dtype,
    }
    if play:
        without = next((name for name, value in of_policies.items() if value is not None), None)
        if without is not None:
            raise AgentPeftError(f"{without} has no effect with --play, where a person replies; leave it out")
        return _play(Path(target), task)
    if task is not None:
        raise AgentPeftError("--task has an effect with --play only; add it, or leave --task out")
    from agent_peft.agents.chat import ChatSettings, converse

    (policy, *_) = _policies([target], device, dtype).values()
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    settings = ChatSettings(system, **{name: value for name, value in sampling.items() if value is not None})  # type: ignore[arg-type]
    converse(policy, settings, _messages(), _say, _warn)


def mcp(
    root: Annotated[
        Path, typer.Option(help="the only folder that the tool uses; relative paths begin there")
    ] = Path("."),
) -> None:
    """Serve the training tool to an agent, over the Model Context Protocol on standard input and output."""
    from agent_peft.agents.tool import serve

    serve(root)


def _policies(targets: list[str], device: str | None, dtype: str | None) -> dict[str, Policy]:
    from agent_peft.agents.serving.models import load_policies
    from agent_peft.hardware import set_threads

    set_threads(None)
    machine = {"device": device, "dtype": dtype}
    return load_policies(targets, {key: value for key, value in machine.items() if value is not None})


def _play(path: Path, task: str | None) -> None:
    from agent_peft.agents.play import play
    from agent_peft.configuration.load import read_config

    own = path / "config.yaml"
    config = read_config(own if own.is_file() else path, check_files=not own.is_file())[0]
    messages = _messages()
    episode = play(config, task, _show, lambda: next(messages, None), _warn)
    terms = ", ".join(f"{name} {value:.4g}" for name, value in episode.reward_terms.items())
    score = "" if episode.score is None else f", score {episode.score:.4g}"
    print(f"{episode.outcome.value}{score}, {episode.stop_reason.value}")
    print(f"reward {sum(episode.rewards):.4g} = {printable(terms)}")


def _messages() -> Iterator[str]:
    """What a person types or a pipe brings: a line each, or several of which all but the last end with a
    backslash.
    """
    parts: list[str] = []
    for line in _lines():
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.removesuffix("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives ``input`` a history and editing

    with suppress(EOFError):
        while True:
            yield input("> ")


def _write(text: str, style: str, end: str = "", error: bool = False) -> None:
    """Write a stranger's text; colours reach a terminal only."""
    from rich.console import Console
    from rich.text import Text

    content = "\n".join(map(printable, text.split("\n")))
    Console(stderr=error, highlight=False, soft_wrap=True).print(Text(content, style=style), end=end)


def _say(text: str) -> None:
    if text:
        _write(text, "cyan")


def _show(text: str) -> None:
    _write(text, "cyan", end="\n")


def _warn(text: str) -> None:
    _write(text, "yellow", end="\n", error=True)
