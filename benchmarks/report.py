"""Write the report of a long run and open it in headless Chromium: seconds, bytes and memory.

    python benchmarks/report.py [--steps 500] [--episodes 100] [--folder DIR]
    python benchmarks/report.py --run RUN

An episode has three turns and 400 tokens: a prompt of 200, actions of 40 and observations of 40. The run has
20 metrics. The program prints a table and writes benchmarks/results/report.json. "write again" is a second
report, when the run has one step more. "open" is the time from the request for the page to the end of its
scripts, with all curves drawn; "viewer" goes on to the newest episode with all its tokens. The tab's memory
is the resident memory of Chromium's renderer.

With ``--run`` it is the report of a run that is there, up to the log-probabilities of its worst episode, and
the program writes benchmarks/results/report_of_a_run.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from time import perf_counter

import torch
import yaml
from measuring import seconds, write
from rich.console import Console
from rich.table import Table

from agent_peft.reports.page import write_report
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.seeding import generator
from agent_peft.training.token_values import TokenValues
from agent_peft.types import Group, Message, Outcome, Task, Trajectory, Turn

GROUP_SIZE, TURNS, PROMPT, REPLY = 10, 3, 200, 40
TOKENS = PROMPT + (2 * TURNS - 1) * REPLY
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 5000)))  # a token is a character
METRICS = (
    "reward",
    "success",
    "loss",
    "gradient_norm",
    "surprisal",
    "approx_kl",
    "clip_fraction",
    "mismatch",
)
WAYS = 8  # different steps, written in turn


def episode(task: Task, seed: int, prompt: tuple[int, ...]) -> Trajectory:
    draw = generator(0, "episode", task.id, seed)
    turns, messages = [], []
    for turn in range(TURNS):
        observation = tuple(draw.randrange(5000) for _ in range(REPLY)) if turn else prompt
        action = tuple(draw.randrange(5000) for _ in range(REPLY))
        logprobs = tuple(-4 * draw.random() for _ in range(REPLY))
        turns.append(Turn(tuple(i + 3 for i in observation), tuple(i + 3 for i in action), logprobs))
        for role, said in (("user", observation), ("assistant", action)):
            messages.append(Message(role, "".join(ALPHABET[i] for i in said)))
    outcome = draw.choice([Outcome.CORRECT, Outcome.INCORRECT])
    rewards = (0.0, 0.0, float(outcome is Outcome.CORRECT))
    return Trajectory(task, tuple(turns), tuple(messages), outcome, rewards=rewards, seed=seed)


def groups_of(way: int, episodes: int) -> list[Group]:
    made = []
    for number in range(episodes // GROUP_SIZE):
        task = Task(f"task-{way}-{number}", (f"skill-{number % 6}",))
        draw = generator(1, way, number)
        prompt = tuple(draw.randrange(5000) for _ in range(PROMPT))
        made.append(Group(task, [episode(task, n, prompt) for n in range(GROUP_SIZE)]))
    return made


def write_run(folder: Path, steps: int, episodes: int) -> None:
    ways = [groups_of(way, episodes) for way in range(WAYS)]
    count = episodes // GROUP_SIZE * GROUP_SIZE * TOKENS
    values = TokenValues(torch.randn(count).round(decimals=3), -4 * torch.rand(count))
    draw = generator(2)
    lines = []
    for step in range(steps):
        write_trajectories(folder / "trajectories", step, "grpo", ways[step % WAYS], values=values)
        names = (*METRICS, *(f"metric_{number}" for number in range(20 - len(METRICS))))
        lines.append({"step": step, "stage": "grpo", **{name: draw.random() for name in names}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    policy = {"kind": "scratch", "architecture": {"model_type": "llama"}, "alphabet": ALPHABET}
    config = {"seed": 0, "policy": policy, "stages": [{"name": "grpo", "steps": steps}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def open_page(page_path: Path) -> dict[str, float]:
    """Seconds to the curves and to an episode, and megabytes of the tab."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        processes = browser.new_browser_cdp_session()
        begun = perf_counter()
        page.goto(f"file://{page_path}")
        page.wait_for_selector(".chart canvas")
        opened = perf_counter() - begun
        begun = perf_counter()
        page.keyboard.press("4")
        page.wait_for_selector(".token")
        viewed = perf_counter() - begun
        begun = perf_counter()
        page.get_by_label("order").select_option("worst")
        page.locator(".list button[aria-current=true]").wait_for()
        page.locator(".message.assistant .token").first.hover()
        told = page.inner_text("#tip")
        worst = perf_counter() - begun
        if "log p as sampled" not in told:
            raise RuntimeError(f"the first token of the worst episode tells no log-probability: {told!r}")
        kinds = processes.send("SystemInfo.getProcessInfo")["processInfo"]
        memory = max(_resident(one["id"]) for one in kinds if one["type"] == "renderer")
        heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
        browser.close()
    times = {"open_seconds": opened, "viewer_seconds": viewed, "worst_seconds": worst}
    return {**times, "tab_mb": memory, "heap_mb": heap}


def _resident(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024 / 1e6


def of_run(run: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "report.html"
        made = seconds(lambda: write_report([run], out))
        episodes = sum(1 for file in (run / "trajectories").glob("*.jsonl") for _ in file.open())
        size = out.stat().st_size / 1e6
        return {"episodes": episodes, "write_seconds": made, "page_mb": size, **open_page(out)}


def tell(result: dict[str, float], name: str) -> None:
    table = Table("measure", "value")
    for measure, value in result.items():
        table.add_row(measure.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    write(name, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--episodes", type=int, default=100, help="of a step")
    parser.add_argument("--folder", type=Path, help="where the run is written; a temporary one by default")
    parser.add_argument("--run", type=Path, help="a run directory, in the place of one made up")
    chosen = parser.parse_args()
    if chosen.run is not None:
        tell(of_run(chosen.run), "report_of_a_run")
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        run, out = Path(place) / "run", Path(place) / "report.html"
        run.mkdir()
        write_run(run, chosen.steps, chosen.episodes)
        made = seconds(lambda: write_report([run], out))
        episodes = run / "trajectories"
        for file in list(episodes.glob("step_000000*")):  # the episodes, and the arrays beside them
            shutil.copy(file, episodes / file.name.replace("step_000000", f"step_{chosen.steps:06d}"))
        again = seconds(lambda: write_report([run], out))
        beside = sum(path.stat().st_size for path in Path(place).glob("report_episodes/*.js"))
        result = {
            "steps": chosen.steps,
            "episodes": chosen.steps * (chosen.episodes // GROUP_SIZE) * GROUP_SIZE,
            "write_seconds": made,
            "write_again_seconds": again,
            "page_mb": out.stat().st_size / 1e6,
            "beside_mb": beside / 1e6,
            **open_page(out),
        }
    tell(result, "report")


if __name__ == "__main__":
    main()
