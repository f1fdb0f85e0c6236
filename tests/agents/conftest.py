"""A tiny model that ends its replies soon, a folder with GSM8K's files, as a user would have them, and an
OpenAI-compatible server that follows a script.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agent_peft.policies.models.tokenizer import character_tokenizer

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2-0.5B-Instruct")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a GPT-2 of random weights over ASCII. One token in four that it draws ends the reply."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = character_tokenizer(ALPHABET)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 4.0  # a constant that every position sees
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a user: models by the names that guides give them, and problems of GSM8K."""
    for name in MODELS:
        shutil.copytree(tiny, tmp_path / name)
    data = tmp_path / "data/gsm8k"
    data.mkdir(parents=True)
    for split, numbers in (("train", range(1, 5)), ("test", range(5, 8))):
        rows = [
            {"question": f"{n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
            for n in numbers
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


Message = dict[str, Any]
Script = Sequence[Callable[[dict[str, Any]], Message]]


class _Endpoint(BaseHTTPRequestHandler):
    """Answers the n-th chat completion as the n-th function of the script says."""

    script: ClassVar[list[Callable[[dict[str, Any]], Message]]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions" and self.headers["Authorization"] == "Bearer key"
        number = len(self.requests)
        self.requests.append(request)
        message = {
            "role": "assistant",
            "content": None,
            **self.script[min(number, len(self.script) - 1)](request),
        }
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        shell = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
        }
        body = json.dumps(shell | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Script], list[dict[str, Any]]]]:
    """``endpoint(script)``: what OPENAI_BASE_URL names from now on, and the requests that it gets."""
    servers = []

    def start(script: Script) -> list[dict[str, Any]]:
        handler = type("Endpoint", (_Endpoint,), {"script": list(script), "requests": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        return handler.requests

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def calling() -> Callable[..., Callable[[dict[str, Any]], Message]]:
    return _calling


@pytest.fixture
def check_numbers() -> Callable[[dict[str, Any]], None]:
    return _check_numbers


def _calling(name: str, /, **arguments: Any) -> Callable[[dict[str, Any]], Message]:
    """A reply of a script that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return lambda request: {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def _check_numbers(told: dict[str, Any]) -> None:
    """Every number of a training's result is that of the files of its run."""
    run = Path(told["output_dir"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert told["step"] == told["steps"] == len(lines) and told["state"] == "done"
    assert told["metrics"] == {
        name: value for name, value in lines[-1].items() if name not in ("step", "stage")
    }
    assert Path(told["checkpoint"]).is_dir() and told["checkpoint"].endswith(f"step_{len(lines):06d}")
    files = sorted((run / "evaluations").glob("*.json"))
    names = ("base", f"after_{told['algorithm']}")
    reports = {name: json.loads(file.read_text()) for name, file in zip(names, files, strict=True)}
    assert told["evaluations"].keys() == reports.keys()
    for name, report in reports.items():
        rates = {"low": report["success"]["low"], "high": report["success"]["high"]}
        assert told["evaluations"][name] == {
            "accuracy": report["success"]["value"],
            "tasks": report["success"]["tasks"],
            **rates,
        }
    assert told["accuracy_before"] == reports["base"]["success"]["value"]
    assert told["accuracy"] == reports[f"after_{told['algorithm']}"]["success"]["value"]
