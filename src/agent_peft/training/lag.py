"""Sampling ahead: with ``lag: k``, step n learns from episodes that were sampled before step n - k's update.

So sampling need not wait for an update, and an update need not wait for sampling. The collections of the next
k steps are in a queue. While step n computes the gradient of its first update, another thread samples step
n + k with the same weights. Both end before the weights change, so each trajectory has one version, and a run
repeats bit for bit. Where a sampler cannot share the process with a gradient, it samples before the gradient,
with the same result.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_peft.environments.digests import digest, task_digest, tasks_to_digest
from agent_peft.files import MAX_JSONL_BYTES, read_bytes, write_atomic
from agent_peft.policies.engine.base import EngineStatistics, Sampler
from agent_peft.policies.engine.daemon_threads import DaemonThreads
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collection, trajectory_from_json, trajectory_to_json
from agent_peft.rollout.sources import Source
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError, Group, Task

FILE = "pending.jsonl"  # in a checkpoint: a line of digests, then a line for each collection
GRACE = 5.0  # seconds for sampling that is under way when a step fails
# keys of a stage that decide what is sampled
_DECISIVE_KEYS = {"sampling", "rewards", "tasks_per_step", "group_size", "task_order", "refill"} | {
    "replay_in_prompt"
}
_COUNTS = ("prefilled", "prefilled_naive", "sampled", "row_halvings")  # of a sampler; they repeat
_PLAIN = ("failures", "defects", "metrics", "lag")  # of a collection


class LaggedSource:
    """A ``Source`` whose collections were sampled ``lag`` steps before, and at the start of a stage by the
    weights that it starts with.

    Args:
        source: samples a step.
        steps: of the stage.
        measure: the mismatch of a collection that the present weights have sampled, as metrics. It raises an
            error where other weights have sampled it.
        overlaps: whether another thread may sample. With several ranks it must not, since ``source`` has
            collectives then.
    """

    def __init__(
        self,
        source: Source,
        lag: int,
        steps: int,
        sampler: Sampler,
        measure: Callable[[Collection], Mapping[str, float]],
        overlaps: bool,
    ) -> None:
        self.source, self.lag, self.steps, self.sampler = source, lag, steps, sampler
        self.measure, self.overlaps = measure, overlaps
        self.queue = deque[Collection]()  # of the present step, until it is done, and of those after it
        self._arriving: Future[list[Collection]] | None = None
        self._held = ExitStack()

    def collect(self, step: int) -> Collection:
        """See ``Source.collect``."""
        if not self.queue:
            self._add(self.source.collect(step))
        return self.queue[0]

    @contextmanager
    def ahead(self, step: int) -> Iterator[None]:
        """Inside, the weights of the step sample what the queue lacks after it. Call ``wait`` before they
        change, and turn no adapter off until then. Afterwards the step is done.
        """
        missing = range(step + len(self.queue), min(step + self.lag, self.steps - 1) + 1)

        def sample() -> list[Collection]:
            return [replace(self.source.collect(number), lag=number - step) for number in missing]

        hold = self.sampler.hold() if missing and self.overlaps else None
        with self._held:
            if hold is None:
                self._arriving = Future()
                self._arriving.set_result(sample())
            else:
                self._held.enter_context(hold)
                threads = DaemonThreads(1, "sampling")
                self._held.callback(threads.shutdown, GRACE)
                self._arriving = threads.submit(sample)
            yield
            self.wait()
        self.queue.popleft()

    def wait(self) -> None:
        """Return when what is being sampled is in the queue."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            with self._held:
                collections = arriving.result()
            for collection in collections:
                self._add(collection)

    def _add(self, collection: Collection) -> None:
        metrics = {**collection.metrics, **self.measure(collection)}
        self.queue.append(replace(collection, metrics=metrics))

    # -- what a checkpoint holds -----------------------------------------------------------------------------

    def write(self, folder: Path, contents: Mapping[str, Any]) -> None:
        """Write the queue into a checkpoint, under the digests of what decides it."""
        lines = [contents, *map(_to_json, self.queue)]
        write_atomic(folder / FILE, "".join(json.dumps(line) + "\n" for line in lines))

    def read(self, folder: Path, contents: Mapping[str, Any], tasks: Sequence[Task], number: int) -> None:
        """Take the queue of a checkpoint, which has this ``number`` of collections.

        Raises:
            AgentPeftError: they were sampled under other digests, or some are gone.
        """
        path = folder / FILE
        self.queue.clear()
        if not number:
            return
        header, *lines = map(json.loads, read_bytes(path, "a JSONL file", MAX_JSONL_BYTES).splitlines())
        if changed := [name for name in contents if header.get(name) != contents[name]]:
            raise AgentPeftError(
                f"{FILE} was sampled with another {changed[0]}; put it back, or resume with lag=0 --change, "
                "which samples these steps again"
            )
        if len(lines) != number:
            raise AgentPeftError(f"{FILE} has {len(lines)} of {number} lines; put it back from a backup")
        ids = {group["task"] for line in lines for group in line["groups"]}
        known = {task.id: task for task in tasks if task.id in ids}
        self.queue.extend(_from_json(line, known) for line in lines)


def contents_of(stage: StageConfig, seed: int, tasks: Sequence[Task], chat: ChatTokenizer) -> dict[str, Any]:
    """The digests of all that decides what is sampled, except the weights."""
    keys = stage.model_dump(mode="json", include=_DECISIVE_KEYS)
    return {
        "task": digest([task_digest(task) for task in tasks_to_digest(tasks)]),
        "chat template": digest([chat.template, sorted(chat.end_of_turn)]),
        "seed": seed,
        **{name: digest(value) for name, value in keys.items()},
    }


def _to_json(collection: Collection) -> dict[str, Any]:
    places = {id(t): [g, i] for g, of in enumerate(collection.groups) for i, t in enumerate(of.trajectories)}
    return {
        **{name: getattr(collection, name) for name in _PLAIN},
        "statistics": {name: getattr(collection.statistics, name) for name in _COUNTS},
        "dropped": [places[id(trajectory)] for trajectory in collection.dropped],
        "groups": [
            {"task": of.task.id, "trajectories": [trajectory_to_json(t) for t in of.trajectories]}
            for of in collection.groups
        ],
    }


def _from_json(content: Mapping[str, Any], tasks: Mapping[str, Task]) -> Collection:
    groups = [
        Group(task := tasks[of["task"]], [trajectory_from_json(task, t) for t in of["trajectories"]])
        for of in content["groups"]
    ]
    return Collection(
        groups,
        **{name: content[name] for name in _PLAIN},
        statistics=EngineStatistics(**content["statistics"]),
        dropped=[groups[g].trajectories[i] for g, i in content["dropped"]],
    )
