"""Trackers: TensorBoard, Weights & Biases, Trackio, MLflow, and a user's own. Each is a row of ``TRACKERS``
and an extra of the package, which one module imports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent_peft.config import first_error
from agent_peft.configuration.trackers import AnyTracker, TrackerConfig
from agent_peft.lookup import find
from agent_peft.runs.observers import Observer
from agent_peft.runs.trackers.base import TrackedRun, Tracker, TrackerThread
from agent_peft.runs.trackers.services import Mlflow, TensorBoard, Trackio, Wandb
from agent_peft.types import AgentPeftError

__all__ = ["TRACKERS", "TrackedRun", "Tracker", "load_tracker", "load_trackers"]

TRACKERS: Mapping[str, Callable[[Any], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def load_tracker(kind: str, /, **keys: Any) -> Observer:
    """Return a tracker as an observer, for ``train(config, observers=[...])``.

    ``kind`` is a row of ``TRACKERS``, or ``"package.module:Class"`` for a ``Tracker`` of your own.
    """
    try:
        config: TrackerConfig = TypeAdapter(AnyTracker).validate_python({**keys, "kind": kind})
    except ValidationError as error:
        raise AgentPeftError(first_error(error, "trackers")) from error
    return load_trackers([config])[0]


def load_trackers(configs: Iterable[TrackerConfig]) -> list[Observer]:
    """Return the trackers of a configuration as observers. Nothing is opened before the run starts."""
    counts = Counter[str]()
    observers: list[Observer] = []
    for config in configs:
        name = config.kind.rpartition(":")[2].replace(".", "_")
        counts[name] += 1
        name += f"-{counts[name]}" if counts[name] > 1 else ""  # as its files are called
        observers.append(TrackerThread(_build(config), config, name))
    return observers


def _build(config: TrackerConfig) -> Tracker:
    if config.kind in TRACKERS:
        return TRACKERS[config.kind](config)
    try:
        tracker = find(config.kind)(**(config.model_extra or {}))
    except Exception as error:  # a user's class may fail in any way
        raise AgentPeftError(f"trackers: {config.kind}: {type(error).__name__}: {error}") from error
    if not isinstance(tracker, Tracker):
        raise AgentPeftError(f"trackers: {config.kind} is not a tracker; make it a subclass of Tracker")
    return tracker
