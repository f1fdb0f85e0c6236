"""The policies that a server answers with, by the names that clients give."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from agent_peft.policies.loading import load_policy, policy_config
from agent_peft.policies.policy import Policy
from agent_peft.runs.targets import open_run, run_config, target_kind
from agent_peft.types import AgentPeftError

BASE = "base"  # the name of the model under the first adapter


def load_policies(targets: Sequence[str], machine: Mapping[str, str]) -> dict[str, Policy]:
    """The policies of targets, and as ``base`` the model under the first of their adapters. Weights that are
    equal are kept once.

    Args:
        targets: each a run directory, ``RUN:best``, ``RUN:step_000012``, an adapter or a model; after
            ``NAME=`` under this name, otherwise under the last part of its path.
        machine: the keys ``device`` and ``dtype`` of ``policy``, where they are to differ.
    """
    policies: dict[str, Policy] = {}
    for text in targets:
        given, equals, target = text.partition("=")
        if not equals or not kind_of_model(text):  # a path may have an =, too
            given, target = "", text
        name = given or (target if kind_of_model(target) else Path(target).resolve().name)
        if name in policies:
            raise AgentPeftError(f"two policies are named {name!r}; name one of them: {name}-2={target}")
        policies[name] = load_target(target, machine)
        share_weights(policies[name], list(policies.values())[:-1])
    adapted = next((policy for policy in policies.values() if policy.has_adapter), None)
    if adapted is not None and BASE not in policies:
        policies[BASE] = under(adapted)
    return policies


def kind_of_model(target: str) -> bool:
    """Whether a target is the name of a model, and not a path."""
    return not Path(split_checkpoint(target)[0]).exists()


def split_checkpoint(target: str) -> tuple[str, str | None]:
    """A run directory and the name of its checkpoint, where the target names one.

    >>> split_checkpoint("runs/sums:best"), split_checkpoint("smollm2-135m")
    (('runs/sums', 'best'), ('smollm2-135m', None))
    """
    run, colon, checkpoint = target.rpartition(":")
    named = colon and (checkpoint == "best" or checkpoint.startswith("step_"))
    return (run, checkpoint) if named else (target, None)


def load_target(target: str, machine: Mapping[str, str] | None = None) -> Policy:
    """The policy of a run directory, ``RUN:CHECKPOINT``, an adapter or a model."""
    folder, checkpoint = split_checkpoint(target)
    machine = machine or {}
    kind = target_kind(Path(folder))
    if kind == "run":
        config = run_config(folder)
        policy = policy_config(config.policy, **machine)
        return open_run(folder, checkpoint, config=config.model_copy(update={"policy": policy}))[1]
    if checkpoint is not None:
        raise AgentPeftError(f"{folder}: is not a run directory, so it has no checkpoint {checkpoint}")
    if kind == "weights":
        raise AgentPeftError(
            f"{folder}: only a run's configuration can load these weights; name the run, and the checkpoint "
            "as RUN:step_000012"
        )
    lora = {} if kind == "adapter" else {"lora": None}
    return load_policy({"model": folder, **lora, **machine})


def share_weights(policy: Policy, others: Sequence[Policy]) -> None:
    """Take the tensors of ``others`` for weights that are equal."""
    known: dict[str, torch.nn.Parameter] = {}
    for other in others:
        for name, parameter in other.base.named_parameters():
            known.setdefault(name.replace(".base_layer", ""), parameter)
    for name, parameter in policy.base.named_parameters():
        same = known.get(name.replace(".base_layer", ""))
        if (
            same is not None
            and (same.shape, same.dtype, same.device) == (parameter.shape, parameter.dtype, parameter.device)
            and torch.equal(same, parameter)
        ):
            parameter.data = same.data


def under(policy: Policy) -> Policy:
    """The model under a policy's adapter, with the same weights in the memory."""
    return Policy(copy_under(policy.model), policy.chat, packing=False)


def copy_under(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """A copy of a model without its adapter, whose tensors are the same ones."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, weights)
    return cast(PreTrainedModel, copied.unload() if isinstance(copied, PeftModel) else copied)
