"""``kind: "package.module:row"``: a user's own row, algorithm or configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from agent_peft.algorithms import ALGORITHMS, Algorithm, AnyAlgorithm, GrpoConfig
from agent_peft.configuration import yaml12
from agent_peft.configuration.load import read_config
from agent_peft.configuration.run_config import resolved
from agent_peft.environments.arithmetic import ALPHABET, Arithmetic, ArithmeticConfig
from agent_peft.lookup import without_imports
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.loading import load_policy
from agent_peft.training.stage import StageConfig
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError

MODULE = '''
from pydantic import Field

from agent_peft.algorithms import (
    Algorithm, AlgorithmConfig, MovingAverageBaseline, PolicyGradient, clipped, plain_return, sequence_mean,
)


def centered_ranks(returns, groups):
    same = groups[:, None] == groups[None]
    wins = same * (returns[:, None] - returns[None]).sign()
    return wins.sum(1) / (same.sum(1) - 1).clamp(min=1)


row = PolicyGradient("rank_based", centered_ranks, clipped(0.2, 0.2), sequence_mean, compares_groups=True)
remembering = PolicyGradient(
    "remembering", plain_return, clipped(0.2, 0.2), sequence_mean, baseline=MovingAverageBaseline(0.5)
)


class Scaled(AlgorithmConfig):
    """Advantages times a scale."""

    scale: float = Field(default=1.0, gt=0, description="of the advantages")
    kl_coef: float = 0.0

    def build(self):
        advantage = lambda returns, groups: self.scale * centered_ranks(returns, groups)
        return PolicyGradient(self.kind, advantage, clipped(0.2, 0.2), sequence_mean, kl_coef=self.kl_coef)


class Likelihood(Algorithm):
    on_policy = False
    learns_at_zero_advantage = True

    def loss(self, output, microbatch):
        loss = -(microbatch.weights * output.logprobs).sum()
        return loss, {"weight": microbatch.weights.sum()}


class NoLoss(Algorithm):
    pass


class Broken(AlgorithmConfig):
    def build(self):
        raise ZeroDivisionError("oh")


class Nothing(AlgorithmConfig):
    def build(self):
        return 3


class NeedsMore(Likelihood):
    def __init__(self, more):
        self.more = more


number = 3
'''
SCRATCH = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_algorithms"
    sys.modules.pop("my_algorithms", None)


def stage(algorithm, **keys) -> StageConfig:
    more = {"tasks_per_step": 4, "sampling": {"max_new_tokens": 3}, "rewards": {"invalid_action": -0.5}}
    return StageConfig.model_validate({"algorithm": algorithm, "steps": 2, **more, **keys})


def trainer(stage: StageConfig) -> Trainer:
    config = ScratchConfig(architecture=SCRATCH, alphabet=ALPHABET, device="cpu")
    return Trainer(load_policy(config, seed=0), Arithmetic(ArithmeticConfig(digits=1, num_tasks=10)), stage)


def test_a_row_trains_and_its_facts_are_known(module):
    config = stage(f"{module}:row")
    assert (config.name, config.group_size) == ("row", 8)
    facts = config.algorithm.facts
    assert (facts.kind, facts.on_policy, facts.compares_groups) == ("rank_based", True, True)
    made = trainer(config)
    before = [p.detach().clone() for p in made.parameters]
    steps = list(made)
    assert len(steps) == 2 and len(steps[0].trajectories) == 32
    assert not all(torch.equal(p, q) for p, q in zip(made.parameters, before, strict=True))
    with pytest.raises(ValidationError, match="group_size: 1 is too small"):
        stage(f"{module}:row", group_size=1)


def test_an_algorithm_class_trains_on_demonstrations(module):
    config = stage(f"{module}:Likelihood", tasks_per_step=10, optimizer={"learning_rate": 1e-2})
    assert (config.name, config.group_size) == ("Likelihood", 1)
    first, second = trainer(config)
    assert first.metrics["demonstrations_incorrect"] == 0
    assert second.metrics["loss"] < first.metrics["loss"]


def test_a_configuration_is_validated(module):
    config = stage({"kind": f"{module}:Scaled", "scale": 2.0, "kl_coef": 0.1}, reference="stage_start")
    assert config.algorithm.facts.needs_reference
    returns, groups = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64)
    assert config.algorithm.build().advantage(returns, groups).tolist() == [2.0, -1.0, -1.0]


def test_an_instance_of_a_configuration_is_taken_as_it_is(module):
    import my_algorithms

    config = my_algorithms.Scaled(scale=3.0)
    assert stage(config).algorithm is config


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("my_algorithms:nothing_here", "cannot be imported (AttributeError"),
        ("no_such_module:row", "cannot be imported (ModuleNotFoundError"),
        (
            "my_algorithms:number",
            "is not an algorithm; name a row, or a subclass of Algorithm or AlgorithmConfig",
        ),
        ("my_algorithms:NoLoss", "has no loss: define loss(self, output, microbatch) in its class"),
        ("my_algorithms:Broken", "cannot be built (ZeroDivisionError: oh)"),
        ("my_algorithms:NeedsMore", "cannot be built (TypeError"),
        ("my_algorithms:Nothing", "must return an Algorithm, got int"),
        ({"kind": "my_algorithms:row", "clip_low": 0.1}, "clip_low: unknown key"),
        ({"kind": "my_algorithms:Scaled", "scal": 0.1}, "scal: unknown key; did you mean 'algorithm.scale'?"),
        ({"kind": "my_algorithms:Scaled", "scale": "1"}, "algorithm.scale: must be a number"),
        ({"kind": "my_algorithms:Scaled", "scale": 0}, "algorithm.scale: must be greater than 0"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(module, tmp_path, algorithm, message):
    with pytest.raises(AgentPeftError) as raised:
        read_config(write(tmp_path, algorithm), check_files=False)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def write(folder: Path, algorithm) -> Path:
    path = folder / "run.yaml"
    head = "run_dir: r\npolicy: {kind: pretrained, model: m}\nenvironment: {kind: arithmetic}\nsteps: 3\n"
    path.write_text(head + f"algorithm: {algorithm!r}\n")
    return path


@pytest.mark.parametrize("algorithm", ["my_algorithms:row", {"kind": "my_algorithms:Scaled", "scale": 2.5}])
def test_it_goes_through_a_resolved_configuration(module, tmp_path, algorithm):
    config, _ = read_config(write(tmp_path, algorithm), check_files=False)
    path = tmp_path / "config.yaml"
    path.write_text(yaml12.dump(resolved(config)))
    assert read_config(path, check_files=False)[0] == config


def test_without_trust_the_name_is_believed_and_nothing_runs(module, tmp_path):
    path = write(tmp_path, {"kind": f"{module}:Scaled", "scal": 1})
    with without_imports() as names:
        config, _ = read_config(path, check_files=False)
        assert config.stages[0].algorithm.facts.on_policy  # a default: nothing is known
    assert names == [f"{module}:Scaled"] and module not in sys.modules


def test_it_goes_on_from_a_checkpoint(module, tmp_path):
    config = stage(f"{module}:remembering", steps=4)
    straight = trainer(config)
    expected = [step.metrics for step in straight]
    first = trainer(config)
    steps = iter(first)
    next(steps), next(steps)
    first.save(tmp_path / "checkpoint")
    again = trainer(config)
    again.load(tmp_path / "checkpoint")
    assert [step.metrics for step in again] == expected[2:]
    assert straight.algorithm.baseline.value == again.algorithm.baseline.value != 0.0
    assert config.algorithm.build().baseline.value == 0.0, "a row keeps nothing from a run"


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_facts_are_read_without_building_twice(kind):
    config = TypeAdapter(AnyAlgorithm).validate_python(
        {"kind": kind, **({"constant_length": 8} if kind == "dr_grpo" else {})}
    )
    assert config.facts is config.facts and isinstance(config.facts, Algorithm)
    assert config.build() is not config.facts


def test_a_changed_copy_has_its_own_facts():
    config = GrpoConfig()
    assert not config.facts.needs_reference
    assert config.model_copy(update={"kl_coef": 0.1}).facts.needs_reference
