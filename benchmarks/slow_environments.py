"""Measure slow environments: how much of their time decoding hides, whether a run repeats bit for bit, and
how many episodes are open at once.

    python benchmarks/slow_environments.py [--rows 64] [--rounds 3]

The models are random, so that only time is measured. Each time is compared with decoding alone (environments
that answer at once), with the environments alone (as many threads as rows, and no model), and, if that does
not take minutes, with a run that waits for every answer at its due step (it follows an empty schedule). The
chain of actions and answers of one episode is another bound. The program prints a table and writes
benchmarks/results/slow_environments.json.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from measuring import command_line, show, table, write
from transformers import AutoModelForCausalLM, LlamaConfig

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.base import Episode
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig, EngineStatistics, Sampler
from agent_peft.policies.engine.schedule import Schedule
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.rollout.collector import Collector
from agent_peft.rollout.rewards import RewardConfig
from agent_peft.seeding import generator
from agent_peft.types import Task

TURNS = 3


@dataclass(frozen=True)
class Case:
    """Episodes of three turns, whose actions take ``least`` to ``most`` seconds."""

    name: str
    hidden: int
    layers: int
    episodes: int
    tokens: int  # at most, for one action
    least: float
    most: float

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(max_new_tokens=self.tokens, max_tokens=4 * self.tokens + 32)


def cases(rows: int) -> list[Case]:
    return [
        Case("tiny model, 0.3 s", 16, 1, rows, 60, 0.3, 0.3),
        Case("tiny model, 2 s", 16, 1, rows, 60, 2.0, 2.0),
        Case("larger model, 0.3 s", 256, 6, rows, 60, 0.3, 0.3),
        Case("larger model, 0.3 s, 3 episodes a row", 256, 6, 3 * rows, 40, 0.3, 0.3),
        Case("larger model, 0 to 2 s, 3 episodes a row", 256, 6, 3 * rows, 40, 0.0, 2.0),
    ]


@dataclass
class Talk:
    """An episode whose actions take the time of its own random clock. Opening it takes no time."""

    number: int
    case: Case
    clock: int  # seed of the latencies; the sampled tokens do not depend on it
    slow: bool
    actions: list[tuple[int, ...]] = field(default_factory=list)
    logprobs: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def prompt(self) -> Sequence[int]:
        return [1, 5, 6 + self.number // 8 % 8]

    @property
    def seed(self) -> int:
        return self.number

    def wait(self, turn: int) -> None:
        draw = generator(self.clock, self.number, turn).random()
        time.sleep(self.case.least + draw * (self.case.most - self.case.least))

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        if self.slow:
            self.wait(len(self.actions))
        self.actions.append(tuple(action))
        self.logprobs.append(tuple(logprobs))
        return [4, 5] if len(self.actions) < TURNS else None


def make_policy(hidden: int, layers: int) -> Policy:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    heads = max(2, hidden // 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return Policy(model, ChatTokenizer(tokenizer))


def run(
    engine: Sampler, case: Case, slow: bool = True, clock: int = 0, schedule: Schedule | None = None
) -> tuple[float, EngineStatistics, object]:
    """Return the seconds, the sampler's statistics, and all tokens and log-probabilities."""
    talks = [Talk(number, case, clock, slow) for number in range(case.episodes)]
    begin = time.perf_counter()
    statistics = engine.generate(talks, case.sampling, schedule)
    return time.perf_counter() - begin, statistics, [(talk.actions, talk.logprobs) for talk in talks]


def environments_alone(case: Case, rows: int, clock: int) -> float:
    def play(number: int) -> None:
        for turn in range(TURNS):
            Talk(number, case, clock, True).wait(turn)

    begin = time.perf_counter()
    with ThreadPoolExecutor(rows) as threads:
        list(threads.map(play, range(case.episodes)))
    return time.perf_counter() - begin


def measure(case: Case, rows: int, rounds: int) -> dict[str, Any]:
    engine = load_sampler(make_policy(case.hidden, case.layers), EngineConfig(rows=rows))
    alone = environments_alone(case, rows, clock=0)
    # in turn, so that noise affects both
    pairs = [(run(engine, case, slow=False), run(engine, case)) for _ in range(rounds)]
    pairs.sort(key=lambda pair: pair[1][0] / max(pair[0][0], alone))
    (decoding, plain, tokens), (seconds, statistics, expected) = pairs[len(pairs) // 2]
    waiting = run(engine, case, schedule=())[0] if case.most < 1 else None
    followed, again, found = run(engine, case, clock=1, schedule=statistics.schedule)
    if found != expected or again.schedule != statistics.schedule:
        sys.exit(f"{case.name}: the run that followed the schedule gave other bytes")
    if [actions for actions, _ in expected] != [actions for actions, _ in tokens]:  # type: ignore[attr-defined]
        print(f"{case.name}: rounding made another token of one, somewhere: that may happen")
    return {
        **asdict(case),
        "decoding": decoding,
        "environments": alone,
        "seconds": seconds,
        "ratio": seconds / max(decoding, alone),
        "waited": statistics.waited,
        "late": statistics.late,
        "steps": statistics.steps,
        "steps_alone": plain.steps,
        "waiting_for_each": waiting,
        "followed": followed,
    }


class Doors(Arithmetic):
    """Counts its open episodes."""

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(config)
        self.lock, self.open, self.peak = threading.Lock(), set[Episode](), 0

    def episode(self, task: Task, seed: int) -> Episode:
        episode = super().episode(task, seed)
        episode.close = lambda: self.open.discard(episode)  # an episode here has nothing else to close
        with self.lock:
            self.open.add(episode)
            self.peak = max(self.peak, len(self.open))
        return episode


def measure_doors(rows: int, tasks: int = 1319) -> dict[str, int]:
    doors = Doors(ArithmeticConfig(digits=3, num_tasks=tasks))
    policy = make_policy(16, 1)
    policy = Policy(policy.model, ChatTokenizer(character_tokenizer(ALPHABET)))
    engine = load_sampler(policy, EngineConfig(rows=rows))
    Collector(doors, engine).collect(doors.tasks, 1, SamplingConfig(max_new_tokens=8), RewardConfig(), 0)
    return {"tasks": tasks, "rows": rows, "peak_open": doors.peak, "left_open": len(doors.open)}


def main() -> None:
    given = command_line(
        __doc__,
        quick={"rows": 8, "rounds": 1, "only": "tiny model, 0.3 s"},
        rows=64,
        rounds=3,  # the median is printed
        only=str,  # cases whose name begins with this
    )
    torch.set_num_threads(1)
    chosen = [case for case in cases(given.rows) if case.name.startswith(given.only or "")]
    found = [measure(case, given.rows, given.rounds) for case in chosen]
    keys = ("name", "decoding", "environments", "seconds", "ratio", "waited", "late", "waiting_for_each")
    columns = "case|decoding alone|environments alone|together|/ the larger|sampler waited|late answers"
    rows = ([result[key] for key in keys] for result in found)
    show(table(f"{columns}|waiting for each", rows, f"{given.rows} rows, three turns, seconds"))
    doors = measure_doors(given.rows)
    counts = (
        "{tasks} tasks with {rows} rows: at most {peak_open} episodes were open, and {left_open} are open now"
    )
    show(
        "each run was repeated with other latencies, following its schedule: the same bytes",
        counts.format(**doors),
    )
    if not given.only or given.quick:
        content = {"rows": given.rows, "cases": found, "evaluation": doors}
        write(given.results / "slow_environments.json", content)


if __name__ == "__main__":
    main()
