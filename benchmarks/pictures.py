"""Draw benchmarks/results/*.json as pictures, for the README and the documentation.

    python benchmarks/pictures.py

Writes docs/pictures/{speed,learning_curves,algorithm_curves}.svg. They are light or dark as the reader's
system is. Nothing is measured here; the commands of benchmarks/RESULTS.md write the JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from smoke import RESULTS, parse

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
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


PARTS = {"arithmetic": "one-turn sums", "episodes": "DB Bench episodes", "step": "one step"}


def speed(content: dict[str, dict[str, Any]]) -> str:
    """A bar for each comparison: how many times the peer's time is ours, with the range of the pairs."""
    left, bar, gap, scale = 190, 16, 14, 60
    parts = ['<text x="10" y="18" font-weight="bold">Seconds of TRL / ours, for the same step</text>']
    for number, row in enumerate(content.values()):
        y = 32 + number * (bar + gap)
        name = PARTS[row["part"]] + (f", prompt {row['prompt_tokens']}" if row["part"] == "step" else "")
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


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def pictures() -> dict[str, str]:
    """Name -> SVG."""
    runs = ("os_grpo", "os_ppo", "adder_fast", "multiplier_fast")
    return {
        "speed": speed(read("against_trl")),
        "learning_curves": learning_curves({name: read(name) for name in runs}),
        "algorithm_curves": algorithm_curves(read("algorithm_curves")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments = parse(parser)
    folder = arguments.results if arguments.quick else PICTURES
    folder.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
