"""The policy: a causal language model that acts, with a LoRA adapter or with all its parameters trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_peft.batch import Batch, PolicyOutput
from agent_peft.files import check_regular
from agent_peft.policies import adapters, proofs, value_head
from agent_peft.policies.forward.attention import attempt
from agent_peft.policies.forward.language_model import LanguageModel, Measure, entropy_of, logprobs_of_targets
from agent_peft.policies.forward.layers import (
    AdapterDropout,
    checkpointing,
    dropping,
    fuse_activations,
    in_float32,
    prefix_keys,
)
from agent_peft.policies.forward.trie import Layout, build_trie, count_nodes, fill_rows, lay_out
from agent_peft.policies.models.custom_module import CustomModel
from agent_peft.policies.models.positions import bound_of
from agent_peft.policies.models.shape import layers_of
from agent_peft.policies.models.tokenizer import save_tokenizer
from agent_peft.policies.reference import Reference, trained
from agent_peft.policies.sampling import SamplingConfig, log_distribution
from agent_peft.policies.tokenization import ChatTokenizer
from agent_peft.policies.value_head import ValueHead
from agent_peft.types import AgentPeftError

logger = logging.getLogger(__name__)

EXACT_CHUNK = 128  # predictors whose logits exist at once in ``exact_logprobs``


@dataclass(frozen=True)
class Teaching:
    """A teacher's reading of a batch. Its logits are computed for a chunk of predictors at a time, as the
    policy's are.

    Args:
        hidden: (n, H) its last hidden states.
        predictors: (B, T) of each token of the batch, the index of the state that predicts it.
        logits: gives (n, V') logits of its states. Those beyond the policy's vocabulary are left out.
        divergence: (log-probabilities (n, V) of the policy and of the teacher) -> (n,) nats.
    """

    hidden: Tensor
    predictors: Tensor
    logits: Callable[[Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]

    def divergence_of(self, logp: Tensor, nodes: Tensor, sampling: SamplingConfig) -> Tensor:
        """(n,) nats between the policy's log-probabilities (n, V) and those after the teacher's ``nodes``
        (n,), under the same sampling distribution. The gradient is the policy's alone.
        """
        with torch.no_grad():
            logits = self.logits(self.hidden[nodes])[:, : logp.shape[-1]]
            target = log_distribution(logits, sampling)
        return self.divergence(logp, target)


class Policy(LanguageModel):
    """The model that acts.

    Args:
        packing: train on the token trie. A model that cannot read a trie is padded, with a warning.
        activation_checkpointing: use less memory in training, and compute each layer twice.

    Attributes:
        rounding: the bound in nats on ``drift`` between two exact computations (``proofs.measure_rounding``).
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        chat: ChatTokenizer,
        packing: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(model)
        self.chat = chat
        self.value_head: ValueHead | None = None
        fuse_activations(self.base)
        self.checkpointed = layers_of(self.decoder) if activation_checkpointing else []
        self.bound = bound_of(self.base.config)
        proofs.prove_head(self)
        proofs.prove_window(self)
        opening = self.opening()
        self.rounding = proofs.measure_rounding(self, opening)
        self.packing = packing and not isinstance(self.base, CustomModel)  # which gets no mask
        self.tiled = self.packing and proofs.prove_tiles(self)
        if self.packing and (reason := proofs.refuse_packing(self, opening, self.rounding)):
            logger.warning("packing is off, trajectories are padded: %s", reason)
            self.packing = self.tiled = False
        self._attention_cost = self._measure_attention_cost()

    def opening(self) -> list[int]:
        """The first tokens of a short conversation, on which the policy and its sampler are proven."""
        return proofs.opening(self.chat, None if self.bound is None else self.bound.positions)

    @property
    def has_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    @property
    def dropouts(self) -> list[nn.Module]:
        """The dropout layers of the adapter whose probability is above 0."""
        return [
            m
            for name, m in self.model.named_modules()
            if "lora_dropout" in name and isinstance(m, nn.Dropout) and m.p > 0
        ]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained: the adapter's or all of them, without the critic's."""
        return trained(self.model)

    def attach_value_head(self, *, detach: bool) -> ValueHead:
        """Give the policy a critic that returns 0 everywhere, unless it has one.

        Args:
            detach: the value loss trains the critic only, and not the model under it.
        """
        if self.value_head is None:
            with torch.no_grad():
                one = torch.ones(1, 1, dtype=torch.int64, device=self.device)
                state = self.padded_states(one, lengths=one[0])
            self.value_head = ValueHead(state.shape[-1]).to(self.device)
        self.value_head.detach_states = detach
        return self.value_head

    def forward(
        self,
        batch: Batch,
        sampling: SamplingConfig,
        *,
        entropy: bool = False,
        values: bool = False,
        teaching: Teaching | None = None,
        dropout_seed: int | None = None,
        greedy: bool = False,
    ) -> PolicyOutput:
        """Log-probabilities of the sampled tokens, under the distribution that they were drawn from.

        Shared prefixes are computed once (the token trie). Logits exist for a chunk of predictors at a time.

        Args:
            entropy: also compute the entropies.
            values: also compute the critic's values, from the states that predict the tokens.
            teaching: also compute the divergences from this teacher.
            dropout_seed: decides the masks of the adapter's dropout, which are those of a trajectory
                whatever the batch. With None, dropout does not act.
            greedy: also compare each token with the likeliest one.

        Returns:
            (B, T) log-probabilities, entropies and divergences in nats, and values, all with gradient, and
            zero off the action mask.
        """
        batch = batch.to(self.device)
        with checkpointing(self.checkpointed if torch.is_grad_enabled() else []):
            hidden, predictors, dropout = self.states(batch, dropout_seed)
        mask = batch.action_mask
        # Siblings that sampled the same token after the same prefix share its logits, if their teacher's
        # prefix is the same, too.
        taught = [] if teaching is None else [teaching.predictors[mask]]
        pairs = torch.stack([predictors[mask], batch.tokens[mask], *taught])
        pairs, inverse = pairs.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
        states, plain = hidden[pairs[0]], self.softcap is None
        measures: list[Measure] = [entropy_of] if entropy else []
        if greedy:
            measures.append(lambda logp, part: (logp.argmax(-1) == pairs[1][part]).float())
        if teaching is not None:
            measures.append(lambda logp, part: teaching.divergence_of(logp, pairs[2][part], sampling))
        logp, *measured = logprobs_of_targets(
            self.head,
            plain,
            self.logits,
            states,
            pairs[1],
            sampling,
            measures,
            within=lambda part: dropping(dropout and dropout.at(pairs[0][part])),
        )
        zeros = torch.zeros(mask.shape, device=mask.device)
        found = [zeros.masked_scatter(mask, measure[inverse]) for measure in measured]
        # values come last and index the states again: the order of the gradient's sum decides its rounding
        return PolicyOutput(
            logprobs=zeros.masked_scatter(mask, logp[inverse]),
            entropy=found[0] if entropy else None,
            divergence=None if teaching is None else found[-1],
            greedy=found[int(entropy)] if greedy else None,
            values=zeros.masked_scatter(mask, self._value(hidden[pairs[0]])[inverse]) if values else None,
        )

    def exact_logprobs(self, batch: Batch, sampling: SamplingConfig) -> Tensor | None:
        """(B, T) log-probabilities in nats as ``forward`` gives them, computed in fp32 from the same weights.
        The difference is rounding to 16 bits. Each trajectory is read alone, without the trie. No gradient.

        None where the model refuses fp32.
        """
        batch = batch.to(self.device)
        scores = attempt(lambda: self._in_float32(batch.rows, sampling))
        return None if isinstance(scores, Exception) else batch.joined(scores)

    def _in_float32(self, batch: Batch, sampling: SamplingConfig) -> Tensor:
        scores = torch.zeros_like(batch.logprobs)
        with in_float32(self.model):
            for row, length in enumerate(batch.lengths.tolist()):
                hidden = self.padded_states(
                    batch.tokens[row : row + 1, :length], batch.lengths[row : row + 1]
                )
                for places in torch.split(batch.action_mask[row].nonzero()[:, 0], EXACT_CHUNK):
                    targets = batch.tokens[row, places]
                    logp = log_distribution(self.logits(hidden[0, places - 1]), sampling, keep=targets)
                    scores[row, places] = logp.gather(-1, targets[:, None])[:, 0]
        return scores

    def reference_logprobs(
        self, batch: Batch, sampling: SamplingConfig, reference: Reference, dropout_seed: int | None = None
    ) -> Tensor:
        """(B, T) log-probabilities in nats under the reference, as ``forward`` gives the policy's. No
        gradient.
        """
        with torch.no_grad(), reference.acting(self.model):
            return self.forward(batch, sampling, dropout_seed=dropout_seed).logprobs

    def values(self, batch: Batch) -> Tensor:
        """(B, T) present values of the critic, zero off the action mask. No logits, no gradient."""
        with torch.no_grad():
            batch = batch.to(self.device)
            hidden, predictors, _ = self.states(batch)
            mask = batch.action_mask
            zeros = torch.zeros(mask.shape, device=mask.device)
            return zeros.masked_scatter(mask, self._value(hidden[predictors[mask]]))

    def count_nodes(self, sequences: Sequence[Sequence[int]]) -> int:
        """The number of positions that a forward over these trajectories computes. It is the cost that
        ``microbatch_tokens`` limits.
        """
        return count_nodes(sequences) if self.packing else len(sequences) * max(map(len, sequences))

    def _value(self, states: Tensor) -> Tensor:
        if self.value_head is None:
            raise ValueError("the policy has no critic: call attach_value_head first")
        return self.value_head(states)  # type: ignore[no-any-return]

    def states(
        self, batch: Batch, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor, AdapterDropout | None]:
        """Last hidden states (n, H), the index (B, T) of each token's predictor, and the dropout."""
        hidden, predictors, dropout = self._states(batch.rows, dropout_seed)
        return hidden, batch.joined(predictors), dropout

    def _states(self, batch: Batch, dropout_seed: int | None) -> tuple[Tensor, Tensor, AdapterDropout | None]:
        rows, length = batch.tokens.shape
        if self.bound is not None and length > self.bound.positions:
            raise AgentPeftError(
                f"a trajectory has {length} tokens, and the model can read {self.bound.positions} "
                f"({self.bound.reason}); shorten the demonstration or the task, or take another model"
            )
        layout, dropout = self._lay_out(batch) if self.packing else None, None
        if dropout_seed is not None:
            keys = prefix_keys(batch.tokens.cpu())
            keys = keys if layout is None else layout.nodes(keys)
            dropout = AdapterDropout(self.dropouts, dropout_seed, keys.to(self.device))
        with dropping(dropout):
            if layout is not None:
                hidden, predictors = self.packed_states(layout), layout.predictors(length).to(self.device)
            else:
                hidden = self.padded_states(batch.tokens, batch.lengths)
                predictors = torch.arange(rows * length, device=self.device).view(rows, length) - 1
        return hidden.flatten(0, 1), predictors.clamp_(min=0), dropout

    def _lay_out(self, batch: Batch) -> Layout:
        sequences = batch.sequences
        if self.tiled:  # a node of a longer row costs no more
            return fill_rows([build_trie(sequences)], [range(len(sequences))])
        return lay_out(sequences, batch.groups.tolist(), self._attention_cost)

    def _measure_attention_cost(self) -> float:
        """Multiplications for a pair of positions in attention, per those for a position in all else."""
        config = self.text_config
        weights = sum(
            p.numel()
            for m in self.decoder.modules()
            if not isinstance(m, nn.Embedding)
            for p in m.parameters(recurse=False)
        )
        return float(2 * config.num_hidden_layers * config.hidden_size / max(weights, 1))

    def save(self, folder: str | Path) -> None:
        """Write the adapter in PEFT's layout, or the whole model and its tokenizer where all parameters are
        trained; and the critic, where there is one.
        """
        adapters.save(self.model, Path(folder))
        if not self.has_adapter:
            save_tokenizer(self.chat.tokenizer, self.chat.template, Path(folder))
        if self.value_head is not None:
            value_head.save(self.value_head, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read what ``save`` wrote. A critic in the folder is attached."""
        folder = Path(folder).expanduser()
        check_regular(folder)
        adapters.load(self.model, folder)
        self.load_value_head(folder)

    def load_value_head(self, folder: Path) -> None:
        """Read the critic in a folder, if there is one or the policy has one."""
        if self.value_head is not None or (folder / value_head.WEIGHTS).exists():
            value_head.load(self.value_head or self.attach_value_head(detach=False), folder)

    def save_merged(self, folder: str | Path) -> None:
        """Write a model that Transformers loads without PEFT: the adapter is added to the weights in fp32.
        Do not use this policy afterwards.
        """
        self.model.cpu()  # where the copy in fp32 has room
        merged = adapters.merge(self.model) if isinstance(self.model, PeftModel) else self.model
        merged.save_pretrained(folder)
        save_tokenizer(self.chat.tokenizer, self.chat.template, Path(folder))
