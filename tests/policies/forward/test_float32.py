"""The weights of a model in 16 bits, computed with in fp32, one layer at a time."""

from __future__ import annotations

import pytest
import torch

from agent_peft.batch import collate
from agent_peft.policies.config import ScratchConfig
from agent_peft.policies.forward.layers import in_float32
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.types import Task, Trajectory, Turn

MOE = {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def narrow_and_wide(config: ScratchConfig, architecture: dict, lora: bool) -> tuple[Policy, Policy]:
    """A trained policy in bfloat16, and one in fp32 with the same weights."""
    update = {"architecture": config.architecture | architecture, **({} if lora else {"lora": None})}
    narrow, wide = (
        load_policy(config.model_copy(update={**update, "dtype": dtype}), 0)
        for dtype in ("bfloat16", "float32")
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in narrow.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    wide.model.load_state_dict({name: value.float() for name, value in narrow.model.state_dict().items()})
    return narrow, wide


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    "architecture", [{}, {"model_type": "qwen3"}, MOE, GPT2], ids=["llama", "qwen3", "moe", "gpt2"]
)
def test_scores_are_those_of_the_same_weights_in_fp32(policy_config, architecture, lora):
    narrow, wide = narrow_and_wide(policy_config, architecture, lora)
    turns = (Turn((1, 2, 3), (4, 5), (0.0, 0.0)), Turn((6,), (7,), (0.0,)))
    batch = collate([Trajectory(Task("a"), turns), Trajectory(Task("b"), turns[:1])], [0, 1])
    before = {name: (p.dtype, p.data_ptr()) for name, p in narrow.model.named_parameters()}
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.3, top_k=5)):
        exact = narrow.exact_logprobs(batch, sampling)
        with torch.no_grad():
            theirs = wide.forward(batch, sampling).logprobs
            rounded = narrow.forward(batch, sampling).logprobs
        torch.testing.assert_close(exact, theirs, rtol=1e-4, atol=1e-4)
        assert (rounded - theirs).abs().max() > 1e-3
    assert before == {name: (p.dtype, p.data_ptr()) for name, p in narrow.model.named_parameters()}


def test_weights_come_back_after_an_error(policy_config):
    narrow, _ = narrow_and_wide(policy_config, {}, True)
    layer = next(m for name, m in narrow.model.named_modules() if name.endswith("q_proj"))
    before = {name: p.data_ptr() for name, p in narrow.model.named_parameters()}
    with pytest.raises(RuntimeError), in_float32(narrow.model):
        layer(torch.zeros(1, 3, dtype=torch.bfloat16))  # of another width
    assert before == {name: p.data_ptr() for name, p in narrow.model.named_parameters()}
    assert not layer._forward_hooks and not layer._forward_pre_hooks
