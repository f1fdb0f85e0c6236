"""What works on a CPU works on a GPU. Each test runs on a real one where there is one, and everywhere on
one that is pretended, which finds tensors that were made in the wrong place. The pretended one is tested
at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM

from agent_peft.algorithms import ALGORITHMS
from agent_peft.batch import Batch, collate
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings, ScratchConfig
from agent_peft.policies.engine import kv_cache, load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.engine.shared_attention import PrefixGroups, group_by_prefix
from agent_peft.policies.forward.microbatching import Microbatching
from agent_peft.policies.models.pretrained import build_model
from agent_peft.policies.models.shape import scratch_architecture
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.ranks import Ranks
from agent_peft.seeding import derive, generator
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import Task, Trajectory, Turn

pytestmark = pytest.mark.filterwarnings(
    "ignore:User provided device_type of 'cuda', but CUDA is not available"
)

PLAIN = SamplingConfig(max_new_tokens=4, max_tokens=48)
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
LORA = LoraSettings(rank=4, alpha=8)

each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
lora_or_whole = pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "whole"])


def real(test: Callable[[], None]) -> Callable[[], None]:
    """Only on a GPU that is there."""
    skips = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"
    )
    found: Callable[[], None] = pytest.mark.gpu(skips(test))
    return found


def make_policy(
    device: torch.device,
    dtype: str = "float32",
    lora: LoraSettings | None = LORA,
    architecture: Mapping[str, int] = MappingProxyType({}),
    **more: bool,
) -> Policy:
    """A random one; where there is an adapter it counts: B is random, too."""
    tokenizer = character_tokenizer(ALPHABET)
    config = ScratchConfig(architecture={**ARCHITECTURE, **architecture}, alphabet=ALPHABET)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(scratch_architecture(config, tokenizer), getattr(torch, dtype)).to(device)
    if lora is not None:
        model = adapters.attach(model, lora, 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return Policy(model, ChatTokenizer(tokenizer), **more)


@dataclass
class Talk:
    """A conversation of three turns whose observations are fixed."""

    prompt: Sequence[int]
    seed: int
    answers: Sequence[Sequence[int]] = ((3, 4), (5, 6, 7))
    turns: list[Turn] = field(default_factory=list)

    def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
        place = len(self.turns)
        self.turns.append(
            Turn(
                tuple(self.prompt if place == 0 else self.answers[place - 1]), tuple(action), tuple(logprobs)
            )
        )
        return self.answers[place] if place < len(self.answers) and len(self.answers[place]) < room else None


def make_talks(groups: int = 2, siblings: int = 2) -> list[Talk]:
    """Prompts of several lengths that begin alike, each with siblings."""
    draw = generator(0, "talks")
    beginning = [draw.randrange(3, 12) for _ in range(5)]
    prompts = [
        [*beginning, *(draw.randrange(3, 12) for _ in range(4 + 2 * group))] for group in range(groups)
    ]
    return [
        Talk(prompt, derive(0, group, sibling))
        for group, prompt in enumerate(prompts)
        for sibling in range(siblings)
    ]


def make_batch(length: int = 20, count: int = 6) -> Batch:
    """Two groups, whose trajectories share half of their tokens."""
    trajectories = []
    for number in range(count):
        shared, own = generator(0, number % 2), generator(1, number)
        read = tuple(shared.randrange(3, 12) for _ in range(length // 2))
        action = tuple(own.randrange(3, 12) for _ in range(length // 2 - number % 3))
        trajectories.append(Trajectory(Task(f"t{number % 2}"), (Turn(read, action, (-1.0,) * len(action)),)))
    return collate(trajectories, [number % 2 for number in range(count)])


def is_on(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return len(tensors) > 0 and all(tensor.device == device for tensor in tensors)


def gradient(policy: Policy, batch: Batch, **more: Any) -> Tensor:
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    policy.forward(batch, PLAIN, **more).logprobs.sum().backward()
    found = [p.grad for p in policy.trainable_parameters() if p.grad is not None]
    assert is_on(found, policy.device)
    return torch.cat([g.float().flatten() for g in found]).cpu()


@lora_or_whole
@each_dtype
def test_packed_padded_and_the_models_own_forward_are_one(gpu, dtype, lora):
    policy, batch = make_policy(gpu, dtype, lora), make_batch()
    padding = Policy(policy.model, policy.chat, packing=False)
    with torch.no_grad():
        packed, padded = (way.forward(batch, PLAIN).logprobs for way in (policy, padding))
        own = policy.model(input_ids=batch.tokens.to(gpu)).logits.float().log_softmax(-1)
    assert policy.packing and is_on([packed, padded], gpu)
    mask = batch.action_mask.to(gpu)
    expected = own[:, :-1].gather(-1, batch.tokens.to(gpu)[:, 1:, None]).squeeze(-1)
    for found in (packed, padded):
        assert policy.drift((found[:, 1:] - expected)[mask[:, 1:]]) <= policy.rounding


@lora_or_whole
@each_dtype
def test_the_engine_says_what_a_forward_says(gpu, dtype, lora):
    policy, talks = make_policy(gpu, dtype, lora), make_talks()
    engine = load_sampler(policy, EngineConfig(rows=3))
    assert engine.shares
    engine.generate(talks, PLAIN)
    trajectories = [Trajectory(Task(str(number)), tuple(talk.turns)) for number, talk in enumerate(talks)]
    batch = collate(trajectories, [number // 2 for number in range(len(talks))])
    with torch.no_grad():
        scored = policy.forward(batch, PLAIN).logprobs.cpu()
    assert policy.drift((scored - batch.logprobs)[batch.action_mask]) <= policy.rounding
    tokens = batch.tokens[0, : int(batch.lengths[0])].tolist()
    assert policy.drift(
        (torch.tensor(engine.score(tokens, PLAIN)) - scored[0, 1 : len(tokens)])[
            batch.action_mask[0, 1 : len(tokens)]
        ]
    ) <= (policy.rounding)


@lora_or_whole
def test_the_gradient_is_that_of_a_cpu_with_less_memory_too(gpu, lora):
    batch = make_batch()
    expected = gradient(make_policy(torch.device("cpu"), lora=lora), batch)
    for more in ({}, {"packing": False}, {"activation_checkpointing": True}):
        torch.testing.assert_close(
            gradient(make_policy(gpu, lora=lora, **more), batch), expected, rtol=1e-3, atol=1e-4
        )


def make_trainer(policy: Policy, algorithm: str, **more: Any) -> Trainer:
    # maxrl divides by a group's mean return, which must not be below 0
    rewards = {"invalid_action": -0.5} | ({"incorrect": 0.6} if algorithm == "maxrl" else {})
    demonstrated = algorithm in {"sft", "dpo", "kto", "orpo", "simpo"}
    on_policy = {} if demonstrated else {"group_size": 4, "rewards": rewards}
    kind = {"kind": algorithm, **({"constant_length": 8} if algorithm == "dr_grpo" else {})}
    if algorithm == "distill":
        on_policy["teacher"] = {"prompt": "{solution}={task}"}
    stage = {
        "algorithm": kind,
        "steps": 1,
        "tasks_per_step": 2,
        "optimizer": {"learning_rate": 1e-2},
        **on_policy,
        **more,
    }
    settings = StageConfig.model_validate({"sampling": {"max_new_tokens": 3, "max_tokens": 64}, **stage})
    return Trainer(
        policy,
        Arithmetic(ArithmeticConfig(digits=1, num_tasks=10)),
        settings,
        load_sampler(policy, EngineConfig()),
        0,
    )


FAST = {"sft", "grpo", "ppo", "distill", "dpo", "kto"}  # each way of learning


@pytest.mark.parametrize(
    "algorithm", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in ALGORITHMS]
)
def test_each_algorithm_takes_its_steps(gpu, algorithm):
    policy = make_policy(gpu, "bfloat16")
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    for step in make_trainer(policy, algorithm):
        assert all(math.isfinite(value) for value in step.metrics.values())
    after = policy.trainable_parameters()
    assert is_on(after, gpu) and any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


@each_dtype
def test_all_parameters_are_trained_there_too(gpu, dtype):
    policy = make_policy(gpu, dtype, lora=None)
    before = [p.detach().clone() for p in policy.trainable_parameters()]
    list(make_trainer(policy, "ppo"))
    assert any(not torch.equal(p, q) for p, q in zip(before, policy.trainable_parameters(), strict=True))


def test_what_is_saved_there_goes_on_on_a_cpu(gpu, tmp_path):
    trainer = make_trainer(make_policy(gpu), "ppo", steps=2)
    assert next(iter(trainer)).number == 0
    trainer.save(tmp_path)
    again = make_trainer(make_policy(torch.device("cpu")), "ppo", steps=2)
    again.load(tmp_path)
    for ours, theirs in zip(again.parameters, trainer.parameters, strict=True):
        assert ours.device.type == "cpu" and torch.equal(ours, theirs.cpu())
    assert len(list(again)) == 1


def test_merged_it_says_the_same(gpu, tmp_path):
    policy, tokens = make_policy(gpu), make_batch().tokens[:1]
    with torch.no_grad():
        expected = policy.model(input_ids=tokens.to(gpu)).logits.cpu()
    policy.save_merged(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).to(gpu)
    with torch.no_grad():
        torch.testing.assert_close(
            merged(input_ids=tokens.to(gpu)).logits.cpu(), expected, rtol=1e-3, atol=1e-3
        )


def test_a_group_of_one_rank_sums_to_itself(gpu, tmp_path):
    """NCCL between GPUs."""
    real = torch.cuda.is_available()
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if real else "gloo",
        init_method=f"file://{tmp_path / 'rendezvous'}",
        rank=0,
        world_size=1,
    )
    try:
        ranks = Ranks(rank=0, world_size=2)  # two, lest it asks nobody
        assert torch.equal(ranks.sum(torch.ones(3, device=gpu)).cpu(), torch.ones(3))
        policy = make_policy(gpu)
        expected = gradient(policy, make_batch())
        ranks.sum_gradients(policy.trainable_parameters())
        found = [p.grad for p in policy.trainable_parameters() if p.grad is not None]
        assert is_on(found, gpu) and torch.equal(torch.cat([g.flatten() for g in found]).cpu(), expected)
    finally:
        distributed.destroy_process_group()


# -- what a pretended GPU has not ----------------------------------------------------------------------------


@real
def test_dropout_is_what_its_seed_says():
    gpu = torch.device("cuda", 0)
    policy, batch = make_policy(gpu, lora=LoraSettings(rank=4, alpha=8, dropout=0.5)), make_batch()
    first, again, other = (gradient(policy, batch, dropout_seed=seed) for seed in (1, 1, 2))
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first, other)


@real
def test_a_full_memory_halves_the_microbatch_and_the_gradient_stays():
    gpu, batch = torch.device("cuda", 0), make_batch(length=512, count=16)
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    policy = make_policy(gpu, packing=False, architecture=wide)

    def work() -> Tensor:
        for parameter in policy.trainable_parameters():
            parameter.grad = None
        for rows in microbatching.cut(batch, torch.ones(len(batch), dtype=torch.bool)):
            policy.forward(batch.select(rows), PLAIN).logprobs.sum().backward()
        return torch.cat(
            [p.grad.flatten().cpu() for p in policy.trainable_parameters() if p.grad is not None]
        )

    microbatching = Microbatching(1 << 20, policy.count_nodes)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    expected = work()
    needed = torch.cuda.max_memory_reserved(gpu) - before
    del policy  # and its gradients
    policy = make_policy(gpu, packing=False, architecture=wide)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(gpu) + needed // 2
    torch.cuda.set_per_process_memory_fraction(
        allowed / torch.cuda.get_device_properties(gpu).total_memory, gpu
    )
    try:
        found = microbatching.within_memory(work)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert microbatching.halvings > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# -- the pretended GPU ---------------------------------------------------------------------------------------


def mixed() -> dict[str, Callable[[Tensor, Tensor], object]]:
    def backward(cpu: Tensor, gpu: Tensor) -> None:
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * torch.full(gradient.shape, 2.0)

        Wrong.apply(gpu.requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]

    return {
        "a sum": lambda cpu, gpu: cpu + gpu,
        "a list": lambda cpu, gpu: torch.stack([cpu, gpu]),
        "a keyword": lambda cpu, gpu: torch.add(input=gpu, other=cpu),
        "a view": lambda cpu, gpu: cpu[:2] * gpu[:2],
        "an index": lambda cpu, gpu: cpu[torch.tensor([0], device="cuda")],
        "values": lambda cpu, gpu: gpu.index_put_((torch.tensor([0]),), cpu[:1]),
        "a mask": lambda cpu, gpu: gpu.masked_fill(cpu > 0, 1.0),
        "a layer": lambda cpu, gpu: torch.nn.Linear(3, 2)(gpu),
        "numpy": lambda cpu, gpu: gpu.numpy(),
        "a backward": backward,
    }


@pytest.mark.parametrize("mistake", list(mixed()))
def test_two_devices_in_one_operator_are_found(pretended_gpu, mistake):
    with pretended_gpu():
        cpu, gpu = torch.ones(3), torch.ones(3, device="cuda")
        with pytest.raises((RuntimeError, TypeError), match=r"same device|to numpy"):
            mixed()[mistake](cpu, gpu)
        assert (
            gpu.device
            == gpu.to("cuda").device
            == cpu.cuda().device
            == torch.zeros_like(gpu).device
            == (gpu * cpu[0].sum()).device
        )
        assert (
            cpu.device
            == gpu.cpu().device
            == cpu.to(gpu).cpu().device
            == torch.zeros(2).device
            == torch.device("cpu")
        )
        assert gpu[torch.tensor([0])].is_cuda and not cpu.is_cuda and (gpu.cpu() == cpu).all()
    assert gpu.device == torch.device("cpu"), "outside there is no such thing"


def test_a_tensor_that_the_engine_makes_in_the_wrong_place_is_found(pretended_gpu, monkeypatch):
    def wrong(
        parents: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> PrefixGroups:
        return group_by_prefix(parents, lengths, dtype, torch.device("cpu"))

    with pretended_gpu():
        engine = load_sampler(make_policy(torch.device("cuda", 0)), EngineConfig())
        engine.generate(make_talks(), PLAIN)
        monkeypatch.setattr(kv_cache, "group_by_prefix", wrong)
        with pytest.raises(RuntimeError, match="same device"):
            engine.generate(make_talks(), PLAIN)
