"""Where a run keeps when late answers joined, and whose schedule it follows:
``schedule/step_000012.rank_0.json``, one file for each collection, evaluations included, and each rank. One
whose answers all joined when they were due has none.

A step that is done again, since the run was killed after its newest checkpoint, follows what was written of
it. So does a run of its own that is given another one's directory (``engine.schedule``).
"""

from __future__ import annotations

from pathlib import Path

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import CollectionSchedule
from agent_peft.types import AgentPeftError

FOLDER = "schedule"
_DECIDES = (
    "rows",
    "kv_tokens",
    "prefill_tokens",
    "overlap",
)  # with other values, answers have other steps to join at


class Schedules:
    """Those of one run, on one rank. Made before the run forgets what it will do again.

    Raises:
        AgentPeftError: ``engine.schedule`` is no run's directory.
    """

    def __init__(self, run_dir: Path, engine: EngineConfig, ranks: Ranks) -> None:
        self.folder, self.rank = run_dir / FOLDER, ranks.rank
        self.settings = {**engine.model_dump(include=set(_DECIDES)), "ranks": ranks.world}
        self.other = None if engine.schedule is None else engine.schedule.expanduser()
        if self.other is not None and not (self.other / "metrics.jsonl").is_file():
            raise AgentPeftError(
                f"engine.schedule: {self.other} is no run directory (it holds no metrics.jsonl); give one, or null"
            )
        self.done = _collections(run_dir)
        self.done_there = set[str]() if self.other is None else _collections(self.other)

    def of_step(self, first: int, step: int) -> CollectionSchedule:
        """Of a stage's step, where the stage begins with the run's step ``first``."""
        return self.of(f"step_{first + step:06d}")

    def of(self, name: str) -> CollectionSchedule:
        """
        Raises:
            AgentPeftError: the file is damaged, or tells of a run with other rows, which cannot be followed.
        """
        file = f"{name}.rank_{self.rank}.json"
        followed = self._read(self.folder / file, name in self.done)
        if followed is None and self.other is not None:
            followed = self._read(self.other / FOLDER / file, name in self.done_there)
        return CollectionSchedule(self.folder / file, self.settings, followed)

    def _read(self, path: Path, done: bool) -> tuple[Schedule, ...] | None:
        if not path.is_file():
            return () if done else None
        try:
            content = parse_json(read_text(path, "a JSON file", 256 * MEGABYTE))
            calls = tuple(
                tuple((int(c), int(turn), int(step)) for c, turn, step in call)
                for call in content.pop("calls")
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AgentPeftError(
                f"{path}: is damaged ({type(error).__name__}: {error}); remove it, and another is recorded"
            ) from error
        changed = sorted(key for key in self.settings if content.get(key) != self.settings[key])
        if not changed:
            return calls
        if (
            path.parent == self.folder
        ):  # the run goes on with other settings, and so with a schedule of its own
            return None
        key = "the number of ranks" if changed[0] == "ranks" else f"engine.{changed[0]}"
        raise AgentPeftError(
            f"{path}: was recorded with another {key} ({content.get(changed[0])}); set that, or engine.schedule=null"
        )


def _collections(run: Path) -> set[str]:
    """What a run has collected, by the names that its schedules have."""
    return {path.stem for path in (run / "trajectories").glob("step_*.jsonl")} | {
        f"evaluation_{path.stem}" for path in (run / "evaluations").glob("*.json")
    }
