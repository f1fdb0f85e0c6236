"""``agent-peft show``: an episode as the agent saw it; ``agent-peft report``: its line, files and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from agent_peft.cli import run as command
from agent_peft.rollout.statistics import summarize
from agent_peft.runs.evaluations import write_evaluation
from agent_peft.runs.trajectories import write_trajectories
from agent_peft.training.step_metrics import TokenValues
from agent_peft.types import Group, Message, Outcome, StopReason, Task, Trajectory, Turn

SAID = (
    Message("system", "Answer in digits.\nBe brief."),
    Message("user", "An example: 1+1="),
    Message("assistant", "2"),
    Message("user", "3+4="),
    Message("assistant", "\x1b[31mseven\u202e\rforged"),
    Message("user", "no digits [bold]here[/bold]"),
    Message("assistant", "7"),
)


def episode(task, attempt):
    turns = (Turn((1, 2), (3,), (-0.5,), valid=False), Turn((4,), (5,), (-0.1,), cut=True))
    terms = {"outcome": 1.0, "invalid_action": -0.25, "my:term": 0.1 + 0.2}
    prices = (-0.25, 1.3)
    return Trajectory(
        task, turns, SAID, Outcome.CORRECT, StopReason.FINISHED, prices, 0.5, terms, seed=40 + attempt
    )


@pytest.fixture
def folder(tmp_path):
    tasks = [Task("add-1", ("sum",)), Task("add-2")]
    groups = [Group(task, [episode(task, n) for n in range(2)]) for task in tasks]
    for step in (3, 12):
        advantages = torch.tensor([0, 0, 0.75, 0, -1.5] * 4)
        write_trajectories(
            tmp_path / "trajectories", step, "grpo", groups, values=TokenValues(advantages, None)
        )
    single = [Group(tasks[0], [episode(tasks[0], 0)])]
    write_evaluation(tmp_path / "evaluations" / "step_000012.json", replace(summarize(single), step=12))
    (tmp_path / "config.yaml").write_text("stages: [{name: grpo, steps: 12}]\n")
    return tmp_path


def shown(capsys, *arguments):
    code = command(["show", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_an_episode_as_the_agent_saw_it(folder, capsys):
    code, out, err = shown(capsys, folder, "--task", "add-1", "--attempt", "1")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "step 13 of stage grpo, task add-1 (sum), attempt 1 of group 0, seed 41",
        "correct, score 0.5, finished; 5 tokens, 2 of them the agent's",
        "reward 1.05 = outcome 1, invalid_action -0.25, my:term 0.3",
        "",
        "── system ──",
        "Answer in digits.",
        "Be brief.",
        "",
        "── user ──",
        "An example: 1+1=",
        "",
        "── assistant ──",  # of the opening: an example, and no action of the agent
        "2",
        "",
        "── user ──",
        "3+4=",
        "",
        "── assistant, turn 1, reward -0.25, advantage 0.75, not understood ──",
        r"\x1b[31mseven\u202e\rforged",
        "",
        "── user ──",
        "no digits [bold]here[/bold]",
        "",
        "── assistant, turn 2, reward 1.3, advantage -1.5, cut by a limit on tokens ──",
        "7",
    ]


def test_what_would_have_been_right_comes_last(folder, capsys):
    right = replace(episode(Task("add-1"), 0), reference="7\n\x1b[31mred")
    write_trajectories(folder / "trajectories", 13, "grpo", [Group(Task("add-1"), [right])])
    _, out, _ = shown(capsys, folder)
    assert out.endswith("── what would have been right ──\n7\n\\x1b[31mred\n")
    _, out, _ = shown(capsys, folder, "--json")
    assert json.loads(out)["episodes"][0]["reference"] == "7\n\x1b[31mred"


def test_the_worst_a_kind_and_an_order(folder, capsys):
    kinds = [Outcome.CORRECT, Outcome.INCORRECT, Outcome.INCORRECT]
    group = [
        replace(episode(Task("t"), n), outcome=kind, rewards=(0.0, reward))
        for n, (kind, reward) in enumerate(zip(kinds, (1.0, -0.5, 0.25), strict=True))
    ]
    write_trajectories(folder / "trajectories", 14, "grpo", [Group(Task("t"), group)])
    _, out, _ = shown(capsys, folder, "--worst")
    assert "attempt 1 of group 0" in out and "turn 2, reward -0.5" in out

    def attempts(*arguments):
        _, out, _ = shown(capsys, folder, *arguments, "--json")
        return [one["attempt"] for one in json.loads(out)["episodes"]]

    assert attempts("--outcome", "incorrect") == [1, 2]
    assert attempts("--sort", "reward") == [1, 2, 0] and attempts("--sort", "-reward") == [0, 2, 1]
    assert attempts("--outcome", "correct", "--worst") == [0]
    for arguments, message in (
        (["--outcome", "unknown"], "there is no such episode; leave --outcome out"),
        (["--sort", "rewards"], "did you mean 'reward'?"),
        (["--worst", "--sort", "reward"], "leave --sort and --attempt out"),
    ):
        code, _, err = shown(capsys, folder, *arguments)
        assert code == 2 and message in err


def test_a_mistake_of_a_demonstration_is_named(tmp_path, capsys):
    turns = (Turn((1,), (2,), (0.0,), mistake=True), Turn((3,), (4,), (0.0,)))
    said = [Message(role, "x") for role in ("user", "assistant", "user", "assistant")]
    shown_to_learn = Trajectory(Task("t"), turns, tuple(said), rewards=(0.0, 1.0))
    write_trajectories(tmp_path / "trajectories", 0, "sft", [Group(Task("t"), [shown_to_learn])])
    (tmp_path / "config.yaml").write_text("{}\n")
    _, out, _ = shown(capsys, tmp_path, "--task", "t")
    assert "── assistant, turn 1, reward 0, a mistake, not learned ──\n" in out
    assert "── assistant, turn 2, reward 1 ──\n" in out


def test_in_a_terminal_it_has_colours(folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = shown(capsys, folder, "--task", "add-1", "--attempt", "1")
    assert "\x1b[32m7\x1b[0m" in out and "\x1b[36m3+4=\x1b[0m" in out
    assert r"\x1b[31mseven" in out, "the agent's own colours are no colours"
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in out.splitlines()) <= 60


def test_without_a_task_they_are_listed(folder, capsys):
    code, out, _ = shown(capsys, folder, "--step", 4)
    assert code == 0 and "step 4: 4 episodes" in out
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in out.splitlines() if line.startswith("│ add")]
    assert rows[1] == ["add-1", "1", "correct", "finished", "1.05", "-0.375", "2", "5"]
    assert out.endswith("add --task and --attempt to see one of them\n")
    _, out, _ = shown(capsys, folder, "--task", "add-2")
    assert "step 13: 2 episodes" in out and "add-1" not in out


def test_an_evaluation(folder, capsys):
    for name in ("after_grpo", "after grpo"):
        code, out, _ = shown(capsys, folder, "--evaluation", name)
        assert code == 0
        assert out.startswith("evaluation after_grpo, task add-1 (sum), attempt 0 of group 0, seed 40\n")
        assert "── assistant, turn 2, reward 1.3, cut by a limit on tokens ──\n" in out, "no advantage"


def test_json_for_scripts(folder, capsys):
    code, out, _ = shown(capsys, folder, "--task", "add-2", "--json")
    episodes = json.loads(out)["episodes"]
    assert code == 0 and [one["attempt"] for one in episodes] == [0, 1]
    assert episodes[1]["messages"][4] == {"role": "assistant", "content": SAID[4].content}
    assert episodes[1]["reward_terms"]["invalid_action"] == -0.25
    assert (episodes[1]["stage"], episodes[1]["step"], episodes[1]["seed"]) == ("grpo", 12, 41)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--task", "ad-1"], "step 13 has no task 'ad-1'; did you mean 'add-1'?"),
        (["--task", "delete"], "step 13 has no task 'delete'; leave --task out to list them"),
        (["--task", "add-1", "--attempt", 7], "step 13, task 'add-1': has no attempt 7; the last is 1"),
        (["--step", 5], "step 5 has no trajectories on disk; the nearest that has some is 4"),
        (["--evaluation", "base"], "has no evaluation 'base'; give one of after_grpo"),
        (["--evaluation", "../x"], "has no evaluation '../x'; give one of after_grpo"),
        (["--evaluation", "base", "--step", 3], "--step has no effect with --evaluation"),
    ],
)
def test_what_is_not_there_is_one_line(folder, capsys, arguments, told):
    code, out, err = shown(capsys, folder, *arguments)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


def test_a_run_without_episodes(folder, capsys):
    (folder / "evaluations" / "step_000012.jsonl").unlink()
    for path in (folder / "trajectories").iterdir():
        path.unlink()
    _, _, err = shown(capsys, folder)
    assert "has no trajectories; there are some once a step is done" in err
    _, _, err = shown(capsys, folder, "--evaluation", "after_grpo")
    assert "the evaluation 'after_grpo' has no episodes; its numbers are in " in err


def test_it_opens_only_the_files_that_it_needs_and_no_torch(folder):
    for path in (*(folder / "trajectories").glob("step_000003.*"), *folder.rglob("*.safetensors")):
        path.write_bytes(b"damaged")
    code = (
        "import sys; from agent_peft.cli import run; code = run(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    arguments = ["show", str(folder), "--task", "add-1", "--attempt", "0"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch is loaded"
    assert "turn 2" in done.stdout


# -- agent-peft report ----------------------------------------------------------------------


@pytest.fixture
def bare_run(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "stage": "sft", "loss": 1.0}) + "\n")
    return run


def reported(capsys, *arguments):
    code = command(["report", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_page_lies_in_the_run_or_here(bare_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = reported(capsys, bare_run)
    assert code == 0 and f"wrote {bare_run / 'report.html'}: 0 episodes" in out
    assert "Agent-PEFT report" in (bare_run / "report.html").read_text()
    assert reported(capsys, bare_run, bare_run)[0] == 0 and (tmp_path / "report.html").is_file()
    assert reported(capsys, bare_run, "--output", tmp_path / "new" / "b.html")[0] == 0
    assert (tmp_path / "new" / "b.html").is_file()


def test_mistakes_are_one_line(bare_run, tmp_path, capsys):
    for arguments, words in (
        ([tmp_path], "not a run directory"),
        ([bare_run, "--port", "8"], "--port has no effect without --live"),
        ([bare_run, "--live", "--output", "x.html"], "--output has no effect with --live"),
        ([bare_run, "--output", bare_run], "--output"),
    ):
        code, _, error = reported(capsys, *arguments)
        assert (code, error.count("\n")) == (2, 1) and words in error
