"""SQLite and MariaDB under DB Bench: do both give the same tasks, how fast are they, and what do faults do?

    python benchmarks/databases.py [--parts skills,real,speed,faults] [--per-skill 50] [--faults 500]
        [--tasks data/db_bench/entry_dict.json] [--agentbench data/dbbench_dev.jsonl]

``skills``: of generated tasks of each skill, how many are valid on each database (the gold gives the stored
rows or table, and doing nothing does not), and whether the skills read off the SQL are those asked for.
``real``: the tasks of both files that can be used on each database, and why the others cannot. ``speed``:
episodes a second of an agent with two statements and an answer, 8 at once. ``faults``: episodes with the
faults of tests/environments/db_bench/faults.py; as root also with a disk that is full.
It writes results/databases.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import ROOT, command_line, skipped

sys.path.insert(0, str(ROOT))

from agent_peft.environments.db_bench import (
    DBBench,
    DBBenchConfig,
    GenerateConfig,
    fork_server,
    skills_of,
)
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS, generate
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.servers import accounts, private
from agent_peft.environments.db_bench.servers.accounts import server_of
from agent_peft.environments.db_bench.servers.client import Client
from agent_peft.environments.db_bench.tasks import load_tasks, read_entry
from tests.environments.db_bench import faults

DATABASES = ["sqlite", "mariadb"]
THREADS = 8


def skills(per_skill: int) -> dict[str, Any]:
    """How many of the tasks of each skill are valid on each database."""
    entries = generate(per_skill * len(GENERATED_SKILLS), 0, GENERATED_SKILLS)
    rows = {skill: Counter[str]() for skill in GENERATED_SKILLS}
    for i, (name, entry) in enumerate(entries.items()):
        row, problem = rows[GENERATED_SKILLS[i % len(GENERATED_SKILLS)]], read_entry(name, entry)
        row["tasks"] += 1
        row["skills"] += set(skills_of(entry["answer_info"]["sql"])) == set(entry["skill_list"])
        row["asked"] += GENERATED_SKILLS[i % len(GENERATED_SKILLS)] in entry["skill_list"]
        for database in DATABASES:
            found = inspect(problem, DBBenchConfig(generate=GenerateConfig(num_tasks=1), database=database))
            row[database] += found.cause is None
            if found.cause is not None:
                print(f"  {name} on {database}: {found.cause}\n    {problem.sql}")
    print(f"{'skill':48} tasks  asked  skills equal  sqlite  mariadb")
    for skill, row in rows.items():
        print(
            f"{skill:48} {row['tasks']:5}  {row['asked']:5}  {row['skills']:12}  {row['sqlite']:6}  "
            f"{row['mariadb']:7}"
        )
    total = sum(rows.values(), Counter[str]())
    print(f"{'all':48} {json.dumps(total)}")
    return {"skills": rows, "all": total}


CAUSES = {
    r"other rows": "LIMIT without a total order",
    r"DELETE FROM \w+ AS": "DELETE FROM t AS a",
    r"\bJOIN\b": "UPDATE or DELETE with JOIN",
    r"STDDEV": "STDDEV",
    r"Incorrect column name": "a column without a name",
    r"stored md5": "a fraction in an INT column",
}


def real(path: Path) -> dict[str, Any]:
    """Which tasks of a file each database agrees with."""
    tasks = load_tasks(path)
    found: dict[str, Any] = {"tasks": len(tasks)}
    for database in DATABASES:
        config = DBBenchConfig(tasks=path, database=database)
        refused = {}
        for task in tasks:
            problem = read_entry(task.id, task.content)
            if (cause := inspect(problem, config).cause) is not None:
                kind = next(
                    (
                        name
                        for pattern, name in CAUSES.items()
                        if re.search(pattern, f"{cause} {problem.sql}")
                    ),
                    "other",
                )
                refused[task.id] = {"cause": kind, "told": cause, "sql": problem.sql}
        agreement = 1 - len(refused) / len(tasks)
        kinds = Counter(each["cause"] for each in refused.values())
        usable = len(tasks) - len(refused)
        print(f"{path.name} on {database}: {usable} of {len(tasks)} ({agreement:.2%}) {dict(kinds)}")
        found[database] = {"usable": usable, "agreement": agreement, "refused": refused}
        if any(task.content.get("description") for task in tasks):
            found[database]["sql gives the label"] = _with_demonstrations(config)
    return found


def _with_demonstrations(config: DBBenchConfig) -> dict[str, Any]:
    """AgentBench's tasks whose SQL gives the stored answer or table."""
    environment = DBBench(config)
    silent = [task.id for task in environment.tasks if environment.demonstration(task) is None]
    environment.close()
    print(f"  SQL that gives the label: {len(environment.tasks) - len(silent)}; that does not: {silent}")
    return {"number": len(environment.tasks) - len(silent), "others": silent}


def speed(seconds: float) -> dict[str, Any]:
    """Episodes a second of a scripted agent."""
    found = {}
    for database in DATABASES:
        config = DBBenchConfig(generate=GenerateConfig(num_tasks=64, seed=1), database=database)
        environment = DBBench(config)
        scripts = []
        for task in environment.tasks:
            problem = read_entry(task.id, task.content)
            last = answer(problem.direct if problem.direct is not None else "done")
            look = operation(f"SELECT * FROM `{problem.table.name}` LIMIT 3")
            scripts.append((task, (look, operation(problem.sql), last)))

        def play(i: int, environment: DBBench = environment, scripts: Any = scripts) -> str:
            task, replies = scripts[i % len(scripts)]
            episode = environment.episode(task, i)
            episode.start()
            result = [episode.step(reply) for reply in replies][-1]
            episode.close()
            return str(result.outcome)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(play, range(64)))
            begun, ran, outcomes = time.perf_counter(), 0, Counter[str]()
            used = time.process_time()
            while time.perf_counter() - begun < seconds:
                outcomes.update(pool.map(play, range(ran, ran + 128)))
                ran += 128
            wall, used = time.perf_counter() - begun, time.process_time() - used
        environment.close()
        found[database] = {"episodes a second": ran / wall, "ms of our own CPU": 1000 * used / ran}
        print(
            f"{database}: {ran / wall:.0f} episodes a second ({THREADS} at once, 3 turns), "
            f"{1000 * used / ran:.2f} ms of our process each; {dict(outcomes)}"
        )
    return found


@contextmanager
def small_disk(megabytes: int = 200) -> Iterator[Path | None]:
    """A disk of our own, where we may mount one."""
    folder = Path(tempfile.mkdtemp())
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True
        ).returncode
    )
    try:
        if mounted:
            folder.chmod(0o755)
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()


def storms(episodes: int) -> dict[str, Any]:
    """Episodes with faults, and what is left behind them."""
    found = {}
    for database in DATABASES:
        with small_disk() as disk:
            world: dict[str, Callable[[Any], None]] = {"fork server killed": faults.kill_the_fork_server}
            place, room = private._MEMORY_FOLDER, private._ROOM
            if database == "mariadb":
                world = {
                    "server killed in a query": faults.kill_the_server,
                    "connection cut": faults.cut_the_connection,
                }
                if disk is not None:
                    world["disk full"] = faults.fill(disk)
                    private._MEMORY_FOLDER, private._ROOM = disk, 1
                else:
                    print("no disk can be mounted here, so none is full")
            config = DBBenchConfig(
                generate=GenerateConfig(num_tasks=40, seed=3),
                database=database,
                statement_seconds=faults.SECONDS,
                max_turns=6,
            )
            environment = DBBench(config)
            begun = time.perf_counter()
            storm = faults.storm(environment, episodes, world, every=20)
            wall = time.perf_counter() - begun
            left = _left(database)
            environment.close()
            accounts.stop()
            fork_server.stop()
            private._MEMORY_FOLDER, private._ROOM = place, room
            left["folders"] = len(
                [*Path("/dev/shm").glob("agent-peft-server_*"), *(disk.glob("agent-peft-*") if disk else ())]
            )
            left["processes"] = len(_children())
        unexpected = storm.unexpected or "none"
        print(f"{database}: {episodes} episodes in {wall:.0f} s; unexpected: {unexpected}; left: {left}")
        for name, count in sorted(storm.outcomes.items()):
            print(f"  {name:45} {count:4}   attempts that failed: {storm.failures[name.partition(':')[0]]}")
        found[database] = {
            "episodes": episodes,
            "seconds": wall,
            "outcomes": storm.outcomes,
            "failed attempts": storm.failures,
            "unexpected": storm.unexpected,
            "left": left,
        }
    return found


def _left(database: str) -> dict[str, int]:
    if database == "sqlite":
        return {}
    client = Client(server_of("mariadb").address)
    left = {
        "schemas": sum(str(row[0]).startswith("ap_") for row in client.run("SHOW DATABASES")),
        "users": sum(str(row[0]).startswith("ap_") for row in client.run("SELECT User FROM mysql.user")),
    }
    client.close()
    return left


def _children() -> list[str]:
    path = f"/proc/{os.getpid()}/task"
    return [pid for task in os.listdir(path) for pid in Path(f"{path}/{task}/children").read_text().split()]


def main() -> None:
    given = command_line(
        __doc__,
        quick={"per_skill": 1, "seconds": 0.2, "faults": 4},
        parts="skills,real,speed,faults",
        per_skill=50,
        seconds=10.0,
        faults=500,
        tasks=ROOT / "data/db_bench/entry_dict.json",
        agentbench=ROOT / "data/dbbench_dev.jsonl",
    )
    if given.quick and private.find_program("mariadbd", "mysqld") is None:
        skipped("mariadb: neither mariadbd nor mysqld is on the search path")
        DATABASES.remove("mariadb")
    file = given.results / "databases.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    paths = {"LifelongAgentBench": given.tasks, "AgentBench": given.agentbench}
    work: dict[str, Callable[[], Any]] = {
        "skills": lambda: skills(given.per_skill),
        "real": lambda: {name: real(path) for name, path in paths.items() if path.is_file()},
        "speed": lambda: speed(given.seconds),
        "faults": lambda: storms(given.faults),
    }
    for part in given.parts.split(","):
        print(f"-- {part}", flush=True)
        results[part] = work[part]()
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
