"""Play episodes of every environment with random hostile replies from the tests' corpora, and count what is
left behind.

    python benchmarks/hostile.py [--episodes 1000] [--environments NAME ...]
    python benchmarks/hostile.py --attacks [--each 1]        # as root, 20 minutes

For each environment it counts: the ends of the episodes; exceptions (target: none); processes, mounts,
descriptors, temporary files and System V objects more than before (target: none); the trainer's memory after
a fifth of the episodes and at the end (target: constant); and hostile replies that were graded as correct.
It writes results/hostile.json.

With --attacks it tries every attack of the tests' corpus as root and as ordinary users, with and without
control groups. It prints counts, and writes results/attacks.json with the result of each attack in each case:
held, bounded (the trainer ended the machine above its limits) or open; for honest work seen or refused.
"""

from __future__ import annotations

# ruff: noqa: E501 (a reply a word)
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from measuring import ROOT, command_line, no_sandbox, skipped
from sandbox import left_behind

sys.path.insert(0, str(ROOT))

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment
from agent_peft.environments.db_bench import isolated as databases
from agent_peft.sandbox.runtime import _FOUND
from agent_peft.seeding import derive
from agent_peft.types import Outcome
from tests.environments.db_bench.hostile_replies import COLUMNS, HOSTILE_REPLIES, ROWS, TABLE
from tests.environments.os_interaction import attacks
from tests.environments.os_interaction.blind_replies import BLIND_REPLIES

DIGITS = "9" * 5000
TEXTS = (
    *("", "\0", "\ud800", "\u202e42", "^$", "#### ", f"#### {DIGITS}", f"#### -{DIGITS}.{DIGITS}", "#### 1e400", "#### NaN", "#### ٣", "#### 1,2,3,,4"),
    *("####" * 5000, "#### 1\n" * 2000, DIGITS, f"{DIGITS} = {DIGITS}", "1" + "_1" * 3000, "<<1+1=2>>" * 2000, "(" * 5000, "[" * 5000, "{" * 5000),
    *("Act: finish", "Act: answer(" + "a" * 100_000 + ")", "Act: answer(\ud800)", "Act: bash", "Act: bash\n\n```bash\n```", "```" * 3000, "Act: " * 3000),
    *('{"name": "bash", "arguments": {"command": ' + "[" * 900 + "]" * 900 + "}}", '<tool_call>{"name": 5}</tool_call>', "Final Answer: " + "[" * 900),
    *("Action: Answer\nFinal Answer: [(" + "'a'," * 5000 + ")]", "Action: Operation\n```sql\n" + "(" * 3000 + "\n```", "Action: Operation\n```sql\n\0\n```"),
)  # fmt: skip


COMMANDS = (
    *(reach.command for reach in attacks.REACHES),
    *(trick.command for trick in attacks.TRICKS),
    *(command for _, command in BLIND_REPLIES),
)
SHELL = tuple(f"Act: bash\n\n```bash\n{command}\n```" for command in COMMANDS)


def entry(number: int) -> dict[str, Any]:
    kinds = zip(COLUMNS, ("INT", "TEXT", "INT"), strict=True)
    columns = [{"name": name, "type": kind} for name, kind in kinds]
    sql = f"UPDATE {TABLE} SET score = 5 WHERE id = {number}"
    return {
        "instruction": f"Set the score of {number} to 5.",
        "table_info": {"name": TABLE, "column_info_list": columns, "row_list": [list(row) for row in ROWS]},
        "answer_info": {"sql": sql, "direct": None, "md5": None},
        "skill_list": ["update"],
    }


def environments(folder: Path) -> dict[str, tuple[dict[str, Any], Sequence[str]]]:
    """The settings of each environment, and replies for it."""
    lines = ({"question": f"{i} + {i}?", "answer": f"It is so.\n#### {2 * i}"} for i in range(1, 41))
    problems, tables = folder / "problems.jsonl", folder / "tables.json"
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables.write_text(json.dumps({str(i): entry(i) for i in range(1, len(ROWS))}))
    limits = {"memory_mb": 128, "processes": 40, "file_size_mb": 16, "cpu_seconds": 4}
    bounds = {"limits": limits, "command_timeout": 4, "script_timeout": 6, "max_turns": 4}
    shells = {"num_tasks": 58, "seed": 5, "split": "heldout"}
    return {
        "arithmetic": ({"digits": 2, "num_tasks": 40}, TEXTS),
        "gsm8k": ({"tasks": str(problems)}, TEXTS),
        "db_bench": ({"tasks": str(tables)}, (*HOSTILE_REPLIES, *TEXTS)),
        "os_interaction": ({"generate": shells, **bounds}, (*SHELL, *SHELL, *TEXTS)),
    }


def left() -> dict[str, int]:
    """Count what could stay behind, except the databases' fork server, which is stopped first."""
    databases.stop_workers()
    for runtime in _FOUND.values():
        runtime.result().finish()
    return {**left_behind(), "files": len(os.listdir(tempfile.gettempdir())) + len(os.listdir("/dev/shm"))}


def resident() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def play(environment: Environment, replies: Sequence[str], seed: int) -> str:
    """Return the end of one episode: its stop reason and outcome, or the exception."""
    rng = random.Random(seed)
    task = environment.tasks[seed % len(environment.tasks)]
    finish = ("Act: finish", "Action: Answer\nFinal Answer: done")
    try:
        with closing(environment.episode(task, seed)) as episode:
            episode.start()
            for reply in (*(rng.choice(replies) for _ in range(rng.randint(1, 3))), *finish * 4):
                result = episode.step(reply)
                if result.done:
                    return f"{result.stop_reason}, {result.outcome}"
            return "continues"
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


def play_all(given: Any) -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # so that only our files are counted
        os.chmod(folder, 0o711)  # machines have users of their own, who must reach their files
        for name, (settings, replies) in environments(Path(folder)).items():
            if given.environments and name not in given.environments:
                continue
            if given.quick and name == "os_interaction" and (lacks := no_sandbox()):
                skipped(f"{name}: {lacks}")
                continue
            environment = load_environment({"kind": name, **settings})
            found[name] = run(name, environment, replies, given.episodes, given.threads, given.seed)
            print(name, json.dumps(found[name], indent=2))
    (given.results / "hostile.json").write_text(json.dumps(found, indent=2) + "\n")


def try_attacks(given: Any) -> None:
    if (lacks := no_sandbox()) or os.geteuid() != 0:
        skipped(f"the attacks: {lacks or 'only root can become another user'}")
        return
    report = {}
    for case in attacks.CASES:
        command = attacks.command_of(case)
        if command is None:
            skipped(f"{case}: no Python here can be run by an ordinary user")
            continue
        done = subprocess.run([*command, str(given.each)], stdout=subprocess.PIPE, text=True, cwd="/")
        if done.returncode != 0:
            sys.exit(f"{case}: the attacks did not run")
        report[case] = json.loads(done.stdout)
        results = report[case]["results"]
        print(f"{case} ({report[case]['case']}): {dict(Counter(results.values()))}", flush=True)
        for what, result in results.items():
            if result not in ("held", "seen"):
                print(f"    {result}: {what}")
    (given.results / "attacks.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def main() -> None:
    given = command_line(
        __doc__,
        quick={"episodes": 20, "each": 40},
        episodes=1000,
        threads=4,
        seed=0,
        environments={"nargs": "*", "help": "play only these"},
        attacks=False,
        each=1,  # tries every so-many-th attack only
    )
    if given.attacks or given.quick:
        try_attacks(given)
    if not given.attacks:
        play_all(given)


if __name__ == "__main__":
    main()
