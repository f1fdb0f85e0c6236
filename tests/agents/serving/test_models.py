"""The targets of ``serve-policy``: their names, and the weights that they share."""

from __future__ import annotations

import pytest
import torch

from agent_peft.agents.serving.models import BASE, load_policies
from agent_peft.cli import run as command
from agent_peft.policies.config import LoraSettings
from agent_peft.policies.loading import load_policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.runs.targets import open_run
from agent_peft.types import AgentPeftError

CONFIG = """\
run_dir: {folder}/run
policy:
  kind: scratch
  alphabet: "0123456789+*-= "
  device: cpu
  lora: {{rank: 2, alpha: 4}}
  architecture:
    {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
     num_key_value_heads: 2}}
environment: {{kind: arithmetic, num_tasks: 10, digits: 1}}
steps: 1
algorithm: sft
optimizer: {{learning_rate: 0.1}}
"""


def scores(policy):
    from agent_peft.policies.engine import load_sampler

    return load_sampler(policy).score([1, 4, 5, 6, 7, 8], SamplingConfig())


def test_a_run_and_the_model_under_its_adapter(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    assert command(["train", str(tmp_path / "c.yaml")]) == 0
    policies = load_policies([f"{tmp_path}/run:step_000001", f"again={tmp_path}/run"], {"device": "cpu"})
    assert list(policies) == ["run:step_000001", "again", BASE]
    for name, base in (("run:step_000001", False), ("again", False), (BASE, True)):
        assert scores(policies[name]) == pytest.approx(scores(open_run(tmp_path / "run", base=base)[1]))
    assert scores(policies["again"]) != pytest.approx(scores(policies[BASE]))
    weights = [{p.data_ptr() for p in policy.base.parameters()} for policy in policies.values()]
    assert weights[2] < weights[0] and weights[2] < weights[1]  # the adapters are their own


def test_a_path_may_have_an_equals_sign(tmp_path, policies):
    folder = tmp_path / "lr=0.1"
    policies["base"].save(folder)
    assert list(load_policies([str(folder), f"mine={folder}"], {"device": "cpu"})) == ["lr=0.1", "mine"]


def test_adapters_beside_their_model(tmp_path, policies):
    policies["base"].save(tmp_path / "model")
    for name, rank in (("a", 2), ("b", 3)):
        policy = load_policy(tmp_path / "model", lora=LoraSettings(rank=rank, alpha=4), device="cpu")
        for key, parameter in policy.model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(rank))
        policy.save(tmp_path / name)
    targets = [f"{tmp_path}/a", f"second={tmp_path}/b", f"{tmp_path}/model"]
    loaded = load_policies(targets, {"device": "cpu"})
    assert list(loaded) == ["a", "second", "model", BASE]
    assert scores(loaded["a"]) != pytest.approx(scores(loaded["second"]))
    assert scores(loaded["model"]) == pytest.approx(scores(policies["base"])) == scores(loaded[BASE])
    embeddings = {policy.base.get_input_embeddings().weight.data_ptr() for policy in loaded.values()}
    assert len(embeddings) == 1
    for wrong, words in (
        ([targets[0], targets[0]], "two policies are named 'a'"),
        ([f"{tmp_path}/nothing"], "there is no run directory"),
        ([f"{tmp_path}/a:best"], "is not a run directory"),
    ):
        with pytest.raises(AgentPeftError, match=words):
            load_policies(wrong, {"device": "cpu"})
