"""Measure everything of interest on a GPU that is available for minutes only: the tests that need one, two
models of random weights, and a real model.

    python benchmarks/gpu.py [--seconds 480] [--output gpu.json] [--only limits tests 0.5B 7B smollm2-135m]
    [--device cuda]
    python benchmarks/gpu.py --device cpu --tiny     # the same code on small shapes

For each model, in bfloat16 with a LoRA adapter, it measures: the tokens per second of 32 decoding rows,
compared with Transformers' generate with the same adapter and with the time to read the weights; the
difference of the log-probabilities of sampler and trainer; a decode step that is captured as a CUDA graph;
the share of the GPU's arithmetic that training uses, packed and padded; and the memory that `explain`
predicts, compared with the allocated memory. "Useful"
operations are the minimum for both ways: attention only to visible tokens, and gradients only of the
adapter's weights.

The program ends after --seconds and prints its results so far. Each section is written to the JSON file when
it ends.
"""

from __future__ import annotations

import gc
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import transformers
from measuring import RESULTS, ROOT, OneTurn, command_line, generation, show, skipped, table
from training import Point, operations
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from agent_peft.batch import collate
from agent_peft.configuration.memory import MemoryModel, stage_memory
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.kv_cache import ROWS
from agent_peft.policies.engine.local import LocalEngine
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.bundled import cached
from agent_peft.policies.models.shape import ModelShape, measure_shape
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive, generator
from agent_peft.training.optimizer import build_optimizer
from agent_peft.training.stage import StageConfig
from agent_peft.types import Task, Trajectory, Turn

REAL = "smollm2-135m"
# from the models' config.json on the hub: Qwen/Qwen2.5-0.5B and Qwen/Qwen2.5-7B
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": dict(zip(SIZES, (896, 4864, 24, 14, 2, 151936, True), strict=True)),
    "7B": dict(zip(SIZES, (3584, 18944, 28, 28, 4, 152064, False), strict=True)),
}
TINY = {"hidden_size": 56, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
LORA, DTYPE = LoraSettings(), torch.bfloat16
GROUPS, SIBLINGS = 4, 8


@dataclass(frozen=True)
class Size:
    """The amount of work: prompts and new tokens of a rollout, trajectories of a group to train on, and the
    size of the matrix for measuring.
    """

    prompt: int = 256
    new: int = 64
    observed: int = 512
    sampled: int = 256
    matrix: int = 8192
    rounds: int = 3


@dataclass(frozen=True)
class Bench:
    """A device, and the amount of work on it."""

    device: torch.device
    size: Size

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def took(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has finished ``work``."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun

    def repeated(self, work: Callable[[], object], inside: int = 5) -> float:
        """Return the median time of one call, after a warm-up."""

        def several() -> None:
            for _ in range(inside):
                work()

        self.took(several)
        return statistics.median(self.took(several) for _ in range(self.size.rounds)) / inside

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def peak(self, work: Callable[[], object]) -> int | None:
        """Return the peak bytes of tensors during ``work``, including earlier ones, or None if the device
        does not count them.
        """
        gc.collect()
        if not self.on_gpu:
            work()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device)


def limits(bench: Bench) -> dict[str, float]:
    """Return the operations per second of a square matrix product in bfloat16, and the bytes per second of a
    copy (read and written). Both are medians.
    """
    size, device = bench.size.matrix, bench.device
    a, b = (torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(2))
    product = bench.repeated(lambda: a @ b)
    source = torch.zeros(size * size * 16, device=device, dtype=DTYPE)
    target = torch.empty_like(source)
    copy = bench.repeated(lambda: target.copy_(source))
    return {"operations": 2 * size**3 / product, "bytes": 2 * source.numel() * source.element_size() / copy}


def random_policy(bench: Bench, settings: Mapping[str, Any]) -> tuple[Policy, ModelShape]:
    """Make a model of this shape on the device, in bfloat16, with random weights and a non-zero adapter."""
    config = Qwen2Config(
        **settings, max_position_embeddings=32768, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    shape = measure_shape(model, LORA)
    chat = ChatTokenizer(character_tokenizer(ALPHABET))
    return counting(Policy(adapters.attach(model, LORA, 0), chat)), shape


def counting(policy: Policy) -> Policy:
    """Return the policy with a random B in its adapter."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 1e-2)
    return policy


def conversations(size: Size, vocabulary: int, number: int) -> list[OneTurn]:
    draw = generator(0, "prompts", number)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(size.prompt)] for _ in range(GROUPS)]
    return [
        OneTurn(prompt, derive(0, number, group, row))
        for group, prompt in enumerate(prompts)
        for row in range(SIBLINGS)
    ]


def decoding(bench: Bench, policy: Policy, shape: ModelShape, found: Mapping[str, float]) -> dict[str, Any]:
    """Return the tokens per second, those of Transformers, the maximum for the memory's bandwidth, and the
    mismatch of the sampled tokens.
    """
    size, vocabulary, rows = bench.size, shape.vocabulary, GROUPS * SIBLINGS
    engine = load_sampler(policy, EngineConfig(rows=rows))
    sampling = SamplingConfig(max_new_tokens=size.new, max_tokens=size.prompt + size.new)
    rounds = [conversations(size, vocabulary, number) for number in range(size.rounds + 1)]
    ours, theirs, steps = [], [], []
    for number, talks in enumerate(rounds):  # the ways alternate; the first round is a warm-up
        times = {"ours": bench.took(lambda talks=talks: steps.append(engine.generate(talks, sampling).steps))}
        tokens = torch.tensor([talk.prompt for talk in talks], device=bench.device)
        whole = {"attention_mask": torch.ones_like(tokens)}
        with torch.no_grad():
            times["theirs"] = bench.took(
                partial(policy.base.generate, tokens, generation_config=generation(size.new), **whole)
            )
        if number:
            ours.append(sum(len(talk.action) for talk in talks) / times["ours"])
            theirs.append(rows * size.new / times["theirs"])
    floor = DTYPE.itemsize * shape.multiplied / found["bytes"]
    speed = statistics.median(ours)
    return {
        "rows": rows,
        "shares_prompts": engine.shares,
        "tokens_per_second": speed,
        "generate_tokens_per_second": statistics.median(theirs),
        "bandwidth_tokens_per_second": rows / floor,
        "of_bandwidth": speed * floor / rows,
        "milliseconds_per_step": 1000 * rows / speed,
        "engine_steps": steps[-1],
        **mismatch(policy, rounds[-1]),
    }


def captured_step(bench: Bench, policy: Policy) -> dict[str, Any]:
    """Capture a decode step of the sampler's own decoder as a CUDA graph. Return the seconds of a replay and
    of the same step in eager mode, and the largest difference of their states.
    """
    rows, length = GROUPS * SIBLINGS, bench.size.prompt
    engine = LocalEngine(policy, EngineConfig(rows=rows))
    if engine.way != "lean":
        return {"way": engine.way}
    cache = engine.new_cache((1, 1, rows), (1, 1, length + 1))
    tokens = torch.full((rows, length), 3, device=bench.device)
    positions = torch.arange(length + 1, device=bench.device).expand(rows, -1)
    with sampling_weights(policy, engine.way), torch.no_grad():
        cache.read(policy, ROWS, range(rows), tokens, positions[:, :-1])
        mask, now = cache.place(ROWS, range(rows), positions[:, -1:]), tokens[:, -1:]

        def step() -> torch.Tensor:
            return policy.read(
                now,
                position_ids=positions[:, -1:],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )

        found: dict[str, Any] = {"way": engine.way, "eager": bench.repeated(step)}
        if bench.on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                states = step()
            found["graph"] = bench.repeated(graph.replay)
            found["apart"] = float((states - step()).abs().max())
    return found


def mismatch(policy: Policy, talks: Sequence[OneTurn]) -> dict[str, float]:
    """Return the difference of the trainer's and the sampler's log-probabilities in nats per token. k3
    estimates their KL divergence.
    """
    turns = [Turn(tuple(t.prompt), tuple(t.action), tuple(t.logprobs)) for t in talks if t.action]
    apart = []
    for start in range(0, len(turns), SIBLINGS):
        group = [Trajectory(Task("t"), (turn,)) for turn in turns[start : start + SIBLINGS]]
        batch = collate(group, [0] * len(group))
        with torch.no_grad():
            scored = policy.forward(batch, SamplingConfig()).logprobs.cpu()
        apart.append((scored - batch.logprobs)[batch.action_mask].double())
    ratio = torch.cat(apart)
    return {
        "mismatch_mean": float(ratio.abs().mean()),
        "mismatch_max": float(ratio.abs().max()),
        "mismatch_k3": float((ratio.exp() - 1 - ratio).mean()),
    }


def training(
    bench: Bench, policy: Policy, shape: ModelShape, found: Mapping[str, float], packed: bool
) -> dict[str, Any]:
    """Measure forward, backward and update of one group: the useful share of the arithmetic, the memory and
    its prediction.
    """
    size = bench.size
    point = Point("group", SIBLINGS, SIBLINGS, 1, size.observed, size.sampled, shared=size.observed)
    batch = point.batch(shape.vocabulary)
    way = policy if packed else Policy(policy.model, policy.chat, packing=False)
    positions = point.nodes if packed else point.padded
    stage = StageConfig.model_validate(
        {
            "algorithm": {"kind": "grpo"},
            "steps": 1,
            "tasks_per_step": 1,
            "group_size": SIBLINGS,
            "sampling": {"max_tokens": point.length, "max_new_tokens": size.sampled},
            "microbatch_tokens": positions,
        }
    )
    optimizer = build_optimizer(way.trainable_parameters(), stage.optimizer)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        (-way.forward(batch, SamplingConfig()).logprobs).sum().backward()
        optimizer.step()

    update()  # the first one makes AdamW's moments
    peak = bench.peak(update)
    took = statistics.median(bench.took(update) for _ in range(bench.size.rounds))
    model = MemoryModel(shape, DTYPE.itemsize, LORA.rank, packed=packed and way.packing, tiled=way.tiled)
    expected = stage_memory(model, stage, EngineConfig())
    useful = operations(policy, batch, packed)
    return {
        "packed": packed and way.packing,
        "positions": positions,
        "seconds": took,
        "positions_per_second": positions / took,
        "useful_operations": useful,
        "utilisation": useful / took / found["operations"],
        "predicted_bytes": sum(part.size for part in (*expected.always, *expected.training)),
        "allocated_bytes": peak,
    }


def real_policy(bench: Bench, name: str) -> tuple[Policy, ModelShape]:
    config = PretrainedConfig(model=name, dtype="bfloat16", device=str(bench.device))
    with torch.device("meta"):
        shape = measure_shape(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(cached(name)))), LORA
        )
    return counting(load_policy(config, 0)), shape


# -- the program ---------------------------------------------------------------------------------------------


class TimeUpError(Exception):
    """The time limit is reached."""


@dataclass
class Session:
    """The remaining time, and the results."""

    bench: Bench
    seconds: float
    output: Path
    begun: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def write(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.found, indent=1) + "\n")


def run_tests(session: Session, files: Sequence[str]) -> dict[str, Any]:
    """Run every test marked ``gpu`` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = f"-q -m gpu -p no:cacheprovider -W default --tb=short --junitxml={report}".split()
        command = [sys.executable, "-m", "pytest", *options, *files]
        limit = max(1.0, min(240.0, session.left - 5))
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": "the tests did not end in time"}
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    states = {case.get("name", ""): {child.tag for child in case} for case in cases}
    wrong = [name for name, tags in states.items() if tags & {"failure", "error"}]
    skips = sum("skipped" in tags for tags in states.values())
    counts = {"passed": len(states) - len(wrong) - skips, "failed": wrong, "skipped": skips}
    failed = done.returncode not in (0, 5)  # 5: there was no test
    return counts | ({"output": done.stdout[-6000:] + done.stderr[-2000:]} if failed else {})


def model_section(
    session: Session, make: Callable[[], tuple[Policy, ModelShape]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part of a model's results as soon as it is measured."""
    found, bench = session.found["limits"], session.bench
    policy, shape = make()
    place = {"device": str(policy.device), "dtype": str(policy.dtype)}
    yield "model", {"parameters": shape.parameters, "packs": policy.packing, **place}
    yield "decoding", decoding(bench, policy, shape, found)
    yield "captured step", captured_step(bench, policy)
    for packed in (True, False):
        yield "packed" if packed else "padded", training(bench, policy, shape, found, packed)


@contextmanager
def ending_in(seconds: float) -> Iterator[None]:
    """Raise TimeUpError inside the block after this many seconds."""

    def ring(*_: object) -> None:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(session: Session, sections: Mapping[str, Callable[[], Any]]) -> None:
    """Run the sections in order. A failure is recorded, and the next section runs."""
    for name, work in sections.items():
        content: dict[str, Any] = {}
        session.found[name] = content
        begun = time.monotonic()
        try:
            with ending_in(session.left):
                result = work()
                for part, value in result.items() if isinstance(result, Mapping) else result:
                    content[part] = value
        except TimeUpError:
            content["error"] = "the time was up"
        except Exception as error:  # the other sections still run
            content["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            content["traceback"] = traceback.format_exc()[-4000:]
        content["section_seconds"] = time.monotonic() - begun
        session.write()
        gc.collect()
        if session.bench.on_gpu:
            torch.cuda.empty_cache()


def print_results(session: Session) -> None:
    found = session.found
    speed = found.get("limits", {})
    if "operations" in speed:
        title = f"{found['machine']['device']}: {speed['operations'] / 1e12:.0f} TFLOP/s in bfloat16, "
        models = {name: parts for name, parts in found.items() if name not in ("machine", "limits", "tests")}
        rows = [
            (name, part, sentence(part, row))
            for name, parts in models.items()
            for part, row in parts.items()
            if isinstance(row, Mapping)
        ]
        show(table("model|part|", rows, f"{title}{speed['bytes'] / 1e9:.0f} GB/s"))
    if "tests" in found:
        show({key: value for key, value in found["tests"].items() if key != "output"})
    show(*(f"{name}: {parts['error']}" for name, parts in found.items() if "error" in parts))
    show(f"{session.seconds - session.left:.0f} s; {session.output}")


def sentence(part: str, row: Mapping[str, Any]) -> str:
    if part == "decoding":
        return (
            f"{row['tokens_per_second']:.0f} tokens/s, {100 * row['of_bandwidth']:.0f} % of the bandwidth; "
            f"generate {row['generate_tokens_per_second']:.0f}; "
            f"mismatch {row['mismatch_mean']:.2g} nats on average, "
            f"{row['mismatch_max']:.2g} at most, k3 {row['mismatch_k3']:.2g}"
        )
    if part in ("packed", "padded"):
        bytes_ = row["allocated_bytes"]
        memory = (
            ""
            if bytes_ is None
            else f", allocated {bytes_ / 1e9:.2f} GB (ratio {row['predicted_bytes'] / bytes_:.2f})"
        )
        speed = f"{row['positions_per_second']:.0f} positions/s, {100 * row['utilisation']:.0f} % of the GPU"
        return f"{speed}; predicted {row['predicted_bytes'] / 1e9:.2f} GB{memory}"
    return ", ".join(f"{key} {value}" for key, value in row.items())


def marked_tests() -> list[str]:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in tests if "mark.gpu" in path.read_text()]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    given = command_line(
        __doc__,
        None,
        arguments,
        quick={"tiny": True, "only": ["0.5B"]},
        seconds=480.0,
        device="cuda",
        output=RESULTS / "gpu.json",
        only={"nargs": "+", "help": "run only these sections"},
        tests=marked_tests(),  # files
        tiny=False,
    )
    if given.quick and given.device == "cuda" and not torch.cuda.is_available():
        skipped("all of it: there is no CUDA device; tests/devices/test_gpu_benchmark.py runs it on a CPU")
        return {}
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device(given.device)
    size = Size(prompt=16, new=4, observed=12, sampled=4, matrix=64, rounds=1) if given.tiny else Size()
    bench = Bench(device, size)
    session = Session(bench, given.seconds, given.output)
    name = torch.cuda.get_device_name(device) if bench.on_gpu else platform.processor() or "CPU"
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    versions["python"] = platform.python_version()
    session.found["machine"] = {"device": name, **versions, "tiny": given.tiny}
    sections: dict[str, Callable[[], Any]] = {
        "limits": partial(limits, bench),
        "tests": partial(run_tests, session, given.tests),
    }
    for model, shape in SHAPES.items():
        make = partial(random_policy, bench, shape | (TINY if given.tiny else {}))
        sections[model] = partial(model_section, session, make)
    if cached(REAL) is not None and not given.tiny:
        sections[REAL] = partial(model_section, session, partial(real_policy, bench, REAL))
    chosen = {*(given.only or sections), "limits"}
    run(session, {name: work for name, work in sections.items() if name in chosen})
    print_results(session)
    return session.found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    main()
