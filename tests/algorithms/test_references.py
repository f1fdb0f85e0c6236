"""Every row against its paper's equation: values and gradients, of a real model, packed and padded, over
microbatches. A reference goes trajectory by trajectory in float64, without any code of the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agent_peft.algorithms import ALGORITHMS, Algorithm
from agent_peft.batch import Batch, collate
from agent_peft.policies.models.tokenizer import character_tokenizer
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.types import Task, Trajectory, Turn

# (prompt, [(observation, action), ...], reward, group): ragged, of one and of two turns, an answer of one
# token, and a trajectory without any action. The last group has no variance.
EPISODES = [
    ((5, 6, 7), [((), (8, 9, 10, 2))], 1.0, 0),
    ((5, 6, 7), [((), (8, 9)), ((4, 11), (3, 12, 2))], 0.0, 0),
    ((5, 6, 7), [((), (2,))], 0.5, 0),
    ((5, 6), [((), (13, 7, 2)), ((9,), (2,))], 0.0, 1),
    ((5, 6), [((), ())], 0.25, 1),
    ((5, 6), [((), (13, 8, 8, 8, 8, 2))], 1.0, 1),
    ((4,), [((), (3, 3))], 1.0, 2),
    ((4,), [((), (3, 2))], 1.0, 2),
]


@dataclass(frozen=True)
class Episode:
    """The sampled tokens of an episode; (n,) float64."""

    now: Tensor  # log π, with gradient
    old: Tensor
    reference: Tensor
    entropy: Tensor
    reward: float
    peers: Tensor  # the rewards of its group, its own included

    @property
    def rho(self) -> Tensor:
        return (self.now - self.old).exp()


Reference = Callable[[Sequence[Episode]], Tensor]


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


def normalized(e: Episode) -> Tensor:
    return (e.reward - e.peers.mean()) / (e.peers.std() + 1e-6)


def clip_objective(rho: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage)


def reinforce(episodes: Sequence[Episode]) -> Tensor:
    """Williams, 1992, with b = 0.25 and the mean over episodes."""
    return -mean([(e.reward - 0.25) * e.now.sum() for e in episodes])


def rloo(episodes: Sequence[Episode]) -> Tensor:
    """Ahmadian et al., 2024, section 3.3, with importance weights. KL in the loss: ∇ of it is ρ (log π - log
    reference) ∇ log π (Schulman, 2020), which is that of ρ (log ratio)² / 2 with ρ held fixed.
    """
    total = []
    for e in episodes:
        others = (e.peers.sum() - e.reward) / (len(e.peers) - 1)
        total.append((e.rho * (e.reward - others)).sum())
    return -mean(total)


def grpo(episodes: Sequence[Episode]) -> Tensor:
    """Shao et al., 2024, equation 3: a mean over answers of the mean over their tokens."""
    spoken = [e for e in episodes if len(e.now)]
    return -mean([clip_objective(e.rho, normalized(e), 0.2, 0.2).mean() for e in spoken])


def dual_grpo(episodes: Sequence[Episode]) -> Tensor:
    """Ye et al., 2020: max(min(ρ Â, clip(ρ) Â), c Â) where Â < 0, with c = 1.5."""
    values = []
    for e in (e for e in episodes if len(e.now)):
        advantage = normalized(e)
        objective = clip_objective(e.rho, advantage, 0.2, 0.2)
        values.append((torch.maximum(objective, 1.5 * advantage) if advantage < 0 else objective).mean())
    return -mean(values)


def dapo(episodes: Sequence[Episode]) -> Tensor:
    """Yu et al., 2025, equation 8: one mean over all tokens, ε_low 0.2, ε_high 0.28."""
    return -torch.cat([clip_objective(e.rho, normalized(e), 0.2, 0.28) for e in episodes]).mean()


def dr_grpo(episodes: Sequence[Episode]) -> Tensor:
    """Liu et al., 2025, section 3.2: no std, and a constant length of 7."""
    return -mean([clip_objective(e.rho, e.reward - e.peers.mean(), 0.2, 0.2).sum() / 7 for e in episodes])


def gspo(episodes: Sequence[Episode]) -> Tensor:
    """Zheng et al., 2025, equations 5 to 7, with wider ε, so that some are clipped and some are not."""
    values = []
    for e in (e for e in episodes if len(e.now)):
        s = ((e.now - e.old).sum() / len(e.now)).exp()
        values.append(clip_objective(s, normalized(e), 0.02, 0.03))
    return -mean(values)


def cispo(episodes: Sequence[Episode]) -> Tensor:
    """MiniMax-M1, 2025, equations 4 and 5, with a cap of 1.5."""
    return -torch.cat([e.rho.detach().clamp(max=1.5) * normalized(e) * e.now for e in episodes]).mean()


def icepop(episodes: Sequence[Episode]) -> Tensor:
    """INTELLECT-3, 2025, equation 1, with a band of [0.8, 1.25]."""
    values = torch.cat([e.rho * normalized(e) for e in episodes])
    inside = torch.cat([(e.rho >= 0.8) & (e.rho <= 1.25) for e in episodes])
    return -(values * inside).mean()


def maxrl(episodes: Sequence[Episode]) -> Tensor:
    """Tajwar et al., 2026: (r - mean) / mean, and the mean over episodes of the score of the whole."""
    return -mean([(e.rho * (e.reward - e.peers.mean()) / (e.peers.mean() + 1e-6)).sum() for e in episodes])


def reinforce_plus_plus(episodes: Sequence[Episode], group_mean: float = 0.0) -> Tensor:
    """Hu et al., 2025: A_t = r - β Σ_{i ≥ t} log(π_old / π_reference), over the batch's mean and std."""
    raw = []
    for e in episodes:
        kl = e.old - e.reference
        to_go = torch.tensor([float(kl[t:].sum()) for t in range(len(kl))], dtype=torch.float64)
        raw.append(e.reward - group_mean * e.peers.mean() - 0.1 * to_go)
    every = torch.cat(raw)
    advantages = [(a - every.mean()) / (every.std(correction=0) + 1e-8) for a in raw]
    pairs = [(e, a) for e, a in zip(episodes, advantages, strict=True) if len(e.now)]
    return -mean([clip_objective(e.rho, a, 0.2, 0.2).mean() for e, a in pairs])


def reinforce_plus_plus_baseline(episodes: Sequence[Episode]) -> Tensor:
    return reinforce_plus_plus(episodes, group_mean=1.0)


def penalized(row: Reference) -> Reference:
    """Any row of a mean over tokens with 0.1 KL(π ‖ reference) - 0.01 entropy: the penalty's gradient alone
    is told, ρ (log π - log reference) ∇ log π.
    """

    def loss(episodes: Sequence[Episode]) -> Tensor:
        kl = torch.cat([e.rho.detach() * (e.now - e.reference).square() / 2 for e in episodes])
        value = torch.cat([e.rho * ((e.reference - e.now).expm1() - (e.reference - e.now)) for e in episodes])
        kl = kl + (value - kl).detach()  # the value of ρ k3 with that gradient
        return row(episodes) + 0.1 * kl.mean() - 0.01 * torch.cat([e.entropy for e in episodes]).mean()

    return loss


PENALTIES = {"kl_coef": 0.1, "entropy_coef": 0.01}
ROWS: dict[str, tuple[dict[str, Any], Reference]] = {
    "reinforce": ({"kind": "reinforce", "baseline_start": 0.25}, reinforce),
    "reinforce_plus_plus": ({"kind": "reinforce_plus_plus", "reward_kl_coef": 0.1}, reinforce_plus_plus),
    "reinforce_plus_plus_baseline": (
        {"kind": "reinforce_plus_plus", "reward_kl_coef": 0.1, "group_baseline": True},
        reinforce_plus_plus_baseline,
    ),
    "rloo": ({"kind": "rloo"}, rloo),
    "grpo": ({"kind": "grpo"}, grpo),
    "dual_clip": ({"kind": "grpo", "dual_clip": 1.5}, dual_grpo),
    "dapo": ({"kind": "dapo"}, dapo),
    "dapo_penalized": ({"kind": "dapo", **PENALTIES}, penalized(dapo)),
    "dr_grpo": ({"kind": "dr_grpo", "constant_length": 7}, dr_grpo),
    "gspo": ({"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03}, gspo),
    "cispo": ({"kind": "cispo", "clip_high": 0.5}, cispo),
    "cispo_penalized": ({"kind": "cispo", "clip_high": 0.5, **PENALTIES}, penalized(cispo)),
    "maxrl": ({"kind": "maxrl"}, maxrl),
    "policy_gradient": (
        {
            "kind": "policy_gradient",
            "surrogate": "band",
            "clip_low": 0.2,
            "clip_high": 0.25,
            "weighting": "token_mean",
        },
        icepop,
    ),
}


def test_every_row_has_its_reference():
    rows = {kind for kind, config in ALGORITHMS.items() if config.__module__.endswith((".rows", ".parts"))}
    assert rows == {keys["kind"] for keys, _ in ROWS.values()}


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def policy(request) -> Policy:
    tokenizer = character_tokenizer("0123456789+-*= \n")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,  # far from uniform
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    made = Policy(model, ChatTokenizer(tokenizer), packing=request.param)
    assert made.packing == request.param
    return made


def rollout() -> Batch:
    trajectories, groups = [], []
    for prompt, turns, reward, group in EPISODES:
        made = tuple(
            Turn((prompt if number == 0 else ()) + observation, action, (0.0,) * len(action))
            for number, (observation, action) in enumerate(turns)
        )
        trajectories.append(Trajectory(Task("t"), made, rewards=(reward, 0.0)[: len(made)]))
        groups.append(group)
    return collate(trajectories, groups)


def with_logprobs(policy: Policy, batch: Batch, noise: float = 0.5) -> tuple[Batch, list[Episode], Any]:
    """The batch with a sampler and a reference that differ from the policy by noise, its episodes for a
    reference equation, and the model in float64 that they have their gradient in.
    """
    exact = copy.deepcopy(policy.model).double()
    generator = torch.Generator().manual_seed(0)
    old, reference = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs)
    episodes = []
    for row, mask in enumerate(batch.action_mask):
        tokens = batch.tokens[row, : batch.lengths[row]]
        logits = exact(tokens[None]).logits[0, :-1].log_softmax(-1)
        places = mask.nonzero()[:, 0]
        now = logits[places - 1, tokens[places]]
        drift = noise * torch.randn(2, len(places), generator=generator)
        old[row, places], reference[row, places] = (now.detach() + drift).float()
        entropy = -(logits.exp() * logits).sum(-1)[places - 1]
        peers = batch.returns[batch.groups == batch.groups[row]].double()
        there = (old[row, places].double(), reference[row, places].double())
        episodes.append(Episode(now, *there, entropy, float(batch.returns[row]), peers))
    return replace(batch, logprobs=old, scored_logprobs=old, reference_logprobs=reference), episodes, exact


def loss_and_gradient(
    policy: Policy, algorithm: Algorithm, batch: Batch, parts: Sequence[Sequence[int]]
) -> Any:
    """The sums of the loss and of the gradients of the model's weights over microbatches."""
    weighed, denominator = algorithm.weigh(algorithm.prepare(batch))
    weighed = replace(weighed, weights=weighed.weights / denominator)
    total = 0.0
    policy.model.zero_grad()
    for rows in parts:
        microbatch = weighed.select(rows)
        output = policy.forward(microbatch, SamplingConfig(), entropy=algorithm.needs_entropy)
        loss, _ = algorithm.loss(output, microbatch)
        total += float(loss.detach())
        if loss.requires_grad:
            loss.backward()
    return total, [p.grad for p in policy.model.parameters()]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_its_papers_equation(policy, name):
    keys, reference = ROWS[name]
    batch, episodes, exact = with_logprobs(policy, rollout())
    if keys.get("reward_kl_coef", 0) + keys.get("kl_coef", 0) == 0:
        batch = replace(batch, reference_logprobs=None)
    expected = reference(episodes)
    expected.backward()
    gradients = [p.grad for p in exact.parameters()]
    size = max(float(gradient.abs().max()) for gradient in gradients)
    assert size > 0.01, size
    for parts in ([range(8)], [[7], [2, 5, 0], [4, 6, 1, 3]]):
        algorithm = ALGORITHMS[keys["kind"]](**keys).build()
        loss, found = loss_and_gradient(policy, algorithm, batch, parts)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
        for ours, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
