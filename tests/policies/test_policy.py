from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from agent_peft.batch import Batch, collate
from agent_peft.policies import adapters
from agent_peft.policies import policy as policy_module
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import load_sampler
from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.forward import attention, language_model
from agent_peft.policies.loading import load_policy
from agent_peft.policies.policy import Policy
from agent_peft.policies.reference import reference_of
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.types import AgentPeftError, Task, Trajectory, Turn
from tests.conftest import case

MakePolicy = Callable[..., Policy]
ARCHITECTURES = ("llama", "qwen3", "gpt2", "gpt_neox", "mistral", "gemma3_text", "gemma2")  # of conftest.py
PLAIN = SamplingConfig()
TRUNCATED = SamplingConfig(temperature=0.8, top_k=10, top_p=0.9)
WHOLE_OR_ADAPTER = pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])


def trajectories(count: int = 6, groups: int = 2, turns: int = 2) -> list[Trajectory]:
    """Groups that share a prompt and, in part, a first action; turns of many lengths; one trajectory
    twice.
    """
    found = []
    for i in range(count):
        common, own = random.Random(i % groups), random.Random(1000 + i // 2)
        exchanges = []
        for turn in range(turns):
            read = (
                [1, *common.choices(range(3, 19), k=5)]
                if turn == 0
                else own.choices(range(3, 19), k=own.randrange(1, 5))
            )
            action = own.choices(range(2, 19), k=own.randrange(1, 7))
            exchanges.append(Turn(tuple(read), tuple(action), (-1.0,) * len(action)))
        found.append(Trajectory(Task(f"t{i % groups}"), tuple(exchanges)))
    return [*found, found[0]]


def make_batch(**settings: int) -> Batch:
    chosen = trajectories(**settings)
    batch = collate(chosen, [int(t.task.id[1:]) for t in chosen])
    weights = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1)) * batch.action_mask
    return replace(batch, weights=weights)


def padded_by(batch: Batch, columns: int) -> Batch:
    """The same batch with more columns of rubbish on its right."""
    wider = {
        f.name: pad(getattr(batch, f.name), (0, columns))
        for f in fields(batch)
        if getattr(batch, f.name) is not None
    }
    same = {name: getattr(batch, name) for name in ("lengths", "returns", "groups")}
    tokens = pad(batch.tokens, (0, columns), value=7)
    return Batch(**{**wider, **same, "tokens": tokens})


def gradient(policy: Policy, pieces: Sequence[Batch], sampling: SamplingConfig = PLAIN) -> Tensor:
    """Of the sum over the pieces of Σ weights · log-probability, as one vector."""
    policy.model.zero_grad()
    for piece in pieces:
        (piece.weights * policy.forward(piece, sampling).logprobs).sum().backward()
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in policy.trainable_parameters()
        ]
    )


def assert_same_gradient(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    assert float(a.norm()) > 1e-2 and a.shape == b.shape
    assert float((a - b).norm() / a.norm()) < tolerance


def direct(policy: Policy, batch: Batch, sampling: SamplingConfig = PLAIN) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from one forward for each row, with no code of ours but the sampling
    distribution's.
    """
    logprobs, entropy = torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[b, :length]
        with torch.no_grad():
            logits = policy.model(input_ids=tokens[None]).logits[0, :-1]
        logp = log_distribution(logits, sampling, keep=tokens[1:])
        logprobs[b, 1:length] = logp.gather(-1, tokens[1:, None]).squeeze(-1)
        entropy[b, 1:length] = torch.distributions.Categorical(probs=logp.exp()).entropy()
    return logprobs * batch.action_mask, entropy * batch.action_mask


# -- what is scored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "packing", "truncated"),
    [
        case(kind, packing, truncated, fast=packing or truncated == bool(number % 2))
        for number, kind in enumerate(ARCHITECTURES)
        for packing, truncated in product((True, False), (True, False))
    ],
)
def test_logprobs_and_entropies_are_the_models(kind, packing, truncated, make_policy):
    sampling = TRUNCATED if truncated else PLAIN
    policy, batch = make_policy(kind, packing=packing, lora=kind != "gpt2"), make_batch()
    out = policy.forward(batch, sampling, entropy=True)
    logprobs, entropy = direct(policy, batch, sampling)
    assert torch.allclose(out.logprobs, logprobs, atol=1e-5)
    assert out.entropy is not None and torch.allclose(out.entropy, entropy, atol=2e-5)
    assert (
        out.logprobs.dtype == torch.float32
        and not out.logprobs[~batch.action_mask].any()
        and not out.entropy[~batch.action_mask].any()
    )
    assert policy.packing == packing, "a model with attention alone needs no padding"
    assert policy.forward(batch, sampling).entropy is None


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2"])
def test_the_trainer_scores_what_the_sampler_recorded(kind, sampling, make_policy):
    class Once:
        def __init__(self, prompt: list[int], seed: int) -> None:
            self.prompt, self.seed, self.turns = prompt, seed, []

        def act(self, action: Sequence[int], logprobs: Sequence[float], room: int) -> Sequence[int] | None:
            self.turns.append(
                Turn(tuple([4, 5] if self.turns else self.prompt), tuple(action), tuple(logprobs))
            )
            return [4, 5] if len(self.turns) < 3 else None

    policy = make_policy(kind)
    conversations = [Once([1, 5, 6, 7 + seed % 3], seed) for seed in range(9)]
    load_sampler(policy, EngineConfig(rows=4)).generate(
        conversations, sampling.model_copy(update={"max_new_tokens": 5})
    )
    batch = collate([Trajectory(Task("t"), tuple(c.turns)) for c in conversations], [0] * 9)
    assert torch.allclose(policy.forward(batch, sampling).logprobs, batch.logprobs, atol=1e-4)


def test_a_batch_without_actions_scores_nothing(make_policy):
    batch = make_batch()
    silent = replace(batch, action_mask=torch.zeros_like(batch.action_mask))
    policy = make_policy()
    out = policy.forward(silent, PLAIN, entropy=True)
    assert not out.logprobs.any() and out.entropy is not None and not out.entropy.any()


# -- one gradient, however it is computed --------------------------------------------------------------------


@WHOLE_OR_ADAPTER
@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
def test_packed_and_padded_gradients_are_one(lora, sampling, make_policy):
    policy, batch = make_policy(lora=lora), make_batch()
    policy.forward(batch, sampling)
    assert policy.packing
    packed = gradient(policy, [batch], sampling)
    policy.packing = False
    assert_same_gradient(packed, gradient(policy, [batch], sampling))


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "llama"])
def test_packed_and_padded_gradients_are_one_for_other_models(kind, make_policy):
    policy, batch = make_policy(kind, lora=False), make_batch(count=4)
    packed = gradient(policy, [batch])
    assert policy.packing
    policy.packing = False
    assert_same_gradient(packed, gradient(policy, [batch]), 2e-6)


@WHOLE_OR_ADAPTER
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_microbatches_padding_and_order_do_not_matter(lora, packing, make_policy):
    policy, batch = make_policy(lora=lora, packing=packing), make_batch()
    whole = gradient(policy, [batch])
    rows = list(range(len(batch)))
    for size in (1, 2, 3):
        assert_same_gradient(
            whole, gradient(policy, [batch.select(rows[i : i + size]) for i in range(0, len(rows), size)])
        )
    random.Random(0).shuffle(rows)
    assert_same_gradient(whole, gradient(policy, [batch.select(rows)]))
    assert_same_gradient(whole, gradient(policy, [padded_by(batch, 9)]))


def test_the_gradient_is_the_direct_one(make_policy):
    policy, batch = make_policy(), make_batch()
    ours = gradient(policy, [batch])
    policy.model.zero_grad()
    for b, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[b, :length]
        logp = (
            policy.model(input_ids=tokens[None])
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(-1, tokens[1:, None])
            .squeeze(-1)
        )
        (logp * batch.weights[b, 1:length]).sum().backward()
    assert_same_gradient(
        ours, torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None])
    )


def test_the_entropys_gradient_is_the_direct_one(make_policy):
    policy, batch = make_policy(), make_batch(count=2)
    entropy = policy.forward(batch, PLAIN, entropy=True).entropy
    assert entropy is not None
    entropy.sum().backward()
    ours = torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None])
    policy.model.zero_grad()
    for b, length in enumerate(batch.lengths.tolist()):
        logits = policy.model(input_ids=batch.tokens[b : b + 1, :length]).logits[0, :-1]
        (
            torch.distributions.Categorical(logits=logits).entropy() * batch.action_mask[b, 1:length]
        ).sum().backward()
    assert_same_gradient(
        ours, torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None]), 1e-5
    )


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_heads_chunks_do_not_matter(chunk, make_policy, monkeypatch):
    policy, batch = make_policy(lora=False), make_batch()
    before, out = gradient(policy, [batch]), policy.forward(batch, TRUNCATED, entropy=True)
    monkeypatch.setattr(language_model, "CHUNK", chunk * policy.base.config.vocab_size)
    again = policy.forward(batch, TRUNCATED, entropy=True)
    assert torch.allclose(out.logprobs, again.logprobs, atol=1e-6)
    assert (
        out.entropy is not None
        and again.entropy is not None
        and torch.allclose(out.entropy, again.entropy, atol=1e-6)
    )
    assert_same_gradient(before, gradient(policy, [batch]))


def test_only_a_chunk_of_logits_exists_at_once(make_policy, monkeypatch):
    policy = make_policy(lora=False)
    batch = make_batch()
    heights = []
    scored = language_model.log_distribution
    policy.forward(batch, PLAIN)
    monkeypatch.setattr(language_model, "CHUNK", 3 * policy.base.config.vocab_size)
    monkeypatch.setattr(
        language_model,
        "log_distribution",
        lambda logits, *rest, **more: heights.append(len(logits)) or scored(logits, *rest, **more),
    )
    policy.forward(batch, PLAIN)
    assert max(heights) == 3 and sum(heights) <= int(batch.action_mask.sum())


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED])
def test_a_head_that_is_not_trained_gets_the_same_gradient(sampling, make_policy):
    """Found in the forward, where p is; or by autograd, as where entropies are asked for."""
    policy, batch, found = make_policy(), make_batch(), []
    torch.nn.init.normal_(next(p for n, p in policy.model.named_parameters() if "lora_B" in n))
    for entropy in (False, True):
        policy.model.zero_grad()
        (
            policy.forward(batch, sampling, entropy=entropy).logprobs * torch.arange(batch.tokens.shape[1])
        ).sum().backward()
        found.append(
            torch.cat([p.grad.flatten() for p in policy.trainable_parameters() if p.grad is not None])
        )
    assert found[0].abs().max() > 0
    assert_same_gradient(*found)


@pytest.mark.parametrize("tile", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_tiles_do_not_matter(kind, tile, make_policy, monkeypatch):
    policy, batch = make_policy(kind, lora=False), make_batch()
    assert policy.tiled
    monkeypatch.setattr(attention, "TILE", tile)
    ours = gradient(policy, [batch])
    policy.tiled = False
    dense = gradient(policy, [batch])
    policy.packing = False
    assert_same_gradient(ours, dense, 5e-6)
    assert_same_gradient(ours, gradient(policy, [batch]), 5e-6)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gemma2"])
def test_attention_of_another_kind_is_left_to_the_model(kind, make_policy):
    policy = make_policy(kind)
    assert not policy.tiled and policy.packing


@pytest.mark.parametrize("packing", [True, False])
def test_more_tokens_than_positions_are_a_mistake_of_one_line(packing, make_policy):
    policy = make_policy("gpt2", packing=packing)
    assert policy.bound is not None
    tokens = (2,) * policy.bound.positions
    too_long = Trajectory(Task("t"), (Turn((1,), tokens, (0.0,) * len(tokens)),))
    with pytest.raises(
        AgentPeftError, match=f"{len(tokens) + 1} tokens, and the model can read {len(tokens)} "
    ):
        policy.forward(collate([too_long], [0]), PLAIN)


def test_siblings_cost_what_they_do_not_share(make_policy):
    policy, sequences = make_policy(), [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2]]
    assert policy.count_nodes(sequences) == 5
    policy.packing = False
    assert policy.count_nodes(sequences) == 12


# -- models that need another way, or none -------------------------------------------------------------------

MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


def test_a_model_with_a_running_state_falls_back_to_padding(make_policy, caplog):
    with caplog.at_level(logging.WARNING, logger=policy_module.__name__):
        policy = make_policy("mamba", new=True, lora=False, **MAMBA)
    assert caplog.text.count("packing is off, trajectories are padded") == 1
    assert not policy.packing and not policy.tiled
    for batch in (make_batch(), make_batch(count=2, groups=2)):
        assert torch.allclose(policy.forward(batch, PLAIN).logprobs, direct(policy, batch)[0], atol=1e-5)


def test_a_model_that_ignores_the_mask_falls_back_to_padding(make_policy, caplog):
    """It adds to each token's state those of all tokens before it, whatever the mask says. It reads a chain
    right, and only branches tell: the proof has some.
    """
    model = make_policy(lora=False).base
    forward = model.model.forward

    def summing(*arguments: object, **inputs: object) -> object:
        out = forward(*arguments, **inputs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.cumsum(1)
        return out

    model.model.forward = summing
    policy, batch = Policy(model, make_policy().chat), make_batch()
    assert not policy.packing and "differ by" in caplog.text
    assert torch.allclose(policy.forward(batch, PLAIN).logprobs, direct(policy, batch)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("cohere", {"logit_scale": 0.0625}), ("granite", {"logits_scaling": 8.0})],
)
def test_a_model_that_scales_its_logits_in_a_way_of_its_own_is_refused(kind, settings, make_policy):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with pytest.raises(AgentPeftError, match="changes its logits after the output layer"):
        make_policy(kind, lora=False, initializer_range=0.3, **shape, **settings)


def test_attention_in_chunks_is_refused(make_policy):
    policy = make_policy()
    policy.base.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(AgentPeftError, match="attends in chunks"):
        Policy(policy.base, policy.chat)


# -- from a configuration ------------------------------------------------------------------------------------

SCRATCH = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
}  # whose own end token is no token here


def test_a_policy_from_scratch_depends_on_its_seed_alone():
    config = ScratchConfig(architecture=SCRATCH, alphabet="01+=", device="cpu")
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = load_policy(config, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"
    torch.manual_seed(6)
    again, other = load_policy(config, seed=0), load_policy(config, seed=1)
    shape, tokenizer = first.base.config, first.chat.tokenizer
    assert shape.vocab_size == 3 + 4 and not first.has_adapter
    assert (shape.bos_token_id, shape.eos_token_id, shape.pad_token_id) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    assert any(
        not torch.equal(tensor, other.model.state_dict()[name])
        for name, tensor in first.model.state_dict().items()
    )


def test_strings_paths_and_mappings_name_a_policy(tmp_path):
    scratch = {"kind": "scratch", "architecture": SCRATCH, "alphabet": "0123456789+-*= \n"}
    policy = load_policy(scratch, device="cpu", lora={"rank": 2})
    policy.save(str(tmp_path / "adapter"))
    policy.load(str(tmp_path / "adapter"))
    policy.save_merged(str(tmp_path / "merged"))
    batch = make_batch()
    expected = load_policy(scratch, device="cpu").forward(batch, PLAIN).logprobs
    for name in (tmp_path / "merged", str(tmp_path / "merged")):
        merged = load_policy(name, lora=None, dtype="float32", device="cpu")
        assert not merged.has_adapter and torch.equal(merged.forward(batch, PLAIN).logprobs, expected)


@pytest.mark.parametrize(
    ("model", "keys", "line"),
    [
        ("m", {"drype": "float32"}, "policy.drype: unknown key; did you mean 'dtype'?"),
        ("m", {"lora": {"rang": 8}}, "policy.lora.rang: unknown key; did you mean 'rank'?"),
        ({"kind": "scrach"}, {}, "policy.kind: there is no 'scrach'; did you mean 'scratch'?"),
        ({"kind": "scratch", "architecture": SCRATCH}, {}, "policy.alphabet: "),
        (PretrainedConfig(model="m"), {"dtype": "int4"}, "policy.dtype: must be 'auto', 'float32' or"),
    ],
)
def test_wrong_keys_are_one_line(model, keys, line):
    with pytest.raises(AgentPeftError) as raised:
        load_policy(model, **keys)
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def test_an_adapter_starts_at_zero_and_alone_is_trained():
    config = ScratchConfig(
        architecture=SCRATCH, alphabet="0123456789+-*= \n", device="cpu", lora=adapters.LoraSettings(rank=2)
    )
    policy, batch = load_policy(config, seed=0), make_batch()
    base = policy.reference_logprobs(batch, PLAIN, reference_of(policy.model, "base"))
    assert torch.allclose(policy.forward(batch, PLAIN).logprobs, base, atol=1e-6)
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert (
        names and all("lora_" in name for name in names) and len(names) == len(policy.trainable_parameters())
    )


@WHOLE_OR_ADAPTER
def test_saved_and_loaded_it_says_the_same(lora, make_policy, tmp_path):
    policy, batch = make_policy(lora=lora), make_batch()
    expected = policy.forward(batch, PLAIN).logprobs
    policy.save(tmp_path / "saved")
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(policy.forward(batch, PLAIN).logprobs, expected, atol=1e-3)
    policy.load(tmp_path / "saved")
    assert torch.equal(policy.forward(batch, PLAIN).logprobs, expected)


def test_merged_it_says_the_same_without_peft(make_policy, tmp_path):
    policy, batch = make_policy(), make_batch()
    expected = policy.forward(batch, PLAIN).logprobs
    policy.save_merged(tmp_path / "merged")
    merged = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), policy.chat)
    assert not merged.has_adapter and torch.allclose(
        merged.forward(batch, PLAIN).logprobs, expected, atol=1e-5
    )


def test_a_model_that_is_nowhere_is_a_mistake_of_one_line(tmp_path):
    with pytest.raises(AgentPeftError, match=r"^policy\.model: .*nothing'"):
        load_policy(PretrainedConfig(model=str(tmp_path / "nothing"), device="cpu"), seed=0)


def test_no_proof_reads_padding(monkeypatch):
    """Some models warn of padding without a mask, which looks like a fault."""
    seen = []
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "warn_if_padding_and_no_attention_mask",
        lambda self, input_ids, attention_mask: seen.append(input_ids),
    )
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}
    policy = load_policy({"kind": "scratch", "alphabet": "0123456789", "architecture": gpt2, "device": "cpu"})
    padding = policy.chat.tokenizer.pad_token_id
    assert seen and not any((tokens[:, [0, -1]] == padding).any() for tokens in seen if tokens is not None)
