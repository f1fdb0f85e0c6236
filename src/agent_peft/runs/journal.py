"""Learning from the trajectories of another run alone: ``train CONFIG --from-journal RUN``.

No token is drawn in training. With RUN's configuration the weights have the same bytes, on the same kind of
machine; elsewhere they are equal up to rounding, and the check that is always on compares what RUN's sampler
recorded with the trainer's log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from agent_peft.configuration.run_config import TrainConfig
from agent_peft.files import MAX_JSONL_BYTES, read_bytes
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collection
from agent_peft.rollout.pairs import read_arrays, read_episode
from agent_peft.rollout.replays import Replays
from agent_peft.rollout.sources import drop_constant, only_successes
from agent_peft.runs.changes import changed_contents, names, read_earlier
from agent_peft.runs.digests import Contents, read_contents
from agent_peft.training.stage import StageConfig
from agent_peft.types import AgentPeftError, Group, Task


@dataclass(frozen=True)
class JournalSource:
    """The episodes that another run has sampled in a stage.

    Attributes:
        folder: of their trajectories (``open_journal``).
        tasks: by their ids.
        first: the run's step with which the stage begins.
    """

    folder: Path
    tasks: Mapping[str, Task]
    first: int
    stage: StageConfig
    chat: ChatTokenizer
    replays: Replays

    def collect(self, step: int) -> Collection:
        path = self.folder / f"step_{self.first + step:06d}.jsonl"
        if not path.is_file():
            raise AgentPeftError(
                f"--from-journal: {path} is not there; give a run that has finished and has kept the "
                "trajectories of every step"
            )
        try:
            groups = self._read(path)
        except (LookupError, TypeError, ValueError) as error:
            raise AgentPeftError(f"--from-journal: {path} is damaged ({error}); take another run") from error
        self.replays.add(groups, self.chat)
        collection, facts = Collection(groups), self.stage.algorithm.facts
        if self.stage.refill:
            collection = drop_constant(collection, self.stage.tasks_per_step, facts.minibatches)
        return collection if facts.on_policy else only_successes(collection)

    def _read(self, path: Path) -> list[Group]:
        content = read_bytes(path, "a JSONL file", MAX_JSONL_BYTES, unlinked=2)
        lines, arrays = map(json.loads, content.splitlines()), read_arrays(path.with_suffix(".safetensors"))
        groups = []
        for _, members in groupby(lines, key=lambda line: line["group"]):
            of_task = list(members)
            task = self.tasks[of_task[0]["task"]]
            episodes = (
                replace(
                    read_episode(line, arrays),
                    task=task,
                    rewards=tuple(line["rewards"]),
                    reward_terms=line["reward_terms"],
                    reference=line.get("reference"),
                )
                for line in of_task
            )
            groups.append(Group(task, list(episodes)))
        return groups


def open_journal(run: str, config: TrainConfig, contents: Contents) -> Path:
    """Return the trajectories of a run that has learned from these tasks by this configuration."""
    path = Path(run).expanduser()
    if (earlier := read_earlier(path)) is None:
        raise AgentPeftError(f"--from-journal: {path} is not a run directory; give one")
    changes = [*earlier.changes(config, 0), *changed_contents(read_contents(path), contents, config, 0)]
    if deciding := [change for change in changes if change.rule != "free"]:
        raise AgentPeftError(
            f"--from-journal: {path} has learned by another configuration ({names(deciding)}), so its "
            f"episodes are those of other weights; train {path / 'config.yaml'} with another run_dir"
        )
    return path.resolve() / "trajectories"
