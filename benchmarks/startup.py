"""Measure how long `agent-peft` takes to answer, and to make its first update.

    python benchmarks/startup.py [--before SRC] [--rounds 5] [--config quickstart]

Each command is a process of one thread, whose CPU seconds are those of user and system. `--before` names the
`src` of another commit, whose processes run in turn with this one's. A run has no evaluation, and is killed
where its measurement ends. The program prints a table of medians and writes
benchmarks/results/startup.json.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import ROOT, command_line, in_turn, show, table, temporary_folder, tiny_run, write


def seconds(source: Path, arguments: list[str], until: str | None) -> tuple[float, float]:
    """CPU and wall seconds of a command: whole, or until it is killed at the first line with ``until``."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "agent_peft", *arguments]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found = any(until is not None and until in line for line in process.stdout)
    wall = time.perf_counter() - begin
    if found:
        process.kill()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if until is not None and not found:
        sys.exit(f"{' '.join(arguments)}: ended without {until or 'a line'}")
    return used.ru_utime + used.ru_stime, wall


def main() -> None:
    given = command_line(__doc__, quick={"rounds": 1}, before=Path, rounds=5, config="quickstart")
    folder = temporary_folder()
    run = tiny_run(folder)
    config = str(folder / "run.yaml") if given.quick else given.config
    sources = {"before": given.before, "now": ROOT / "src"}
    sources = {name: source for name, source in sources.items() if source is not None}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, side in in_turn(sources, given.rounds, warm_up=not given.quick):
        train = ["train", config, "evaluation=null", "threads=1"]
        places = [f"run_dir={folder / f'{side}{number}{what}'}" for what in ("line", "update")]
        commands = {
            "a typo in a key": (["train", config, "environmnt.x=1"], None),
            "a typo in a configuration's name": (["train", "quickstrt"], None),
            "--help": (["--help"], None),
            "show": (["show", str(run)], None),
            "train, to its first line": ([*train, places[0]], ""),
            "train, to its first update": ([*train, places[1]], "loss"),
        }
        for name, (arguments, until) in commands.items():
            took = seconds(sources[side], arguments, until)
            if number >= 0:
                times.setdefault((name, side), []).append(took)
    rows = [
        {"what": name, "side": side, "cpu": statistics.median(cpu), "wall": statistics.median(wall)}
        for (name, side), of in sorted(times.items(), key=lambda item: list(commands).index(item[0][0]))
        for cpu, wall in [zip(*of, strict=True)]
    ]
    title = f"{config}: seconds, medians of {given.rounds}"
    show(table("what|commit|CPU s|wall s", (row.values() for row in rows), title))
    write(given.results / "startup.json", {"rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    main()
