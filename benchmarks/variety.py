"""How narrow is DB Bench's generator? Its tasks next to LifelongAgentBench's real ones.

    python benchmarks/variety.py [--num-tasks 5000]
    [--tasks data/lifelong_agent_bench/db_bench/entry_dict.json]
    [--run RUN --scored 32] [--name ENTRY]

Prints a table and writes an entry of benchmarks/results/variety.json. Without ``--run`` it takes a minute.
With it, the nats of the gold SQL are measured at the run's checkpoints (0 is the base model), on fresh tasks,
on each held-out split and on the real tasks: what a generator is too narrow for costs more there.

- derivation bits: minus the logarithm of the probability of all phrasing choices, mean over tasks
- SQL skeleton: the gold SQL without aliases, with one sign for all names and one for all values
- effective: exp(entropy); unseen mass (Good-Turing): the share of tasks whose skeleton occurs once
- features: what `features` reads off the syntax tree; a real task is reached if each of its features occurs
- frame: the instruction with its names and values masked
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, command_line, show, table, tiny_run
from sqlglot import exp

from agent_peft.batch import collate
from agent_peft.environments import load_environment
from agent_peft.environments.db_bench import DBBench, DBBenchConfig, generate, generator
from agent_peft.environments.db_bench.syntax import parse_sql
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.runs.targets import run_config
from agent_peft.seeding import derive
from agent_peft.types import Trajectory

REAL = ROOT / "data/lifelong_agent_bench/db_bench/entry_dict.json"
Entry = Mapping[str, Any]

# -- SQL -----------------------------------------------------------------------------------------------------


def skeleton(sql: str) -> str:
    """The statement without its names, values and aliases; lists of names or values collapse."""
    tree = parse_sql(sql)
    assert tree is not None, sql

    def bare(node: exp.Expr) -> exp.Expr:
        if isinstance(node, exp.Alias):
            return node.this
        if isinstance(node, exp.Column):
            return exp.column("x")
        if isinstance(node, exp.Literal):
            return exp.column("v")
        if isinstance(node, exp.Table):
            return exp.to_table("t")
        if isinstance(node, exp.Subquery | exp.Select | exp.Delete | exp.Update):
            node.set("alias", None)
        if isinstance(node, exp.Identifier):
            return exp.to_identifier("x")
        return node

    text = tree.transform(bare).sql("mysql").replace("`", "")
    text = re.sub(r"\b([xv])(?:, [xv])+", r"\1s", text)
    return re.sub(r"\(vs?\)(?:, \(vs?\))*", "(vs)", text)


def features(sql: str) -> frozenset[str]:
    """What a statement is made of, clause by clause."""
    tree = parse_sql(sql)
    assert tree is not None, sql
    found = {type(tree).__name__}
    query = tree.expression if isinstance(tree, exp.Insert) else tree
    if isinstance(tree, exp.Insert):
        found.add("insert select" if isinstance(query, exp.Select) else "insert values")
    inner = [select for select in tree.find_all(exp.Select) if select is not query]
    outermost = [select for select in inner if select.parent_select in (None, query)]
    if len(outermost) > 1:
        found.add("several subqueries")
    for select in [query, *inner]:
        if not isinstance(select, exp.Select | exp.Update | exp.Delete):
            continue
        where = "" if select is query else "inner "
        found |= {where + feature for feature in _clauses(select)}
    source = query.find(exp.From) if isinstance(query, exp.Select) else None
    if source is not None and isinstance(source.this, exp.Subquery):
        found.add("derived table")
    return frozenset(found)


def _clauses(select: exp.Expr) -> set[str]:
    found = set()
    for name in ("where", "having"):
        if (clause := select.args.get(name)) is not None:
            found |= {f"{name}: {feature}" for feature in _conditions(clause.this)}
    if (group := select.args.get("group")) is not None:
        found.add(f"group by {min(len(group.expressions), 2)}")
    if (order := select.args.get("order")) is not None:
        found.add(f"order by {min(len(order.expressions), 2)}")
        aggregates = {
            column.alias for column in getattr(select, "expressions", []) if column.find(exp.AggFunc)
        }
        if any(key.find(exp.AggFunc) or key.this.name in aggregates for key in order.expressions):
            found.add("order by aggregate")
    if select.args.get("limit") is not None:
        kind = "offset" if select.args.get("offset") else "limit"
        found.add(kind if order is not None else f"{kind} unsorted")
    outputs = select.expressions
    if isinstance(select, exp.Select):
        found.add("many columns" if len(outputs) > 3 else "columns")
        computed = [column for column in outputs if column.find(exp.AggFunc)]
        nodes = (node for column in outputs for node in column.find_all(exp.AggFunc, exp.Binary))
        found |= {f"output {type(node).__name__}" for node in nodes}
        if len(computed) > 1:
            found.add("several aggregates")
        if computed and group is None:
            found.add("aggregate of all")
    if isinstance(select, exp.Update):
        found |= {"several sets"} if len(outputs) > 1 else set()
        for assignment in outputs:
            value = assignment.expression
            kind = type(value).__name__ if isinstance(value, exp.Binary) else "value"
            found.add("set query" if value.find(exp.Select) else f"set {kind}")
    return found


def _conditions(condition: exp.Expr) -> set[str]:
    found = set()
    nodes = list(condition.walk(prune=lambda node: isinstance(node, exp.Select)))
    connectors = [node for node in nodes if isinstance(node, exp.Connector)]
    found |= {type(node).__name__ for node in connectors}
    if any(isinstance(side, exp.Paren) for node in connectors for side in (node.left, node.right)):
        found.add("parentheses")
    for node in nodes:
        if isinstance(node, exp.Predicate) and not isinstance(node, exp.Connector):
            right = node.args.get("query") or node.args.get("expression")
            kind = "IN query" if isinstance(node, exp.In) and node.args.get("query") else type(node).__name__
            found.add(kind + (" query" if isinstance(right, exp.Subquery) and kind != "IN query" else ""))
        elif isinstance(node, exp.AggFunc | exp.Add | exp.Sub | exp.Mul | exp.Div):
            found.add(type(node).__name__)
    return found


def spread(signs: Sequence[str]) -> dict[str, float]:
    """Of the skeletons of tasks: how many, how many effectively, and the unseen mass."""
    counts = Counter(signs)
    shares = [count / len(signs) for count in counts.values()]
    return {
        "distinct": len(counts),
        "effective": math.exp(-sum(share * math.log(share) for share in shares)),
        "unseen mass": sum(count == 1 for count in counts.values()) / len(signs),
    }


# -- words ---------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]\b|[a-z]+(?:'[a-z]+)?|[^\w\s]")
_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = re.compile(rf"{_MONTH} \d+, \d{{4}}|\d+ {_MONTH} \d{{4}}")
_FUNCTION_WORDS = frozenset(
    {
        *(
            "a",
            "an",
            "the",
            "of",
            "in",
            "on",
            "at",
            "by",
            "for",
            "to",
            "is",
            "are",
            "with",
            "and",
            "or",
            "from",
        ),
        *("per", "number", "total", "average", "count", "date", "name"),
    }
)


def frame(entry: Entry) -> tuple[str, ...]:
    """The instruction's words: C for names of columns, T for the table, V for values; lists collapse."""
    info = entry["table_info"]
    text = _DATE.sub(" V ", entry["instruction"])
    text = re.sub(r"'[^']*'|\"[^\"]*\"", " V ", text)
    cells = {
        cell
        for row in info["row_list"]
        for cell in row
        if isinstance(cell, str) and len(cell) > 2 and not cell.islower()
    }
    for cell in sorted(cells, key=len, reverse=True):
        text = text.replace(cell, " V ")
    text = re.sub(r"[-$]?\d[\d.,:/-]*\d%?|\d(?:st|nd|rd|th)?", " V ", text)
    names = _words(column["name"] for column in info["column_info_list"])
    table = _words([info["name"]])
    words = []
    for word in _WORD.findall(re.sub(r"\bV\b", "\0", text).lower().replace("\0", "V").replace("_", " ")):
        stems = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
        sign = "C" if stems & names else "T" if stems & table else word
        if not (words and words[-1] == sign and sign in "CTV"):
            words.append(sign)
    joined = " ".join(words)
    for _ in range(2):
        joined = re.sub(r"\b([CV])(?: ,)?(?: and)?(?: the)? \1\b", r"\1", joined)
    return tuple(joined.split())


def _words(names: Iterable[str]) -> set[str]:
    parts = {part.lower() for name in names for part in re.split(r"[_\s]+", name)}
    return {
        form
        for part in parts - _FUNCTION_WORDS
        for form in (part, part.removesuffix("s"), re.sub("ies$", "y", part))
        if form
    }


def ngrams(frames: Iterable[Sequence[str]], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + size]) for words in frames for i in range(len(words) - size + 1))


def trigram_bits(train: Sequence[Sequence[str]], test: Sequence[Sequence[str]]) -> float:
    """Bits a word of a trigram model with Witten-Bell smoothing, whose words are those of both sides."""
    padded = [("<s>", "<s>", *words, "</s>") for words in train]
    words = {word for words in (*train, *test) for word in words} | {"</s>"}
    followers: dict[tuple[str, ...], Counter[str]] = {}
    for sentence in padded:
        for i in range(2, len(sentence)):
            for size in range(3):
                followers.setdefault(sentence[i - size : i], Counter())[sentence[i]] += 1
    totals = {context: sum(counts.values()) for context, counts in followers.items()}

    def probability(word: str, context: tuple[str, ...]) -> float:
        shorter = probability(word, context[1:]) if context else 1 / len(words)
        counts = followers.get(context)
        if counts is None:
            return shorter
        return (counts[word] + len(counts) * shorter) / (totals[context] + len(counts))

    bits, number = 0.0, 0
    for sentence in (("<s>", "<s>", *words, "</s>") for words in test):
        for i in range(2, len(sentence)):
            bits -= math.log2(probability(sentence[i], sentence[i - 2 : i]))
            number += 1
    return bits / number


# -- the table -----------------------------------------------------------------------------------------------


def derivation_bits(num_tasks: int) -> float:
    """Of the phrasing of a task, on average."""
    maker = generator.TaskMaker(generator.GenerateConfig(num_tasks=1))
    bits = [maker.draft(i, None, random.Random(derive(0, "variety", i))).bits for i in range(num_tasks)]
    return sum(bits) / num_tasks


def seconds_to_load(num_tasks: int) -> float:
    """CPU seconds of loading so many generated tasks as an environment: those of this process, and those of
    the processes that run the SQL (Linux).
    """
    before = cpu_seconds()
    environment = load_environment("db_bench", generate={"num_tasks": num_tasks})
    spent = cpu_seconds() - before
    environment.close()
    return spent


def cpu_seconds() -> float:
    """Of this process and all processes under it."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(stat.parent.name)
        parents[process], ticks[process] = int(parts[1]), sum(map(int, parts[11:15]))
    ours = {os.getpid()}
    while under := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= under
    return sum(ticks[process] for process in ours) / os.sysconf("SC_CLK_TCK")


def narrowness(entries: Sequence[Entry], real: Sequence[Entry]) -> dict[str, float | None]:
    """One column of the table: ``entries`` seen from the real tasks."""
    signs = [skeleton(entry["answer_info"]["sql"]) for entry in entries]
    frames = [frame(entry) for entry in entries]
    known = frozenset().union(*(features(entry["answer_info"]["sql"]) for entry in entries))
    rows = {f"SQL skeletons at {len(signs)}: {name}": value for name, value in spread(signs).items()}
    few = spread(signs[: len(real)] or signs)
    rows |= {f"SQL skeletons at {len(real) or len(signs)}: {name}": value for name, value in few.items()}
    rows["words an instruction"] = sum(len(entry["instruction"].split()) for entry in entries) / len(entries)
    rows["distinct frames"] = len(set(frames)) / len(frames)
    results = [
        entry["answer_info"]["direct"] for entry in entries if entry["answer_info"]["direct"] is not None
    ]
    rows["rows of a result"] = sum(map(len, results)) / len(results)
    rows["skills a task"] = sum(len(entry["skill_list"]) for entry in entries) / len(entries)
    if not real:
        return rows
    real_signs = [skeleton(entry["answer_info"]["sql"]) for entry in real]
    real_frames = [frame(entry) for entry in real]
    reached = [features(entry["answer_info"]["sql"]) <= known for entry in real]
    rows["real tasks whose features occur"] = sum(reached) / len(real)
    rows["real tasks whose skeleton occurs"] = sum(sign in set(signs) for sign in real_signs) / len(real)
    for size in (1, 2, 3, 4):
        known_grams, grams = ngrams(frames[:2000], size), ngrams(real_frames, size)
        rows[f"real {size}-grams of frames that occur"] = sum(
            n for gram, n in grams.items() if gram in known_grams
        ) / sum(grams.values())
    rows["trigram bits a word on real frames"] = trigram_bits(frames[:1000], real_frames)
    missing = Counter(feature for entry in real for feature in features(entry["answer_info"]["sql"]) - known)
    if missing:
        print("features of real tasks that never occur:", dict(missing.most_common(12)))
    return rows


# -- nats of the gold SQL ------------------------------------------------------------------------------------


def nats_of(run: Path, scored: int, real: Path, longest: int) -> dict[int, dict[str, float]]:
    """Mean nats of a gold SQL by set of tasks, at each checkpoint that the run has kept; at 0, without an
    adapter. Demonstrations have at most ``longest`` tokens.
    """
    config = run_config(run)
    policy = load_policy(config.policy, config.seed)
    sets = {
        "fresh" if split == "train" else split: _demonstrations(
            policy, generate(scored, 1_000_001, split=split), longest
        )
        for split in generator.SPLITS
    }
    if real.exists():
        entries = json.loads(real.read_text())
        order = sorted(entries, key=lambda name: derive(0, "variety", name))
        some = {name: entries[name] for name in order[: 2 * scored]}
        sets["real"] = _demonstrations(policy, some, longest)[:scored]
    table: dict[int, dict[str, float]] = {}
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    for step, folder in [(0, None), *((int(folder.name[5:]), folder) for folder in checkpoints)]:
        if folder is not None:
            policy.load(folder)
        table[step] = {name: _nats(policy, trajectories) for name, trajectories in sets.items()}
        print(f"step {step}:", {name: round(nats, 2) for name, nats in table[step].items()}, flush=True)
    return table


def _demonstrations(policy: Policy, entries: Mapping[str, Any], longest: int) -> list[Trajectory]:
    """Of the tasks that can be used."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.json"
        path.write_text(json.dumps(entries))
        environment = DBBench(DBBenchConfig(tasks=path, max_observation_chars=1500))
    with closing(environment):
        made = [demonstrate(environment, task, policy.chat, RewardConfig(), 0) for task in environment.tasks]
    return [trajectory for trajectory in made if len(trajectory.tokens) <= longest]


def _nats(policy: Policy, trajectories: list[Trajectory]) -> float:
    """Of the first action, in which the SQL stands: mean over tasks."""
    total = 0.0
    for i in range(0, len(trajectories), 8):
        some = trajectories[i : i + 8]
        with torch.no_grad():
            logprobs = policy.forward(collate(some, list(range(len(some)))), SamplingConfig()).logprobs
        for row, trajectory in zip(logprobs, some, strict=True):
            first = trajectory.turns[0]
            begin = len(first.observation)
            total -= float(row[begin : begin + len(first.action)].sum())
    return total / len(trajectories)


def main() -> None:
    given = command_line(
        __doc__,
        quick={"num_tasks": 60, "scored": 1, "run": tiny_run},
        num_tasks=5000,
        tasks=REAL,  # the real ones
        run=Path,  # at whose checkpoints the nats of the gold SQL are measured, too
        scored=32,  # tasks a split
        name="names",  # of the entry in the results
    )
    real: list[Entry] = []
    if given.tasks.exists():
        real = list(json.loads(given.tasks.read_text()).values())
    else:
        print(f"there is no {given.tasks}, so nothing is compared with real tasks")
    begin = time.process_time()
    generated = list(generate(given.num_tasks, 0).values())
    seconds = time.process_time() - begin
    columns = {"generated": narrowness(generated, real)}
    columns["generated"]["derivation bits a phrasing"] = derivation_bits(500)
    columns["generated"]["CPU seconds for 10,000 tasks"] = seconds / len(generated) * 10_000
    loaded = seconds_to_load(given.num_tasks)
    columns["generated"]["CPU seconds to load 10,000 tasks"] = loaded / given.num_tasks * 10_000
    if real:
        columns["real"] = narrowness(real, [])
        columns["one real half by the other"] = narrowness(real[::2], real[1::2])
    report: dict[str, Any] = {"table": columns}
    names = dict.fromkeys(row for column in columns.values() for row in column)
    cells = {name: [column.get(name) for column in columns.values()] for name in names}
    rows = ([name, *("-" if x is None else f"{x:.4g}" for x in values)] for name, values in cells.items())
    show(table("|" + "|".join(columns), rows))
    if given.run:
        longest = 8192 if given.quick else 900  # a letter is a token of the tiny model
        report["nats"] = nats_of(given.run, given.scored, given.tasks, longest)
    file = given.results / "variety.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, given.name: report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
