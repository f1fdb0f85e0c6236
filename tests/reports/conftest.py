"""Runs on disk, written as training writes them, and a browser to look at their report."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from agent_peft.reports.page import write_report
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.evaluations import write_evaluation
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.step_metrics import TokenValues
from agent_peft.types import Group, Message, Outcome, StopReason, Task, Trajectory, Turn

HOSTILE = "</script><script>boom()</script>\x1b[31mred\x00nul\u202edrow <img src=x onerror=boom()> é€😀"
ALPHABET = "".join(dict.fromkeys("\n" + "".join(map(chr, range(32, 127))) + HOSTILE))
SYSTEM = Message("system", "You work on one table.\nReply with SQL.")
DB = (
    "Action: Operation\n```sql\nUPDATE orders SET price = {n} WHERE name = 'tea' -- cheaper\n```",
    "Action: Answer\nFinal Answer: done",
)
OS = (
    "Act: bash\n```bash\nfind /etc -name '*.conf' | wc -l  # count them\n```",
    "Act: answer({n})",
)


def spelled(text):
    return tuple(ALPHABET.index(character) + 3 for character in text)


def episode(task, said, answers, reward, seed=0):
    """An episode of a few turns, in the characters' tokens of a scratch policy."""
    messages, turns = [SYSTEM, Message("user", said)], []
    observation = (1, *spelled(SYSTEM.content), *spelled(said))
    for number, answer in enumerate(answers):
        action = (*spelled(answer), 2)
        logprobs = tuple(-0.01 * (place % 50) for place in range(len(action)))
        turns.append(Turn(observation, action, logprobs))
        messages.append(Message("assistant", answer))
        if number + 1 < len(answers):
            messages.append(Message("user", "3 rows changed."))
            observation = spelled("3 rows changed.")
    outcome = Outcome.CORRECT if reward > 0 else Outcome.INCORRECT
    stop = StopReason.FINISHED if reward >= 0 else StopReason.TURN_LIMIT
    rewards = (*(0.0,) * (len(turns) - 1), reward)
    return Trajectory(
        task,
        tuple(turns),
        tuple(messages),
        outcome,
        stop,
        rewards,
        reward_terms={"outcome": reward},
        seed=seed,
    )


def groups(step, shift=0):
    """Two tasks with four attempts each."""
    made = []
    for kind, answers in (("db", DB), ("os", OS)):
        task = Task(f"{kind}-{step}", (f"{kind}_skill", "both"))
        attempts = []
        for n in range(4):
            texts = [answer.format(n=n // 2) for answer in answers]
            reward = (-0.5, 0.0, 1.0)[(n + step + shift) % 3]
            attempts.append(episode(task, f"Make tea cheaper in {kind}.", texts, reward, seed=n))
        made.append(Group(task, attempts))
    return made


def write_run(folder, seed=0, steps=4, more=()):
    """A run directory with ``steps`` steps and two evaluations; ``more`` are further groups of each step."""
    for step in range(steps):
        of_step = [*groups(step, seed), *more]
        flat = [t for group in of_step for t in group.trajectories]
        tokens = sum(len(t.tokens) for t in flat)
        values = TokenValues(torch.arange(tokens) % 5 - 2.0, torch.full((tokens,), -0.125))
        write_trajectories(folder / "trajectories", step, "rloo", of_step, values=values)
    lines = [
        {"step": step, "stage": "sft" if step < 1 else "rloo", "reward": 0.1 * step + 0.01 * seed,
         "success": 0.25 + 0.1 * step, "loss": 1.0 / (step + 1), "gradient_norm": "nan", "surprisal": 0.5,
         "clip_fraction": 0.0}
        for step in range(steps)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    (folder / "timing.jsonl").write_text('{"step": 0, "seconds": 2.0, "sampled": 300}\n')
    policy = {"kind": "scratch", "architecture": {"model_type": "llama"}, "alphabet": ALPHABET}
    config = {
        "run_dir": str(folder),
        "seed": seed,
        "policy": policy,
        "stages": [{"name": "rloo", "steps": 9}],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=False))
    for step, shift in ((0, 0), (9, 1)):
        report = replace(summarize(groups(0, shift + seed)), step=step)
        write_evaluation(folder / "evaluations" / f"step_{step:06d}.json", report)
    return folder


@pytest.fixture
def disk():
    """What the tests write runs with."""
    return SimpleNamespace(HOSTILE=HOSTILE, episode=episode, groups=groups, write_run=write_run)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def found_browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; the tests skip without it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = found_browser()
    if path is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as starter:
        program = starter.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield program
        program.close()


@pytest.fixture
def look(browser, tmp_path):
    """``look(folders, address, width, scheme)``: a page that shows their report. No test may leave an error
    in its console, or a wish to load something from elsewhere.
    """
    faults, contexts = [], []

    def opened(folders, address="", width=1280, scheme="light", **options):
        out = tmp_path / "report.html"
        write_report(folders, out, **options)
        return at(f"file://{out}{address}", width, scheme)

    def at(url, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        own = url.partition("//")[2].partition("/")[0]
        page.on("request", lambda r: faults.append(r.url) if not _own(r.url, own) else None)
        page.goto(url)
        page.wait_for_selector("header")
        return page

    def keep(page, name):
        """Take a screenshot, for people into the folder ``AGENT_PEFT_SCREENSHOTS``."""
        folder = os.environ.get("AGENT_PEFT_SCREENSHOTS", str(tmp_path))
        os.makedirs(folder, exist_ok=True)
        return page.screenshot(path=f"{folder}/{name}.png")

    def expected(known):
        """Errors that the test wants."""
        faults[:] = [fault for fault in faults if fault not in known]

    opened.at, opened.keep, opened.expected = at, keep, expected
    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def _own(url, host):
    return url.startswith(("file:", "data:", "blob:")) or (bool(host) and url.startswith(f"http://{host}/"))
