"""A full memory, wherever it is met: the same gradient, or one line that says what to do. The tests raise
what torch raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel

from agent_peft.configuration.load import read_config
from agent_peft.environments.arithmetic import ALPHABET
from agent_peft.policies import policy
from agent_peft.policies.engine import kv_cache, load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.loading import load_policy
from agent_peft.runs import run, targets
from agent_peft.training.trainer import Trainer
from agent_peft.types import AgentPeftError

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 8 bytes."
    ),
    MemoryError(),
]
SMOOTH = {"learning_rate": 1e-2, "epsilon": 1e-2, "max_grad_norm": float("inf")}

each_kind = pytest.mark.parametrize("error", FULL, ids=["cuda", "cpu", "python"])


def fill(trainer: Trainer, when: Callable[[], bool], error: Exception) -> None:
    """From now on a forward finds the memory full, whenever ``when`` says so."""

    def check(module: torch.nn.Module, arguments: Any) -> None:
        if when():
            raise error

    trainer.policy.decoder.register_forward_pre_hook(check)


def raises(error: Exception) -> Callable[..., Any]:
    def work(*arguments: Any, **named: Any) -> Any:
        raise error

    return work


def one_line(error: pytest.ExceptionInfo[AgentPeftError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@each_kind
@pytest.mark.parametrize("step", ["tree_states", "packed_states"])
def test_met_in_the_proofs_of_a_policy_it_is_one_line(policy_config, monkeypatch, step, error):
    """It says nothing about the model: neither tiles nor packing are given up for it."""
    monkeypatch.setattr(policy.Policy, step, raises(error))
    with pytest.raises(AgentPeftError, match="out of memory as the model was put on its device: set") as told:
        load_policy(policy_config, 0)
    assert one_line(told)


@each_kind
def test_met_in_the_proof_of_the_engine_it_is_one_line(policy_config, monkeypatch, error):
    policy = load_policy(policy_config, 0)
    monkeypatch.setattr(kv_cache.TierCache, "read", raises(error))
    with pytest.raises(
        AgentPeftError, match="out of memory as the sampler read its first tokens: set policy"
    ) as told:
        load_sampler(policy, EngineConfig())
    assert "slots" not in one_line(told)


@each_kind
def test_met_in_the_check_of_an_update_it_is_one_line(make_trainer, error):
    trainer = make_trainer("grpo")
    fill(trainer, lambda: trainer.updates > 0, error)
    with pytest.raises(AgentPeftError, match="out of memory as an update was checked: ") as told:
        list(trainer)
    one_line(told)


@each_kind
def test_met_in_the_optimizers_step_it_is_one_line(make_trainer, monkeypatch, error):
    trainer = make_trainer("grpo")
    monkeypatch.setattr(trainer.optimizer, "step", raises(error))
    with pytest.raises(AgentPeftError, match="out of memory in the optimizer's step: ") as told:
        list(trainer)
    one_line(told)


@each_kind
@pytest.mark.parametrize("moment", ["a checkpoint was written", "the adapter was merged"])
def test_met_as_a_file_is_written_it_is_one_line(policy_config, tmp_path, monkeypatch, moment, error):
    (tmp_path / "config.yaml").write_text(
        f"""
run_dir: {tmp_path / "run"}
environment: {{kind: arithmetic, digits: 1, num_tasks: 10}}
policy:
  {{kind: scratch, alphabet: {ALPHABET!r}, lora: {{rank: 2, alpha: 4}}, device: cpu,
   architecture: {policy_config.architecture!r}}}
algorithm: {{kind: grpo}}
stages: [{{name: one, steps: 1, tasks_per_step: 2, group_size: 2, sampling: {{max_new_tokens: 3}}}}]
""".replace("False", "false")
    )
    config, _ = read_config(tmp_path / "config.yaml")
    if moment == "a checkpoint was written":
        monkeypatch.setattr(Trainer, "save", raises(error))
        with pytest.raises(AgentPeftError, match=f"out of memory as {moment}") as told:
            run.train(config)
    else:
        run.train(config)
        own = copy.deepcopy
        monkeypatch.setattr(
            copy, "deepcopy", lambda x, *more: raises(error)() if isinstance(x, PeftModel) else own(x, *more)
        )
        with pytest.raises(AgentPeftError, match=f"out of memory as {moment}") as told:
            targets.merge_run(config.run_dir, tmp_path / "merged")
    one_line(told)
