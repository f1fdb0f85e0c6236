"""How narrow is DB Bench's generator? Its tasks next to LifelongAgentBench's real ones.

    python benchmarks/variety.py [--num-tasks 5000]
    [--tasks data/lifelong_agent_bench/db_bench/entry_dict.json]
    [--run RUN --scored 32]

Prints a table and writes benchmarks/results/variety.json. Without ``--run`` it takes a minute and needs no
model. With it, the nats of the gold SQL are measured at the run's checkpoints, on fresh tasks, on each
held-out split and on the real tasks: what a generator is too narrow for costs more there. The table without a
model is made on older commits, too, so that two generators can be compared.

- derivation bits: minus the logarithm of the probability of all phrasing choices, mean over tasks
- SQL skeleton: the gold SQL without aliases, with one sign for all names and one for all values
- effective: exp(entropy); unseen mass (Good-Turing): the share of tasks whose skeleton occurs once
- features: what `features` reads off the syntax tree; a real task is reached if each of its features occurs
- frame: the instruction with its names and values masked
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from smoke import parse, temporary_folder, tiny_run
from variety_sql import features, skeleton

from agent_peft.environments import load_environment
from agent_peft.environments.db_bench import generate, generator
from agent_peft.seeding import derive

HERE = Path(__file__).resolve().parent
REAL = HERE.parent / "data/lifelong_agent_bench/db_bench/entry_dict.json"
Entry = Mapping[str, Any]

# ---- SQL -------------------------------------------------------------------------------------------------


def spread(signs: Sequence[str]) -> dict[str, float]:
    """Of the skeletons of tasks: how many, how many effectively, and the unseen mass."""
    counts = Counter(signs)
    shares = [count / len(signs) for count in counts.values()]
    return {
        "distinct": len(counts),
        "effective": math.exp(-sum(share * math.log(share) for share in shares)),
        "unseen mass": sum(count == 1 for count in counts.values()) / len(signs),
    }


# ---- words -----------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]\b|[a-z]+(?:'[a-z]+)?|[^\w\s]")
_MONTHS = "January February March April May June July August September October November December"
_DATE = re.compile(
    rf"(?:{_MONTHS.replace(' ', '|')}) \d+, \d{{4}}|\d+ (?:{_MONTHS.replace(' ', '|')}) \d{{4}}"
)
_FUNCTION_WORDS = frozenset(
    [
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
        "per",
        "number",
        "total",
        "average",
        "count",
        "date",
        "name",
    ]
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


# ---- the table -------------------------------------------------------------------------------------------


def derivation_bits(num_tasks: int) -> float | None:
    """Of the phrasing of a task, on average; None for a generator that does not tell."""
    if not hasattr(generator, "TaskMaker"):
        return None
    maker = generator.TaskMaker("train")
    bits = [maker.draft(i, None, random.Random(derive(0, "variety", i))).bits for i in range(num_tasks)]
    return sum(bits) / num_tasks


def seconds_to_load(num_tasks: int) -> float:
    """CPU seconds of loading so many generated tasks as an environment: those of this process, and those of
    the processes that run the SQL (Linux).
    """
    before = _cpu_seconds()
    environment = load_environment("db_bench", generate={"num_tasks": num_tasks})
    spent = _cpu_seconds() - before
    environment.close()
    return spent


def _cpu_seconds() -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-tasks", type=int, default=5000)
    parser.add_argument("--tasks", type=Path, default=REAL, help="the real tasks")
    parser.add_argument("--run", type=Path, help="also measure nats of the gold SQL at its checkpoints")
    parser.add_argument("--scored", type=int, default=32, help="tasks a split that are scored")
    arguments = parse(parser, num_tasks=60, scored=1)
    if arguments.quick:
        arguments.run = tiny_run(temporary_folder())
    real: list[Entry] = []
    if arguments.tasks.exists():
        real = list(json.loads(arguments.tasks.read_text()).values())
    else:
        print(f"{arguments.tasks} is not there, so nothing is compared with real tasks")
    begin = time.process_time()
    generated = list(generate(arguments.num_tasks, 0).values())
    seconds = time.process_time() - begin
    columns = {"generated": narrowness(generated, real)}
    columns["generated"]["derivation bits a phrasing"] = derivation_bits(500)
    columns["generated"]["CPU seconds for 10,000 tasks"] = seconds / len(generated) * 10_000
    loaded = seconds_to_load(arguments.num_tasks)
    columns["generated"]["CPU seconds to load 10,000 tasks"] = loaded / arguments.num_tasks * 10_000
    if real:
        halves = real[::2], real[1::2]
        columns["real"] = narrowness(real, [])
        columns["one real half by the other"] = narrowness(*halves)
    report: dict[str, Any] = {"table": columns}
    table = Table("", *columns)
    for row in dict.fromkeys(row for column in columns.values() for row in column):
        cells = (column.get(row) for column in columns.values())
        table.add_row(row, *("-" if cell is None else f"{cell:.4g}" for cell in cells))
    Console(width=120).print(table)
    if arguments.run:
        from variety_nats import measure  # torch, which the table does not need

        longest = 900 if not arguments.quick else 8192  # a letter is a token of the tiny model
        report["nats"] = measure(arguments.run, arguments.scored, arguments.tasks, longest)
    arguments.results.mkdir(exist_ok=True)
    (arguments.results / "variety.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
