"""Keys and values of many conversations, in three tiers: the common beginning of all prompts, each prompt
once, and each row's own tokens.

A slot of one tier refers to the slot of the tier above that it continues. So forking a prompt to its siblings
costs nothing, and attention reads a prompt once for all of them (``shared_attention``). A model that must see
its keys in one tensor gets copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from agent_peft.hardware import give_back_memory
from agent_peft.policies.engine.shared_attention import NAME, Prefix, PrefixGroups, group_by_prefix
from agent_peft.policies.forward.attention import Override, overriding
from agent_peft.policies.forward.language_model import LanguageModel

COMMON, PROMPTS, ROWS = 0, 1, 2  # the tiers
LARGE = 1 << 20  # bytes of a tensor: the memory of smaller ones is not worth the milliseconds


@dataclass
class _Tier:
    """(slots, heads, capacity, head size) a layer. Index i of a slot holds the token at position
    ``starts[slot] + i``.
    """

    slots: int
    capacity: int
    keys: list[Tensor | None]
    values: list[Tensor | None]
    parents: list[int]  # the slot of the tier above that each slot continues, or -1
    starts: list[int]

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's storage, made when its first keys (B, H, Q, D) come. It is zeroed, since masked values
        must be finite.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.slots, key.shape[1], self.capacity)
            keys = torch.zeros(*shape, key.shape[-1], dtype=key.dtype, device=key.device)
            values = torch.zeros(*shape, value.shape[-1], dtype=value.dtype, device=value.device)
            self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def grow(self, extent: int, max_tokens: int) -> None:
        """Double the capacity until ``extent`` tokens fit, but not beyond ``max_tokens`` without need."""
        old_capacity = self.capacity
        while self.capacity < extent:
            self.capacity *= 2
        self.capacity = max(old_capacity, extent, min(self.capacity, max_tokens))
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is not None and self.capacity > old_capacity:
                    new = torch.zeros(
                        *old.shape[:2], self.capacity, old.shape[3], dtype=old.dtype, device=old.device
                    )
                    new[:, :, :old_capacity] = old
                    self._replace(tensors, layer, new)

    def _replace(self, tensors: list[Tensor | None], layer: int, new: Tensor) -> None:
        """Free the old tensor before the next one grows: the larger tensors do not fit into its memory."""
        tensors[layer] = new
        if new.device.type == "cpu" and new.nbytes >= LARGE:
            give_back_memory()

    def widen(self, slots: int) -> None:
        """Add empty slots, up to this number."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is not None:
                    self._replace(
                        tensors, layer, torch.cat([old, old.new_zeros(slots - self.slots, *old.shape[1:])])
                    )
        self.parents += [-1] * (slots - self.slots)
        self.starts += [0] * (slots - self.slots)
        self.slots = slots


class TierCache(Cache):
    """Slots whose capacity is doubled when needed. A slot's own tokens begin where those of its parent end.

    ``place`` sets where the next forward over B rows writes. Values behind a row's last token are stale and
    never attended to, so forgetting costs nothing.

    Args:
        capacities: tokens for which a slot of each tier has room at first.
        shared: slots refer to their parents, and attention is ``shared_attention``; otherwise ``fork``
            copies.
        max_tokens: the most tokens that a slot will ever hold.
    """

    def __init__(
        self,
        slots: tuple[int, int, int],
        capacities: tuple[int, int, int],
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool,
        max_tokens: int = sys.maxsize,
    ) -> None:
        self.max_tokens = max_tokens
        self.num_layers = layers = config.get_text_config().num_hidden_layers
        self.dtype, self.device, self.shared = dtype, device, shared
        self.tiers = [
            _Tier(count, max(1, capacity), [None] * layers, [None] * layers, [-1] * count, [0] * count)
            for count, capacity in zip(slots, capacities, strict=True)
        ]
        super().__init__(layers=[])
        self._tier = self.tiers[ROWS]
        self._rows: Tensor | slice = slice(0)
        self._row_index = self._index = torch.zeros(0, 0, dtype=torch.int64)
        self._extent = 0
        # heads, capacity, and the (B * H * Q) indices of the placed tokens in a tensor of these
        self._targets = (0, 0, self._index)
        self._prefixes: list[tuple[_Tier, PrefixGroups]] = []
        self._sources: dict[int, int] = {}  # slots of rows whose tokens still lie in another one
        self._known: dict[int, tuple[object, PrefixGroups]] = {}

    def read(
        self, model: LanguageModel, tier: int, slots: Sequence[int], tokens: Tensor, positions: Tensor
    ) -> Tensor:
        """Last hidden states (B, Q, H) of tokens (B, Q) at positions (B, Q). Their keys go into B slots."""
        mask = self.place(tier, slots, positions)
        if not self.shared:
            return model.hidden_states(tokens, positions, mask, self)
        # our own decoder computes its attention itself, and leaves the model's configuration alone
        ours = not isinstance(model.decoder, nn.Module)
        with nullcontext() if ours else overriding(Override(model.text_config, NAME, self)):
            return model.read(
                tokens, position_ids=positions, attention_mask=mask, past_key_values=self, use_cache=True
            )

    def place(self, tier: int, slots: Sequence[int], positions: Tensor) -> Tensor:
        """Set where the next forward writes, and return its attention mask.

        Args:
            slots: B slots of the tier; either all of them have a parent, or none has.
            positions: (B, Q) of the tokens. Positions that repeat a row's last one mark padding: it is
                overwritten later.

        Returns:
            (B, 1, Q, extent) which keys of its own slot a query sees: bool, or with ``shared`` an additive
            mask.
        """
        self._settle()
        store = self._tier = self.tiers[tier]
        starts = torch.tensor([store.starts[slot] for slot in slots], device=self.device)
        self._index = positions - starts.unsqueeze(1)
        self._extent = int(self._index.max()) + 1
        self._targets = (0, 0, self._index)
        store.grow(self._extent, self.max_tokens)
        self._row_index = torch.tensor(list(slots), device=self.device).unsqueeze(1)
        contiguous = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        # a slice keeps reads free of copies; decoding compacts its rows so that it always is one
        self._rows = slice(slots[0], slots[0] + len(slots)) if contiguous else self._row_index[:, 0]
        seen = torch.arange(self._extent, device=self.device) <= self._index[:, None, :, None]
        if not self.shared:
            return seen
        self._prefixes = []
        while store.parents[slots[0]] >= 0:
            parents, lengths = [store.parents[slot] for slot in slots], [store.starts[slot] for slot in slots]
            tier, store = tier - 1, self.tiers[tier - 1]
            lengths = [length - store.starts[parent] for length, parent in zip(lengths, parents, strict=True)]
            if not any(lengths):  # nothing of that slot is continued
                break
            key = (parents, lengths)
            # the rows that decode stay the same for many steps
            if tier not in self._known or self._known[tier][0] != key:
                self._known[tier] = (key, group_by_prefix(parents, lengths, self.dtype, self.device))
            self._prefixes.append((store, self._known[tier][1]))
            slots = parents
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, H, Q, D) at the placed positions; return (B, H, extent, D), the rows' own
        slots.
        """
        keys, values = self._tier.allocate(layer_idx, key_states, value_states)
        heads, capacity = keys.shape[1:3]
        if (heads, capacity) != self._targets[:2]:  # in most models the same in all layers
            head = torch.arange(heads, device=self.device)[None, :, None]
            places = (self._row_index.unsqueeze(1) * heads + head) * capacity + self._index.unsqueeze(1)
            self._targets = (heads, capacity, places.flatten())
        for tensor, states in ((keys, key_states), (values, value_states)):
            tensor.view(-1, states.shape[-1]).index_copy_(
                0, self._targets[2], states.reshape(-1, states.shape[-1])
            )
        return keys[self._rows, :, : self._extent], values[self._rows, :, : self._extent]

    def prefixes(self, layer: int) -> list[Prefix]:
        """The keys and values that the placed rows see in the tiers above, nearest first."""
        prefixes = []
        for store, groups in self._prefixes:
            keys, values = store.keys[layer], store.values[layer]
            assert keys is not None and values is not None
            part = groups.slots, slice(None), slice(groups.extent)
            prefixes.append(Prefix(keys[part], values[part], groups))
        return prefixes

    def fork(self, tier: int, slots: Sequence[int], parent: int | None, length: int = 0) -> None:
        """Empty these slots, and let them continue the first ``length`` positions of slot ``parent`` of the
        tier above; without a parent they begin at position 0.
        """
        store = self.tiers[tier]
        refers = parent is not None and self.shared
        for slot in slots:
            store.parents[slot] = parent if parent is not None and refers else -1
            store.starts[slot] = length if refers else 0
        if parent is None or self.shared:
            return
        self._settle()
        above, index = self.tiers[tier - 1], torch.tensor(list(slots), device=self.device)
        store.grow(length, self.max_tokens)
        for layer, (keys, values) in enumerate(zip(above.keys, above.values, strict=True)):
            if keys is not None and values is not None:
                own_keys, own_values = store.allocate(layer, keys, values)
                own_keys[index, :, :length] = keys[parent, :, :length]
                own_values[index, :, :length] = values[parent, :, :length]

    def widen(self, tier: int, slots: int) -> None:
        """Give a tier more slots."""
        self.tiers[tier].widen(slots)

    def swap(self, a: int, b: int) -> None:
        """Exchange the slots of two rows. The tensors follow before they are next read or written, for all
        exchanges at once.
        """
        rows = self.tiers[ROWS]
        for facts in (rows.parents, rows.starts):
            facts[a], facts[b] = facts[b], facts[a]
        self._sources[a], self._sources[b] = self._sources.get(b, b), self._sources.get(a, a)

    def _settle(self) -> None:
        moves = [(slot, source) for slot, source in self._sources.items() if slot != source]
        self._sources.clear()
        if not moves:
            return
        targets, sources = torch.tensor(moves, device=self.device).T
        rows = self.tiers[ROWS]
        for tensor in (*rows.keys, *rows.values):
            if tensor is not None:
                tensor[targets] = tensor[sources]

    # Transformers asks a cache for these. Positions are always given, so they only replace its guesses.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._extent - self._index.shape[-1], 0)

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self._extent, 0

    @property
    def is_compileable(self) -> bool:
        return False


def padded(
    pieces: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and positions (B, Q) of pieces of different lengths. Padding repeats the last token at the last
    position, so it writes the same keys there.
    """
    longest = max(map(len, pieces))
    tokens = [[*piece, *[piece[-1]] * (longest - len(piece))] for piece in pieces]
    positions = [
        [start + min(i, len(piece) - 1) for i in range(longest)]
        for piece, start in zip(pieces, starts, strict=True)
    ]
    return torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
