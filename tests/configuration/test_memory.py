"""What `explain` says of memory, against what the tensors of real forwards and backwards take: counted, so
exact and always the same.
"""

from __future__ import annotations

import json
import logging
import platform
import string
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agent_peft.algorithms.distillation import divergence
from agent_peft.batch import Batch, collate
from agent_peft.configuration.load import read_config
from agent_peft.configuration.memory import MemoryModel, stage_memory
from agent_peft.configuration.planning import memory
from agent_peft.policies import adapters
from agent_peft.policies.config import LoraSettings, PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import fused_linear
from agent_peft.policies.engine.base import EngineConfig, ServerEngineConfig
from agent_peft.policies.engine.weights import sampling_weights
from agent_peft.policies.forward.layers import fuse_activations
from agent_peft.policies.loading import load_policy
from agent_peft.policies.models.shape import measure_shape, shape_of
from agent_peft.policies.policy import Policy, Teaching
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.training.stage import StageConfig
from agent_peft.types import Task, Trajectory, Turn
from tests.conftest import case

GROUPED = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOWED = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": (
        "llama",
        {
            "hidden_size": 288,
            "intermediate_size": 768,
            "num_hidden_layers": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 4, "n_head": 8}),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", {**GROUPED, "intermediate_size": 256, "num_key_value_heads": 4}),
    "gemma3": ("gemma3_text", GROUPED | WINDOWED),
}
LORA = LoraSettings(rank=8)
TWO = LoraSettings(rank=8, target_modules=["q_proj", "v_proj"])
ADAPTERS = {"lora": LORA, "dropout": LoraSettings(rank=8, dropout=0.1), "two": TWO, "whole": None}


def build(
    name: str, dtype: torch.dtype = torch.float32, vocabulary: int = 100, **more: Any
) -> PreTrainedModel:
    kind, settings = ARCHITECTURES[name]
    config = AutoConfig.for_model(
        kind, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2, pad_token_id=0, **{**settings, **more}
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def model_of(
    model: PreTrainedModel, lora: LoraSettings | None, recomputes: bool = False, tiled: bool = False
) -> MemoryModel:
    rank, dropout = (None, False) if lora is None else (lora.rank, lora.dropout > 0)
    return MemoryModel(measure_shape(model, lora), model.dtype.itemsize, rank, dropout, recomputes, tiled)


def make_batch(length: int, count: int = 4) -> Batch:
    """Siblings: so many positions, of which their prompt is a third."""
    prompt, own = length // 3, (length - length // 3) // count
    found = []
    for i in range(count):
        drawn = torch.randint(3, 16, (own - 1,), generator=torch.Generator().manual_seed(i)).tolist()
        found.append(Trajectory(Task("t"), (Turn((1,) * prompt, (3 + i, *drawn), (-1.0,) * own),)))
    return collate(found, [0] * count)


def bytes_kept(model: nn.Module, forward: Callable[[], object]) -> int:
    """By the tensors that a forward saves for its backward, each storage once, parameters left out."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # alive, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    assert out is not None
    return sum(storage.nbytes() for storage in kept.values())


# -- activations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "adapter", "dtype"),
    [
        case(n, a, d, fast=d == torch.float32 or a == ("whole" if n == "gpt2" else "lora"))
        for n, a, d in product(ARCHITECTURES, ADAPTERS, (torch.float32, torch.bfloat16))
        if a != "two" or n not in ("gpt2", "gpt_neox")  # whose layers have other names
    ],
    ids=str,
)
def test_what_the_layers_keep_for_the_backward(name, adapter, dtype):
    lora, positions = ADAPTERS[adapter], 192
    model: Any = build(name, dtype)
    needs = model_of(model, lora)
    fuse_activations(model)  # as a policy does
    if lora is not None:
        model = adapters.attach(model, lora, 0)
        for path, module in model.named_modules():
            if "lora_dropout" in path:
                module.train()
    decoder = (model.get_base_model() if lora is not None else model).get_decoder()
    mask: Any = torch.zeros(positions, positions, dtype=dtype).masked_fill_(
        torch.ones(positions, positions).triu(1) > 0, -1e9
    )[None, None]
    if needs.shape.masks == 2:
        mask = {"full_attention": mask, "sliding_attention": mask.clone()}
    tokens, places = torch.zeros(1, positions, dtype=torch.int64), torch.arange(positions)[None]
    counted = bytes_kept(
        model,
        lambda: (
            decoder(
                input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False
            ).last_hidden_state
        ),
    )
    assert needs.saved_bytes(positions, positions) == pytest.approx(counted, rel=0.2)
    assert needs.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


PAIRS = (("smollm2", "gpt2"), ("tiled", "masked"), ("kept", "recomputed"), (100, 8000), ("lora", "whole"))
PEAKS = [  # fast ones: each value with each value of another pair
    case(*map(tuple.__getitem__, PAIRS, bits), "plain", fast=d == a ^ c and e == a ^ b)
    for bits in product((0, 1), repeat=5)
    for a, b, c, d, e in [bits]
]
PEAKS += [
    case(name, "masked", "kept", 8000, trained, what, fast=(name == "gpt2") == (trained == "whole"))
    for name, trained, what in product(PAIRS[0], PAIRS[4], ("entropy", "truncated", "teacher"))
]


@pytest.mark.parametrize(("name", "attention", "layers", "vocabulary", "trained", "what"), PEAKS)
def test_the_peak_of_a_microbatch(
    name, attention, layers, vocabulary, trained, what, char_tokenizer, peak_bytes
):
    tiled, recomputes, entropy = attention == "tiled", layers == "recomputed", what == "entropy"
    lora = LORA if trained == "lora" else None
    model: Any = build(name, vocabulary=vocabulary)
    needs = model_of(model, lora, recomputes, tiled)
    if lora is not None:
        model = adapters.attach(model, lora, 0)
    policy = Policy(model, ChatTokenizer(char_tokenizer), activation_checkpointing=recomputes)
    policy.tiled = tiled
    sampling = SamplingConfig(top_p=0.9 if what == "truncated" else 1.0)
    policy.forward(
        make_batch(16), sampling
    ).logprobs.sum().backward()  # packing is proven, and gradients are there
    batch = make_batch(400)
    positions = policy.count_nodes(batch.tokens.tolist())

    teaching = None
    if what == "teacher":
        hidden, predictors, _ = policy.states(batch)
        teaching = Teaching(hidden.detach(), predictors, policy.logits, partial(divergence, beta=0.5))

    def work() -> None:
        out = policy.forward(batch, sampling, entropy=entropy, teaching=teaching)
        sum(x.sum() for x in (out.logprobs, out.entropy, out.divergence) if x is not None).backward()

    depth = batch.tokens.shape[1]
    inside = needs.backward_bytes(positions, depth)
    logits = needs.head_bytes(int(batch.action_mask.sum()), entropy, sampling.truncates, teaching is not None)
    assert needs.saved_bytes(positions, depth) + max(inside, logits) == pytest.approx(
        peak_bytes(work), rel=0.2
    )


# -- a stage -------------------------------------------------------------------------------------------------


def make_stage(**settings: Any) -> StageConfig:
    return StageConfig.model_validate({"algorithm": {"kind": "grpo"}, "steps": 1, **settings})


def sizes(parts: Any) -> dict[str, int]:
    return {part.name: part.size for part in parts}


def test_the_parts_of_a_stage():
    """Numbers by hand: SmolLM2's shape at half its width, with three layers."""
    needs = model_of(build("smollm2"), LORA)
    found = stage_memory(
        needs, make_stage(sampling={"max_tokens": 500}, microbatch_tokens=1000), EngineConfig(rows=10)
    )
    matrices = 3 * (288 * 288 * 2 + 288 * 96 * 2 + 3 * 288 * 768)
    adapter = 3 * 8 * ((288 + 288) * 2 + (288 + 96) * 2 + (288 + 768) * 3)
    # Transformers ties the embeddings of neither here, so there are two
    assert sizes(found.always) == {
        "weights": 4 * (2 * 100 * 288 + matrices + 7 * 288),
        "adapter, gradient, AdamW": 16 * adapter,
    }
    assert sizes(found.sampling)["keys and values"] == 10 * 500 * (2 * 3 * 3 * 32 * 4)
    assert sizes(found.sampling)["weights with the adapter folded in"] == 4 * matrices
    assert sizes(found.training)["activations of a microbatch"] == needs.saved_bytes(1000, 500)
    whole = [sum(sizes(parts).values()) for parts in (found.always, found.sampling, found.training)]
    assert found.peak == whole[0] + max(whole[1:])


def test_the_parts_in_16_bits():
    """The adapter is computed next to the weights, so nothing is folded; what is trained has copies in
    fp32.
    """
    adapted = model_of(build("smollm2", torch.bfloat16), LORA)
    whole = model_of(build("smollm2", torch.bfloat16), None)
    found = stage_memory(adapted, make_stage(), EngineConfig())
    assert "weights with the adapter folded in" not in sizes(found.sampling)
    assert sizes(found.always) == {
        "weights": 2 * adapted.shape.parameters,
        "adapter, gradient, AdamW": 16 * adapted.trained,
    }
    held = sizes(stage_memory(whole, make_stage(), EngineConfig()).always)
    assert sum(held.values()) == (2 + 4 + 4 + 8) * whole.trained


def test_a_reference_is_a_copy_of_what_is_trained():
    penalized = {"algorithm": {"kind": "grpo", "kl_coef": 0.1}}
    for lora, dtype, width in (
        (LORA, torch.bfloat16, 4),
        (None, torch.bfloat16, 2),
        (None, torch.float32, 4),
    ):
        needs = model_of(build("smollm2", dtype), lora)
        assert "reference" not in sizes(stage_memory(needs, make_stage(), EngineConfig()).always)
        assert (
            sizes(stage_memory(needs, make_stage(**penalized), EngineConfig()).always)["reference"]
            == width * needs.trained
        )
        assert "reference" not in sizes(
            stage_memory(needs, make_stage(**penalized, reference="base"), EngineConfig()).always
        )


def test_a_teacher_adds_its_weights_its_states_and_its_logits():
    needs, teacher = model_of(build("smollm2"), LORA), model_of(build("gpt2"), None).shape
    stage = make_stage(algorithm={"kind": "distill"}, teacher={"model": "gpt2"})
    found = stage_memory(needs, stage, EngineConfig(), teacher)
    assert sizes(found.always)["teacher"] == 4 * teacher.parameters
    assert sizes(found.training)["the teacher's states"] == 1024 * 4 * teacher.hidden
    itself = stage_memory(needs, make_stage(algorithm={"kind": "distill"}), EngineConfig())
    assert "teacher" not in sizes(itself.always)
    assert sizes(itself.training)["the teacher's states"] == 1024 * 4 * needs.shape.hidden


def test_padded_rows_have_smaller_masks():
    packed = model_of(build("smollm2"), LORA)
    padded = replace(packed, packed=False)
    assert packed.saved_bytes(4000, 500) - padded.saved_bytes(4000, 500) == 5 * 4000 * (4000 - 500)


def test_servers_take_the_memory_of_sampling():
    engine = ServerEngineConfig(urls=("http://127.0.0.1:1",))
    needs = model_of(build("smollm2"), LORA)
    assert not stage_memory(needs, make_stage(), engine).sampling
    assert stage_memory(needs, make_stage(), EngineConfig()).sampling


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_samplers_layout_is_a_copy_of_all_weights(lora, char_tokenizer, monkeypatch):
    """It was left out where all parameters are trained, and the output layer everywhere."""
    monkeypatch.setattr(fused_linear, "CACHED_WEIGHTS", 1)
    model = build("smollm2")
    needs = replace(model_of(model, lora), reordered=True)
    (predicted,) = [
        part.size
        for part in stage_memory(needs, make_stage(), EngineConfig()).sampling
        if "layout" in part.name
    ]
    policy = Policy(adapters.attach(model, lora, 0) if lora else model, ChatTokenizer(char_tokenizer))
    assert fused_linear.suits(policy.base)
    with sampling_weights(policy, "layers"):
        copies = [m.weight for m in policy.model.modules() if isinstance(m, fused_linear.FusedLinear)]
    assert predicted == 4 * sum(copy.numel() for copy in copies)


def test_budgets_bound_it():
    needs = model_of(build("gpt2"), None)

    def of(**settings: Any) -> dict[str, int]:
        engine = EngineConfig(rows=settings.pop("rows", 64), kv_tokens=settings.pop("kv_tokens", None))
        found = stage_memory(needs, make_stage(**settings), engine)
        return sizes((*found.always, *found.sampling, *found.training))

    usual, small = of(), of(tasks_per_step=1, group_size=2, microbatch_tokens=10**6)
    assert "adapter, gradient, AdamW" not in usual and usual["gradient, AdamW"] == 3 * usual["weights"]
    assert of(kv_tokens=8 * 1024 + 1000)["keys and values"] * 8 == usual["keys and values"]
    assert of(rows=8)["keys and values"] * 8 == usual["keys and values"]
    assert small["keys and values"] * 32 == usual["keys and values"], "no more rows than episodes"
    assert small["activations of a microbatch"] == needs.saved_bytes(2048, 1024), (
        "no more positions than two episodes"
    )
    assert of(microbatch_tokens=1)["activations of a microbatch"] == needs.saved_bytes(1024, 1024), (
        "one episode is never cut"
    )


def test_a_process_is_more_than_its_tensors():
    """A file in another dtype is in memory until it is converted. A GPU's peak counts tensors alone."""
    shape = replace(measure_shape(build("smollm2", torch.bfloat16), LORA), stored=4)
    needs, stage = MemoryModel(shape, 2, 8, process=10**9), make_stage()
    found = stage_memory(needs, stage, EngineConfig())
    tensors = 2 * shape.parameters + 4 * shape.parameters + 4 * needs.trained  # model, file, adapter
    assert sizes(found.always)["the process"] == 10**9
    assert replace(found, sampling=(), training=()).peak == 10**9 + tensors
    assert not stage_memory(replace(needs, width=4), stage, EngineConfig()).loading
    on_gpu = stage_memory(replace(needs, process=0), stage, EngineConfig())
    assert "the process" not in sizes(on_gpu.always) and not on_gpu.loading


def test_a_stored_dtype_is_read_from_the_model(tmp_path):
    build("gpt2").save_pretrained(tmp_path / "wide")
    build("gpt2", torch.bfloat16).save_pretrained(tmp_path / "narrow")
    shapes = [shape_of(PretrainedConfig(model=str(tmp_path / name))) for name in ("wide", "narrow")]
    assert [shape and shape.stored for shape in shapes] == [4, 2]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another heap may grow")
def test_a_process_takes_what_was_predicted(tmp_path):
    architecture = {"model_type": "llama", "num_hidden_layers": 12, "num_attention_heads": 8}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 1024}
    policy = load_policy(ScratchConfig(alphabet=string.printable, architecture=architecture | sizes), 0)
    policy.save(tmp_path)
    policy.chat.tokenizer.save_pretrained(tmp_path)
    program = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    point = ["--point", "lora, checkpointing", "training"]
    command = [sys.executable, str(program), "--model", str(tmp_path), *point]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.25)


def test_demonstrations_need_no_sampling():
    found = stage_memory(model_of(build("gpt2"), LORA), make_stage(algorithm={"kind": "sft"}), EngineConfig())
    assert not found.sampling
    assert found.peak == sum(part.size for part in (*found.always, *found.training))


# -- where the shape comes from ------------------------------------------------------------------------------


def test_a_shape_needs_no_weights(peak_bytes):
    large = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    config = ScratchConfig(
        architecture={**large, "num_key_value_heads": 8}, alphabet="01", lora=LoraSettings(rank=16)
    )
    shapes: list[Any] = []
    assert peak_bytes(lambda: shapes.append(shape_of(config))) == 0 or shapes[0].parameters > 6e9
    assert (shapes[0].layers, shapes[0].hidden, shapes[0].heads, shapes[0].kv_heads, shapes[0].head_size) == (
        32,
        4096,
        32,
        8,
        128,
    )
    assert shapes[0].gated and shapes[0].rms and len(shapes[0].linears) == 7
    assert MemoryModel(shapes[0], 2, 16).trained == 41_943_040, (
        "PEFT's own count of rank 16 on all linear layers of Llama 3 8B"
    )


def test_a_scratch_model_has_the_special_tokens_of_its_tokenizer(caplog):
    """GPT-2's own are beyond a small vocabulary; Transformers warned of that at every `explain`."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        shape_of(
            ScratchConfig(
                architecture={"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 4}, alphabet="01"
            )
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.messages


def test_what_cannot_be_known_is_not_made_up(tmp_path):
    own = ScratchConfig(architecture={"model_type": "torch.nn:Linear"}, alphabet="01")
    assert shape_of(own) is None
    assert shape_of(PretrainedConfig(model=str(tmp_path / "nowhere"))) is None


def test_explain_tells_of_every_stage_and_of_the_evaluation(tmp_path):
    """An evaluation was left out, which has more rows than a small step, and may need the most."""
    (tmp_path / "x.yaml").write_text(
        f"""run_dir: {tmp_path}/run
policy:
  kind: scratch
  alphabet: "01234"
  architecture: {{model_type: gpt2, n_layer: 2, n_embd: 32, n_head: 4}}
environment: {{kind: arithmetic, num_tasks: 10}}
evaluation: {{environment: {{kind: arithmetic, split: heldout, num_tasks: 100}}}}
tasks_per_step: 1
group_size: 2
stages: [{{algorithm: sft, steps: 1}}, {{algorithm: grpo, steps: 1}}]
"""
    )
    config = read_config(tmp_path / "x.yaml")[0]
    found = memory(config)
    assert list(found) == ["stage 0: sft", "stage 1: grpo", "evaluation"]
    assert found["stage 1: grpo"].peak >= found["stage 0: sft"].peak > 0
    kept = {name: sizes(needed.sampling).get("keys and values") for name, needed in found.items()}
    assert (
        kept["evaluation"] == config.engine.rows / 2 * kept["stage 1: grpo"]
        and not found["evaluation"].training
    )
    few = memory(
        read_config(
            tmp_path / "x.yaml",
            ["evaluation.num_tasks=3", "evaluation.attempts=2", "evaluation.sampling.temperature=1"],
        )[0]
    )
    assert sizes(few["evaluation"].sampling)["keys and values"] == 3 * kept["stage 1: grpo"], (
        "no more rows than episodes"
    )
