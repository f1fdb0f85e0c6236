"""SQLite and MariaDB under DB Bench: do both give the same tasks, and how fast are they?

    python benchmarks/databases.py [--parts skills real speed] [--per-skill 50] [--seconds 10]
        [--tasks data/db_bench/entry_dict.json] [--agentbench data/dbbench_dev.jsonl]

``skills``: of generated tasks of each skill, how many are valid on each database (the gold gives the stored
rows or table, and doing nothing does not), and whether the skills read off the SQL are the requested ones.
``real``: the tasks of both files that can be used on each database, and why the others cannot. ``speed``:
episodes a second of an agent with two statements and an answer, 8 at once. It writes results/databases.json.
Episodes with faults are in tests/environments/db_bench/test_faults.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from measuring import ROOT, command_line, show, skipped, table

from agent_peft.environments.db_bench import DBBench, DBBenchConfig, GenerateConfig, skills_of
from agent_peft.environments.db_bench.generator import GENERATED_SKILLS, generate
from agent_peft.environments.db_bench.inspection import inspect
from agent_peft.environments.db_bench.protocol import answer, operation
from agent_peft.environments.db_bench.tasks import load_tasks, read_entry

DATABASES = ["sqlite", "mariadb"]
THREADS = 8


def skills(per_skill: int) -> dict[str, Any]:
    """How many of the tasks of each skill are valid on each database."""
    entries = generate(per_skill * len(GENERATED_SKILLS), 0, GENERATED_SKILLS)
    rows = {skill: Counter[str]() for skill in GENERATED_SKILLS}
    for i, (name, entry) in enumerate(entries.items()):
        skill = GENERATED_SKILLS[i % len(GENERATED_SKILLS)]
        row, problem = rows[skill], read_entry(name, entry)
        row["tasks"] += 1
        row["skills"] += set(skills_of(entry["answer_info"]["sql"])) == set(entry["skill_list"])
        row["asked"] += skill in entry["skill_list"]
        for database in DATABASES:
            config = DBBenchConfig(generate=GenerateConfig(num_tasks=1), database=database)
            cause = inspect(problem, config).cause
            row[database] += cause is None
            if cause is not None:
                print(f"  {name} on {database}: {cause}\n    {problem.sql}")
    total = sum(rows.values(), Counter[str]())
    keys = ("tasks", "asked", "skills", *DATABASES)
    cells = ((skill, *(row[key] for key in keys)) for skill, row in {**rows, "all": total}.items())
    show(table("skill|tasks|has it|skills equal|" + "|".join(DATABASES), cells))
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
                text = f"{cause} {problem.sql}"
                kind = next((name for pattern, name in CAUSES.items() if re.search(pattern, text)), "other")
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
    with closing(DBBench(config)) as environment:
        silent = [task.id for task in environment.tasks if environment.demonstration(task) is None]
        number = len(environment.tasks) - len(silent)
    print(f"  SQL that gives the label: {number}; that does not: {silent}")
    return {"number": number, "others": silent}


def speed(seconds: float) -> dict[str, Any]:
    """Episodes a second of a scripted agent."""
    return {database: _speed_of(database, seconds) for database in DATABASES}


def _speed_of(database: str, seconds: float) -> dict[str, float]:
    config = DBBenchConfig(generate=GenerateConfig(num_tasks=64, seed=1), database=database)
    with closing(DBBench(config)) as environment, ThreadPoolExecutor(THREADS) as pool:
        scripts = []
        for task in environment.tasks:
            problem = read_entry(task.id, task.content)
            last = answer(problem.direct if problem.direct is not None else "done")
            look = operation(f"SELECT * FROM `{problem.table.name}` LIMIT 3")
            scripts.append((task, (look, operation(problem.sql), last)))

        def play(i: int) -> str:
            task, replies = scripts[i % len(scripts)]
            with closing(environment.episode(task, i)) as episode:
                episode.start()
                return str([episode.step(reply) for reply in replies][-1].outcome)

        list(pool.map(play, range(64)))
        begin, used, ran, outcomes = time.perf_counter(), time.process_time(), 0, Counter[str]()
        while time.perf_counter() - begin < seconds:
            outcomes.update(pool.map(play, range(ran, ran + 128)))
            ran += 128
        wall, used = time.perf_counter() - begin, time.process_time() - used
    rate, milliseconds = ran / wall, 1000 * used / ran
    print(
        f"{database}: {rate:.0f} episodes a second ({THREADS} at once, 3 turns), "
        f"{milliseconds:.2f} ms of our process each; {dict(outcomes)}"
    )
    return {"episodes a second": rate, "ms of our own CPU": milliseconds}


def main() -> None:
    every = ["skills", "real", "speed"]
    given = command_line(
        __doc__,
        quick={"per_skill": 1, "seconds": 0.2},
        parts={"nargs": "+", "choices": every, "default": every},
        per_skill=50,
        seconds=10.0,
        tasks=ROOT / "data/db_bench/entry_dict.json",
        agentbench=ROOT / "data/dbbench_dev.jsonl",
    )
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/libexec"
    if given.quick and not any(shutil.which(name, path=path) for name in ("mariadbd", "mysqld")):
        skipped("mariadb: neither mariadbd nor mysqld is on the search path")
        DATABASES.remove("mariadb")
    file = given.results / "databases.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    paths = {"LifelongAgentBench": given.tasks, "AgentBench": given.agentbench}
    work: dict[str, Callable[[], Any]] = {
        "skills": lambda: skills(given.per_skill),
        "real": lambda: {name: real(path) for name, path in paths.items() if path.is_file()},
        "speed": lambda: speed(given.seconds),
    }
    for part in given.parts:
        print(f"-- {part}", flush=True)
        results[part] = work[part]()
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
