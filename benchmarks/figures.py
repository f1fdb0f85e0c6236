"""The figures of README.md, and the tables of RESULTS.md that they come from, computed from results/*.json.

    python benchmarks/figures.py [--draw]

Prints every sentence and row as the two pages must have it, and which of them are missing: after a new
measurement, copy those. tests/test_docs.py checks the same, and that README has no other figure. With --draw
it writes docs/pictures/*.svg instead, which are light or dark as the reader's system is.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from measuring import ROOT, command_line, read

from agent_peft.rollout.intervals import sign_flip_p

PICTURES = ROOT / "docs" / "pictures"
# what README says of a configuration, next to its figures
AGENTS = {
    "quickstart": "SmolLM2-135M changes a database with SQL",
    "os_ppo": "SmolLM2-135M works in a shell; PPO with a critic",
    "os_grpo": "SmolLM2-135M works in a shell; GRPO",
    "adder_fast": "a small model adds three digits",
    "multiplier_fast": "a small model multiplies two digits",
}
NATIVE = "db_bench_native"
ON_CLOCK = {"quickstart"}  # their time is that of the clock
# of one seed's run, but not of what it learns
FREE = ("threads=", "evaluation.at=")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    lines = [
        f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in (columns, *rows)
    ]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


# -- seeds.py ------------------------------------------------------------------------------------------------


def recipe(name: str) -> dict[str, Any]:
    """What seeds.py has measured of a configuration."""
    return read("recipes")[name]


def overrides_of(name: str) -> list[str]:
    """The overrides of a configuration's runs. A row's own ones must not change what is learned."""
    content = recipe(name)
    for row in content["rows"]:
        own = [override for override in row.get("overrides", ()) if not override.startswith(FREE)]
        assert not own, f"{name}: seed {row['seed']} ran with {own}, so the seeds have different settings"
    assert len(content["rows"]) == 3, f"{name}: a row of README has three seeds"
    return list(content["overrides"])


def command_of(name: str) -> str:
    quoted = [f"'{o}'" if set(o) & set("[]{}*") else o for o in overrides_of(name)]
    return " ".join([f"python benchmarks/seeds.py configs/{name}.yaml", *quoted])


def moments_of(name: str) -> list[str]:
    """The names of the evaluations: base, which may not have been measured, and after each stage."""
    names = list(max((row["success"] for row in recipe(name)["rows"]), key=len))
    return names if "base" in names else ["base", *names]


def mean_success(name: str, moment: str) -> float:
    rates = [row["success"][moment][0] for row in recipe(name)["rows"] if moment in row["success"]]
    return 100 * statistics.mean(rates)


def minutes(name: str) -> float:
    """On the clock: the median run that measured the base model too, as the command does. Otherwise the mean
    CPU time of the runs that were not stopped.
    """
    rows = recipe(name)["rows"]
    if name in ON_CLOCK:
        return statistics.median(r["cost"]["seconds"] for r in rows if "base" in r["success"]) / 60
    known = [r["cost"]["cpu_seconds"] for r in rows if r["cost"]["cpu_seconds"] is not None]
    return statistics.mean(known) / 60


def readme_row(name: str) -> str:
    base, taught, trained = (f"{mean_success(name, moment):.1f}" for moment in moments_of(name))
    time = f"{minutes(name):.0f} " + ("minutes on two cores" if name in ON_CLOCK else "CPU minutes")
    command = " ".join([name, *overrides_of(name)])
    return f"| `{command}` | {AGENTS[name]} | {base} | {taught} | **{trained}** | {time} |"


def percent(rate: list[float]) -> str:
    value, low, high = (100 * x for x in rate[:3])
    return f"{value:.1f} % ({low:.0f}-{high:.0f})"


def gain_of(row: Mapping[str, Any], moments: list[str]) -> str:
    if "gain" not in row:  # older files have no paired test
        return f"{100 * (row['success'][moments[2]][0] - row['success'][moments[1]][0]):+.1f}"
    difference, low, high = (100 * row["gain"][key] for key in ("difference", "low", "high"))
    return f"{difference:+.1f} ({low:+.0f} to {high:+.0f}), p {row['gain']['p']:.0e}"


def seed_rows(name: str) -> Iterator[list[str]]:
    moments = moments_of(name)
    for row in recipe(name)["rows"]:
        rates = [percent(row["success"][m]) if m in row["success"] else "" for m in moments]
        rates[2] = f"**{rates[2]}**"
        cpu = row["cost"]["cpu_seconds"]
        times = "" if cpu is None else f"{cpu:,.0f}", f"{row['cost']['training_seconds']:,.0f}"
        yield [name, str(row["seed"]), *rates, gain_of(row, moments), *times]


def seed_table(*names: str) -> str:
    columns = ("configuration", "seed", "base", "after SFT", "after RL", "RL - SFT, points")
    return table((*columns, "CPU s", "training, s"), (row for name in names for row in seed_rows(name)))


def skill_table(name: str) -> str:
    _, taught, trained = moments_of(name)
    rows = recipe(name)["rows"]
    skills = list(rows[0]["by_skill"][taught])

    def pair(row: Mapping[str, Any], skill: str) -> str:
        return ", ".join(f"{100 * row['by_skill'][moment][skill]:.0f}" for moment in (taught, trained))

    return table(("seed", *skills), ([str(row["seed"]), *(pair(row, s) for s in skills)] for row in rows))


# -- against_trl.py ------------------------------------------------------------------------------------------

PARTS = {
    "step": "prompt {prompt_tokens}, {tasks_per_step} × {group_size} × {new_tokens} tokens",
    "episodes": "DB Bench, {turns} turns of {new_tokens} tokens, {tasks_per_step} × {group_size}",
    "arithmetic": "arithmetic, {tasks_per_step} × {group_size}, width 256",
}


def trl_row(found: Mapping[str, Any]) -> list[str]:
    ours, trl = found["sides"]["ours"], found["sides"]["trl"]
    walls = {
        side: statistics.median(step["wall"] for step in found["steps"][side]) for side in ("ours", "trl")
    }
    pairs = zip(found["steps"]["ours"], found["steps"]["trl"], strict=True)
    paired = statistics.median(b["wall"] / a["wall"] for a, b in pairs)
    precision = found["precision"]
    equal = found["settings"] == "equal"

    def seconds(side: Mapping[str, float], wall: float) -> str:
        return f"{wall:.2f} ({side['sampling_wall']:.2f} + {side['training_wall']:.2f})"

    return [
        PARTS[found["part"]].format(**found),
        "both fp32" if equal else f"defaults: {precision['ours']} / {precision['trl']}",
        found["command"].removeprefix("python benchmarks/against_trl.py "),
        str(len(found["ratios"])),
        seconds(ours, walls["ours"]),
        seconds(trl, walls["trl"]),
        f"**{walls['trl'] / walls['ours']:.2f}**",
        f"{paired:.2f}",
        f"{ours['cpu']:.1f} / {trl['cpu']:.1f}",
        f"{ours['peak_bytes'] / 1e9:.1f} / {trl['peak_bytes'] / 1e9:.1f} "
        f"({trl['peak_bytes'] / ours['peak_bytes']:.2f})",
        f"{found['floor']['seconds']:.1f}" if equal else "",
    ]


def trl_table() -> str:
    columns = ("part", "settings", "command's arguments", "pairs", "ours, s (sampling + training)")
    columns += ("TRL, s (sampling + training)", "ratio of medians", "median of pairs", "CPU s", "peak GB")
    order = list(PARTS)
    found = sorted(
        read("against_trl").values(),
        key=lambda one: (one["settings"] != "equal", order.index(one["part"]), one["prompt_tokens"]),
    )
    return table((*columns, "floor, s"), map(trl_row, found))


def speed_sentence() -> str:
    content = read("against_trl")

    def times(found: Mapping[str, Any]) -> str:
        ours, trl = found["sides"]["ours"], found["sides"]["trl"]
        return (
            f"{ours['wall']:.0f} seconds and {ours['peak_bytes'] / 1e9:.1f} GB where TRL 1.16 takes "
            f"{trl['wall']:.0f} seconds and {trl['peak_bytes'] / 1e9:.1f} GB"
        )

    equal = times(content["step 256 generate"])
    text = f"A GRPO step of SmolLM2-135M takes {equal} for the same work in float32."
    if defaults := content.get("step 256 generate defaults"):
        text += f" With the defaults of each side it takes {times(defaults)}."
    return text


# -- real_db_bench.py ----------------------------------------------------------------------------------------


REAL_SEEDS = (0, 1, 2)


def real_sentence() -> str:
    """Each seed, since they did not run in one precision."""
    known = read("real_db_bench")

    def solved(name: str, step: str) -> str:
        successes = [known[f"{name}, seed {seed}"][step]["success"] for seed in REAL_SEEDS]
        assert {success["tasks"] for success in successes} == {97}
        *others, last = (f"{100 * success['value']:.1f}" for success in successes)
        return f"{', '.join(others)} and {last}"

    return (
        "Of 97 real tasks of LifelongAgentBench that it never saw, SmolLM2-135M solves "
        f"{solved('generated', 'step 110')} % after {110 * 16:,} generated demonstrations, and "
        f"{solved('variations', 'step 74')} % after 286 other real "
        f"tasks and 900 variations of them as well ({len(REAL_SEEDS)} seeds)."
    )


REAL_STAGES = {
    "generated": "generated",
    "real": "generated and real",
    "variations": "generated, real and variations",
}


def real_report(stage: str, seed: int) -> dict[str, Any]:
    (report,) = read("real_db_bench")[f"{stage}, seed {seed}"].values()
    return report


def real_rate(report: Mapping[str, Any], name: str) -> str:
    rate = report["by_class"].get(name) or report["by_class"][f"  {name}"]
    return percent([rate[key] for key in ("value", "low", "high")])


def real_table() -> str:
    ends = ("other rows", "refused at last", "other change")
    rows = []
    for seed in REAL_SEEDS:
        for stage, words in REAL_STAGES.items():
            report = real_report(stage, seed)
            shares = [f"{100 * report['ends'][end] / report['success']['tasks']:.1f} %" for end in ends]
            rates = [real_rate(report, name) for name in ("all", "SELECT", "change")]
            rows.append([str(seed), words, *rates, *shares])
    return table(("seed", "demonstrations", "all, 97", "SELECT, 69", "change, 28", *ends), rows)


def real_gains() -> str:
    """Pairs of stages: the points of each seed, and the test of each task's sum over the seeds."""
    rows = []
    for before, after in (("generated", "real"), ("real", "variations"), ("generated", "variations")):
        seeds = []
        for seed in REAL_SEEDS:
            old, new = (real_report(stage, seed)["outcomes"] for stage in (before, after))
            seeds.append([(new[task] == ["correct"]) - (old[task] == ["correct"]) for task in old])
        points = ", ".join(f"{100 * sum(one) / len(one):+.1f}" for one in seeds)
        counts = [str(sum(change == sign for one in seeds for change in one)) for sign in (1, -1)]
        p = sign_flip_p([sum(task) for task in zip(*seeds, strict=True)])
        rows.append([f"{REAL_STAGES[after]}, after {REAL_STAGES[before]}", points, *counts, f"{p:.1g}"])
    return table(("", "points, each seed", "won", "lost", "p"), rows)


def real_classes() -> str:
    reports = [real_report("variations", seed) for seed in REAL_SEEDS]
    names = [name.strip() for name in reports[0]["by_class"] if name.startswith(("  ", "SELECT with"))]
    counts = {name.strip(): str(rate["tasks"]) for name, rate in reports[0]["by_class"].items()}
    rows = [[name, counts[name], *(real_rate(report, name) for report in reports)] for name in names]
    return table(("with variations", "tasks", *(f"seed {seed}" for seed in REAL_SEEDS)), rows)


# -- the pages -----------------------------------------------------------------------------------------------


def readme() -> list[str]:
    """Rows and sentences of README.md; a line break counts as a space."""
    return [*map(readme_row, AGENTS), speed_sentence(), real_sentence()]


def results() -> list[str]:
    """Tables and commands of RESULTS.md."""
    arithmetic = ("adder_reinforce", "adder_fast", "multiplier_reinforce", "multiplier_fast")
    shell = ("os_ppo", "os_grpo")
    commands = [f"`{command_of(name)}`" for name in ("quickstart", NATIVE, *arithmetic, *shell)]
    tables = [
        seed_table("quickstart"),
        seed_table(NATIVE),
        skill_table(NATIVE),
        skill_table("quickstart"),
        seed_table(*arithmetic),
        seed_table(*shell),
    ]
    return [*tables, trl_table(), real_table(), real_gains(), real_classes(), *commands]


def flat(text: str) -> str:
    return " ".join(text.split())


def missing() -> list[str]:
    """What does not stand in its page."""
    pages = {"README.md": readme(), "benchmarks/RESULTS.md": results()}
    return [
        f"{page} lacks:\n{passage}"
        for page, passages in pages.items()
        for passage in passages
        if flat(passage) not in flat((ROOT / page).read_text(encoding="utf-8"))
    ]


# -- pictures ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 150, 100  # of a panel
STYLE = """<style>
text { fill: #222 } .frame { stroke: #bbb } .seed { stroke: #9ab } .mean { stroke: #036 } .bar { fill: #369 }
.range { stroke: #222 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .frame { stroke: #666 } .seed { stroke: #578 } .mean { stroke: #8cf }
  .bar { fill: #48b } .range { stroke: #ddd }
}
</style>"""

Curve = list[tuple[int, float]]  # step, share of 1


def svg(width: float, height: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    return "\n".join([head + 'font-family="sans-serif" font-size="10">', STYLE, *parts, "</svg>"]) + "\n"


def mean_of(curves: list[Curve]) -> Curve:
    """The mean over the curves, at the steps that all of them have."""
    shares = [dict(curve) for curve in curves]
    steps = [step for step, _ in curves[0] if all(step in curve for curve in shares)]
    return [(step, sum(curve[step] for curve in shares) / len(shares)) for step in steps]


def panels(curves: dict[str, list[Curve]], caption: str, columns: int = 4) -> str:
    """One panel for each name: a thin line for each seed, a thick one for their mean."""
    left, top = 40, 30
    parts = []
    for number, (name, runs) in enumerate(curves.items()):
        last = max(run[-1][0] for run in runs)
        x, y = left + number % columns * (WIDTH + 30), top + number // columns * (HEIGHT + 50)

        def line(points: Curve, kind: str, width: float, last: float = last) -> str:
            places = " ".join(f"{WIDTH * x / last:.1f},{HEIGHT * (1 - y):.1f}" for x, y in points)
            return f'<polyline class="{kind}" points="{places}" fill="none" stroke-width="{width}"/>'

        parts.append(f'<g transform="translate({x},{y})">')
        parts.append(f'<rect class="frame" width="{WIDTH}" height="{HEIGHT}" fill="none"/>')
        parts.append(f'<text x="{WIDTH / 2}" y="-8" text-anchor="middle" font-weight="bold">{name}</text>')
        parts += [line(run, "seed", 0.8) for run in runs]
        parts.append(line(mean_of(runs), "mean", 2.5))
        for share in (0, 50, 100):
            parts.append(
                f'<text x="-5" y="{HEIGHT * (1 - share / 100) + 4}" text-anchor="end">{share}</text>'
            )
        for step, place in ((0, 0), (last, WIDTH)):
            parts.append(f'<text x="{place}" y="{HEIGHT + 14}" text-anchor="middle">{step}</text>')
        parts.append("</g>")
    bottom = top + -(-len(curves) // columns) * (HEIGHT + 50)
    parts.append(f'<text x="{left}" y="{bottom - 4}">{caption}</text>')
    return svg(left + min(columns, len(curves)) * (WIDTH + 30), bottom + 8, parts)


def algorithm_curves(content: dict[str, Any]) -> str:
    return panels(content["curves"], "% of sampled answers that are correct, by step")


def heldout(row: dict[str, Any]) -> Curve:
    """Step -> success on held-out tasks. A run measured at its stages' ends has these alone."""
    measured = {name: rate[0] for name, rate in row["success"].items()}
    if row["curve"]:
        return [(0, measured["base"])] + [(int(step), share) for step, share in row["curve"].items()]
    stages = [step["stage"] for step in row["steps"]]
    ends = {stage: at for at, stage in enumerate(stages, 1)}
    return [(0, measured["base"])] + [(at, measured[f"after_{stage}"]) for stage, at in ends.items()]


def learning_curves(runs: dict[str, dict[str, Any]]) -> str:
    curves = {name: [heldout(row) for row in content["rows"]] for name, content in runs.items()}
    caption = "% of held-out tasks solved, by step, demonstrations first; a thin line for each seed"
    return panels(curves, caption)


NAMES = {"arithmetic": "one-turn sums", "episodes": "DB Bench episodes", "step": "one step"}


def speed(content: dict[str, dict[str, Any]]) -> str:
    """A bar for each comparison: how many times the peer's time is ours, with the range of the pairs."""
    left, bar, gap, scale = 190, 16, 14, 60
    parts = ['<text x="10" y="18" font-weight="bold">Seconds of TRL / ours, for the same step</text>']
    for number, row in enumerate(content.values()):
        y = 32 + number * (bar + gap)
        name = NAMES[row["part"]] + (f", prompt {row['prompt_tokens']}" if row["part"] == "step" else "")
        name += ", defaults" if row["settings"] == "defaults" else ""
        width = scale * row["median_of_pairs"]
        low, high = (left + scale * limit for limit in (min(row["ratios"]), max(row["ratios"])))
        parts += [
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect class="bar" x="{left}" y="{y}" width="{width:.1f}" height="{bar}"/>',
            f'<path class="range" d="M{low:.1f},{y + bar / 2} H{high:.1f}" stroke-width="2"/>',
            f'<text x="{max(high, left + width) + 8:.1f}" y="{y + 12}">'
            f"{row['median_of_pairs']:.1f} times; memory {row['memory_ratio']:.1f} times</text>",
        ]
    bottom = 32 + len(content) * (bar + gap)
    cores = next(iter(content.values()))["cores"]
    parts.append(
        f'<text x="10" y="{bottom + 8}">Bar: median of the pairs. Line: range. {cores} CPU cores.</text>'
    )
    return svg(left + scale * 9, bottom + 18, parts)


def pictures() -> dict[str, str]:
    """Name -> SVG."""
    runs = ("os_grpo", "os_ppo", "adder_fast", "multiplier_fast")
    return {
        "speed": speed(read("against_trl")),
        "learning_curves": learning_curves({name: recipe(name) for name in runs}),
        "algorithm_curves": algorithm_curves(read("algorithm_curves")),
    }


def main() -> None:
    given = command_line(__doc__, draw=False)
    if given.draw or given.quick:
        folder = given.results if given.quick else PICTURES
        folder.mkdir(exist_ok=True)
        for name, text in pictures().items():
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    if not given.draw:
        print("\n\n".join([*readme(), *results()]))
        lacking = missing()
        print("\n\n" + ("\n\n".join(lacking) or "both pages have all of it"))
        sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
