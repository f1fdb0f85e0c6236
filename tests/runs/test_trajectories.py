"""The episodes of a run on disk: what a line and its arrays hold, which steps stay, what a kill leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count

import numpy
import pytest
import torch
from safetensors.numpy import load_file

from agent_peft.configuration.load import load_config
from agent_peft.configuration.run_config import TrajectoriesConfig, resolved
from agent_peft.configuration.yaml12 import dump
from agent_peft.runs.reading import load_run
from agent_peft.runs.resume import forget_after
from agent_peft.runs.run import train
from agent_peft.runs.trajectories import episode_record, steps_in, write_episodes, write_trajectories
from agent_peft.training.step_metrics import TokenValues
from agent_peft.types import AgentPeftError, Group, Message, Outcome, StopReason, Task, Trajectory, Turn

TASK = Task("insert-7", skills=("insert", "where"))
ONE = Trajectory(
    TASK,
    (Turn((1, 2), (3,), (-0.5,), valid=False), Turn((4,), (5, 6), (-0.1, -0.25), cut=True)),
    (Message("user", "Zürich?"), Message("assistant", "a lone \ud800 surrogate")),
    Outcome.CORRECT,
    StopReason.FINISHED,
    (-0.5, 1.0),
    score=0.75,
    reward_terms={"outcome": 1.0, "invalid_action": -0.5},
    seed=1 << 62,
)
OTHER = Trajectory(TASK, (Turn((1,), (2,), (-1.0,)),), (), Outcome.INCORRECT, StopReason.TURN_LIMIT, (-0.1,))
GROUPS = [Group(Task("lost"), []), Group(TASK, [ONE, OTHER])]


def test_a_line_says_it_all_but_the_tokens(tmp_path):
    advantages = torch.tensor([0, 0, 0.5, 0, 1, 0.25, 0, -0.75])
    path = write_trajectories(tmp_path, 12, "grpo", GROUPS, values=TokenValues(advantages, advantages))
    assert path == tmp_path / "step_000012.jsonl"
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "stage": "grpo",
        "step": 12,
        "group": 1,
        "attempt": 0,
        "seed": 1 << 62,
        "row": 0,
        "task": "insert-7",
        "skills": ["insert", "where"],
        "outcome": "correct",
        "stop_reason": "finished",
        "score": 0.75,
        "rewards": [-0.5, 1.0],
        "reward_terms": {"outcome": 1.0, "invalid_action": -0.5},
        "advantages": [0.5, 0.625],
        "num_tokens": 6,
        "num_action_tokens": 3,
        "invalid_turns": [0],
        "cut_turns": [1],
        "messages": [
            {"role": "user", "content": "Zürich?"},
            {"role": "assistant", "content": "a lone \ud800 surrogate"},
        ],
    }
    assert (second["group"], second["attempt"], second["row"]) == (1, 1, 1)
    assert second["advantages"] == [-0.75] and "score" not in second


def test_the_arrays_keep_every_bit(tmp_path):
    bits = numpy.random.default_rng(0).standard_normal((2, 8)).astype(numpy.float32)
    bits[0, -2:] = numpy.nan
    values = TokenValues(*map(torch.tensor, bits))
    write_episodes(tmp_path, "x", {}, GROUPS, values=values)
    arrays = load_file(tmp_path / "x.safetensors")
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "offsets": "int64",
        "tokens": "int32",
        "mask": "bool",
        "sampler_logprobs": "float32",
        "trainer_logprobs": "float32",
        "advantages": "float32",
    }
    assert arrays["offsets"].tolist() == [0, 6, 8]
    assert arrays["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    assert arrays["mask"].tolist() == [False, False, True, False, True, True, False, True]
    sampled = numpy.array([0, 0, -0.5, 0, -0.1, -0.25, 0, -1], numpy.float32)
    for name, expected in (
        ("sampler_logprobs", sampled),
        ("advantages", bits[0]),
        ("trainer_logprobs", bits[1]),
    ):
        assert arrays[name].tobytes() == expected.tobytes(), name
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert ["advantages" in line for line in lines] == [True, False], "the trainer set none for the second"


def test_what_was_not_sampled_has_no_log_probabilities(tmp_path):
    write_episodes(tmp_path, "demonstrations", {}, GROUPS, sampled=False, values=TokenValues(None, None))
    write_episodes(tmp_path, "evaluation", {"evaluation": "base"}, GROUPS)
    names = {"offsets", "tokens", "mask"}
    assert load_file(tmp_path / "demonstrations.safetensors").keys() == names
    assert load_file(tmp_path / "evaluation.safetensors").keys() == names | {"sampler_logprobs"}


def test_no_episode_at_all_is_no_error(tmp_path):
    path = write_episodes(tmp_path, "none", {}, [])
    assert path.read_text() == "" and load_file(path.with_suffix(".safetensors"))["offsets"].tolist() == [0]


# -- of a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def configure(tmp_path, policy_config):
    """``configure(name, **changes)``: a supervised step and four of grpo, in a folder of that name."""

    def configure(name, **changes):
        return load_config(
            {
                "run_dir": str(tmp_path / name),
                "threads": 1,
                "policy": policy_config.model_dump(mode="json"),
                "environment": {"kind": "arithmetic", "digits": 1, "num_tasks": 6},
                "tasks_per_step": 3,
                "stages": [
                    {"algorithm": "sft", "steps": 1},
                    {
                        "algorithm": "grpo",
                        "steps": 4,
                        "group_size": 4,
                        "sampling": {"max_new_tokens": 3},
                        "rewards": {"invalid_action": -0.5},
                    },
                ],
                **changes,
            }
        )

    return configure


def names_in(run_dir):
    return sorted(path.name for path in (run_dir / "trajectories").iterdir())


def files_of(*steps):
    return sorted(f"step_{step:06d}{suffix}" for step in steps for suffix in (".jsonl", ".safetensors"))


def test_a_run_keeps_what_sampler_and_trainer_computed(configure):
    config = configure("run")
    train(config)
    run = load_run(config.run_dir)
    supervised, *rest = (run.trajectories.of_step(step) for step in range(5))
    for episode in supervised:
        assert (episode.stage, episode.outcome) == ("sft", Outcome.CORRECT)
        assert episode.mask.any() and len(episode.tokens) == episode.num_tokens
        assert episode.sampler_logprobs is episode.trainer_logprobs is episode.advantages is None
    episodes = [episode for step in rest for episode in step]
    assert len(episodes) == 48 and len({episode.seed for episode in episodes}) == 48
    scored = [episode for episode in episodes if not numpy.isnan(episode.trainer_logprobs).any()]
    assert scored and {episode.stage for episode in episodes} == {"grpo"}
    for episode in scored:
        assert numpy.allclose(episode.trainer_logprobs, episode.sampler_logprobs, atol=1e-4)
        assert not episode.sampler_logprobs[~episode.mask].any()
    for episode in episodes:
        assert episode.reward == pytest.approx(sum(episode.reward_terms.values()))
        assert set(episode.reward_terms) == {"outcome", "invalid_action"}
        (advantage,) = episode.advantages
        assert numpy.array_equal(episode.token_advantages, advantage * episode.mask)
    for step, line in zip(rest, run.metrics[1:], strict=True):
        assert sum(episode.reward for episode in step) / 12 == pytest.approx(line["reward"])
        assert [(e.group, e.attempt) for e in step] == [(g, a) for g in range(3) for a in range(4)]


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ({}, [0, 1, 2, 3, 4]),
        ({"every": 2}, [0, 2, 4]),
        ({"last": 2}, [3, 4]),
        ({"every": 2, "last": 1}, [4]),
    ],
    ids=str,
)
def test_only_the_steps_that_are_wanted_stay(configure, keep, steps):
    config = configure("run", trajectories=keep)
    train(config)
    assert names_in(config.run_dir) == files_of(*steps)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("some", "trajectories: must be a mapping"),
        ({"every": 0}, "trajectories.every: must be greater than or equal to 1, got 0"),
        ({"least": 3}, "trajectories.least: unknown key; did you mean 'trajectories.last'?"),
    ],
    ids=str,
)
def test_a_mistake_is_told_in_one_line(configure, wrong, told):
    with pytest.raises(AgentPeftError) as refused:
        configure("run", trajectories=wrong)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_later_steps_are_forgotten_with_all_that_a_kill_left(tmp_path):
    folder = tmp_path / "trajectories"
    for step in range(4):
        write_trajectories(folder, step, "grpo", GROUPS)
    (folder / "step_000003.jsonl").unlink()
    (folder / ".step_000004.safetensors.aside").write_bytes(b"torn")
    assert steps_in(folder) == [0, 1, 2, 3, 4]
    forget_after(tmp_path, 2)
    assert names_in(tmp_path) == files_of(0, 1)


# -- kills ---------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from agent_peft import files
from agent_peft.configuration.load import read_config
from agent_peft.runs.run import train

class Torn:
    '''A file that takes half of what is written to it, before the process is killed.'''
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

def killed(path, name, moment):
    opened, replaced = open, os.replace

    def tearing(descriptor, *arguments, **named):
        file = opened(descriptor, *arguments, **named)
        place = Path(os.readlink(f"/dev/fd/{descriptor}"))
        return Torn(file) if moment == "torn" and place.name == f".{name}.aside" else file

    def kill_after(aside, path, **folders):
        replaced(aside, path, **folders)
        if moment == "renamed" and path == name:
            os.kill(os.getpid(), signal.SIGKILL)

    files.open, os.replace = tearing, kill_after
    train(read_config(Path(path))[0])

for case in sys.argv[1:]:
    if not (child := os.fork()):
        killed(*case.split(":"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, case
"""
ARRAYS, LINES = "step_000003.safetensors", "step_000003.jsonl"
CASES = {  # where the process is killed -> what of step 3 is there
    (ARRAYS, "torn"): [f".{ARRAYS}.aside"],
    (ARRAYS, "renamed"): [ARRAYS],
    (LINES, "torn"): [f".{LINES}.aside", ARRAYS],
    (LINES, "renamed"): [LINES, ARRAYS],
}


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_loses_that_file_and_nothing_else(configure, run_contents, tmp_path):
    """Half of a file is written, or all of it and the next one is not begun."""
    keep = {"last": 3}  # so that old files are removed at each step, too
    whole = configure("whole", trajectories=keep)
    train(whole)
    theirs = run_contents(whole.run_dir)
    killed, arguments = {}, []
    for name, moment in CASES:
        killed[name, moment] = configure(f"{moment}_{name}", trajectories=keep)
        path = tmp_path / f"{moment}_{name}.yaml"
        path.write_text(dump(resolved(killed[name, moment])))
        arguments.append(f"{path}:{name}:{moment}")
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, rest in CASES.items():
        config = killed[case]
        assert names_in(config.run_dir) == sorted([*files_of(0, 1, 2), *rest]), case
        steps = [0, 1, 2, 3] if LINES in rest else [0, 1, 2]
        episodes = [e for e in load_run(config.run_dir).trajectories if len(e.tokens)]
        assert [e.step for e in episodes] == [n for n in steps for _ in range(12 if n else 3)], case
        train(config)
        ours = run_contents(config.run_dir)
        assert ours.keys() == theirs.keys(), case
        assert [n for n in theirs if ours[n] != theirs[n] and n != "config.yaml"] == [], case


def test_a_write_that_is_killed_at_any_system_call_leaves_whole_files(tmp_path, monkeypatch):
    """Every prefix of the operations that a write consists of; what is there can be read."""
    from agent_peft import files

    class Kill(BaseException):
        pass

    written = set()
    for survived in count():
        folder, left = tmp_path / str(survived), iter(range(survived))

        def step(original, left=left):
            def operation(*arguments, **named):
                if next(left, None) is None:
                    raise Kill
                return original(*arguments, **named)

            return operation

        with monkeypatch.context() as patched:
            for owner, name in ((files.os, "fsync"), (files.Path, "replace"), (files, "sync")):
                patched.setattr(owner, name, step(getattr(owner, name)))
            try:
                write_trajectories(folder, 0, "grpo", GROUPS)
                ended = True
            except Kill:
                ended = False
        whole = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        written.add(frozenset(whole))
        if "step_000000.jsonl" in whole:
            lines = [json.loads(line) for line in (folder / "step_000000.jsonl").read_text().splitlines()]
            rows = len(load_file(folder / "step_000000.safetensors")["offsets"]) - 1
            assert [line["row"] for line in lines] == list(range(rows)) == [0, 1]
        if ended:
            break
    assert written == {frozenset(), frozenset(files_of(0)[1:]), frozenset(files_of(0))}


def test_a_full_record_of_what_is_configured():
    assert TrajectoriesConfig().model_dump() == {"every": 1, "last": None}
    assert "advantages" not in episode_record(ONE, group=0, attempt=0, row=0)
