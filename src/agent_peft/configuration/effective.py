"""Configurations for commands that do not train. Overrides without an effect on such a command are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_peft.configuration.loading import read_config
from agent_peft.configuration.merging import override
from agent_peft.configuration.run_config import TrainConfig
from agent_peft.configuration.yaml12 import Tree, leaves, parse
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.types import AgentPeftError

POLICY = ("policy.model", "policy.device", "policy.dtype")
EVALUATION = ("evaluation.environment", "evaluation.attempts", "evaluation.num_tasks", "evaluation.sampling")
# nothing is recorded, so no schedule is followed
ENGINE = tuple(f"engine.{key}" for key in EngineConfig.model_fields if key != "schedule")
EFFECTIVE = {
    "evaluate": ("seed", "threads", *POLICY, *ENGINE, *EVALUATION),
    "merge": ("policy.model", "policy.device"),
    "serve": ("environment", "evaluation.environment"),
}


def load_for_evaluation(
    path: Path,
    overrides: Sequence[str],
    tasks: Path | None,
    attempts: int | None,
    effective: Sequence[str] = EFFECTIVE["evaluate"],
) -> TrainConfig:
    """Read the configuration of a run for a command that measures it. Where the file has no ``evaluation``,
    the tasks of training are measured.

    Args:
        tasks: a task file that takes the place of the evaluation's tasks.
        attempts: short for ``evaluation.attempts``.
        effective: the keys that an override may set.

    Raises:
        AgentPeftError: as ``read_config``, or an override has no effect on an evaluation.
    """
    given = [text.partition("=")[0].strip() for text in overrides]
    options = []
    if attempts is not None:
        options.append(f"evaluation.attempts={attempts}")
    if tasks is not None:
        options.append(f"evaluation.environment.tasks={json.dumps(str(tasks))}")
    for option in options:
        if (key := option.partition("=")[0]) in given:
            raise AgentPeftError(
                f"command line: --{key.rpartition('.')[2]} and {key} set the same key; give one of them"
            )
    measures_training = False

    def adapt(top: Tree, general: Tree) -> None:
        nonlocal measures_training
        training, evaluation = top.get("environment"), top.get("evaluation")
        if not isinstance(evaluation, dict):
            measures_training = True
            if isinstance(training, dict) and isinstance(general.get("environment"), dict):
                training = override(top, {"environment": general["environment"]})["environment"]
            evaluation = {} if training is None else {"environment": training}
        environment = evaluation.get("environment")
        if tasks is not None and isinstance(environment, dict):  # the file replaces the other source of tasks
            others = {"generate", "split"}  # of other tasks
            tasks_elsewhere = {key: node for key, node in environment.items() if key not in others}
            evaluation = {**evaluation, "environment": tasks_elsewhere}
        top["evaluation"] = evaluation

    config = read_config(path, [*overrides, *options], adapt=adapt)[0]
    refuse_ineffective("evaluate", overrides, (*effective, "environment") if measures_training else effective)
    if "seed" in given and config.policy.kind == "scratch":
        raise AgentPeftError(
            "command line: seed decides the weights of policy.kind: scratch, too, which would be others; "
            "leave it out"
        )
    sources = [key for key in given if key.startswith(("environment.tasks", "environment.generate"))]
    if tasks is not None and measures_training and sources:
        raise AgentPeftError(
            f"command line: {sources[0]} and --tasks both say where the tasks are; give one of them"
        )
    return config


def refuse_ineffective(command: str, overrides: Sequence[str], effective: Sequence[str]) -> None:
    """Check that every override has an effect on a command.

    Args:
        overrides: as they stand on the command line.
        effective: key paths. One stands for all keys below it.

    Raises:
        AgentPeftError: an override sets a key without an effect. The message names the first one.
    """
    for key in keys_of(overrides):
        if not any(
            f"{key}.".startswith(f"{known}.") or f"{known}.".startswith(f"{key}.") for known in effective
        ):
            raise AgentPeftError(
                f"command line: {key} has no effect on {command}; {_advice(command, key, effective)}"
            )


def keys_of(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the key path of each value that overrides set, those within mappings and lists included.

    >>> list(keys_of(["engine.rows=8", "evaluation={num_tasks: 3, at: [start]}"]))
    ['engine.rows', 'evaluation.num_tasks', 'evaluation.at.0']
    """
    for text in overrides:
        name, _, value = text.partition("=")
        for below, _ in leaves(parse(value, f"command line: {name}", lines=False)):
            yield ".".join((name.strip(), *below))


def _advice(command: str, key: str, effective: Sequence[str]) -> str:
    if command == "merge":
        return "with --evaluate it may have; add that, or leave the key out"
    measured = (
        "evaluation." + key[key.find("sampling") :] if "sampling" in key.split(".") else f"evaluation.{key}"
    )
    if command == "evaluate" and any(f"{measured}.".startswith(f"{known}.") for known in effective):
        return f"set {measured}, or leave it out"
    return "leave it out"
