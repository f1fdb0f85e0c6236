"""Play episodes of every environment with random hostile replies from the tests' corpora, and count what is
left behind.

    python benchmarks/hostile.py --episodes 1000

For each environment it counts: the ends of the episodes; exceptions (target: none); processes, mounts,
descriptors, temporary files and System V objects more than before (target: none); the trainer's memory after
a fifth of the episodes and at the end (target: constant); and hostile replies that were graded as correct.
It writes results/hostile.json.
"""

from __future__ import annotations

# ruff: noqa: E501 (a reply a word)
import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smoke import RESULTS, no_sandbox, parse, skipped

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent_peft.environments import load_environment  # noqa: E402
from agent_peft.environments.base import Environment  # noqa: E402
from agent_peft.environments.db_bench import isolated as databases  # noqa: E402
from agent_peft.sandbox.runtime import _FOUND  # noqa: E402
from agent_peft.seeding import derive  # noqa: E402
from agent_peft.types import Outcome  # noqa: E402
from tests.environments.db_bench.hostile_replies import COLUMNS, HOSTILE_REPLIES, ROWS, TABLE  # noqa: E402
from tests.environments.os_interaction import attacks  # noqa: E402
from tests.environments.os_interaction.blind_replies import BLIND_REPLIES  # noqa: E402

DIGITS = "9" * 5000
TEXTS = (
    *("", "\0", "\ud800", "\u202e42", "^$", "#### ", f"#### {DIGITS}", f"#### -{DIGITS}.{DIGITS}", "#### 1e400", "#### NaN", "#### ٣", "#### 1,2,3,,4"),
    *("####" * 5000, "#### 1\n" * 2000, DIGITS, f"{DIGITS} = {DIGITS}", "1" + "_1" * 3000, "<<1+1=2>>" * 2000, "(" * 5000, "[" * 5000, "{" * 5000),
    *("Act: finish", "Act: answer(" + "a" * 100_000 + ")", "Act: answer(\ud800)", "Act: bash", "Act: bash\n\n```bash\n```", "```" * 3000, "Act: " * 3000),
    *('{"name": "bash", "arguments": {"command": ' + "[" * 900 + "]" * 900 + "}}", '<tool_call>{"name": 5}</tool_call>', "Final Answer: " + "[" * 900),
    *("Action: Answer\nFinal Answer: [(" + "'a'," * 5000 + ")]", "Action: Operation\n```sql\n" + "(" * 3000 + "\n```", "Action: Operation\n```sql\n\0\n```"),
)  # fmt: skip


def shell(command: str) -> str:
    return f"Act: bash\n\n```bash\n{command}\n```"


SHELL = tuple(
    shell(command)
    for command in (
        *(r.command for r in attacks.REACHES),
        *(t.command for t in attacks.TRICKS),
        *(c for _, c in BLIND_REPLIES),
    )
)


def environments(folder: Path) -> dict[str, tuple[Environment, Sequence[str]]]:
    problems = folder / "problems.jsonl"
    problems.write_text(
        "".join(
            json.dumps({"question": f"{i} + {i}?", "answer": f"It is so.\n#### {2 * i}"}) + "\n"
            for i in range(1, 41)
        )
    )
    columns = [
        {"name": name, "type": kind} for name, kind in zip(COLUMNS, ("INT", "TEXT", "INT"), strict=True)
    ]
    table = {"name": TABLE, "column_info_list": columns, "row_list": [list(row) for row in ROWS]}
    tables = folder / "tables.json"
    tables.write_text(
        json.dumps(
            {
                str(i): {
                    "instruction": f"Set the score of {i} to 5.",
                    "table_info": table,
                    "answer_info": {
                        "sql": f"UPDATE {TABLE} SET score = 5 WHERE id = {i}",
                        "direct": None,
                        "md5": None,
                    },
                    "skill_list": ["update"],
                }
                for i in range(1, len(ROWS))
            }
        )
    )
    bounds: dict[str, Any] = {
        "limits": {"memory_mb": 128, "processes": 40, "file_size_mb": 16, "cpu_seconds": 4}
    }
    bounds |= {"command_timeout": 4, "script_timeout": 6, "max_turns": 4}
    return {
        "arithmetic": (load_environment({"kind": "arithmetic", "digits": 2, "num_tasks": 40}), TEXTS),
        "gsm8k": (load_environment({"kind": "gsm8k", "tasks": str(problems)}), TEXTS),
        "db_bench": (
            load_environment({"kind": "db_bench", "tasks": str(tables)}),
            (*HOSTILE_REPLIES, *TEXTS),
        ),
        "os_interaction": (
            load_environment(
                {
                    "kind": "os_interaction",
                    "generate": {"num_tasks": 58, "seed": 5, "split": "heldout"},
                    **bounds,
                }
            ),
            (*SHELL, *SHELL, *TEXTS),
        ),
    }


def left() -> dict[str, int]:
    """Count what could stay behind, except the databases' fork server, which is stopped first."""
    databases.stop()
    for runtime in _FOUND.values():
        runtime.result().finish()
    waiting, processes = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        for task in Path(f"/proc/{pid}/task").glob("*") if Path(f"/proc/{pid}/task").exists() else ():
            try:
                children = (task / "children").read_text().split()
            except OSError:
                continue
            processes += len(children)
            waiting += map(int, children)
    return {
        "processes": processes,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": len(os.listdir(tempfile.gettempdir())) + len(os.listdir("/dev/shm")),
        "bundles": len(list(Path(tempfile.gettempdir()).glob("agent-peft-machines-*/*/*/config.json"))),
        "control_groups": len(list(Path("/sys/fs/cgroup").glob("*/agent-peft-*"))),
        "ipc": sum(
            len(Path(f"/proc/sysvipc/{name}").read_text().splitlines()) - 1 for name in ("shm", "sem", "msg")
        ),
        "threads": threading.active_count(),
    }


def resident() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def play(environment: Environment, replies: Sequence[str], seed: int) -> str:
    """Return the end of one episode: its stop reason and outcome, or the exception."""
    rng = random.Random(seed)
    task = environment.tasks[seed % len(environment.tasks)]
    finish = ("Act: finish", "Action: Answer\nFinal Answer: done")
    try:
        episode = environment.episode(task, seed)
        try:
            episode.start()
            for _ in range(rng.randint(1, 3)):
                result = episode.step(rng.choice(replies))
                if result.done:
                    return f"{result.stop_reason}, {result.outcome}"
            for reply in finish * 4:
                result = episode.step(reply)
                if result.done:
                    return f"{result.stop_reason}, {result.outcome}"
            return "continues"
        finally:
            episode.close()
    except Exception as error:
        return f"EXCEPTION {type(error).__name__}: {error}"[:200]


def run(
    name: str, environment: Environment, replies: Sequence[str], episodes: int, threads: int, seed: int
) -> dict[str, Any]:
    seeds = [derive(seed, "hostile", name, i) % 2**31 for i in range(episodes)]
    begun, before, early = time.monotonic(), {}, 0.0
    ends: Counter[str] = Counter()
    with ThreadPoolExecutor(threads) as pool:
        for first, last in ((0, episodes // 5), (episodes // 5, episodes)):
            ends.update(pool.map(lambda each: play(environment, replies, each), seeds[first:last]))
            if first == 0:  # the shared programs are started by now
                settle()
                before, early = left(), resident()
        settle()
        after = left()
    return {
        "episodes": episodes,
        "seconds": round(time.monotonic() - begun, 1),
        "ends": dict(ends.most_common()),
        "exceptions": sum(count for end, count in ends.items() if end.startswith("EXCEPTION")),
        "correct": sum(count for end, count in ends.items() if end.endswith(f", {Outcome.CORRECT}")),
        "left": {key: after[key] - before[key] for key in before},
        "mb_after_a_fifth": round(early, 1),
        "mb_at_the_end": round(resident(), 1),
    }


def settle() -> None:
    """Wait until all ending processes have ended."""
    for _ in range(100):
        found = left()
        time.sleep(0.1)
        if left() == found:
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--environments", nargs="*", help="play only these environments")
    parser.add_argument("--output", type=Path, default=RESULTS / "hostile.json")
    options = parse(parser, episodes=20)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # so that only our files are counted
        os.chmod(folder, 0o711)  # machines have users of their own, who must reach their files
        for name, (environment, replies) in environments(Path(folder)).items():
            if options.environments and name not in options.environments:
                continue
            if options.quick and name == "os_interaction" and (lacks := no_sandbox()):
                skipped(f"{name}: {lacks}")
                continue
            found[name] = run(name, environment, replies, options.episodes, options.threads, options.seed)
            print(name, json.dumps(found[name], indent=2))
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
