"""What a policy starts from: a model, and the adapter on it where there is one.

``policy.model`` names a model, a run directory (its newest checkpoint), ``RUN:step_000012``, a checkpoint, or
the folder of an adapter. A run that starts from another run, or from an adapter, keeps its own copy in
``RUN/start``, so that it depends on no other run: the adapter that it continues with, or the whole model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agent_peft.files import check_tree
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.models.adapter_files import CONFIG, lora_settings, read_adapter_config
from agent_peft.policies.models.bundled import BUNDLED
from agent_peft.types import AgentPeftError

START = "start"  # the folder in a run directory
_STEP = re.compile(r"step_\d{6,}")
_RUN_STEP = re.compile(r"(.+):(?:step_)?(\d+)")


@dataclass(frozen=True)
class Start:
    """A model (a bundled name, a folder, a GGUF file or a hub id), and the folder of an adapter on it.

    ``of_run`` marks a model that is a checkpoint of a run: the run may remove it some day.
    """

    model: str
    adapter: Path | None = None
    of_run: bool = False


def start_of(config: PretrainedConfig) -> Start:
    """Return what ``policy.model`` and ``policy.adapter`` stand for."""
    folder = checkpoint_of(config.model) or Path(config.model)
    if not (folder / CONFIG).is_file():
        adapter = config.adapter and (checkpoint_of(str(config.adapter)) or config.adapter.expanduser())
        model = str(folder) if folder.is_dir() else config.model
        return Start(model, adapter, of_run=_STEP.fullmatch(folder.name) is not None)
    if (folder / "config.json").is_file():
        raise AgentPeftError(
            f"policy.model: {config.model!r} holds a model (config.json) and an adapter ({CONFIG}); move one "
            "of them to another folder"
        )
    if config.adapter is not None:
        raise AgentPeftError(
            f"policy.adapter: {str(config.adapter)!r} is an adapter, and so is policy.model "
            f"{config.model!r}; name the model of one of them as policy.model"
        )
    return Start(base_of(folder), folder)


def checkpoint_of(name: str) -> Path | None:
    """Return the checkpoint that ``RUN`` (its newest) or ``RUN:step_000012`` stands for; None where the name
    is of no run.
    """
    run, step = split_run(name)
    if step is not None:
        folder = run / "checkpoints" / f"step_{step:06d}"
        if not folder.is_dir():
            raise AgentPeftError(
                f"policy.model: {name!r}: there is no checkpoint {folder} (seen from {Path.cwd()})"
            )
        check_tree(run / "checkpoints", depth=0)
        return folder
    if not (run / "config.yaml").is_file() or (run / "config.json").is_file():
        return None
    check_tree(run / "checkpoints", depth=0)
    steps = [path for path in (run / "checkpoints").glob("step_*") if _STEP.fullmatch(path.name)]
    if not steps:
        raise AgentPeftError(f"policy.model: {name!r} is a run that has no checkpoint yet; train it first")
    return max(steps, key=lambda path: int(path.name.removeprefix("step_")))


def split_run(name: str) -> tuple[Path, int | None]:
    """Return the path in a name, and the step behind it.

    >>> split_run("runs/a:step_000012"), split_run("runs/a:12"), split_run("runs/a")
    ((PosixPath('runs/a'), 12), (PosixPath('runs/a'), 12), (PosixPath('runs/a'), None))
    """
    match = _RUN_STEP.fullmatch(name)
    path, step = (match[1], int(match[2])) if match else (name, None)
    return Path(path).expanduser(), step


def from_start(config: PretrainedConfig, run: Path) -> PretrainedConfig:
    """Return the configuration of a run's policy with ``RUN/start``, where there is one, in place of what it
    was copied from. The model of an adapter there may be named again, since it may lie elsewhere now.
    """
    start = run / START
    if not start.is_dir():
        return config
    here = config.adapter is not None or config.model in BUNDLED or Path(config.model).exists()
    if (start / CONFIG).is_file() and here and names_model(config):
        return config.model_copy(update={"adapter": start})
    return config.model_copy(update={"model": str(start), "adapter": None, "merge_adapter": False})


def names_model(config: PretrainedConfig) -> bool:
    """Whether ``policy.model`` is a model itself: no run, checkpoint or adapter."""
    try:
        return start_of(config).model == config.model
    except AgentPeftError:
        return False


def own_base(adapter: Path) -> Path | None:
    """Return the model that a run keeps for its adapters; None where the adapter is of no such run."""
    checkpoints = adapter.absolute().parent
    model = checkpoints.parent / START
    return model if checkpoints.name == "checkpoints" and (model / "config.json").is_file() else None


def base_of(adapter: Path) -> str:
    """Return the model that the adapter in a folder was trained on, as ``policy.model`` could name it."""
    if (own := own_base(adapter)) is not None:
        return str(own)
    name = read_adapter_config(adapter).get("base_model_name_or_path")
    if not name:
        raise AgentPeftError(
            f"the adapter in {adapter} names no model that it was trained on (one of random weights?); merge "
            "its run (agent-peft merge RUN --output FOLDER), and name that folder as policy.model"
        )
    path = Path(str(name))
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2):
        raise AgentPeftError(
            f"the adapter in {adapter} was trained on {name!r}, which is not here; name that model as "
            "policy.model, and this folder as policy.adapter"
        )
    return str(name)


def portable(model: str) -> str:
    """Return a name that an adapter can give its model: a bundled name, a hub id or an absolute path.

    >>> portable("smollm2-135m"), portable("somebody/model")
    ('smollm2-135m', 'somebody/model')
    """
    return str(Path(model).absolute()) if model not in BUNDLED and Path(model).exists() else model


def with_adapter(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with the LoRA settings of the adapter that it continues with, if there is one."""
    adapter = start_of(config).adapter
    if config.merge_adapter or adapter is None:
        if adapter is None and config.merge_adapter:
            raise AgentPeftError(
                f"policy.merge_adapter: policy.model {config.model!r} has no adapter to merge; leave the key "
                "out"
            )
        return config
    advice = "to continue with it, or set policy.merge_adapter=true to merge it into its model first"
    if config.lora is None:
        raise AgentPeftError(
            f"policy.lora: null trains every parameter, and {adapter} is an adapter; leave the key out "
            f"{advice}"
        )
    theirs = lora_settings(adapter, config.lora.dropout)
    given = config.lora.model_fields_set
    for key in ("rank", "alpha"):
        ours, stored = getattr(config.lora, key), getattr(theirs, key)
        if key in given and ours != stored:
            raise AgentPeftError(
                f"policy.lora.{key}: is {ours:g}, and that of the adapter in {adapter} is {stored:g}; leave "
                f"the key out {advice}"
            )
    if "target_modules" in given:  # loading compares them with the tensors
        theirs = theirs.model_copy(update={"target_modules": config.lora.target_modules})
    return config.model_copy(update={"lora": theirs})
