"""How much memory a stage needs, before it runs: plain arithmetic from the model's shape and the
configuration.

What is always there (weights, adapter, gradients, AdamW's moments), and on top of it the larger of two
phases: sampling (keys and values, folded weights), or training (activations of one microbatch, a chunk of
logits). The sizes are those of tensors: Python, torch's own code and what the allocator leaves unused come on
top (a few hundred MB on a CPU, more on a GPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent_peft.policies.engine.base import EngineConfig
from agent_peft.policies.forward.output_layer import CHUNK
from agent_peft.policies.forward.tree_attention import TILE
from agent_peft.policies.models.shape import LinearShape, ModelShape
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig

FP32 = 4  # bytes: of the adapter, its gradient and moments, and of logits


@dataclass(frozen=True)
class Learner:
    """A model and how it is trained: ``width`` bytes a number; ``rank`` of its adapter, None where all its
    parameters are trained.

    What a microbatch takes depends on its ``positions`` and on its ``depth``, the longest of its
    trajectories.
    """

    shape: ModelShape
    width: int
    rank: int | None
    dropout: bool = False
    recomputes: bool = False  # activation checkpointing
    tiled: bool = False  # attention along the trie, tile by tile
    blocks: bool = False  # the sampler has a copy of all weights in a layout of its own
    packed: bool = True  # on the token trie; else padded

    @property
    def narrow(self) -> bool:
        """In 16 bits: the adapter is computed beside the weights, and what is trained has a copy in fp32."""
        return self.width < FP32

    @property
    def adapted(self) -> list[LinearShape]:
        return [linear for linear in self.shape.linears if linear.adapted] if self.rank is not None else []

    @property
    def middle(self) -> int:
        """The width of the MLP."""
        return max(
            (linear.inputs for linear in self.shape.linears if linear.last and not linear.attention),
            default=self.shape.hidden,
        )

    @property
    def trained(self) -> int:
        """Parameters that get a gradient."""
        if self.rank is None:
            return self.shape.parameters
        return self.shape.layers * sum(
            self.rank * (linear.inputs + linear.outputs) for linear in self.adapted
        )

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one position."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_size * self.width

    def layer_bytes(self, positions: int, depth: int) -> int:
        """What one layer keeps of one position for its backward.

        A frozen matrix keeps nothing but its input's gradient's path; LoRA's A keeps its input, and B the
        rank numbers between them. RMS norms are computed in fp32, and so is an adapter whose input is dropped
        out: a copy of it, and what is left.
        """
        shape, width = self.shape, self.width
        whole = self.rank is None
        heads = shape.heads * shape.head_size
        kept = sum(shape.norms) * (FP32 if shape.rms else width)
        if whole and shape.rms:
            kept += sum(shape.norms) * width  # normalized, before the norm's weight
        if (
            self.tiled
        ):  # q and what attention gives; k and v, and a copy of those that a tile of a branch sees
            copied = 0 if positions <= depth else depth / TILE
            kept += 2 * heads * width + int(2 * shape.kv_heads * shape.head_size * width * (1 + copied))
        else:
            kept += 4 * heads * width  # q, k, v (repeated for all heads) and what attention gives
        kept += (shape.activation + 2 * shape.gated) * self.middle * width  # gate, its activation, up
        for attention in (True, False):
            block = [linear for linear in shape.linears if linear.attention == attention]
            first = [linear for linear in block if not linear.last and (whole or linear.adapted)]
            last = [linear for linear in block if linear.last and (whole or linear.adapted)]
            if self.dropout:
                kept += sum(linear.inputs for linear in first + last) * 2 * FP32
            else:
                kept += max((linear.inputs for linear in first), default=0) * width
                read = sum(linear.inputs for linear in last) * width
                kept += (
                    0 if attention and not self.tiled else read
                )  # all in one, attention keeps its output anyway
        if self.rank is not None:
            kept += len(self.adapted) * self.rank * width
        return kept

    def kept_bytes(self, positions: int, depth: int) -> int:
        """What a forward, in one row, keeps for its backward: its layers, its masks, and the states that
        predict.
        """
        shape, width = self.shape, self.width
        if self.tiled:
            masks = shape.heads // shape.kv_heads * width * positions * min(positions, depth + TILE)
        else:
            masks = (1 + shape.masks * width) * positions * (positions if self.packed else depth)
        layer = shape.hidden * width * positions if self.recomputes else self._layer(positions, depth)
        return shape.layers * layer + masks + shape.hidden * width * positions

    def backward_bytes(self, positions: int, depth: int) -> int:
        """What the backward of one layer takes on top: a few gradients as wide as its MLP, and what it
        computes again.
        """
        return 2 * self.middle * FP32 * positions + (self._layer(positions, depth) if self.recomputes else 0)

    def head_bytes(self, predictors: int, entropy: bool, truncates: bool) -> int:
        """Logits of a chunk of predictors, in copies: log-softmax, its gradient where it is asked for later;
        sorted, for an entropy.

        Where all is trained, the gradient of the output layer's weights as well, to which each further chunk
        adds its own.
        """
        vocabulary, frozen = self.shape.vocabulary, self.rank is not None
        logits = min(CHUNK, predictors * vocabulary) * FP32
        copies = 8 if truncates else 5 if entropy else 2 if frozen else 3
        weights = 0 if frozen else vocabulary * self.shape.hidden * self.width
        before = weights if predictors * vocabulary > CHUNK else 0
        return before + max(copies * logits, logits + weights)

    def _layer(self, positions: int, depth: int) -> int:
        scores = 2 * FP32 * self.shape.heads * positions**2 if self.shape.eager else 0
        return self.layer_bytes(positions, depth) * positions + scores


@dataclass(frozen=True)
class Part:
    """One thing that takes memory, and the numbers its size comes from."""

    name: str
    size: int  # bytes
    source: str


@dataclass(frozen=True)
class StageMemory:
    """Bytes of each part of a stage or an evaluation, at most: as if every episode were as long as it may
    be.
    """

    held: tuple[Part, ...]  # always there
    sampling: tuple[Part, ...]  # on top while it samples; empty where a stage learns from demonstrations
    training: tuple[Part, ...]  # on top while it trains; empty in an evaluation

    @property
    def peak(self) -> int:
        held, *phases = (
            sum(part.size for part in parts) for parts in (self.held, self.sampling, self.training)
        )
        return held + max(phases)


def stage_memory(learner: Learner, stage: StageConfig, engine: EngineConfig) -> StageMemory:
    """What a stage needs. Its phases follow one another, so its peak is that of the larger one."""
    on_policy = stage.build().on_policy
    return StageMemory(
        held=(*_held(learner), *_reference(learner, stage)),
        sampling=tuple(_sampling(learner, stage.sampling, engine, stage.episodes_per_step))
        if on_policy
        else (),
        training=tuple(_training(learner, stage)),
    )


def evaluation_memory(learner: Learner, evaluation: EvaluationConfig, engine: EngineConfig) -> StageMemory:
    """What an evaluation needs. It may have more rows than a step, which has no more of them than
    episodes.
    """
    episodes = engine.rows if evaluation.num_tasks is None else evaluation.num_tasks * evaluation.attempts
    return StageMemory(
        tuple(_held(learner)), tuple(_sampling(learner, evaluation.sampling, engine, episodes)), ()
    )


def _held(learner: Learner) -> Iterator[Part]:
    shape, trained = learner.shape, learner.trained
    yield Part("weights", shape.parameters * learner.width, f"{shape.parameters:,} × {learner.width} bytes")
    if learner.rank is None:
        what, copies = ("fp32 weights, gradient, AdamW", 4) if learner.narrow else ("gradient, AdamW", 3)
        yield Part(what, copies * trained * FP32, f"{trained:,} × {copies} × {FP32} bytes")
    else:
        yield Part(
            "adapter, gradient, AdamW",
            4 * trained * FP32,
            f"{trained:,} of rank {learner.rank} × 4 × {FP32} bytes",
        )


def _reference(learner: Learner, stage: StageConfig) -> Iterator[Part]:
    """A frozen copy of what is trained. The base model takes nothing: it is the policy with its adapter
    off.
    """
    if stage.build().needs_reference and stage.reference == "stage_start":
        width = learner.width if learner.rank is None else FP32
        yield Part("reference", learner.trained * width, f"{learner.trained:,} × {width} bytes")


def _sampling(
    learner: Learner, sampling: SamplingConfig, engine: EngineConfig, episodes: int
) -> Iterator[Part]:
    shape = learner.shape
    if learner.blocks:
        yield Part(
            "weights in the sampler's layout",
            shape.multiplied * learner.width,
            f"{shape.multiplied:,} × {learner.width} bytes",
        )
    elif learner.adapted and not learner.narrow:
        folded = shape.layers * sum(linear.inputs * linear.outputs for linear in learner.adapted)
        yield Part(
            "weights with the adapter folded in",
            folded * learner.width,
            f"{folded:,} × {learner.width} bytes",
        )
    rows = min(engine.rows_of(sampling.max_tokens), episodes)
    kept = rows * sampling.max_tokens * learner.kv_bytes
    yield Part(
        "keys and values",
        kept,
        f"{rows} rows × {sampling.max_tokens:,} positions × {learner.kv_bytes:,} bytes",
    )
    read = max(engine.prefill_tokens, sampling.max_tokens)
    wide = 4 * (learner.middle + shape.hidden) * learner.width
    yield Part("a prefill", read * wide, f"{read:,} positions × {wide:,} bytes")
    drawn = shape.vocabulary * (
        24 + 20 * sampling.truncates
    )  # logits and log-probabilities in fp32, running sums in fp64
    yield Part("distributions", rows * drawn, f"{rows} rows × {drawn:,} bytes")


def _training(learner: Learner, stage: StageConfig) -> Iterator[Part]:
    longest = stage.sampling.max_tokens
    positions = min(max(stage.microbatch_tokens, longest), stage.episodes_per_step * longest)
    kept = learner.kept_bytes(positions, longest)
    layer = (
        learner.shape.hidden * learner.width
        if learner.recomputes
        else learner.layer_bytes(positions, longest)
    )
    yield Part(
        "activations of a microbatch",
        kept,
        f"{positions:,} positions × {learner.shape.layers} layers × {layer:,} bytes, and masks",
    )
    logits = learner.head_bytes(positions, stage.build().needs_entropy, stage.sampling.truncates)
    inside = learner.backward_bytes(positions, longest)
    update = learner.trained * FP32 - kept  # AdamW's own numbers, when the activations are gone
    what, size, source = max(
        (
            "logits",
            logits,
            f"{min(CHUNK // learner.shape.vocabulary, positions):,} predictors × {learner.shape.vocabulary:,} tokens, some copies",
        ),
        ("a layer's backward", inside, f"{positions:,} positions × {inside // positions:,} bytes"),
        ("the update", update, "AdamW's step, once the activations are gone"),
        key=lambda row: row[1],
    )
    yield Part(what, size, source)


def in_words(size: int) -> str:
    """
    >>> in_words(1_234_567_890), in_words(12_345)
    ('1.23 GB', '0.0123 MB')
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
