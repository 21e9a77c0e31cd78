"""Keys and values of the rows being decoded: one preallocated buffer per layer, rows side by side, written in place.

Layout: row r's tokens are contiguous in columns [start_r, end), so that all rows write their next token into column
``end`` and differences of columns are differences of positions. A row that leaves is overwritten by the last one; a row
that comes in is laid against the right edge. Sliding-window layers are kept whole: the mask narrows the view.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_ROOM = 64  # columns that a buffer grows by at least


class SlotLayer(CacheLayerMixin):
    """One layer's buffers (slots, heads, columns, head size); the view in use is columns [begin, end) of ``rows``."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.begin = self.end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("made with its buffers")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends one column and returns the view that attention reads."""
        assert self.keys is not None and self.values is not None
        rows, new = key_states.shape[0], self.end + key_states.shape[2]
        self.keys[:rows, :, self.end : new] = key_states
        self.values[:rows, :, self.end : new] = value_states
        self.end = new
        return self.keys[:rows, :, self.begin : new], self.values[:rows, :, self.begin : new]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end - self.begin + query_length, 0

    def get_seq_length(self) -> int:
        return self.end - self.begin

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache of up to ``slots`` rows, in use from ``begin`` to ``end``; a transformers Cache for the decode steps."""

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.rows = 0
        self.starts: list[int] = []  # first column of each row

    @property
    def end(self) -> int:
        return self.layers[0].end if self.layers else 0

    @property
    def begin(self) -> int:
        return min(self.starts, default=self.end)

    def add(self, prefill: Cache, *, source: Tensor, lengths: list[int], room: int) -> None:
        """Appends rows: row i takes the last lengths[i] columns of row source[i] of a left-padded ``prefill`` cache,
        which is shared by all its completions and copied here. ``room``: columns that will be written at most."""
        width = prefill.get_seq_length()
        self._reserve(prefill, width, room)
        first, end = self.rows, self.end
        target = slice(first, first + len(lengths))
        for layer, new in zip(self.layers, prefill.layers, strict=True):
            layer.keys[target, :, end - width : end] = new.keys[source]  # type: ignore[index]
            layer.values[target, :, end - width : end] = new.values[source]  # type: ignore[index]
        self.rows += len(lengths)
        self.starts += [end - length for length in lengths]
        self._set_view(end)

    def keep(self, alive: list[int]) -> list[int]:
        """Drops all other rows; the last ones move into the gaps. Returns the old slot of each remaining row."""
        order = list(range(len(alive)))
        gaps = sorted(set(order) - set(alive))
        moved = [row for row in alive if row >= len(alive)]
        if moved:
            to, from_ = (torch.tensor(x, device=self.layers[0].device) for x in (gaps, moved))  # type: ignore[union-attr]
            for layer in self.layers:
                layer.keys[to] = layer.keys[from_]  # type: ignore[index]
                layer.values[to] = layer.values[from_]  # type: ignore[index]
        for gap, row in zip(gaps, moved, strict=True):
            order[gap] = row
        self.starts = [self.starts[row] for row in order]
        self.rows = len(order)
        self._set_view(self.end)
        return order

    def _set_view(self, end: int) -> None:
        begin = min(self.starts, default=end)
        for layer in self.layers:
            layer.begin, layer.end = begin, end  # type: ignore[attr-defined]

    def _reserve(self, prefill: Cache, width: int, room: int) -> None:
        """Makes sure that ``width`` columns fit before ``end`` and ``room`` after it; may move everything."""
        used = self.end - self.begin
        end = max(used, width)
        capacity = self.layers[0].keys.shape[2] if self.layers else 0  # type: ignore[union-attr]
        if self.layers and width <= self.end and self.end + room <= capacity:
            return
        columns = end + room + _ROOM
        shift = end - self.end
        layers: list[CacheLayerMixin] = []
        for index, new in enumerate(prefill.layers):
            buffers = []
            for name in ("keys", "values"):
                like: Tensor = getattr(new, name)
                # zeros: columns before a row's start are masked, but NaN in them would still spread
                buffer = like.new_zeros((self.slots, like.shape[1], columns, like.shape[3]))
                if self.rows:
                    old: Tensor = getattr(self.layers[index], name)
                    buffer[: self.rows, :, end - used : end] = old[: self.rows, :, self.begin : self.end]
                buffers.append(buffer)
            layers.append(SlotLayer(*buffers))
        self.starts = [start + shift for start in self.starts]
        self.layers = layers
        self._set_view(end)
