"""Keys and values of many conversations, each in a slot of its own, where index == position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig


class SlotCache(Cache):
    """A pre-allocated cache of (slots, heads, capacity, head size) a layer, grown by doubling.

    A forward over B rows names, with ``place``, the slot of each row and the position of each of its Q tokens; token at position p is
    written at index p of its slot. What lies behind a row's last position is stale and never attended to (``mask``), so forgetting
    costs nothing and a fork is one copy.
    """

    def __init__(self, slots: int, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, capacity: int) -> None:
        text = config.get_text_config()
        self.slots, self.capacity, self.dtype, self.device = slots, capacity, dtype, device
        self.num_layers = text.num_hidden_layers
        self.keys: list[Tensor | None] = [None] * self.num_layers
        self.values: list[Tensor | None] = [None] * self.num_layers
        super().__init__(layers=[])
        self._rows: Tensor | slice = slice(0)
        self._positions = torch.zeros(0, 0, dtype=torch.int64)
        self._extent = 0

    def place(self, rows: Sequence[int], positions: Tensor) -> Tensor:
        """Say where the next forward writes, and return its attention mask.

        Args:
            rows: B slots.
            positions: (B, Q) of the tokens. Positions that repeat a row's last one mark padding: it is overwritten later.

        Returns:
            (B, 1, Q, extent) bool: a query sees index k of its own slot iff k <= its position.
        """
        self._extent = int(positions.max()) + 1
        if self._extent > self.capacity:
            self._grow(self._extent)
        contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        # a slice keeps reads free of copies; decoding compacts its rows so that it always is one
        self._rows = slice(rows[0], rows[0] + len(rows)) if contiguous else torch.tensor(list(rows), device=self.device)
        self._row_index = torch.tensor(list(rows), device=self.device).unsqueeze(1)
        self._positions = positions
        return torch.arange(self._extent, device=self.device) <= positions[:, None, :, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write (B, H, Q, D) keys and values at the placed positions; give back (B, H, extent, D) of the rows."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if keys is None or values is None:
            _, heads, _, size = key_states.shape
            keys = torch.zeros(self.slots, heads, self.capacity, size, dtype=key_states.dtype, device=key_states.device)
            values = torch.zeros(self.slots, heads, self.capacity, value_states.shape[-1], dtype=value_states.dtype, device=keys.device)
            self.keys[layer_idx], self.values[layer_idx] = keys, values
        keys[self._row_index, :, self._positions] = key_states.transpose(1, 2)
        values[self._row_index, :, self._positions] = value_states.transpose(1, 2)
        return keys[self._rows, :, : self._extent], values[self._rows, :, : self._extent]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Fork: the first ``length`` positions of slot ``source`` into each of ``targets``."""
        index = torch.tensor(list(targets), dtype=torch.int64, device=self.device)
        for tensor in (*self.keys, *self.values):
            if tensor is not None:
                tensor[index, :, :length] = tensor[source, :, :length]

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        for tensor in (*self.keys, *self.values):
            if tensor is not None:
                tensor[[a, b]] = tensor[[b, a]]

    def _grow(self, extent: int) -> None:
        capacity = self.capacity
        while capacity < extent:
            capacity *= 2
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is not None:
                    new = torch.zeros(*old.shape[:2], capacity, old.shape[3], dtype=old.dtype, device=old.device)
                    new[:, :, : self.capacity] = old
                    tensors[layer] = new
        self.capacity = capacity

    # What Transformers asks of a cache. Positions are always given, so these only keep its defaults from guessing.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._extent - self._positions.shape[-1], 0)

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        return self._extent, 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values) if t is not None)
