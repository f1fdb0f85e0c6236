"""An environment that hangs, and limits that cut every episode: a line at once, and an end."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path

from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.engine import load_sampler, schedule
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models import positions
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout import evaluation
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.types import Message, Outcome, StepResult, StopReason, Task

ARCHITECTURE = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
ARCHITECTURE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
SCRATCH = {"kind": "scratch", "alphabet": "0123456789+=", "architecture": ARCHITECTURE}
NEVER = StepResult("1+1=")


class Hanging(Environment):
    """``hangs`` at its ``start`` or its ``step``, or nowhere; then each step answers ``result``."""

    def __init__(self, hangs=None, result=NEVER):
        self.hangs, self.result, self.tasks_ = hangs, result, [Task("a"), Task("b")]
        self.gate = threading.Event()

    @property
    def tasks(self):
        return self.tasks_

    def episode(self, task, seed):
        return HangingEpisode(self, task)


class HangingEpisode(Episode):
    def __init__(self, world, task):
        self.world, self.task = world, task

    def start(self):
        if self.world.hangs == "start" and self.task.id == "b":
            self.world.gate.wait(60)
        return [Message("user", "1+1=")]

    def step(self, action):
        if self.world.hangs == "step" and self.task.id == "b":
            self.world.gate.wait(60)
        return self.world.result

    def close(self):
        pass


def collect(world, seconds=None, **limits):
    sampling = SamplingConfig(**{"max_new_tokens": 3, "max_tokens": 40, **limits})
    sampler = load_sampler(load_policy(SCRATCH, device="cpu"), EngineConfig(environment_seconds=seconds))
    return Collector(world, sampler).collect(world.tasks, 2, sampling, RewardConfig(), seed=0)


def test_a_step_that_hangs_ends_its_episode_as_incorrect():
    world = Hanging("step")
    groups = {group.task.id: group.trajectories for group in collect(world, seconds=0.2).groups}
    world.gate.set()
    assert [(t.stop_reason, t.outcome) for t in groups["b"]] == [(StopReason.TIMEOUT, Outcome.INCORRECT)] * 2
    assert [t.stop_reason for t in groups["a"]] == [StopReason.TOKEN_LIMIT] * 2


def test_a_start_that_hangs_is_left_out(caplog):
    world = Hanging("start")
    collection = collect(world, seconds=0.1)
    world.gate.set()
    assert [group.task.id for group in collection.groups if group.trajectories] == ["a"]
    assert "its start took more than 0.1 s" in caplog.text


def test_a_wait_for_an_environment_is_a_line(monkeypatch, caplog):
    world = Hanging("step")
    monkeypatch.setattr(schedule, "NOTES", (0.1, 30.0))

    def open_when_said():
        deadline = time.monotonic() + 60
        while not any(text.startswith("waiting") for text in caplog.messages) and time.monotonic() < deadline:
            time.sleep(0.01)
        world.gate.set()

    threading.Thread(target=open_when_said, daemon=True).start()
    collect(world)
    (line,) = [text for text in caplog.messages if text.startswith("waiting")]
    assert "waiting for the environment for 0 s: task 'b', seed" in line
    assert line.endswith("turn 1 and 1 more")


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import test_limits
from agent_peft.policies.engine import local
local.GRACE = 0.5  # instead of 5 seconds
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
world = test_limits.Hanging("step")
wait = world.gate.wait
world.gate.wait = lambda seconds: os.write(1, b"h") and wait(seconds)
test_limits.collect(world)
"""


def test_an_environment_that_hangs_does_not_keep_the_process(tmp_path, warm_process):
    (tmp_path / "p.py").write_text(PROGRAM.format(folder=str(Path(__file__).parent)))
    with (tmp_path / "out").open("w+") as output:
        process = warm_process.start("p.py", folder=tmp_path, output=output)
        while not os.fstat(output.fileno()).st_size:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.3)  # it hangs
        process.send_signal(signal.SIGINT)
        process.wait(20)  # the environment would wait for 60 s
        assert "KeyboardInterrupt" in (tmp_path / "out").read_text()


def test_replies_that_are_all_cut_are_a_line(caplog):
    wrong = StepResult("", True, Outcome.INCORRECT, StopReason.FINISHED)
    collect(Hanging(result=wrong), max_new_tokens=2)
    assert "all 4 episodes were cut by sampling.max_new_tokens: 2 (tokens of an action)" in caplog.text
    caplog.clear()
    collect(Hanging(result=StepResult("", True, Outcome.CORRECT, StopReason.FINISHED)), max_new_tokens=2)
    assert not caplog.messages


def test_more_new_tokens_than_positions_are_a_line(caplog):
    positions._check_new_tokens.cache_clear()
    world = Hanging(result=StepResult("", True, Outcome.CORRECT, StopReason.FINISHED))
    for _ in range(2):
        collect(world, max_new_tokens=2000)
    lines = [text for text in caplog.messages if "max_new_tokens: 2000" in text and "64 positions" in text]
    assert len(lines) == 1


def test_an_evaluation_on_few_tasks_is_a_line(caplog, monkeypatch):
    monkeypatch.setattr(evaluation, "_check_number", cache(evaluation._check_number.__wrapped__))
    world = Hanging(result=StepResult("", True, Outcome.CORRECT, StopReason.FINISHED))
    for _ in range(2):
        evaluation.evaluate(load_policy(SCRATCH, device="cpu"), world, {"sampling": {"max_new_tokens": 2}})
    lines = [text for text in caplog.messages if text.startswith("an evaluation on 2 tasks")]
    assert len(lines) == 1 and "69 points off" in lines[0]
