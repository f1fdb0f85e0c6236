"""Every algorithm raises the reward of an agent that adds one-digit numbers, within seconds.

From random weights an agent is never right, and RL has nothing to make likelier. So each RL test starts from
the same model, which a little supervised training has made right about one time in three, and trains a LoRA
adapter on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.environments.questions import QuestionEpisode
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.ranks import ALONE
from agent_peft.rollout.pairs import EpisodePairs
from agent_peft.training.source import build_source
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import Group, Message, Task

TASKS = Arithmetic(ArithmeticConfig(digits=1, num_tasks=24))
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # features rich enough for an adapter, which leaves the embeddings as they are
}


def rewards(
    policy: Policy, algorithm: dict[str, Any], steps: int, learning_rate: float, **stage: Any
) -> list[dict[str, float]]:
    """The metrics of ``steps`` steps."""
    settings = {
        "algorithm": algorithm,
        "steps": steps,
        "optimizer": {"learning_rate": learning_rate},
        **stage,
    }
    trainer = Trainer(
        policy, TASKS, StageConfig.model_validate(settings), load_sampler(policy, EngineConfig()), seed=0
    )
    return [step.metrics for step in trainer]


def scratch() -> Policy:
    return load_policy(ScratchConfig(architecture=ARCHITECTURE, alphabet=ALPHABET, device="cpu"), seed=0)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    policy, folder = scratch(), tmp_path_factory.mktemp("warm")
    rewards(policy, {"kind": "sft"}, steps=6, learning_rate=3e-3, tasks_per_step=24)
    policy.save_merged(folder)
    return folder


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "grpo"},
        *(
            pytest.param(row, marks=pytest.mark.slow, id=row["kind"])
            for row in (
                {"kind": "policy_gradient", "surrogate": "band", "minibatches": 2},
                {"kind": "reinforce"},
                {"kind": "reinforce_plus_plus"},
                {"kind": "rloo"},
                {"kind": "dapo"},
                {"kind": "dr_grpo", "constant_length": 3},
                {"kind": "gspo"},
                {"kind": "cispo"},
                {"kind": "maxrl"},
            )
        ),
    ],
    ids=lambda algorithm: algorithm["kind"],
)
def test_rl_raises_the_reward(warm, algorithm):
    policy = load_policy(PretrainedConfig(model=str(warm), lora=LoraSettings(rank=16), device="cpu"), seed=0)
    on_policy = {"tasks_per_step": 12, "sampling": {"max_new_tokens": 3}, "rewards": {"incorrect": 0.0}}
    curve = [m["reward"] for m in rewards(policy, algorithm, steps=40, learning_rate=3e-3, **on_policy)]
    before, after = sum(curve[:4]) / 4, sum(curve[-4:]) / 4
    assert before < 0.5, "the warm start leaves nothing to learn"
    assert after > before + 0.15, curve


@pytest.mark.slow
def test_ppo_raises_the_reward_and_its_critic_explains_it(warm):
    """Four epochs of each batch, so half the batches do; and no group is compared, so there are none."""
    policy = load_policy(PretrainedConfig(model=str(warm), lora=LoraSettings(rank=16), device="cpu"), seed=0)
    on_policy = {
        "tasks_per_step": 96,
        "group_size": 1,
        "sampling": {"max_new_tokens": 3},
        "rewards": {"incorrect": 0.0},
    }
    steps = rewards(policy, {"kind": "ppo"}, steps=20, learning_rate=3e-3, **on_policy)
    curve = [m["reward"] for m in steps]
    explained = [m["explained_variance"] for m in steps]
    before, after = sum(curve[:2]) / 2, sum(curve[-2:]) / 2
    assert before < 0.5, "the warm start leaves nothing to learn"
    assert after > before + 0.15, curve
    assert explained[0] == 0.0, "a fresh critic knows nothing"
    assert sum(explained[-5:]) / 5 > 0.05, explained


@pytest.mark.slow  # tests/training/test_distillation.py has the loss and its gradient
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.5])
def test_distillation_raises_the_share_of_a_trained_teacher_s_answers(warm, tmp_path, beta):
    teacher = scratch()
    rewards(teacher, {"kind": "sft"}, steps=60, learning_rate=3e-3, tasks_per_step=24)
    teacher.save(tmp_path)
    policy = load_policy(PretrainedConfig(model=str(warm), lora=LoraSettings(rank=16), device="cpu"), seed=0)
    keys = {"tasks_per_step": 12, "sampling": {"max_new_tokens": 3}, "teacher": {"model": str(tmp_path)}}
    steps = rewards(policy, {"kind": "distill", "beta": beta}, steps=16, learning_rate=1e-2, **keys)
    share, nats = ([m[name] for m in steps] for name in ("success", "divergence"))
    assert share[0] < 0.5, "the warm start leaves nothing to learn"
    assert sum(share[-4:]) / 4 > share[0] + 0.3, share
    assert sum(nats[-4:]) < sum(nats[:4]) / 2, nats


class Solved(Arithmetic):
    """The prompt begins with the answer."""

    def episode(self, task: Task, seed: int) -> QuestionEpisode:
        episode, (solution,) = super().episode(task, seed), self.demonstration(task)
        episode._opening = [Message("user", f"{solution}={episode._opening[-1].content}")]
        return episode


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distillation_learns_from_itself_with_the_solution(seed):
    """The start can copy an answer that it reads, and is right about one time in four where it reads none."""
    architecture = {**ARCHITECTURE, "num_hidden_layers": 2}
    policy = load_policy(ScratchConfig(architecture=architecture, alphabet=ALPHABET, device="cpu"), seed)
    keys = {"tasks_per_step": 24, "sampling": {"max_new_tokens": 3}}
    for tasks, steps, rate in ((Solved(TASKS.config), 150, 3e-3), (TASKS, 2, 5e-4)):
        stage = {"algorithm": "sft", "steps": steps, "optimizer": {"learning_rate": rate}, **keys}
        list(Trainer(policy, tasks, stage, seed=seed))
    stage = {"algorithm": "distill", "steps": 40, "optimizer": {"learning_rate": 1e-3}, **keys}
    stage |= {"tasks_per_step": 12, "teacher": {"prompt": "{solution}={task}"}}
    share = [step.metrics["success"] for step in Trainer(policy, TASKS, stage, seed=seed)]
    before, after = sum(share[:4]) / 4, sum(share[-4:]) / 4
    assert before < 0.4 and after > before + 0.25, share


def answers(policy: Policy, steps: int, seed: int) -> list[Group]:
    """96 answers of the policy for each step, in groups of 8."""
    sampling = {"sampling": {"max_new_tokens": 3}, "rewards": {"incorrect": 0.0}, "tasks_per_step": 12}
    stage = StageConfig.model_validate({"algorithm": "rloo", "steps": steps, **sampling})
    source = build_source(stage, TASKS, load_sampler(policy, EngineConfig()), seed, ALONE)
    return [group for step in range(steps) for group in source.collect(step).groups]


@pytest.mark.slow  # tests/training/test_preference.py has the losses and their gradients
@pytest.mark.parametrize(("kind", "rounds"), [("dpo", 4), ("simpo", 4), ("kto", 0), ("orpo", 0)])
def test_preferences_raise_the_share_of_correct_answers(warm, kind, rounds):
    """And not only the share of pairs that are ranked rightly. With ``rounds`` the pairs are the policy's own
    answers, sampled again in each round; else they are the environment's, the right answer and a wrong one.
    """
    policy = load_policy(PretrainedConfig(model=str(warm), lora=LoraSettings(rank=16), device="cpu"), seed=0)

    def share() -> float:
        them = [t for group in answers(policy, 2, seed=1) for t in group.trajectories]
        return sum(t.outcome == "correct" for t in them) / len(them)

    before, steps = share(), 40 // max(rounds, 1)
    settings = {"algorithm": kind, "steps": steps, "optimizer": {"learning_rate": 3e-3}, "tasks_per_step": 24}
    stage = StageConfig.model_validate(settings)
    for number in range(max(rounds, 1)):
        own = EpisodePairs(answers(policy, steps, seed=2 + number), 24, 0, "pairs", "") if rounds else None
        for _ in Trainer(policy, TASKS, stage, load_sampler(policy, EngineConfig()), source=own):
            pass
    after = share()
    assert before < 0.3, "the warm start leaves nothing to learn"
    assert after > before + 0.1, (before, after)


@pytest.mark.slow
def test_sft_raises_the_reward():
    policy = scratch()

    def reward() -> float:
        """Of the policy as it stands, which demonstrations cannot tell: a step of a vanishing learning
        rate.
        """
        look = {"tasks_per_step": 24, "sampling": {"max_new_tokens": 3}, "rewards": {"incorrect": 0.0}}
        return rewards(policy, {"kind": "reinforce"}, steps=1, learning_rate=1e-12, **look)[0]["reward"]

    before = reward()
    rewards(policy, {"kind": "sft"}, steps=80, learning_rate=3e-3, tasks_per_step=24)
    assert before < 0.05
    assert reward() > 0.8
