from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agent_peft.policies import adapters
from agent_peft.policies.forward import language_model
from agent_peft.policies.forward.language_model import entropy_of, logprobs_of_targets
from agent_peft.policies.sampling import SamplingConfig


def slope(
    head: nn.Linear, states: torch.Tensor, targets: torch.Tensor, entropy: bool = False
) -> torch.Tensor:
    """d Σ log p / d state, by the way that does not compute the logits again, or (with entropies) by
    autograd's.
    """
    states = states.detach().clone().requires_grad_()
    logprobs_of_targets(
        head, True, head, states, targets, SamplingConfig(), (entropy_of,) if entropy else ()
    )[0].sum().backward()
    assert states.grad is not None
    return states.grad.double()


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_of_likely_tokens_the_gradient_is_exact_in_16_bits(p):
    """W[t] and p(t) W[t] nearly cancel. Each rounded to 16 bits first, nothing but rounding is left of
    their difference.
    """
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(64, 400, bias=False).requires_grad_(False)
    head.weight.data.copy_(torch.randn(400, 64, generator=generator))
    targets = torch.arange(32)
    states = head.weight[targets] / 8
    logits = states @ head.weight.T
    rest = logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    now = logits.gather(1, targets[:, None]).squeeze(1)
    # so that the target has about p
    states = states * ((rest + torch.logit(torch.tensor(p))) / now).clamp(1, 4)[:, None]
    states, head = states.bfloat16(), head.bfloat16()
    exact = nn.Linear(64, 400, bias=False).requires_grad_(False)
    exact.weight.data.copy_(head.weight)
    right = slope(exact, states.float(), targets)
    error = (slope(head, states, targets) - right).norm(dim=1) / right.norm(dim=1)
    by_autograd = (slope(head, states, targets, entropy=True) - right).norm(dim=1) / right.norm(dim=1)
    assert error.median() < 2 * by_autograd.median() + 0.01


def test_an_adapter_on_the_output_layer_takes_no_more_logits_at_once(peak_bytes):
    """Chunks are of so many logits, and the layer with its adapter, which is not a linear layer, says how
    many a state has.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3000,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=False,
        )
    ).eval()
    adapted = adapters.attach(model, adapters.LoraSettings(rank=2, target_modules=["lm_head"]), seed=0)
    head = adapted.get_base_model().get_output_embeddings()
    states = torch.randn(4096, 16)
    targets = torch.zeros(4096, dtype=torch.int64)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "CHUNK", 8 * 3000)
        peak = peak_bytes(lambda: logprobs_of_targets(head, True, head, states, targets, SamplingConfig()))
    assert peak < 20 * 8 * 3000 * 4
