"""Check whether this checkout trains exactly like another one. It runs three short configurations in both
and compares their files byte for byte.

    git clone . /tmp/before && git -C /tmp/before checkout COMMIT
    python benchmarks/same_bytes.py /tmp/before [--keep FOLDER] [--only os_ppo]

Each run is a separate process in fp32 on one thread, with the sources of its own checkout and this Python.
It compares `metrics.jsonl` and every file of `trajectories/`, lines and arrays. Keys and arrays that only one
side has are printed; all others must be equal to the bit. A run of the other checkout that is in FOLDER
already is read, not repeated. The program prints a table and exits with 1 if a file differs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, command_line, show, table
from safetensors.numpy import load_file

COMMON = ["evaluation=null", "policy.dtype=float32", "threads=1"]
RUNS = {
    "quickstart": ["stages.0.steps=2", "stages.1.steps=2"],
    "adder_fast": ["stages.0.steps=30", "stages.1.steps=30"],
    "os_ppo": ["stages.0.steps=2", "stages.1.steps=2"],
}


def train(checkout: Path, name: str, run: Path, schedule: Path | None) -> None:
    overrides = [*COMMON, *RUNS[name], f"run_dir={run}"]
    if schedule is not None:
        overrides.append(f"engine.schedule={schedule}")
    command = [sys.executable, "-m", "agent_peft", "train", f"configs/{name}.yaml", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}: {name} ended with {done.returncode}: {done.stderr[-2000:]}")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arrays_of(path: Path) -> list[dict[str, object]]:
    return [{name: (str(x.dtype), x.tobytes()) for name, x in load_file(path).items()}]


def compare(before: Path, after: Path, names: list[str]) -> str:
    """Return how the files of these names differ in two folders; empty if they do not."""
    keys, different = set[str](), []
    for name in names:
        old, new = before / name, after / name
        if not (old.exists() and new.exists()):
            if old.suffix == ".safetensors":  # an older version wrote none
                keys.add("the arrays")
            else:
                different.append(name)
        elif old.read_bytes() != new.read_bytes():
            read = arrays_of if old.suffix == ".safetensors" else lines_of
            one, two = read(old), read(new)
            pairs = list(zip(one, two, strict=False)) if len(one) == len(two) else []
            shared = all(a[key] == b[key] for a, b in pairs for key in a.keys() & b.keys())
            only = {key for a, b in pairs for key in a.keys() ^ b.keys()}
            keys |= only
            different += [] if shared and only else [name]
    if different:
        return f"DIFFERENT: {', '.join(different)}"
    return f"equal but for {', '.join(sorted(keys))}" if keys else ""


def main() -> None:
    given = command_line(
        __doc__,
        {"other": Path},  # the other checkout
        quick={"other": ROOT, "only": ["adder_fast"]},  # this checkout with itself
        keep=Path,  # folder of the runs; without it they are deleted
        only={"nargs": "+", "choices": RUNS, "default": list(RUNS)},
    )
    if given.other is None:
        sys.exit("name the other checkout")
    if given.quick:
        RUNS["adder_fast"] = ["stages.0.steps=2", "stages.1.steps=2"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).absolute()
        for name in given.only:
            before, after = folder / f"before_{name}", folder / f"after_{name}"
            if not (before / "metrics.jsonl").is_file():
                train(given.other.absolute(), name, before, None)
            shutil.rmtree(after, ignore_errors=True)
            train(ROOT, name, after, before)
            metrics = compare(before, after, ["metrics.jsonl"])
            folders = before / "trajectories", after / "trajectories"
            files = {path.name for folder in folders for path in folder.iterdir()}
            trajectories = compare(*folders, sorted(files))
            size = f"{(after / 'metrics.jsonl').stat().st_size:,}"
            rows.append((name, size, metrics or "equal", trajectories or "equal"))
    show(table("configuration|bytes of metrics|metrics.jsonl|trajectories/", rows))
    sys.exit("DIFFERENT" in str(rows))


if __name__ == "__main__":
    main()
