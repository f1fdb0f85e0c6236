"""What a run learns from and measures, named by content: ``RUN/digests.json``.

It holds digests of the tasks, the demonstrations, the tasks of the evaluation, the files of stages, and the
policy's chat template. A run that resumes with other contents under the same keys is refused, or prints that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.environments.base import Environment
from agent_peft.environments.digests import demonstrations_digest, digest, environment_digests
from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.policies.config import PretrainedConfig
from agent_peft.policies.models.start import start_of
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.demonstrations import require_demonstrations
from agent_peft.rollout.task_order import tasks_in_order
from agent_peft.types import AgentPeftError

DIGESTS = "digests.json"
EVALUATION = "tasks of evaluation"
TEMPLATE = "chat template"

Contents = Mapping[str, Any]  # what -> its digest, or those of ``environment_digests``


def contents_of(config: TrainConfig, environment: Environment, heldout: Environment | None) -> dict[str, Any]:
    """The digests of everything but the policy, by a name for messages.

    Raises:
        AgentPeftError: a stage learns from demonstrations, and there are none.
    """
    contents: dict[str, Any] = {"tasks of environment": environment_digests(environment)}
    if any(stage.needs_demonstrations and not stage.has_teacher for stage in config.stages):
        require_demonstrations(environment)
    if any(stage.needs_demonstrations for stage in config.stages):
        contents["demonstrations"] = demonstrations_digest(environment)
    for number, stage in enumerate(config.stages):
        if isinstance(stage.task_order, Path):
            order = tasks_in_order(environment.tasks, stage.task_order)
            contents[f"stages.{number}.task_order"] = digest([task.id for task in order])
        if stage.has_teacher and stage.teacher.model is not None:
            contents[f"stages.{number}.teacher"] = _model_digest(stage.teacher.model)
        if stage.episodes_of is not None:
            run = stage.episodes_of.run.expanduser()
            if run.resolve() != config.run_dir.resolve():  # its own steps are added while it trains
                files = sorted((run / "trajectories").glob("step_*"))
                contents[f"stages.{number}.episodes_of"] = digest([(f.name, f.stat().st_size) for f in files])
    if heldout is not None and config.evaluation is not None:
        contents[EVALUATION] = environment_digests(heldout, config.evaluation.num_tasks)
    return contents


def _model_digest(model: str) -> str:
    """Of the files of a model or an adapter: names, sizes, and both ends of their bytes, since a model may be
    larger than what is read in a moment. Of its name, where there is no folder.
    """
    start = start_of(PretrainedConfig(model=model))
    folders = [folder for folder in (Path(start.model), start.adapter) if folder and folder.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    return digest([start.model if not files else [(path.name, *_ends(path)) for path in files]])


def _ends(path: Path) -> tuple[int, str]:
    """The size of a file, and the digest of its first and its last megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(MEGABYTE)
        file.seek(max(0, size - MEGABYTE))
        return size, hashlib.sha256(first + file.read()).hexdigest()


def template_of(chat: ChatTokenizer) -> dict[str, Any]:
    """The digest of how a policy reads conversations: its chat template and its vocabulary."""
    return {TEMPLATE: digest([chat.template, chat.tokenizer.get_vocab(), sorted(chat.end_of_turn)])}


def read_contents(folder: Path) -> dict[str, Any]:
    """The digests that a run directory holds; empty where the run has not begun."""
    path = folder / DIGESTS
    if not path.is_file():
        return {}
    try:
        content = parse_json(read_text(path, "a JSON file", MEGABYTE))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise AgentPeftError(
            f"{path}: is damaged ({error}); remove it, and the tasks of today count as those of the run"
        ) from error
    return content
