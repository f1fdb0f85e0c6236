"""Run every benchmark with --quick, one after another, to show that each of them still runs.

    python benchmarks/smoke.py [NAME ...]      # or: make bench-smoke

Prints the seconds of each script, and the reason where a part was skipped (no GPU, no TRL, no vLLM). Exits
with 1 if a script fails or changes a file of results/. Nothing is measured. A script with a main is found by
itself; those of `DRIVEN` are run by another script.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVEN = {"trl_sides": "against_trl", "vllm_peer": "sampling"}
LIMIT, TIMEOUT = 40, 300  # seconds of a script: what it should take, and when it is killed


def scripts() -> list[str]:
    """Names of the benchmarks that have a main and are not run by another one."""
    names = {p.stem for p in HERE.glob("*.py") if '__name__ == "__main__"' in p.read_text(encoding="utf-8")}
    return sorted(names - {Path(__file__).stem} - DRIVEN.keys())


def files() -> dict[Path, bytes]:
    """What no quick run may change."""
    folders = (HERE / "results", HERE.parent / "docs" / "pictures")
    return {path: path.read_bytes() for folder in folders for path in folder.glob("*")}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(name: str) -> tuple[bool, list[str]]:
    """Whether the script worked, and what it skipped. Its output is shown if it failed."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick"]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**settings, **os.environ}
    try:
        done = subprocess.run(command, text=True, env=environment, cwd=HERE.parent, timeout=TIMEOUT, **pipes)
        output, worked = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, worked = f"{error.stdout or ''}\nit was killed after {TIMEOUT} s", False
    if not worked:
        print(output, flush=True)
    return worked, [line for line in output.splitlines() if line.startswith("skipped: ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these")
    names = parser.parse_args().names or scripts()
    if unknown := set(names) - set(scripts()):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(scripts())}")
    before, failed, start = files(), [], time.perf_counter()
    for name in names:
        begin, used = time.perf_counter(), cpu_seconds()
        worked, missing = run(name)
        seconds, used = time.perf_counter() - begin, cpu_seconds() - used
        late = f", over {LIMIT} s" if seconds > LIMIT else ""
        print(
            f"{name:22}{'ok' if worked else 'FAILED':8}{seconds:5.1f} s {used:5.1f} CPU s{late}", flush=True
        )
        for line in missing:
            print(f"    {line}")
        failed += [] if worked else [name]
        if files() != before:
            print(f"{name} --quick has changed benchmarks/results or docs/pictures")
            failed, before = [*failed, name], files()
    took = time.perf_counter() - start
    print(f"{len(names)} scripts in {took:.0f} s; failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
