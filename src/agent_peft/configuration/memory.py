"""The memory that a stage needs, before it runs: plain arithmetic on the model's shape and the configuration.

Some parts are always there (the process, weights, adapter, gradients, AdamW's moments). The largest of three
phases comes on top: loading (the file in its own dtype), sampling (keys and values, folded weights), or
training (activations of one microbatch, a chunk of logits). On a GPU the sizes are those of tensors, without
the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent_peft.policies.engine.base import AnyEngine, EngineConfig
from agent_peft.policies.forward.attention import TILE
from agent_peft.policies.forward.language_model import CHUNK
from agent_peft.policies.models.shape import LinearShape, ModelShape
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.rollout.evaluation import EvaluationConfig
from agent_peft.training.stage import StageConfig

FP32 = 4  # bytes per number of the adapter, its gradient and moments, and of logits


@dataclass(frozen=True)
class MemoryModel:
    """A model and how it is trained. A microbatch is described by its ``positions`` and its ``depth``, the
    length of its longest trajectory.
    """

    shape: ModelShape
    width: int  # bytes per number
    rank: int | None  # of the adapter; None trains all parameters
    dropout: bool = False
    checkpoints: bool = False  # activation checkpointing
    tiled: bool = False  # attention along the trie, tile by tile
    reordered: bool = False  # the sampler keeps a copy of all weights in another layout
    packed: bool = True  # on the token trie; False pads
    process: int = 0  # bytes in addition to all tensors

    @property
    def narrow(self) -> bool:
        """Whether the model has 16 bits. Then the adapter is computed apart from the weights, and trained
        parameters have a copy in fp32.
        """
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
        """The number of parameters with a gradient."""
        if self.rank is None:
            return self.shape.parameters
        return self.shape.layers * sum(
            self.rank * (linear.inputs + linear.outputs) for linear in self.adapted
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_size * self.width

    def layer_bytes(self, positions: int, depth: int) -> int:
        """Bytes that one layer saves per position for its backward.

        A frozen matrix saves nothing. LoRA's A saves its input, and B its ``rank`` numbers. RMS norms are
        computed in fp32. So is an adapter with dropout, which saves a copy of its input and the dropped one.
        """
        shape, width = self.shape, self.width
        whole = self.rank is None
        heads = shape.heads * shape.head_size
        saved = sum(shape.norms) * (FP32 if shape.rms else width)
        if whole and shape.rms:
            saved += sum(shape.norms) * width  # normalized, before the norm's weight
        if self.tiled:  # q and the output; k and v, and a copy of those that a tile of a branch attends to
            copied = 0 if positions <= depth else depth / TILE
            saved += 2 * heads * width + int(2 * shape.kv_heads * shape.head_size * width * (1 + copied))
        else:
            saved += 4 * heads * width  # q, k, v (repeated for all heads) and the output
        saved += (shape.activation + 2 * shape.gated) * self.middle * width  # gate, its activation, up
        for attention in (True, False):
            block = [linear for linear in shape.linears if linear.attention == attention]
            first = [linear for linear in block if not linear.last and (whole or linear.adapted)]
            last = [linear for linear in block if linear.last and (whole or linear.adapted)]
            if self.dropout:
                saved += sum(linear.inputs for linear in first + last) * 2 * FP32
            else:
                saved += max((linear.inputs for linear in first), default=0) * width
                read = sum(linear.inputs for linear in last) * width
                # plain attention saves its output anyway
                saved += 0 if attention and not self.tiled else read
        if self.rank is not None:
            saved += len(self.adapted) * self.rank * width
        return saved

    def saved_bytes(self, positions: int, depth: int) -> int:
        """Bytes that a forward of one row saves for its backward: layers, masks, last hidden states."""
        shape, width = self.shape, self.width
        if self.tiled:
            masks = shape.heads // shape.kv_heads * width * positions * min(positions, depth + TILE)
        else:
            masks = (1 + shape.masks * width) * positions * (positions if self.packed else depth)
        layer = shape.hidden * width * positions if self.checkpoints else self._layer(positions, depth)
        return shape.layers * layer + masks + shape.hidden * width * positions

    def backward_bytes(self, positions: int, depth: int) -> int:
        """Bytes that the backward of one layer adds: a few gradients as wide as its MLP, and with activation
        checkpointing the layer itself.
        """
        return 2 * self.middle * FP32 * positions + (self._layer(positions, depth) if self.checkpoints else 0)

    def head_bytes(self, predictors: int, entropy: bool, truncates: bool, teacher: bool = False) -> int:
        """Bytes of the logits of a chunk of predictors, in copies: log-softmax, its gradient if it is needed
        later, a sorted copy for an entropy under truncation, a teacher's and its mixture with the policy's (8
        copies without the mixture); and what the chunk before leaves.

        If all parameters are trained, the gradient of the output layer's weights is added, and each further
        chunk adds its own.
        """
        vocabulary, frozen = self.shape.vocabulary, self.rank is not None
        logits = min(CHUNK, predictors * vocabulary) * FP32
        copies = 12 if teacher else 8 if truncates else 5 if entropy else 2 if frozen else 3
        weights = 0 if frozen else vocabulary * self.shape.hidden * self.width
        left = 0 if predictors * vocabulary <= CHUNK else logits if frozen and not entropy else weights
        return left + max(copies * logits, logits + weights)

    def _layer(self, positions: int, depth: int) -> int:
        scores = 2 * FP32 * self.shape.heads * positions**2 if self.shape.eager else 0
        return self.layer_bytes(positions, depth) * positions + scores


@dataclass(frozen=True)
class MemoryPart:
    """One use of memory, and the numbers that its size comes from."""

    name: str
    size: int  # bytes
    source: str


@dataclass(frozen=True)
class StageMemory:
    """The parts of a stage or an evaluation, at most: as if every episode had the maximum length."""

    always: tuple[MemoryPart, ...]
    loading: tuple[MemoryPart, ...]  # on top until the model is loaded
    sampling: tuple[MemoryPart, ...]  # on top while it samples; empty if the stage learns from demonstrations
    training: tuple[MemoryPart, ...]  # on top while it trains; empty in an evaluation

    @property
    def peak(self) -> int:
        always, *phases = (
            sum(part.size for part in parts)
            for parts in (self.always, self.loading, self.sampling, self.training)
        )
        return always + max(phases)


def stage_memory(
    model: MemoryModel, stage: StageConfig, engine: AnyEngine, teacher: ModelShape | None = None
) -> StageMemory:
    """The memory of a stage. Its phases follow one another, so its peak is that of the larger one. With a
    lag, it samples while it trains.

    Args:
        teacher: the frozen model that the stage loads, in the policy's dtype.
    """
    sampling: tuple[MemoryPart, ...] = ()
    if stage.samples:
        sampling = tuple(_sampling(model, stage.sampling, engine, stage.episodes_per_step))
    training = tuple(_training(model, stage, teacher or model.shape))
    return StageMemory(
        always=(*_always(model), *_reference(model, stage), *_teacher(model, teacher)),
        loading=tuple(_loading(model)),
        sampling=sampling,
        training=(*sampling, *training) if stage.lag else training,
    )


def evaluation_memory(model: MemoryModel, evaluation: EvaluationConfig, engine: AnyEngine) -> StageMemory:
    """The memory of an evaluation. It may have more rows than a step, whose episodes bound its rows."""
    episodes = engine.rows if evaluation.num_tasks is None else evaluation.num_tasks * evaluation.attempts
    return StageMemory(
        tuple(_always(model)),
        tuple(_loading(model)),
        tuple(_sampling(model, evaluation.sampling, engine, episodes)),
        (),
    )


def _always(model: MemoryModel) -> Iterator[MemoryPart]:
    shape, trained = model.shape, model.trained
    if model.process:
        yield MemoryPart("the process", model.process, "Python, torch and Transformers")
    yield MemoryPart("weights", shape.parameters * model.width, f"{shape.parameters:,} × {model.width} bytes")
    if model.rank is None:
        name, copies = ("fp32 weights, gradient, AdamW", 4) if model.narrow else ("gradient, AdamW", 3)
        yield MemoryPart(name, copies * trained * FP32, f"{trained:,} × {copies} × {FP32} bytes")
    else:
        yield MemoryPart(
            "adapter, gradient, AdamW",
            4 * trained * FP32,
            f"{trained:,} of rank {model.rank} × 4 × {FP32} bytes",
        )


def _loading(model: MemoryModel) -> Iterator[MemoryPart]:
    """A file in another dtype is mapped while its tensors are converted, before there is an optimizer. One in
    the same dtype stays mapped, as the weights. No GPU holds the file.
    """
    shape, later = model.shape, 4 if model.rank is None and model.narrow else 3  # copies: gradient, AdamW
    size = shape.parameters * shape.stored - later * model.trained * FP32
    if model.process and shape.stored not in (0, model.width) and size > 0:
        source = f"{shape.parameters:,} × {shape.stored} bytes, less the gradient and AdamW, which come later"
        yield MemoryPart("weights as stored", size, source)


def _reference(model: MemoryModel, stage: StageConfig) -> Iterator[MemoryPart]:
    """A frozen copy of the trained parameters. The base model needs none: it is the policy with its adapter
    off.
    """
    if stage.copies_reference:
        width = model.width if model.rank is None else FP32
        yield MemoryPart("reference", model.trained * width, f"{model.trained:,} × {width} bytes")


def _teacher(model: MemoryModel, teacher: ModelShape | None) -> Iterator[MemoryPart]:
    if teacher is not None:
        size = teacher.parameters * model.width
        yield MemoryPart("teacher", size, f"{teacher.parameters:,} × {model.width} bytes")


def _sampling(
    model: MemoryModel, sampling: SamplingConfig, engine: AnyEngine, episodes: int
) -> Iterator[MemoryPart]:
    if not isinstance(engine, EngineConfig):
        return  # on the servers
    shape = model.shape
    if model.reordered:
        yield MemoryPart(
            "weights in the sampler's layout",
            shape.multiplied * model.width,
            f"{shape.multiplied:,} × {model.width} bytes",
        )
    elif model.adapted and not model.narrow:
        folded = shape.layers * sum(linear.inputs * linear.outputs for linear in model.adapted)
        yield MemoryPart(
            "weights with the adapter folded in",
            folded * model.width,
            f"{folded:,} × {model.width} bytes",
        )
    rows = min(engine.rows_of(sampling.max_tokens), episodes)
    saved = rows * sampling.max_tokens * model.kv_bytes
    yield MemoryPart(
        "keys and values",
        saved,
        f"{rows} rows × {sampling.max_tokens:,} positions × {model.kv_bytes:,} bytes",
    )
    read = max(engine.prefill_tokens, sampling.max_tokens)
    wide = 4 * (model.middle + shape.hidden) * model.width
    yield MemoryPart("a prefill", read * wide, f"{read:,} positions × {wide:,} bytes")
    # logits and log-probabilities in fp32, running sums in fp64
    distribution = shape.vocabulary * (24 + 20 * sampling.truncates)
    yield MemoryPart("distributions", rows * distribution, f"{rows} rows × {distribution:,} bytes")


def _training(model: MemoryModel, stage: StageConfig, teacher: ModelShape) -> Iterator[MemoryPart]:
    longest = stage.sampling.max_tokens
    positions = min(max(stage.microbatch_tokens, longest), stage.episodes_per_step * longest)
    saved = model.saved_bytes(positions, longest)
    layer = model.shape.hidden * model.width if model.checkpoints else model.layer_bytes(positions, longest)
    yield MemoryPart(
        "activations of a microbatch",
        saved,
        f"{positions:,} positions × {model.shape.layers} layers × {layer:,} bytes, and masks",
    )
    if stage.has_teacher:
        states = teacher.hidden * model.width
        source = f"{positions:,} positions × {states:,} bytes"
        yield MemoryPart("the teacher's states", positions * states, source)
    logits = model.head_bytes(
        positions, stage.algorithm.facts.needs_entropy, stage.sampling.truncates, stage.has_teacher
    )
    inside = model.backward_bytes(positions, longest)
    update = model.trained * FP32 - saved  # temporary numbers of AdamW, when the activations are freed
    name, size, source = max(
        (
            "logits",
            logits,
            f"{min(CHUNK // model.shape.vocabulary, positions):,} predictors × "
            f"{model.shape.vocabulary:,} tokens, some copies",
        ),
        ("a layer's backward", inside, f"{positions:,} positions × {inside // positions:,} bytes"),
        ("the update", update, "AdamW's step, once the activations are gone"),
        key=lambda row: row[1],
    )
    yield MemoryPart(name, size, source)


def in_words(size: int) -> str:
    """
    >>> in_words(1_234_567_890), in_words(12_345)
    ('1.23 GB', '0.0123 MB')
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
