"""Adapters that clients load and unload while a server runs, by vLLM's requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from pydantic import Field

from agent_peft.agents.serving.conversation import Wire
from agent_peft.agents.serving.models import copy_under
from agent_peft.environments.http.messages import Health, Refusal
from agent_peft.environments.http.transport import JSON, FastAPI, Response
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.service import Service
from agent_peft.policies.models.adapter_files import CONFIG, lora_settings
from agent_peft.policies.policy import Policy
from agent_peft.types import AgentPeftError


class UnloadRequest(Wire):
    """An adapter that is not used any more."""

    lora_name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,200}$")


class LoadRequest(UnloadRequest):
    """An adapter in PEFT's layout, and the name that requests give as ``model``."""

    lora_path: str = Field(max_length=4000, description="its folder, as the server sees it")


class Adapters:
    """The adapters of clients. Policies of unloaded ones are used again, as their proofs take a second.

    Args:
        folder: adapters are read from folders below it only.

    Attributes:
        base: the name of the policy whose model they adapt: the first one without an adapter.
    """

    _lock = threading.Lock()  # one at a time in this process: PEFT changes the filters of warnings

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.folder = service, folder.expanduser().resolve()
        self.base = next(name for name, policy in service.policies.items() if not policy.has_adapter)
        self.loaded: dict[str, tuple[str, LoraSettings]] = {}  # the folder of each, as it was sent
        policy = service.policies[self.base]
        self._model, self._chat = copy_under(policy.model), policy.chat  # before it is prepared for sampling
        self._unused: list[tuple[LoraSettings, LocalEngine]] = []

    def load(self, name: str, path: str) -> None:
        """Serve the adapter in a folder."""
        with self._lock:
            if name in self.service.policies:
                raise Refusal(400, "invalid", f"the name {name!r} has already been loaded; take another")
            folder = Path(path).resolve()
            if not folder.is_relative_to(self.folder) or not (folder / CONFIG).is_file():
                raise Refusal(404, "model_not_found", f"no adapter found below {self.folder}: {path[:200]}")
            try:
                settings = lora_settings(folder, dropout=0.0)
                engine = self._engine(settings)
                adapters.load(engine.policy.model, folder)
            except AgentPeftError as error:
                raise Refusal(400, "invalid", str(error)) from error
            self.loaded[name] = path, settings
            self.service.add(name, engine, self.service.max_tokens[self.base])

    def unload(self, name: str) -> None:
        """Serve an adapter no longer, and fail the requests that still use it."""
        with self._lock:
            if (loaded := self.loaded.pop(name, None)) is None:
                raise Refusal(404, "model_not_found", f"the adapter {name!r} cannot be found")
            self._unused.append((loaded[1], self.service.remove(name).result()))

    def _engine(self, settings: LoraSettings) -> LocalEngine:
        for unused in self._unused:
            if unused[0] == settings:
                self._unused.remove(unused)
                return unused[1]
        adapted = adapters.attach(copy_under(self._model), settings, seed=0)
        return LocalEngine(Policy(adapted, self._chat, packing=False), self.service.config)

    def add_routes(self, app: FastAPI) -> None:
        @app.post("/v1/load_lora_adapter", response_model=Health)
        async def load(request: LoadRequest) -> Response:
            """Serve an adapter, from a folder that the server sees, under a name that is not used yet."""
            await asyncio.to_thread(self.load, request.lora_name, request.lora_path)
            return JSON(Health())

        @app.post("/v1/unload_lora_adapter", response_model=Health)
        async def unload(request: UnloadRequest) -> Response:
            """Serve an adapter no longer."""
            await asyncio.to_thread(self.unload, request.lora_name)
            return JSON(Health())
