"""The sampling schedules of a run: at which decoding steps the late answers of environments joined.

``schedule/step_000012.rank_0.json`` holds that of one collection (a step or an evaluation) on one rank. A
collection without late answers has no file. A step that is repeated after a kill follows its schedule, and so
does a run that is given the directory of another one (``engine.schedule``).
"""

from __future__ import annotations

from pathlib import Path

from agent_peft.files import MEGABYTE, parse_json, read_text
from agent_peft.policies.engine.base import AnyEngine
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.ranks import Ranks
from agent_peft.rollout.collector import CollectionSchedule
from agent_peft.types import AgentPeftError

FOLDER = "schedule"
# with other values of these keys, answers join at other steps
_DECISIVE_KEYS = ("rows", "kv_tokens", "prefill_tokens", "overlap")


class Schedules:
    """The schedules of one run on one rank. It is made before the run removes the records of later steps."""

    def __init__(self, run_dir: Path, engine: AnyEngine, ranks: Ranks) -> None:
        self.folder, self.rank = run_dir / FOLDER, ranks.rank
        self.settings = {**engine.model_dump(include=set(_DECISIVE_KEYS)), "ranks": ranks.world_size}
        self.other = None if engine.schedule is None else engine.schedule.expanduser()
        if self.other is not None and not (self.other / "metrics.jsonl").is_file():
            raise AgentPeftError(
                f"engine.schedule: {self.other} is not a run directory (it holds no metrics.jsonl); give one "
                "or null"
            )
        self.done = _collections(run_dir)
        self.done_there = set[str]() if self.other is None else _collections(self.other)

    def of_step(self, first: int, step: int) -> CollectionSchedule:
        """Return the schedule of a step of a stage whose first step is the run's step ``first``."""
        return self.of(f"step_{first + step:06d}")

    def of(self, name: str) -> CollectionSchedule:
        """Return the schedule of a collection, such as ``evaluation_base``."""
        file = f"{name}.rank_{self.rank}.json"
        followed = self._read(self.folder / file, name in self.done)
        if followed is None and self.other is not None:
            followed = self._read(self.other / FOLDER / file, name in self.done_there)
        return CollectionSchedule(self.folder / file, self.settings, followed)

    def _read(self, path: Path, done: bool) -> tuple[Schedule, ...] | None:
        if not path.is_file():
            return () if done else None
        try:
            content = parse_json(read_text(path, "a JSON file", 256 * MEGABYTE, unlinked=2))
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
        if path.parent == self.folder:  # the run resumes with other settings, and records a new schedule
            return None
        key = "the number of ranks" if changed[0] == "ranks" else f"engine.{changed[0]}"
        raise AgentPeftError(
            f"{path}: was recorded with another {key} ({content.get(changed[0])}); set that, or "
            "engine.schedule=null"
        )


def _collections(run: Path) -> set[str]:
    """Return the names of a run's collections that are done."""
    return {path.stem for path in (run / "trajectories").glob("step_*.jsonl")} | {
        f"evaluation_{path.stem}" for path in (run / "evaluations").glob("*.json")
    }
