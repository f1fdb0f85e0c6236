"""Any Transformers causal language model, with a LoRA adapter or with all its parameters trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PretrainedConfig as ModelConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from agent_peft.batch import Batch, PolicyOutput
from agent_peft.files import check_regular
from agent_peft.hardware import choose_device
from agent_peft.out_of_memory import telling_out_of_memory
from agent_peft.policies import adapters, proofs, value_head
from agent_peft.policies.config import PretrainedConfig, ScratchConfig
from agent_peft.policies.engine import shared_attention
from agent_peft.policies.engine.onednn_linear import BlockedLinear, blocked, worth_it
from agent_peft.policies.forward import tree_attention
from agent_peft.policies.forward.activation_checkpointing import layers_of, recomputing
from agent_peft.policies.forward.attention_override import Replacement, attempt, replacing
from agent_peft.policies.forward.gelu import fuse_activations
from agent_peft.policies.forward.output_layer import chosen_logprobs
from agent_peft.policies.forward.trie import Rows, build_trie, fill_rows, lay_out
from agent_peft.policies.models.bundled import BUNDLED, fetch, from_gguf
from agent_peft.policies.models.custom_module import OwnModel, own_model
from agent_peft.policies.models.positions import window_of
from agent_peft.policies.models.pretrained import build, cause, ends_of, load_pretrained
from agent_peft.policies.models.shape import scratch_architecture
from agent_peft.policies.precision import choose_precision
from agent_peft.policies.reference import Reference, trained
from agent_peft.policies.sampling import SamplingConfig
from agent_peft.policies.tokenization import ChatTokenizer, character_tokenizer
from agent_peft.policies.value_head import ValueHead
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)


class Policy:
    """The model that acts.

    Args:
        model: a causal language model or a PeftModel around one.
        chat: how conversations become tokens.
        packing: train on the token trie; False pads.
        activation_checkpointing: train with less memory, and compute each layer twice.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        chat: ChatTokenizer,
        packing: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        self.model, self.chat = model.eval(), chat
        self.base = cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)
        self.packing = packing and not isinstance(
            self.base, OwnModel
        )  # which is given no mask, so it cannot read a tree
        self.decoder: nn.Module = self.base.get_decoder()  # type: ignore[no-untyped-call]
        if self.packing and proofs.masks_by_place(self.decoder):
            logger.warning(
                "packing is off, trajectories are padded: %s masks keys by their place in a row",
                type(self.base).__name__,
            )
            self.packing = False
        fuse_activations(self.base)
        self.recomputed = layers_of(self.decoder) if activation_checkpointing else []
        self._layer_types = set(getattr(self._text_config, "layer_types", None) or ())
        if "chunked_attention" in self._layer_types:
            raise AgentPeftError(
                f"{type(self.base).__name__} attends in chunks; Agent-PEFT knows full and sliding-window attention only"
            )
        proofs.prove_head(self)
        proofs.prove_window(self)
        self.value_head: ValueHead | None = None
        self.blocks = worth_it(self.base)
        self.tiled = self.packing and proofs.prove_tiles(self)
        self.rounding = proofs.measure_rounding(self)
        self._packing_proven = False
        self._attention_cost = self._measure_attention_cost()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.base.parameters()).dtype

    @property
    def head(self) -> nn.Module:
        """The output layer, which is another one while sampling."""
        return self.base.get_output_embeddings()  # type: ignore[no-untyped-call,no-any-return]

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    @property
    def _text_config(self) -> ModelConfig:
        return self.base.config.get_text_config()

    @property
    def dropouts(self) -> list[nn.Module]:
        """The adapter's dropout layers that drop anything."""
        return [
            m
            for name, m in self.model.named_modules()
            if "lora_dropout" in name and isinstance(m, nn.Dropout) and m.p > 0
        ]

    @contextmanager
    def _dropping(self, seed: int) -> Iterator[None]:
        """The adapter's dropout acts inside, with masks that ``seed`` decides. The base model's own never
        does: it is not trained.
        """
        layers = self.dropouts
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for layer in layers:
                layer.train()
            try:
                yield
            finally:
                for layer in layers:
                    layer.eval()

    def trainable_parameters(self) -> list[nn.Parameter]:
        return trained(self.model)

    def attach_value_head(self, trunk_gradient: bool) -> ValueHead:
        """A critic that says 0 everywhere; one that is there already stays as it is. Its parameters are
        not among the policy's own.
        """
        if self.value_head is None:
            with torch.no_grad():
                state = self.decoder(
                    input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device)
                ).last_hidden_state
            self.value_head = ValueHead(state.shape[-1]).to(self.device)
        self.value_head.trunk_gradient = trunk_gradient
        return self.value_head

    # -- scoring ---------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        sampling: SamplingConfig,
        *,
        entropy: bool = False,
        values: bool = False,
        dropout_seed: int | None = None,
    ) -> PolicyOutput:
        """Log-probabilities of the sampled tokens, under the very distribution they were drawn from.

        Shared prefixes are computed once (the token trie); logits exist for a chunk of predictors at a time.

        Args:
            dropout_seed: decides the masks of the adapter's dropout; None, as in all scoring, drops nothing.

        Returns:
            (B, T) log-probabilities in nats with gradient, zero off the action mask; entropies alike, without
            gradient tricks; and the critic's values, from the very states that predict the tokens.
        """
        packed = self._packs(batch)
        again = self.recomputed if torch.is_grad_enabled() else []
        dropouts = [] if dropout_seed is None else self.dropouts
        with (
            nullcontext() if dropout_seed is None else self._dropping(dropout_seed),
            recomputing(again, dropouts),
        ):
            return self._score(batch, sampling, entropy, packed, values)

    def reference_logprobs(
        self, batch: Batch, sampling: SamplingConfig, reference: Reference, dropout_seed: int | None = None
    ) -> Tensor:
        """(B, T) log-probabilities of the reference, as ``forward`` gives those of the policy. No
        gradient.
        """
        with torch.no_grad(), reference.acting(self.model):
            return self.forward(batch, sampling, dropout_seed=dropout_seed).logprobs

    def values(self, batch: Batch) -> Tensor:
        """(B, T) values of the critic as it stands, zero off the action mask. No logits are computed. No
        gradient.
        """
        with torch.no_grad():
            packed, batch = self._packs(batch), batch.to(self.device)
            hidden, predictors = self._packed_states(batch) if packed else self._padded_states(batch)
            mask = batch.action_mask
            return torch.zeros(mask.shape, device=mask.device).masked_scatter(
                mask, self._evaluate(hidden.flatten(0, 1), predictors[mask])
            )

    def _evaluate(self, hidden: Tensor, predictors: Tensor) -> Tensor:
        if self.value_head is None:
            raise ValueError("the policy has no critic: attach_value_head first")
        return self.value_head(hidden[predictors])  # type: ignore[no-any-return]

    def count_nodes(self, sequences: Sequence[Sequence[int]]) -> int:
        """How many positions a forward over these trajectories computes: the cost that microbatches are
        budgeted by.
        """
        return len(build_trie(sequences)) if self.packing else len(sequences) * max(len(s) for s in sequences)

    def _score(
        self, batch: Batch, sampling: SamplingConfig, entropy: bool, packed: bool, values: bool = False
    ) -> PolicyOutput:
        batch = batch.to(self.device)
        hidden, predictors = self._packed_states(batch) if packed else self._padded_states(batch)
        mask = batch.action_mask
        # siblings that sampled the same token after the same prefix share its logits
        pairs, inverse = torch.stack([predictors[mask], batch.tokens[mask]]).unique(  # type: ignore[no-untyped-call]
            dim=1, return_inverse=True
        )
        states, plain = (
            hidden.flatten(0, 1)[pairs[0]],
            not getattr(self._text_config, "final_logit_softcapping", None),
        )
        logp, ent = chosen_logprobs(self.head, plain, self.logits, states, pairs[1], sampling, entropy)
        zeros = torch.zeros(mask.shape, device=mask.device)
        return PolicyOutput(
            logprobs=zeros.masked_scatter(mask, logp[inverse]),
            entropy=None if ent is None else zeros.masked_scatter(mask, ent[inverse]),
            values=zeros.masked_scatter(mask, self._evaluate(hidden.flatten(0, 1), pairs[0])[inverse])
            if values
            else None,
        )

    def _packed_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Last hidden states (R, N, H) of the batch's tries, and for each (b, t) the node (of R * N) that
        predicts it.
        """
        rows = self._lay_out(batch)
        predictors = torch.zeros(batch.tokens.shape, dtype=torch.int64)
        for b, path in enumerate(rows.paths):
            predictors[b, 1 : len(path)] = torch.tensor(path[:-1], dtype=torch.int64)
        tokens, positions = rows.tokens.to(self.device), rows.positions.to(self.device)
        if self.tiled:
            return self._along_tree(tokens, positions, rows.ends[0].to(self.device)), predictors.to(
                self.device
            )
        return self.hidden_states(tokens, positions, rows.mask().to(self.device)), predictors.to(self.device)

    def _along_tree(self, tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """Last hidden states (1, N, H) of a trie's nodes, whose attention compares a tile of them only
        with what it sees.
        """
        shape = self._text_config
        groups = shape.num_attention_heads // (
            getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        )
        found = tree_attention.tiles(ends, self.dtype, groups)
        given = torch.zeros(1, 1, 1, 1, device=self.device)  # in place of the mask that the model would make
        with replacing(Replacement(shape, tree_attention.NAME, found)):
            return self._read(tokens, position_ids=positions, attention_mask=given, use_cache=False)

    def _read(self, tokens: Tensor, **how: Any) -> Tensor:
        return cast(Tensor, self.decoder(input_ids=tokens, **how).last_hidden_state)

    def _lay_out(self, batch: Batch) -> Rows:
        tokens = batch.tokens.tolist()
        sequences = [tokens[b][:length] for b, length in enumerate(batch.lengths.tolist())]
        if self.tiled:  # more nodes in a row cost what they see, and no more
            return fill_rows([build_trie(sequences)], [range(len(sequences))])
        return lay_out(sequences, batch.groups.tolist(), self._attention_cost)

    def _measure_attention_cost(self) -> float:
        """What one pair of positions costs in attention, as a part of what one position costs in
        everything else (multiplications).
        """
        shape = self._text_config
        weights = sum(
            p.numel()
            for m in self.decoder.modules()
            if not isinstance(m, nn.Embedding)
            for p in m.parameters(recurse=False)
        )
        return float(2 * shape.num_hidden_layers * shape.hidden_size / max(weights, 1))

    def _padded_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same by the plainest way there is: right-padded rows and the model's own causal mask."""
        rows, length = batch.tokens.shape
        attention_mask = torch.arange(length, device=self.device) < batch.lengths[:, None]
        hidden = self._read(batch.tokens, attention_mask=attention_mask.long(), use_cache=False)
        return hidden, (torch.arange(rows * length, device=self.device).view(rows, length) - 1).clamp_(min=0)

    def hidden_states(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        """Last hidden states (B, Q, H) of tokens (B, Q) at positions (B, Q) under a boolean mask (B, 1, Q,
        K).

        Keys are those of a cache, where index == position unless it shares, or without one those of
        ``tokens``.
        """
        shared = cache is not None and cache.shared
        keys = positions if cache is None else torch.arange(mask.shape[-1], device=mask.device).unsqueeze(0)
        with (
            replacing(Replacement(self._text_config, shared_attention.NAME, cache))
            if shared
            else nullcontext()
        ):
            given = mask if shared else self._layer_masks(mask, positions, keys)
            return self._read(
                tokens,
                position_ids=positions,
                attention_mask=given,
                past_key_values=cache,
                use_cache=cache is not None,
            )

    def _layer_masks(self, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        """``mask`` in the form the model wants: cut to the sliding window, one for each type of layer,
        additive where it is added.
        """
        window = window_of(self._text_config)
        near = mask
        if (
            window is not None and mask.shape[-1] > window
        ):  # Transformers takes a mask of four dimensions as it is, without its window
            near = mask & (queries[:, None, :, None] - keys[:, None, None, :] < window)
        # a boolean mask becomes an additive one anyway, in every layer anew, and each layer keeps its own for
        # the backward
        if self.base.config._attn_implementation == "eager" or torch.is_grad_enabled():
            added = self._additive(mask)
            mask, near = added, added if near is mask else self._additive(near)
        if "sliding_attention" in self._layer_types:
            return {kind: near if kind == "sliding_attention" else mask for kind in self._layer_types}
        return mask if self._layer_types else near

    def _additive(self, mask: Tensor) -> Tensor:
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)

    def logprobs_of(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(B, T - 1) log-probabilities of tokens[:, 1:] under the whole distribution, of last hidden
        states (B, T, H).
        """
        return self.logits(hidden[:, :-1]).float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) logits of last hidden states (..., H)."""
        logits: Tensor = self.head(hidden)
        cap = getattr(self._text_config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    # -- sampling --------------------------------------------------------------------------------------------

    @contextmanager
    def sampling_mode(self, blocks: bool) -> Iterator[None]:
        """No gradient is recorded inside, and ``blocks`` lays the weights out for many forwards.

        In fp32 the adapter is folded into the weights. In 16 bits that would round small changes away, so it
        is computed beside them.
        """
        with torch.no_grad(), ExitStack() as stack:
            if isinstance(self.model, PeftModel) and self.dtype == torch.float32:
                stack.enter_context(adapters.folded(self.model, BlockedLinear if blocks else None))
            elif isinstance(self.model, PeftModel) and blocks:
                stack.enter_context(adapters.beside(self.model))
            if blocks:
                stack.enter_context(blocked(self.base))
            yield

    # -- checks ----------------------------------------------------------------------------------------------

    def _packs(self, batch: Batch) -> bool:
        """Whether to pack. Scores a few trajectories packed and padded until that has once been proven to
        be the same: a model that keeps a running state cannot attend along a tree, and falls back to
        padding.
        """
        if not self.packing or self._packing_proven:
            return self.packing
        sequences = [batch.tokens[b, : int(length)].tolist() for b, length in enumerate(batch.lengths)]
        distinct = sorted({tuple(s): b for b, s in enumerate(sequences)}.values())[:4]
        if len(build_trie([sequences[b] for b in distinct])) == max(len(sequences[b]) for b in distinct):
            return True  # no branches: there is nothing to go wrong, and nothing proven
        few, plain = (
            batch.select(distinct),
            SamplingConfig(),
        )  # a token at the border of top-p would say nothing about the mask
        few = replace(few, groups=torch.zeros_like(few.groups))  # one family: one trie, with branches
        if not few.action_mask.any():
            return True
        with torch.no_grad():
            packed = attempt(lambda: self._score(few, plain, False, True).logprobs)
            if isinstance(packed, Exception):
                logger.warning(
                    "packing is off, trajectories are padded: the model refused a tree mask (%s)", packed
                )
                self.packing = False
                return False
            padded = self._score(few, plain, False, False).logprobs
        if not (drift := self.drift((packed - padded)[few.action_mask.to(packed.device)])) <= self.rounding:
            logger.warning(
                "packing is off, trajectories are padded: packed and padded log-probabilities differ by %.2g",
                drift,
            )
            self.packing = False
        self._packing_proven = True
        return self.packing

    def drift(self, difference: Tensor) -> float:
        """What ``rounding`` bounds: the largest difference in fp32; the mean one in 16 bits, where one
        unlikely token may be far off.
        """
        difference = difference.abs()
        return (
            float(difference.max() if self.dtype == torch.float32 else difference.mean())
            if len(difference)
            else 0.0
        )

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The adapter in PEFT's layout, or the whole model where every parameter is trained; beside it the
        critic, where there is one.
        """
        adapters.save(self.model, folder)
        if self.value_head is not None:
            value_head.save(self.value_head, folder)

    def load(self, folder: Path) -> None:
        """What ``save`` wrote. A critic in the folder is attached; one that is attached must be there."""
        check_regular(folder)
        adapters.load(self.model, folder)
        if self.value_head is not None or (folder / value_head.WEIGHTS).exists():
            value_head.load(self.value_head or self.attach_value_head(trunk_gradient=True), folder)

    def save_merged(self, folder: Path) -> None:
        """A model of its own, adapter folded in (fp32 arithmetic), that Transformers loads without PEFT.
        This policy is used up.
        """
        self.model.cpu()  # where the copy in fp32 has room
        merged = adapters.merge(self.model) if isinstance(self.model, PeftModel) else self.model
        merged.save_pretrained(folder)
        self.chat.tokenizer.save_pretrained(folder)


def load_policy(config: PretrainedConfig | ScratchConfig, seed: int) -> Policy:
    """The policy a configuration describes. The adapter starts at zero: the first output equals the base
    model's, and this is proven.
    """
    device, dtype = choose_device(config.device), choose_precision(config).dtype
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Transformers draws one for every file it reads or writes, checkpoints included
    if isinstance(config, ScratchConfig):
        tokenizer: PreTrainedTokenizerBase = character_tokenizer(config.alphabet)
        own = ":" in str(config.architecture.get("model_type"))
        with torch.random.fork_rng():
            torch.manual_seed(derive(seed, "weights"))
            if own:
                model = own_model(config.architecture, len(tokenizer)).to(dtype)  # type: ignore[arg-type]  # its decorator hides self
            else:
                model = build(scratch_architecture(config, tokenizer), dtype)
    else:
        try:
            tokenizer, model = load_pretrained(resolve_model(config.model), dtype)
        except OSError as error:
            raise AgentPeftError(
                f"policy.model: {config.model!r} is no bundled model ({', '.join(BUNDLED)}), no folder and no model the hub gives: "
                f"{cause(error)}"
            ) from error
    with telling_out_of_memory(
        "as the model was put on its device",
        "set policy.dtype=auto, a smaller policy.model or another device",
    ):
        model.to(device)
    ends = ends_of(model)
    if config.lora is not None:
        model = adapters.attach(model, config.lora, derive(seed, "adapter"))
        adapters.assert_zero_delta(model)
    policy = Policy(
        model,
        ChatTokenizer(tokenizer, ends),
        packing=config.packing,
        activation_checkpointing=config.activation_checkpointing,
    )
    if isinstance(config, PretrainedConfig) and config.adapter is not None:
        policy.load(config.adapter)
    return policy


def resolve_model(name: str) -> str:
    """A bundled name, a GGUF file or a folder to a folder; anything else is taken for a hub id."""
    if name in BUNDLED:
        return str(fetch(name))
    if name.endswith(".gguf"):
        return str(from_gguf(Path(name)))
    return name
