"""The measurements of a model in ``gpu.py``: the speed of decoding and training, the memory, and the
difference between sampler and trainer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from training import Point
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2Config

from agent_peft.batch import Batch, collate
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings, PretrainedConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.forward.trie import build_trie
from agent_peft.policies.loading import load_policy
from agent_peft.policies.memory import MemoryModel, Part, stage_memory
from agent_peft.policies.models.bundled import cached
from agent_peft.policies.models.shape import ModelShape, measure
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.seeding import derive, generator
from agent_peft.training.optimizer import build_optimizer
from agent_peft.training.stage import StageConfig
from agent_peft.types import Task, Trajectory, Turn

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
    shape = measure(model, LORA)
    return counting(
        Policy(adapters.attach(model, LORA, 0), ChatTokenizer(character_tokenizer(ALPHABET)))
    ), shape


def counting(policy: Policy) -> Policy:
    """Return the policy with a random B in its adapter."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 1e-2)
    return policy


@dataclass
class OneTurn:
    """A conversation that ends after one action."""

    prompt: Sequence[int]
    seed: int
    action: Sequence[int] = ()
    logprobs: Sequence[float] = ()

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> None:
        self.action, self.logprobs = action, logprobs


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
        times["theirs"] = bench.took(lambda tokens=tokens: generate(policy, tokens, size.new))
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


def generate(policy: Policy, tokens: torch.Tensor, new: int) -> None:
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.no_grad():
        policy.base.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)


def mismatch(policy: Policy, talks: Sequence[OneTurn]) -> dict[str, float]:
    """Return the difference of the trainer's and the sampler's log-probabilities in nats per token. k3
    estimates their KL divergence.
    """
    trajectories = [
        Trajectory(Task("t"), (Turn(tuple(t.prompt), tuple(t.action), tuple(t.logprobs)),))
        for t in talks
        if t.action
    ]
    apart = []
    for start in range(0, len(trajectories), SIBLINGS):
        batch = collate(
            trajectories[start : start + SIBLINGS], [0] * len(trajectories[start : start + SIBLINGS])
        )
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
    point = Point(
        "group",
        SIBLINGS,
        size=SIBLINGS,
        turns=1,
        observed=size.observed,
        sampled=size.sampled,
        shared=size.observed,
    )
    batch, way = (
        point.batch(shape.vocabulary),
        policy if packed else Policy(policy.model, policy.chat, packing=False),
    )
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
        "predicted_bytes": total(expected.always) + total(expected.training),
        "allocated_bytes": peak,
    }


def total(parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts)


def operations(policy: Policy, batch: Batch, packed: bool) -> float:
    """Return the minimum of operations: 2 per weight forward and 2 backward (frozen), 6 per weight of the
    adapter, the same for the output layer at sampled tokens only, and attention's two products forward and
    five backward over the visible pairs.
    """
    lora = sum(p.numel() for p in policy.trainable_parameters())
    frozen = (
        sum(
            p.numel()
            for m in policy.decoder.modules()
            if isinstance(m, torch.nn.Linear)
            for p in m.parameters()
        )
        - lora
    )
    shape = policy.base.config
    sequences = [batch.tokens[row, : int(batch.lengths[row])].tolist() for row in range(len(batch))]
    depths = (
        build_trie(sequences).positions
        if packed
        else [depth for sequence in sequences for depth in range(len(sequence))]
    )
    attention = 14 * shape.num_hidden_layers * shape.hidden_size * sum(depth + 1 for depth in depths)
    head = 4 * shape.hidden_size * shape.vocab_size * int(batch.action_mask.sum())
    return float(len(depths) * (4 * frozen + 6 * lora) + attention + head)


def real_policy(bench: Bench, name: str) -> tuple[Policy, ModelShape]:
    config = PretrainedConfig(model=name, dtype="bfloat16", device=str(bench.device))
    with torch.device("meta"):
        shape = measure(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(cached(name)))), LORA)
    return counting(load_policy(config, 0)), shape
