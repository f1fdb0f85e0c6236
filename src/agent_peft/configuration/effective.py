"""A configuration for a command that does not train: on the command line, keys without an effect on it are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_peft.configuration.loading import load_config
from agent_peft.configuration.run_config import TrainConfig, resolved
from agent_peft.configuration.yaml12 import leaves, parse
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.types import AgentPeftError

POLICY = ("policy.model", "policy.device", "policy.dtype")
EVALUATION = ("evaluation.environment", "evaluation.attempts", "evaluation.num_tasks", "evaluation.sampling")
ENGINE = tuple(
    f"engine.{key}" for key in EngineConfig.model_fields if key != "schedule"
)  # nothing is recorded, so nothing is repeated
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
    """A run's configuration whose ``evaluation`` is set: that of the file, or the tasks it trains on, with
    ``tasks`` in their place.

    Args:
        effective: the keys that an override may set.

    Raises:
        AgentPeftError: as ``load_config``, or an override has no effect on an evaluation.
    """
    given = [text.partition("=")[0].strip() for text in overrides]
    others = [text for text, key in zip(overrides, given, strict=True) if key.split(".")[0] != "evaluation"]
    content = resolved(load_config(path, others, check_files=False, warn=False)[0])
    measures_training = content["evaluation"] is None
    refuse_ineffective("evaluate", overrides, (*effective, "environment") if measures_training else effective)
    if "seed" in given and content["policy"]["kind"] == "scratch":
        raise AgentPeftError(
            "command line: seed decides the weights of policy.kind: scratch, too, which would be others; leave it out"
        )
    more: dict[str, Any] = {}
    environment = content["environment"] if measures_training else content["evaluation"]["environment"]
    if measures_training:
        inherited = {f"evaluation.environment.{key}": value for key, value in environment.items()}
        more |= {
            key: value
            for key, value in inherited.items()
            if not any(f"{key}.".startswith(f"{name}.") for name in given)
        }
    if attempts is not None:
        more["evaluation.attempts"] = attempts
    if tasks is not None:
        if measures_training and (
            twice := [key for key in given if key.startswith(("environment.tasks", "environment.generate"))]
        ):
            raise AgentPeftError(
                f"command line: {twice[0]} and --tasks both say where the tasks are; give one of them"
            )
        more["evaluation.environment.tasks"] = str(tasks)
        if "generate" in environment:  # the other source of tasks
            more["evaluation.environment.generate"] = None
    return load_config(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in more.items())])[0]


def refuse_ineffective(command: str, overrides: Sequence[str], effective: Sequence[str]) -> None:
    """
    Args:
        overrides: as they stand on the command line.
        effective: key paths. One stands for all keys below it.

    Raises:
        AgentPeftError: an override sets a key without an effect. It names the first one.
    """
    for key in keys_of(overrides):
        if not any(
            f"{key}.".startswith(f"{known}.") or f"{known}.".startswith(f"{key}.") for known in effective
        ):
            raise AgentPeftError(
                f"command line: {key} has no effect on {command}; {_advice(command, key, effective)}"
            )


def keys_of(overrides: Sequence[str]) -> Iterator[str]:
    """The key path of each value that overrides set, those within mappings and lists included.

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
