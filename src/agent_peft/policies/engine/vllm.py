"""Sampling on a private vLLM: started from another Python environment, since its pins exclude ours, started
again when it ends, and ended with the trainer, however that ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from agent_peft.policies import adapters
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.engine.base import ServerEngineConfig, VllmEngineConfig
from agent_peft.policies.engine.server import ServerSampler
from agent_peft.policies.engine.server_proofs import refuse_adapter
from agent_peft.policies.models.bundled import resolve_model
from agent_peft.policies.policy import Policy
from agent_peft.policies.precision import choose_precision
from agent_peft.supervisor import Part, Supervisor
from agent_peft.types import AgentPeftError, InfrastructureError

logger = logging.getLogger(__name__)

OLDEST = "0.32"  # vLLM that answers as ``wire`` asks
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank accepts
PROBE = "from importlib.metadata import version; print(version('vllm'))"
PROBE_SECONDS = 60
# packages of the trainer's environment are none of vLLM's; Python takes an empty variable for none
APART = {"PYTHONPATH": "", "PYTHONHOME": ""}
LOOPBACK = "127.0.0.1"


def vllm_version(python: Path) -> str:
    """The version of vLLM in an environment. Where there is none, the error has the lines that install it."""
    answer = None
    try:
        answer = subprocess.run(
            [python, "-c", PROBE],
            env={**os.environ, **APART},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
        if answer.returncode == 0:
            return answer.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    fault = "cannot be started" if answer is None else "has no vLLM"
    made = "" if answer is not None else f"python3 -m venv {shlex.quote(str(python.parent.parent))} && "
    raise AgentPeftError(
        f"engine.python: {python} {fault}; install it with: {made}{shlex.quote(str(python))} -m pip install "
        f"'vllm>={OLDEST}'"
    )


def vllm_command(
    config: VllmEngineConfig,
    *,
    model: str,
    dtype: str,
    rank: int,
    modules: Sequence[str],
    template: str,
    port: int | str,
) -> tuple[str, ...]:
    """The command line of vLLM under adapters of a rank, on modules that are named by their last part."""
    own = {
        "served-model-name": "base",
        "host": LOOPBACK,
        "port": str(port),
        "dtype": dtype,
        "max-model-len": "auto",  # what the model reads, or as much of it as fits the memory
        "chat-template": template,
        "max-lora-rank": str(next((most for most in RANKS if most >= rank), rank)),
        "max-loras": "2",  # the version that acts, and the next one while it is proven
        "max-cpu-loras": "3",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    words = [word for name, value in own.items() for word in (f"--{name}", value)]
    # named modules leave the output layer out, without which some versions end when two requests are scored
    words += ["--enable-lora", "--lora-target-modules", *modules, *config.arguments]
    return (str(config.python), "-m", "vllm.entrypoints.cli.main", "serve", model, *words)


def vllm_variables(config: VllmEngineConfig, token: str) -> dict[str, str]:
    """The environment variables of vLLM, next to the trainer's."""
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_API_KEY": token}
    return {**APART, **own, **config.variables}


def planned(config: VllmEngineConfig, policy: PretrainedConfig | ScratchConfig) -> str:
    """What would be started, in words. What only a loaded policy knows is in capitals."""
    try:
        version = vllm_version(config.python)
    except AgentPeftError as error:
        return str(error)
    lora, targets = policy.lora, getattr(policy.lora, "target_modules", [])
    command = vllm_command(
        config,
        model=getattr(policy, "model", "MODEL"),
        dtype=choose_precision(policy).name,
        rank=0 if lora is None else lora.rank,
        modules=["ALL_LINEAR"] if isinstance(targets, str) else targets,
        template="TEMPLATE",
        port="PORT",
    )
    variables = vllm_variables(config, "TOKEN").items()
    return f"vLLM {version}: {shlex.join(['env', *(f'{key}={value}' for key, value in variables), *command])}"


def _model_of(policy: Policy) -> str:
    """The folder or hub id of the model under the policy's adapter."""
    name = policy.base.name_or_path
    if not name or name.endswith(" (merged)"):
        raise AgentPeftError(
            "engine.kind: vllm reads policy.model from its files, and this policy's weights have none; with "
            "policy.merge_adapter, merge it first (agent-peft merge RUN --output FOLDER) and name that folder"
        )
    return resolve_model(name)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


class VllmSampler(ServerSampler):
    """A ``Sampler`` over a vLLM in another process, whose log is in a temporary folder."""

    def __init__(self, policy: Policy, config: VllmEngineConfig) -> None:
        layers = adapters.lora_layers(refuse_adapter(policy))
        rank = max(adapters.factors(layer)[0].shape[0] for _, layer in layers)
        model, version = _model_of(policy), vllm_version(config.python)
        self._place, token = Path(tempfile.mkdtemp(prefix="agent-peft-vllm-")), secrets.token_hex()
        text = policy.chat.template or str(policy.chat.tokenizer.get_chat_template())
        (template := self._place / "template.jinja").write_text(text, encoding="utf-8")
        url = f"http://{LOOPBACK}:{(port := _free_port())}"
        command = vllm_command(
            config,
            model=model,
            dtype=str(policy.dtype).removeprefix("torch."),
            rank=rank,
            modules=sorted({name.rpartition(".")[2] for name, _ in layers}),
            template=str(template),
            port=port,
        )
        self._fault: str | None = None
        self._supervisor = Supervisor(
            [Part("vllm", command, health=f"{url}/health")],
            None,
            self._place,
            vllm_variables(config, token),
            ready=config.ready,
            restarts=0,  # a first start that fails would fail again
            report=self._report,
        )
        # one thread starts all: Linux ends a child with the thread that has started it
        self._thread = threading.Thread(target=self._supervise, name="vllm", daemon=True)
        self._thread.start()
        try:
            (keeper,) = self._supervisor.keepers
            while not keeper.answered and self._thread.is_alive():
                self._thread.join(0.05)
            if self._fault is not None:
                raise InfrastructureError(self._fault)
            self._supervisor.restarts = config.restarts
            settings = config.model_dump(include={"rows", "timeout", "environment_seconds"})
            settings |= {"seeded": "cpu" not in version if config.seeded is None else config.seeded}
            settings |= {"patience": config.ready, "folder": self._place / "adapters"}
            super().__init__(policy, ServerEngineConfig(urls=(url,), **settings), token)
        except BaseException:
            self.close()
            raise

    def fault(self) -> str | None:
        """Why vLLM is not started again."""
        return self._fault

    def close(self) -> None:
        """End vLLM, and remove its files; of one that has failed, the log stays."""
        self._supervisor.stop()
        self._thread.join()
        shutil.rmtree(self._place if self._fault is None else self._place / "adapters", ignore_errors=True)

    def _supervise(self) -> None:
        try:
            self._supervisor.run()
        except Exception as error:
            self._fault = str(error)

    def _report(self, line: str) -> None:
        logger.log(logging.WARNING if self._supervisor.restarts else logging.INFO, "%s", line)
