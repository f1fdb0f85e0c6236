"""A server of policies over a tiny random model, on a loopback port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agent_peft.agents.serving.models import under
from agent_peft.agents.serving.server import PolicyHost
from agent_peft.environments.http.transport import Address
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.service import Service
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # distributions that are far from uniform
}
ALPHABET = (
    "0123456789abcdefghijklmnopqrstuvwxyzFLMTXYJSON .,:;+-*=?<>_/{}[]()#\\'\"\n"  # also of a tool's telling
)


@pytest.fixture(scope="session")
def policies() -> dict[str, Policy]:
    """A policy with an adapter that counts, and its base."""
    policy = load_policy(
        {"kind": "scratch", "alphabet": ALPHABET, "architecture": ARCHITECTURE, "device": "cpu"},
        lora=LoraSettings(rank=2, alpha=4),
    )
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    with torch.no_grad():  # the argmax never ends a reply; other draws do
        policy.base.lm_head.weight[sorted(policy.chat.end_of_turn)] = 0
    return {"trained": policy, "base": under(policy)}


# one for all tests, since it takes a while to make; it keeps no connection
CLIENT = httpx.Client(timeout=60, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
USER = [{"role": "user", "content": "1+2="}]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def post(url: str, path: str = "chat/completions", headers: dict[str, str] | None = None, **body: Any) -> Any:
    return CLIENT.post(f"{url}/v1/{path}", json=body, headers=headers)


class Running:
    """A server in its own thread."""

    def __init__(
        self, service: Service, most: int, token: str | None, adapters: Path | None = None, port: int = 0
    ) -> None:
        self.service = service
        self.host = PolicyHost(service, Address(port=port), most, token, grace=0.2, adapters=adapters)
        self.url = self.host.url
        listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.host.run(listening.set)))
        self._thread.start()
        assert listening.wait(10)

    def stop(self) -> None:
        self.host.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.service.close()


@pytest.fixture
def serving(policies: dict[str, Policy]) -> Iterator[Callable[..., Running]]:
    """``serving(rows=8, most=64, token=None, max_tokens=600)``: a server, until the test's end."""
    running: list[Running] = []

    def start(
        rows: int = 8,
        most: int = 64,
        token: str | None = None,
        max_tokens: int = 600,
        adapters: Path | None = None,
        port: int = 0,
        **more: Policy,
    ) -> Running:
        service = Service(more or policies, EngineConfig(rows=rows), max_tokens)
        try:
            running.append(Running(service, most, token, adapters, port))
        except BaseException:
            service.close()
            raise
        return running[-1]

    yield start
    for one in running:
        one.stop()
