"""The files of a run directory, and the checks before they are read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_peft.configuration import CONFIG, RECORD
from agent_peft.files import MEGABYTE, check_tree, parse_json, read_text
from agent_peft.types import AgentPeftError

TRACKERS = "trackers"  # the folder of a run for what trackers write
FOLDERS = ("checkpoints", "evaluations", "schedule", "start", TRACKERS, "trajectories")
# in the order of their removal: as long as the configuration is there, the folder belongs to that run
FILES = ("metrics.jsonl", "timing.jsonl", "stopped.json", "log.txt", "origin.json", "digests.json", CONFIG)


def check_run_files(folder: Path) -> None:
    """Check a run directory, which may come from a stranger, before its files are read. A run has no link,
    pipe, device or socket, no folder where it writes a file, and no file where it writes a folder.
    """
    for name in (*FOLDERS, *FILES, RECORD):
        path = folder / name
        check_tree(path, depth=1 if name == TRACKERS else 8)  # W&B makes links in its own folder
        if os.path.lexists(path) and path.is_dir() != (name in FOLDERS):
            raise AgentPeftError(f"{path}: is {'a' if path.is_dir() else 'no'} folder; remove it")


def read_record(folder: Path) -> dict[str, Any]:
    """The content of a run's ``run.json``; nothing where there is none or it is damaged."""
    with suppress(AgentPeftError, ValueError):
        content = parse_json(read_text(folder / RECORD, "a JSON file", 16 * MEGABYTE, unlinked=1))
        if isinstance(content, dict):
            return content
    return {}


__all__ = ["CONFIG", "FILES", "FOLDERS", "RECORD", "TRACKERS", "check_run_files", "read_record"]
