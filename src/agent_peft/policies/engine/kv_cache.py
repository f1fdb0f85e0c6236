"""Keys and values of many conversations, in three tiers: what all prompts begin with, each prompt once, and
each row's own tokens.

A slot of one tier continues a slot of the tier above, which it refers to: forking a prompt to its siblings
costs nothing, and attention reads a prompt once for all of them (``shared_attention``). A model that must see
its keys in one piece gets copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

from agent_peft.hardware import give_back_memory
from agent_peft.policies.engine.shared_attention import Ancestor, Relatives, relatives

COMMON, PROMPTS, ROWS = 0, 1, 2  # the tiers
LARGE = 1 << 20  # bytes of a tensor: what smaller ones leave behind is not worth the milliseconds


@dataclass
class _Tier:
    """(slots, heads, capacity, head size) a layer. Index i of a slot holds the token at position
    ``starts[slot] + i``.
    """

    slots: int
    capacity: int
    keys: list[Tensor | None]
    values: list[Tensor | None]
    parents: list[int]  # the slot of the tier above that comes before; -1: none
    starts: list[int]

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's storage, made when its first keys (B, H, Q, D) come. Zeroed: what is masked must be
        finite.
        """
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.slots, key.shape[1], self.capacity)
            keys = torch.zeros(*shape, key.shape[-1], dtype=key.dtype, device=key.device)
            values = torch.zeros(*shape, value.shape[-1], dtype=value.dtype, device=value.device)
            self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def grow(self, extent: int, most: int) -> None:
        """By doubling, until ``extent`` tokens have room, but to no more than ``most`` without need."""
        old_capacity = self.capacity
        while self.capacity < extent:
            self.capacity *= 2
        self.capacity = max(old_capacity, extent, min(self.capacity, most))
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is not None and self.capacity > old_capacity:
                    new = torch.zeros(
                        *old.shape[:2], self.capacity, old.shape[3], dtype=old.dtype, device=old.device
                    )
                    new[:, :, :old_capacity] = old
                    self._replace(tensors, layer, new)

    def _replace(self, tensors: list[Tensor | None], layer: int, new: Tensor) -> None:
        """The old tensor is gone before the next one grows: its pieces fit none of the larger ones."""
        tensors[layer] = new
        if new.device.type == "cpu" and new.nbytes >= LARGE:
            give_back_memory()

    def widen(self, slots: int) -> None:
        """To so many slots, the new ones empty."""
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
    """Slots that are grown by doubling. A slot's own tokens begin where those of its parent end.

    A forward over B rows names, with ``place``, the tier and slot of each row and the positions of its Q
    tokens. What lies behind a row's last token is stale and never attended to, so forgetting costs nothing.

    Args:
        slots: of each tier.
        capacities: tokens a slot of each tier has room for at first.
        shared: slots refer to their parents, and attention must be ``shared_attention``; otherwise ``fork``
            copies.
        most: tokens that no slot will ever hold more of.
    """

    def __init__(
        self,
        slots: tuple[int, int, int],
        capacities: tuple[int, int, int],
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool,
        most: int = sys.maxsize,
    ) -> None:
        self.most = most
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
        self._written = (
            0,
            0,
            self._index,
        )  # heads, capacity, and where (B * H * Q) tokens go in tensors of that many
        self._relatives: list[tuple[_Tier, Relatives]] = []
        self._sources: dict[int, int] = {}  # slots of rows whose tokens still lie in another one
        self._known: dict[int, tuple[object, Relatives]] = {}

    def place(self, tier: int, slots: Sequence[int], positions: Tensor) -> Tensor:
        """Say where the next forward writes, and return its attention mask.

        Args:
            slots: B slots of the tier; all of them have a parent, or none.
            positions: (B, Q) of the tokens. Positions that repeat a row's last one mark padding: it is
                overwritten later.

        Returns:
            (B, 1, Q, extent): which keys of its own slot a query sees, as bool, or with ``shared`` as what is
            added to its scores.
        """
        self._settle()
        store = self._tier = self.tiers[tier]
        starts = torch.tensor([store.starts[slot] for slot in slots], device=self.device)
        self._index = positions - starts.unsqueeze(1)
        self._extent = int(self._index.max()) + 1
        self._written = (0, 0, self._index)
        store.grow(self._extent, self.most)
        self._row_index = torch.tensor(list(slots), device=self.device).unsqueeze(1)
        contiguous = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        # a slice keeps reads free of copies; decoding compacts its rows so that it always is one
        self._rows = slice(slots[0], slots[0] + len(slots)) if contiguous else self._row_index[:, 0]
        seen = torch.arange(self._extent, device=self.device) <= self._index[:, None, :, None]
        if not self.shared:
            return seen
        self._relatives = []
        while store.parents[slots[0]] >= 0:
            parents, lengths = [store.parents[slot] for slot in slots], [store.starts[slot] for slot in slots]
            tier, store = tier - 1, self.tiers[tier - 1]
            lengths = [length - store.starts[parent] for length, parent in zip(lengths, parents, strict=True)]
            if not any(lengths):  # nothing of that slot is continued
                break
            key = (parents, lengths)
            if (
                tier not in self._known or self._known[tier][0] != key
            ):  # the rows that decode stay the same for many steps
                self._known[tier] = (key, relatives(parents, lengths, self.dtype, self.device))
            self._relatives.append((store, self._known[tier][1]))
            slots = parents
        return torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, -torch.inf)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, D) keys and values at the placed positions; give back (B, H, extent, D) of the
        rows' own slots.
        """
        keys, values = self._tier.allocate(layer_idx, key_states, value_states)
        heads, capacity = keys.shape[1:3]
        if (heads, capacity) != self._written[:2]:  # the same in all layers, but for few models
            head = torch.arange(heads, device=self.device)[None, :, None]
            places = (self._row_index.unsqueeze(1) * heads + head) * capacity + self._index.unsqueeze(1)
            self._written = (heads, capacity, places.flatten())
        for tensor, states in ((keys, key_states), (values, value_states)):
            tensor.view(-1, states.shape[-1]).index_copy_(
                0, self._written[2], states.reshape(-1, states.shape[-1])
            )
        return keys[self._rows, :, : self._extent], values[self._rows, :, : self._extent]

    def ancestors(self, layer: int) -> list[Ancestor]:
        """What the placed rows see of the tiers above, nearest first."""
        found = []
        for store, kin in self._relatives:
            keys, values = store.keys[layer], store.values[layer]
            assert keys is not None and values is not None
            found.append(
                Ancestor(keys[: kin.slots, :, : kin.extent], values[: kin.slots, :, : kin.extent], kin)
            )
        return found

    def fork(self, tier: int, slots: Sequence[int], parent: int | None, length: int = 0) -> None:
        """Slots begin anew: after the first ``length`` positions of slot ``parent`` of the tier above, or
        with no parent at position 0.
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
        store.grow(length, self.most)
        for layer, (keys, values) in enumerate(zip(above.keys, above.values, strict=True)):
            if keys is not None and values is not None:
                own_keys, own_values = store.allocate(layer, keys, values)
                own_keys[index, :, :length] = keys[parent, :, :length]
                own_values[index, :, :length] = values[parent, :, :length]

    def widen(self, tier: int, slots: int) -> None:
        """Give a tier more slots."""
        self.tiers[tier].widen(slots)

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows' slots. The tensors follow before they are next read or written, for all
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

    # What Transformers asks of a cache. Positions are always given, so these only keep its defaults from
    # guessing.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._extent - self._index.shape[-1], 0)

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self._extent, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        return sum(
            t.numel() * t.element_size()
            for tier in self.tiers
            for t in (*tier.keys, *tier.values)
            if t is not None
        )
