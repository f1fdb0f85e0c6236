"""Run every benchmark with --quick, one after another, to show that each of them still runs.

    python benchmarks/smoke.py [NAME ...]      # or: make bench-smoke

Prints the seconds of each script, and the reason where a part was skipped (no GPU, no TRL, no vLLM). Exits
with 1 if a script fails or changes a file of results/. Nothing is measured.

A benchmark gets --quick from `parse`, with the small sizes of its own, and writes into ``results`` of what
`parse` returns. A script with a main is found by itself; those of `DRIVEN` are run by another script.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DRIVEN = {"our_side": "against_trl", "trl_peer": "against_trl", "vllm_peer": "sampling"}
LIMIT, TIMEOUT = 40, 300  # seconds of a script: what it should take, and when it is killed
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
}


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **quick: Any
) -> argparse.Namespace:
    """Parse the command line with a flag --quick, which makes the values of ``quick`` the defaults.

    ``results`` of what is returned is the folder to write to. With --quick it is a temporary one, and so are
    the defaults of --output and --runs.
    """
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing of results/ is written")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    results = RESULTS
    if "--quick" in arguments:
        results = temporary_folder()
        for key in ("output", "runs"):
            if default := parser.get_default(key):
                quick.setdefault(key, results / Path(default).name)
        parser.set_defaults(**quick)
    given = parser.parse_intermixed_args(arguments)
    given.results = results
    return given


def skipped(what: str) -> None:
    """Print what was skipped and why, for the table of this program."""
    print(f"skipped: {what}", flush=True)


def temporary_folder() -> Path:
    """A folder that is deleted when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="bench-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def no_sandbox() -> str:
    """Why this machine has no sandbox, or an empty text."""
    from agent_peft.sandbox.build import missing
    from agent_peft.types import AgentPeftError

    try:
        missing("oci")
    except AgentPeftError as error:
        return str(error)
    return ""


def tiny_model(folder: Path) -> Path:
    """Write a model of random weights that reads characters, and return its folder."""
    import string

    from agent_peft.policies.config import ScratchConfig
    from agent_peft.policies.loading import load_policy

    policy = load_policy(ScratchConfig(alphabet=string.printable, architecture=TINY, device="cpu"), 0)
    policy.save(folder / "tiny")
    policy.chat.tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


def tiny_run(folder: Path) -> Path:
    """Train that model for one step on two tasks of DB Bench, and return the run directory."""
    from agent_peft.configuration.yaml12 import dump

    content = {
        "run_dir": str(folder / "run"),
        "policy": {"kind": "pretrained", "model": str(tiny_model(folder)), "lora": {"rank": 2}},
        "environment": {"kind": "db_bench", "generate": {"num_tasks": 2}, "max_turns": 2},
        "sampling": {"max_new_tokens": 4, "max_tokens": 8192},
        "stages": [{"algorithm": "sft", "steps": 1, "tasks_per_step": 2}],
    }
    (folder / "run.yaml").write_text(dump(content))
    command = [sys.executable, "-m", "agent_peft", "train", str(folder / "run.yaml")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "run"


def scripts() -> list[str]:
    """Names of the benchmarks that have a main and are not run by another one."""
    names = {
        path.stem
        for path in HERE.glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    return sorted(names - {Path(__file__).stem} - DRIVEN.keys())


def files() -> dict[Path, bytes]:
    """What no quick run may change."""
    kept = (RESULTS, HERE.parent / "docs" / "pictures")
    return {path: path.read_bytes() for folder in kept for path in folder.glob("*")}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(name: str) -> tuple[bool, list[str]]:
    """Whether the script worked, and what it skipped. What it printed is shown if it failed."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick"]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**settings, **os.environ},
            cwd=HERE.parent,
            timeout=TIMEOUT,
        )
        output, worked = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        output, worked = f"{error.stdout or ''}\nit was killed after {TIMEOUT} s", False
    if not worked:
        print(output, flush=True)
    return worked, [line for line in output.splitlines() if line.startswith("skipped: ")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these")
    names = parser.parse_args().names or scripts()
    if unknown := set(names) - set(scripts()):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(scripts())}")
    before, failed, clock = files(), [], time.perf_counter()
    for name in names:
        begun, used = time.perf_counter(), cpu_seconds()
        worked, missing = run(name)
        seconds, used = time.perf_counter() - begun, cpu_seconds() - used
        slow = f", over {LIMIT} s" if seconds > LIMIT else ""
        print(
            f"{name:22}{'ok' if worked else 'FAILED':8}{seconds:5.1f} s {used:5.1f} CPU s{slow}", flush=True
        )
        for line in missing:
            print(f"    {line}")
        failed += [] if worked else [name]
        if files() != before:
            print(f"{name} --quick has changed benchmarks/results or docs/pictures")
            failed, before = [*failed, name], files()
    print(
        f"{len(names)} scripts in {time.perf_counter() - clock:.0f} s; failed: {', '.join(failed) or 'none'}"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
