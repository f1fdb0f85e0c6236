from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_peft.environments import load_environment
from agent_peft.environments.base import Environment, Episode
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine import schedule as clock
from agent_peft.policies.engine.base import EngineConfig, Sampler
from agent_peft.policies.engine.decoding import AHEAD
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import ATTEMPTS, MAX_REFERENCE, Collector
from agent_peft.rollout.demonstrations import demonstrate
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.types import (
    AgentPeftError,
    InfrastructureError,
    Message,
    Outcome,
    StepResult,
    StopReason,
    Task,
    Trajectory,
)

SAMPLING = SamplingConfig(max_new_tokens=6, max_tokens=100)
REWARDS = RewardConfig(correct=1.0, incorrect=-0.1, invalid_action=-0.25)


class Counting(Environment):
    """Answers each action with its number, and is over after as many as the task says; records what is opened
    and closed.

    ``fails[task][where]`` says how many times the world breaks there: at "episode", "start" or "step".
    """

    def __init__(
        self,
        turns: Sequence[int],
        fails: dict[str, dict[str, int]] | None = None,
        error: type[Exception] = InfrastructureError,
    ):
        self._tasks = [Task(f"t{i}", content={"turns": n}) for i, n in enumerate(turns)]
        self.fails, self.error, self.lock = fails or {}, error, threading.Lock()
        self.opened, self.closed, self.seeds = Counter[str](), Counter[str](), list[tuple[str, int]]()
        self.peak = 0  # episodes that were open at once

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def breaks(self, task: Task, where: str) -> None:
        with self.lock:
            left = self.fails.get(task.id, {})
            if left.get(where, 0) > 0:
                left[where] -= 1
                raise self.error(f"{where} of {task.id}")

    def episode(self, task: Task, seed: int) -> Episode:
        self.breaks(task, "episode")
        with self.lock:
            self.opened[task.id] += 1
            self.peak = max(self.peak, self.opened.total() - self.closed.total())
            self.seeds.append((task.id, seed))
        return CountingEpisode(self, task)

    def demonstration(self, task: Task) -> Sequence[str] | None:
        return [str(i) for i in range(task.content["turns"])] if task.content["turns"] else None


class CountingEpisode(Episode):
    def __init__(self, environment: Counting, task: Task) -> None:
        self.environment, self.task, self.steps, self.over = environment, task, 0, False

    def start(self) -> Sequence[Message]:
        self.environment.breaks(self.task, "start")
        return [Message("system", "1+1\n"), Message("user", f"{self.task.id[1:]}=")]

    def step(self, action: str) -> StepResult:
        assert not self.over
        self.environment.breaks(self.task, "step")
        self.steps += 1
        done = self.steps == self.task.content["turns"]
        return StepResult(
            "" if done else f"{self.steps}\n",
            done,
            Outcome.CORRECT if done else Outcome.UNKNOWN,
            StopReason.FINISHED if done else None,
            valid=self.steps != 2,
        )

    def close(self) -> None:
        if not self.over:
            with self.environment.lock:
                self.environment.closed[self.task.id] += 1
        self.over = True


@pytest.fixture
def engine(tiny_policy: Policy) -> Sampler:
    return load_sampler(tiny_policy, EngineConfig(rows=5))


def collect(
    engine: Sampler,
    environment: Environment,
    size: int = 3,
    sampling: SamplingConfig = SAMPLING,
    seed: int = 0,
) -> Any:
    return Collector(environment, engine).collect(environment.tasks, size, sampling, REWARDS, seed)


def check(trajectory: Trajectory, engine: Sampler, sampling: SamplingConfig = SAMPLING) -> None:
    """What every trajectory of whatever environment must hold: tokens that grow append-only, and a mask of
    what was sampled.
    """
    chat = engine.policy.chat
    messages = list(trajectory.messages)
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    read = chat.opening(messages[:first])
    so_far: list[int] = []
    for i, turn in enumerate(trajectory.turns):
        assert list(turn.observation) == read
        so_far += [*turn.observation, *turn.action]
        assert list(trajectory.tokens[: len(so_far)]) == so_far
        said = messages[first + 2 * i]
        assert said == Message("assistant", chat.decode_action(turn.action))
        assert (
            turn.action[-1] in chat.end_of_turn
            or len(turn.action) == sampling.max_new_tokens
            or len(so_far) >= sampling.max_tokens
        )
        assert not set(turn.action[:-1]) & chat.end_of_turn and len(turn.action) <= sampling.max_new_tokens
        if i + 1 < len(trajectory.turns):
            read = chat.following(messages[first + 2 * i + 1].content, turn.action)
    assert list(trajectory.tokens) == so_far and len(trajectory.action_mask) == len(so_far)
    sampled = [token for token, mask in zip(trajectory.tokens, trajectory.action_mask, strict=True) if mask]
    assert sampled == [token for turn in trajectory.turns for token in turn.action]
    with torch.no_grad():
        logp = engine.policy.model(input_ids=torch.tensor([so_far])).logits[0, :-1].log_softmax(-1)
    own = [float(logp[t - 1, so_far[t]]) for t, mask in enumerate(trajectory.action_mask) if mask]
    assert [x for turn in trajectory.turns for x in turn.logprobs] == pytest.approx(own, abs=1e-4)


def test_groups_come_in_the_tasks_order_with_consistent_turns(engine):
    environment = Counting([1, 3, 2, 4])
    collection = collect(engine, environment)
    assert [group.task for group in collection.groups] == list(environment.tasks)
    for group, turns in zip(collection.groups, (1, 3, 2, 4), strict=True):
        assert len(group.trajectories) == 3
        for trajectory in group.trajectories:
            check(trajectory, engine)
            assert trajectory.task is group.task and len(trajectory.turns) == turns
            assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.CORRECT, StopReason.FINISHED)
            expected = [0.0, -0.25, 0.0, 0.0][:turns]  # the second action is invalid there
            expected[-1] += 1.0
            assert list(trajectory.rewards) == expected
        assert len({trajectory.tokens for trajectory in group.trajectories}) > 1, "siblings draw apart"
    assert collection.failures == 0
    assert collection.statistics.sampled == sum(
        t.num_action_tokens for group in collection.groups for t in group.trajectories
    )
    assert environment.opened == environment.closed == Counter({task.id: 3 for task in environment.tasks})


def test_the_seed_decides_and_what_is_around_does_not(engine):
    environment = Counting([1, 3, 2, 4])
    tokens = [[t.tokens for t in group.trajectories] for group in collect(engine, environment).groups]
    assert tokens == [[t.tokens for t in group.trajectories] for group in collect(engine, environment).groups]
    assert tokens != [
        [t.tokens for t in group.trajectories] for group in collect(engine, environment, seed=1).groups
    ]
    fewer = Collector(environment, engine).collect(environment.tasks[:2], 2, SAMPLING, REWARDS, 0)
    assert [[t.tokens for t in group.trajectories] for group in fewer.groups] == [
        found[:2] for found in tokens[:2]
    ]
    assert len(set(environment.seeds)) == 12 + 12, (
        "an episode has its own seed, the same whenever its run is repeated"
    )


def test_arithmetic(engine):
    environment = load_environment({"kind": "arithmetic", "num_tasks": 5, "digits": 1})
    collection = collect(engine, environment, 4)
    assert [group.task.id for group in collection.groups] == [task.id for task in environment.tasks]
    for trajectory in (t for group in collection.groups for t in group.trajectories):
        check(trajectory, engine)
        said = trajectory.messages[-1].content.strip()
        assert (trajectory.outcome is Outcome.CORRECT) == (
            said == str(trajectory.task.content["a"] + trajectory.task.content["b"])
        )


@pytest.fixture
def text_engine() -> Sampler:
    """A tiny random model over all of printable ASCII, for environments that speak in sentences."""
    tokenizer = character_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 8192,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, **shape)
        )
    return load_sampler(Policy(model, ChatTokenizer(tokenizer)), EngineConfig(rows=4))


def test_db_bench(text_engine):
    environment = load_environment({"kind": "db_bench", "generate": {"num_tasks": 3}, "max_turns": 2})
    sampling = SamplingConfig(max_new_tokens=8, max_tokens=6000)
    collection = collect(text_engine, environment, 2, sampling)
    reached = set()
    for trajectory in (t for group in collection.groups for t in group.trajectories):
        check(trajectory, text_engine, sampling)
        assert trajectory.outcome is Outcome.INCORRECT and trajectory.num_invalid == len(trajectory.turns)
        reached.add((len(trajectory.turns), trajectory.stop_reason))
    assert reached == {(2, StopReason.TURN_LIMIT)}


# -- limits --------------------------------------------------------------------------------------------------


def test_an_episode_that_runs_out_of_tokens_is_cut_and_told(engine):
    environment = Counting([40, 40, 1])
    sampling = SamplingConfig(max_new_tokens=6, max_tokens=24)
    collection = collect(engine, environment, 4, sampling)
    for trajectory in (t for group in collection.groups[:2] for t in group.trajectories):
        check(trajectory, engine, sampling)
        assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.INCORRECT, StopReason.TOKEN_LIMIT)
        assert 24 - 4 < len(trajectory.tokens) <= 24
        assert trajectory.messages[-1].role == "user" and trajectory.rewards[-1] == (
            -0.1 if trajectory.turns[-1].valid else -0.35
        )
    assert all(t.stop_reason is StopReason.FINISHED for t in collection.groups[2].trajectories)
    assert environment.opened == environment.closed


def test_no_more_episodes_are_open_than_the_engine_has_rows_and_a_few(tiny_policy: Policy):
    engine = load_sampler(tiny_policy, EngineConfig(rows=8))
    environment = Counting([1 + i % 3 for i in range(200)], {f"t{i}": {"step": 1} for i in range(0, 200, 40)})
    collection = collect(engine, environment, 1)
    assert [len(group.trajectories) for group in collection.groups] == [1] * 200
    assert (collection.failures, environment.opened.total()) == (5, 205)
    assert environment.opened == environment.closed and 8 < environment.peak <= 8 + AHEAD


def test_an_episode_is_closed_when_it_ends_and_not_at_the_end_of_the_trip(engine):
    class Watching(Counting):
        def episode(self, task: Task, seed: int) -> Episode:
            left.append(self.opened.total() - self.closed.total())
            return super().episode(task, seed)

    left = list[int]()
    environment = Watching([2] * 40)
    collect(engine, environment, 1)
    assert len(left) == 40 and max(left) < 5 + AHEAD, "when another is opened"


def test_whatever_ends_a_collection_nothing_stays_open(engine, monkeypatch):
    forward, calls = engine.policy.read, [0]

    def read(*arguments: Any, **inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] > 12:
            raise RuntimeError("a fault of the model's")
        return forward(*arguments, **inputs)

    monkeypatch.setattr(engine.policy, "read", read)
    environment = Counting([3] * 40)
    with pytest.raises(RuntimeError, match="a fault of the model's"):
        collect(engine, environment, 1)
    assert environment.opened == environment.closed and 5 <= environment.opened.total() < 40


def test_a_schedule_is_handed_up_and_can_be_followed(engine, monkeypatch):
    for name in ("PATIENCE", "FIRST_PATIENCE"):
        monkeypatch.setattr(clock, name, 0.0)
    seconds = random.Random(0)

    class Slow(Counting):
        def breaks(self, task: Task, where: str) -> None:
            time.sleep(seconds.random() * 0.01)
            super().breaks(task, where)

    def run(schedule: Any = None) -> Any:
        environment = Slow([1, 3, 2, 4], {"t1": {"step": 1}, "t2": {"start": 1}})
        return Collector(environment, engine).collect(
            environment.tasks, 3, SAMPLING, REWARDS, 0, schedule=schedule
        )

    first = Slow([1, 3, 2, 4])
    recorded = Collector(first, engine).collect(first.tasks, 3, SAMPLING, REWARDS, 0)
    assert len(recorded.schedule) == 1 and recorded.statistics.late == len(recorded.schedule[0]) > 0
    followed = Collector(first, engine).collect(
        first.tasks, 3, SAMPLING, REWARDS, 0, schedule=recorded.schedule
    )
    assert followed.groups == recorded.groups and followed.schedule == recorded.schedule
    assert len(run().schedule) == 2, "each attempt has its own"


def test_actions_that_a_limit_ended_are_marked(engine):
    end = min(engine.policy.chat.end_of_turn)
    sampling = SamplingConfig(temperature=2.0, max_new_tokens=5, max_tokens=60, stop=("3", "+-"))
    reached = set()
    for trajectory in (
        t for group in collect(engine, Counting([4] * 6), 4, sampling).groups for t in group.trajectories
    ):
        for turn in trajectory.turns:
            said = "".join(engine.policy.chat.tokenizer.convert_ids_to_tokens(list(turn.action)))
            assert turn.cut == (turn.action[-1] != end and not said.endswith(("3", "+-"))), said
            reached.add(turn.cut)
        assert trajectory.num_cut == sum(turn.cut for turn in trajectory.turns)
    assert reached == {True, False}


# -- when the world fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["episode", "start", "step"])
def test_an_episode_whose_environment_fails_is_tried_again(where, engine):
    environment = Counting([2, 2], {"t1": {where: 1}})
    collection = collect(engine, environment)
    assert collection.failures == 1 and [len(group.trajectories) for group in collection.groups] == [3, 3]
    for trajectory in (t for group in collection.groups for t in group.trajectories):
        check(trajectory, engine)
        assert trajectory.outcome is Outcome.CORRECT and len(trajectory.turns) == 2
    assert environment.opened == environment.closed
    assert environment.opened["t0"] == 3, "what has come to an end is not repeated"


@pytest.mark.parametrize("where", ["episode", "start"])
def test_what_fails_again_and_again_before_the_agent_acts_is_dropped_and_counted(where, engine, caplog):
    environment = Counting([2, 1, 3], {"t1": {where: 10**6}, "t2": {where: ATTEMPTS * 3 - 2}})
    collection = collect(engine, environment)
    assert [len(group.trajectories) for group in collection.groups] == [3, 0, 2]
    assert (collection.failures, collection.crashed, collection.defects) == (
        3 * ATTEMPTS + 3 * ATTEMPTS - 2,
        0,
        0,
    )
    assert environment.opened == environment.closed
    assert all(
        t.stop_reason is StopReason.FINISHED for group in collection.groups for t in group.trajectories
    )
    assert len(set(environment.seeds)) == len(environment.seeds), (
        "an episode that nobody has acted in is begun again with another seed"
    )
    assert (
        "task t1: the environment failed before the agent had acted; the episode is left out "
        f"(InfrastructureError: {where} of t1)" in caplog.text
    )


def test_what_fails_again_and_again_after_an_action_is_incorrect_and_told(engine, caplog):
    environment = Counting([2, 3], {"t1": {"step": 10**6}})
    collection = collect(engine, environment)
    assert [len(group.trajectories) for group in collection.groups] == [3, 3]
    for trajectory in collection.groups[1].trajectories:
        check(trajectory, engine)
        assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.INCORRECT, StopReason.CRASHED)
        assert len(trajectory.turns) == 1 and trajectory.rewards == (-0.1,), (
            "the action that the world did not survive is learned from"
        )
    assert (collection.failures, collection.crashed, collection.defects) == (3 * ATTEMPTS, 3, 0)
    assert environment.opened == environment.closed == Counter(t0=3, t1=3 * ATTEMPTS)
    assert Counter(environment.seeds).most_common()[2][1] == ATTEMPTS, "the same seed each time"
    (line,) = caplog.messages
    assert line == (
        "task t1: the environment failed after the agent's action, and again when the actions were replayed; "
        "the episode counts as incorrect "
        "(InfrastructureError: step of t1)"
    )


@pytest.mark.parametrize("where", ["episode", "start", "step"])
def test_a_fault_of_another_kind_is_told_and_counted_and_ends_nothing(where, engine, caplog):
    environment = Counting([2, 2, 2], {"t1": {where: 2}}, error=ZeroDivisionError)
    collection = collect(engine, environment)
    assert environment.opened == environment.closed
    assert collection.defects == 2 and [len(group.trajectories) for group in collection.groups] == [3, 3, 3]
    defects = [
        t for group in collection.groups for t in group.trajectories if t.stop_reason is StopReason.DEFECT
    ]
    assert len(defects) == (2 if where == "step" else 0), "an episode that nobody has acted in is begun again"
    for trajectory in defects:
        check(trajectory, engine)
        assert (trajectory.outcome, trajectory.rewards) == (Outcome.INCORRECT, (-0.1,))
    assert sum(": a defect; " in line for line in caplog.messages) == 1, "each kind once"
    assert f"ZeroDivisionError: {where} of t1" in caplog.text and "in breaks" in caplog.text, (
        "with its traceback"
    )


def test_a_mistake_of_the_users_is_told_before_the_agent_acts(engine):
    environment = Counting([2, 2], {"t1": {"start": 1}}, error=AgentPeftError)
    with pytest.raises(AgentPeftError, match="start of t1"):
        collect(engine, environment)
    assert environment.opened == environment.closed
    environment = Counting([2, 2], {"t1": {"step": 1}}, error=AgentPeftError)
    assert collect(engine, environment).defects == 1, "once it acts, a reply might bring that about"


@pytest.mark.parametrize("where", ["start", "step"])
def test_who_wants_to_stop_can_stop(where, engine):
    environment = Counting([2, 2], {"t1": {where: 1}}, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        collect(engine, environment)
    assert environment.opened == environment.closed


def test_an_action_cannot_end_the_program(engine, caplog):
    environment = Counting([2, 2], {"t1": {"step": 1}}, error=SystemExit)  # argparse, at a command it refuses
    assert collect(engine, environment).defects == 1
    assert environment.opened == environment.closed and "SystemExit" in caplog.text


def test_a_prompt_that_cannot_be_encoded_closes_its_episode(engine):
    environment = load_environment({"kind": "db_bench", "generate": {"num_tasks": 1}})
    with pytest.raises(AgentPeftError, match="lacks the characters"):
        collect(engine, environment)


# -- demonstrations ------------------------------------------------------------------------------------------


def test_an_episode_has_what_would_have_been_right(engine, monkeypatch):
    environment = Counting([2, 0])
    (first, *others), _ = (group.trajectories for group in collect(engine, environment).groups)
    assert first.reference == "0\n\n1" and {one.reference for one in others} == {first.reference}
    calls = []
    monkeypatch.setattr(Counting, "reference", lambda self, task: calls.append(task.id) or 1 / 0)
    (one, *_), _ = (group.trajectories for group in collect(engine, environment).groups)
    assert one.reference is None and calls == ["t0", "t1"], "it is for people, and ends nothing"
    monkeypatch.setattr(Counting, "reference", lambda self, task: "x" * 10_000)
    (one, *_), _ = (group.trajectories for group in collect(engine, environment).groups)
    assert len(one.reference) == MAX_REFERENCE


@pytest.mark.parametrize(
    ("kind", "keys", "reference"),
    [
        ("arithmetic", {"digits": 1, "num_tasks": 1}, lambda task: str(sum(map(int, task.id.split("+"))))),
        ("db_bench", {"generate": {"num_tasks": 1}}, lambda task: task.content["answer_info"]["sql"]),
        ("os_interaction", {"generate": {"num_tasks": 1, "skills": ["mkdir"]}}, lambda task: "mkdir"),
    ],
)
def test_environments_know_what_would_have_been_right(kind, keys, reference):
    environment = load_environment(kind, **keys)
    (task,) = environment.tasks
    found = environment.reference(task)
    environment.close()
    assert reference(task) in found


def test_a_demonstration_is_replayed_in_the_environment(engine):
    environment, chat = Counting([3]), engine.policy.chat
    trajectory = demonstrate(environment, environment.tasks[0], chat, REWARDS, seed=0)
    assert [list(turn.action) for turn in trajectory.turns] == [chat.action_tokens(str(i)) for i in range(3)]
    assert [m.content for m in trajectory.messages] == ["1+1\n", "0=", "0", "1\n", "1", "2\n", "2"]
    assert (trajectory.outcome, trajectory.rewards) == (Outcome.CORRECT, (0.0, -0.25, 1.0))
    assert environment.opened == environment.closed == Counter(t0=1)


@pytest.mark.parametrize(
    "config",
    [{"kind": "arithmetic", "num_tasks": 6}, {"kind": "db_bench", "generate": {"num_tasks": 6}}],
    ids=lambda config: config["kind"],
)
def test_golds_of_real_environments_are_correct(config, text_engine):
    environment, chat = load_environment(config), text_engine.policy.chat
    for task in environment.tasks:
        trajectory = demonstrate(environment, task, chat, REWARDS, seed=0)
        assert (
            trajectory.outcome is Outcome.CORRECT and trajectory.reward == 1.0 and trajectory.num_invalid == 0
        )
        said = [m.content for m in trajectory.messages if m.role == "assistant"]
        assert said == list(environment.demonstration(task) or ())
        assert [chat.decode_action(turn.action) for turn in trajectory.turns] == said


@pytest.mark.parametrize("where", ["episode", "start", "step"])
@pytest.mark.parametrize("error", [InfrastructureError, ZeroDivisionError, AgentPeftError])
def test_a_demonstration_that_breaks_is_one_line_and_closed(where, error, engine):
    environment = Counting([3], {"t0": {where: ATTEMPTS}}, error=error)
    with pytest.raises(
        error if error is InfrastructureError else AgentPeftError, match=f"{where} of t0"
    ) as raised:
        demonstrate(environment, environment.tasks[0], engine.policy.chat, REWARDS, seed=0)
    assert "\n" not in str(raised.value)
    if error is ZeroDivisionError:
        cause = rf"\(ZeroDivisionError: {where} of t0, at test_collector.py:\d+\)"
        told = rf"task t0: the environment failed while .* was replayed {cause}"
        assert re.fullmatch(told, str(raised.value))
    assert environment.opened == environment.closed


def test_without_a_demonstration_it_says_so(engine):
    environment = Counting([0])
    with pytest.raises(AgentPeftError, match="task t0: the environment has no demonstration"):
        demonstrate(environment, environment.tasks[0], engine.policy.chat, REWARDS, seed=0)


class Unfinished(Counting):
    def demonstration(self, task: Task) -> Sequence[str]:
        return ["0"]


def test_a_demonstration_that_does_not_end_its_episode_is_a_mistake(engine):
    environment = Unfinished([3])
    with pytest.raises(AgentPeftError, match="task t0: its demonstration does not end the episode"):
        demonstrate(environment, environment.tasks[0], engine.policy.chat, REWARDS, seed=0)
    assert environment.opened == environment.closed
