"""KV cache of the rows being decoded: one preallocated buffer per layer, written in place.

Layout: row r's tokens are contiguous in columns [start_r, end). All rows write their next token to the same column
``end``, and differences of columns are differences of positions. When a row leaves, the last row replaces it; a new row
is aligned to the right edge. Sliding-window layers keep all columns: the mask narrows the view.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

_ROOM = 64  # columns beyond what is needed when a buffer grows: every growth copies the whole cache


class SlotLayer(CacheLayerMixin):
    """One layer's buffers (slots, heads, columns, head size); columns [begin, end) of the running rows are in use."""

    is_sliding = False
    keys: Tensor
    values: Tensor

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
        """Appends the new column and returns the view that attention reads: a slice, not a copy."""
        # key_states, value_states: (rows, heads, new columns, head size).
        rows, new = key_states.shape[0], self.end + key_states.shape[2]
        self.keys[:rows, :, self.end : new] = key_states
        self.values[:rows, :, self.end : new] = value_states
        self.end = new
        return self.keys[:rows, :, self.begin : new], self.values[:rows, :, self.begin : new]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # In older transformers it is a tensor with the position of each query.
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self.end - self.begin + queries, 0

    def get_seq_length(self) -> int:
        return self.end - self.begin

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers


class SlotCache(Cache):
    """A transformers Cache of up to ``slots`` rows; columns ``begin`` to ``end`` are in use."""

    layers: list[SlotLayer]  # type: ignore[assignment]

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

    def add(self, prefill: DynamicCache, *, source: Tensor, lengths: list[int], room: int) -> None:
        """Appends rows: row i takes the last lengths[i] columns of row source[i] of a left-padded ``prefill`` cache.
        Completions of one prompt share its row there; each gets a copy. ``room``: maximum number of columns that will
        be written."""
        width = prefill.get_seq_length()
        self._reserve(prefill, width, room)
        first, end = self.rows, self.end
        target = slice(first, first + len(lengths))
        # Right-aligned: the prefill's last column goes to end - 1, the column before the next token's.
        for layer, new in zip(self.layers, prefill.layers, strict=True):
            assert isinstance(new, DynamicLayer)
            for own, shared in ((layer.keys, new.keys), (layer.values, new.values)):
                assert shared is not None
                # shared: (prompts, heads, width, head size) -> (new rows, heads, width, head size).
                own[target, :, end - width : end] = shared[source]
                # Masked, but memory that was never written may hold NaN, and 0 * NaN is NaN in the attention's sum.
                own[target, :, : end - width] = 0
        self.rows += len(lengths)
        self.starts += [end - length for length in lengths]
        self._set_view(end)

    def copy(self, row: int) -> DynamicCache:
        """A cache of one row's columns alone."""
        copied = DynamicCache()
        start = self.starts[row]
        for index, layer in enumerate(self.layers):
            keys, values = (x[row : row + 1, :, start : self.end].clone() for x in (layer.keys, layer.values))
            copied.update(keys, values, index)
        return copied

    def reorder(self, first: int, order: list[int]) -> None:
        """Moves the rows from ``first`` on: the row that is number i among them becomes number order[i]."""
        if order == sorted(order):
            return
        # The inverse of order.
        place = sorted(range(len(order)), key=order.__getitem__)  # place[new] = old
        source = torch.tensor(place, device=self.layers[0].device) + first
        target = slice(first, first + len(order))
        for layer in self.layers:
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]
        self.starts[first:] = [self.starts[first + old] for old in place]

    def keep(self, alive: list[int]) -> list[int]:
        """Drops all other rows; the last rows move into the gaps. Returns the old slot of each remaining row.

        Copies at most as many rows as have left: compacting in order could copy nearly the whole cache.
        """
        order = list(range(len(alive)))
        # Slots below len(alive) whose row has left take the rows that lie above.
        gaps = sorted(set(order) - set(alive))
        moved = [row for row in alive if row >= len(alive)]
        if moved:
            to, from_ = (torch.tensor(x, device=self.layers[0].device) for x in (gaps, moved))
            for layer in self.layers:
                layer.keys[to] = layer.keys[from_]
                layer.values[to] = layer.values[from_]
        for gap, row in zip(gaps, moved, strict=True):
            order[gap] = row
        self.starts = [self.starts[row] for row in order]
        self.rows = len(order)
        self._set_view(self.end)
        return order

    def _set_view(self, end: int) -> None:
        begin = min(self.starts, default=end)
        for layer in self.layers:
            layer.begin, layer.end = begin, end

    def _reserve(self, prefill: DynamicCache, width: int, room: int) -> None:
        """Ensures that ``width`` columns fit before ``end`` and ``room`` after it; may move the whole cache."""
        used = self.end - self.begin
        # Rows end at this column in the new buffer: it leaves room for the wider of what is there and what comes.
        end = max(used, width)
        capacity = self.layers[0].keys.shape[2] if self.layers else 0
        if self.layers and width <= self.end and self.end + room <= capacity:
            return
        columns = end + room + _ROOM
        # Moving drops the unused columns before ``begin``; rows keep their distances to ``end``, so their positions.
        shift = end - self.end
        layers: list[SlotLayer] = []
        for index, new in enumerate(prefill.layers):
            buffers = []
            for name in ("keys", "values"):
                like: Tensor = getattr(new, name)
                buffer = like.new_empty((self.slots, like.shape[1], columns, like.shape[3]))
                if self.rows:
                    old: Tensor = getattr(self.layers[index], name)
                    buffer[: self.rows, :, end - used : end] = old[: self.rows, :, self.begin : self.end]
                    # For the same reason as in add(): NaN in unwritten memory.
                    buffer[: self.rows, :, : end - used] = 0
                buffers.append(buffer)
            layers.append(SlotLayer(*buffers))
        self.starts = [start + shift for start in self.starts]
        self.layers = layers
        self._set_view(end)
