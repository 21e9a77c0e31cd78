"""Llama-family decoder built from torch operations on buffers with fixed addresses, so that a decoding step can be
recorded as a CUDA graph (:mod:`.graphs`). It runs on any device; graphs are for GPUs.

Rows and columns of a step are rounded up to buckets, so that few graphs serve all steps. Unused rows stay at position 0
of their own slot, where they do no harm; columns that a row has not reached are masked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...models.anatomy import Transformer
from .graphs import Graphs
from .packed import Packed, PackedLayer, RMSNorm

ROWS, COLUMNS = 8, 256
"""Buckets are multiples of these, and a quarter octave apart where that is more; below 8 rows they are powers of 2."""

# Without cuDNN's attention: it builds a plan at the first call with every shape, and here shapes are many and small.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer number, q (..., heads, D), k and v (..., kv_heads, D)) -> the attended values (..., heads, D)."""


def rounded(n: int, unit: int) -> int:
    """The smallest bucket of at least ``n``.

    >>> [rounded(n, 256) for n in (1, 256, 257, 1500, 2049, 5000)]
    [256, 256, 512, 1536, 2560, 5120]
    """
    step = max(unit, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // step) * step


def row_bucket(rows: int) -> int:
    """
    >>> [row_bucket(n) for n in (1, 3, 8, 9, 17, 50, 65, 129)]
    [1, 4, 8, 16, 24, 56, 80, 160]
    """
    return 1 << (rows - 1).bit_length() if rows <= ROWS else rounded(rows, ROWS)


def unsupported(parts: Transformer | str) -> str | None:
    """Says why these parts cannot be decoded here, in words that complete "because ..."; None if they can."""
    if isinstance(parts, str):
        return parts
    plain = [n.weight for n in parts.norms] + [parts.embedding.weight, parts.head.weight]
    if any(p.dtype != torch.float32 for p in plain):
        return "its norms, embedding or head are not float32"
    return None


class StaticModel:
    """``parts`` with room for ``slots`` rows of ``columns`` tokens, and one spare row; products, keys and values in
    ``dtype``; the residual stream, norms and logits in float32.

    ``slots`` and ``columns`` are rounded up to whole buckets: a step's bucket, and so its rounding errors, then do not
    depend on how much room there is.

    Call :meth:`begin` before each use. Callers may access ``cache`` (layers, 2, slots + 1, kv_heads, columns, D),
    ``tokens`` and ``lengths`` (slots,) int64, which :meth:`step` reads, and ``logits`` (slots, V), which it writes.
    """

    def __init__(self, parts: Transformer, *, slots: int, columns: int, dtype: torch.dtype, graphs: Graphs) -> None:
        self.slots, self.columns = slots, columns = row_bucket(slots), rounded(columns, COLUMNS)
        self.parts, self.dtype, self.graphs = parts, dtype, graphs
        device = parts.embedding.weight.device
        self.packed = Packed(parts, dtype)
        self.tables = parts.rotary(columns, device=device)
        # The spare slot, number ``slots``, holds a prompt whose rows have not all begun: see .static.
        shape = len(parts.layers), 2, slots + 1, parts.kv_heads, columns, parts.head_dim
        self.cache = torch.empty(shape, dtype=dtype, device=device)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.logits = torch.zeros(slots, len(parts.head.weight), dtype=torch.float32, device=device)
        # what a draw reads and writes (.static_draw)
        self.keys = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drawn_floats = torch.zeros(3, slots, dtype=torch.float32, device=device)
        self.drawn_finite = torch.zeros(slots, dtype=torch.bool, device=device)
        # Made once: a recorded step reads them, so their addresses must last.
        self.row = torch.arange(slots, device=device)[:, None]
        self.kv_head = torch.arange(parts.kv_heads, device=device)[None]
        self.column = torch.arange(columns, device=device)

    def begin(self, parts: Transformer) -> bool:
        """Loads the model's current weights and drops all rows. Returns False if this object has become useless."""
        self.cache.zero_()  # masked columns have weight 0, and 0 times NaN is NaN
        self.lengths.zero_()
        return self.packed.load(parts)

    @property
    def bytes(self) -> int:
        """The bytes of its buffers, including copies of weights."""
        buffers = [self.cache, self.logits, *self.tables.values(), *self.packed.copies]
        return sum(t.numel() * t.element_size() for t in buffers)

    def serves(self, *, slots: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether there is room for this many slots and columns, in this type."""
        return slots <= self.slots and columns <= self.columns and dtype == self.dtype

    @torch.no_grad()
    def step(self, rows: int, longest: int) -> None:
        """Computes the logits after ``tokens`` at positions ``lengths`` of the first ``rows`` slots; stores keys and
        values. ``longest``: the largest of these positions, given by the caller to avoid a copy from the GPU. Slots up
        to the next bucket must be at position 0."""
        rows, columns = row_bucket(rows), rounded(longest + 1, COLUMNS)
        self.graphs.run((rows, columns), functools.partial(self.compute, rows, columns))

    def compute(self, rows: int, columns: int) -> None:
        """The step itself. To be recorded, so it depends on buffers only and is idempotent: the caller advances
        ``lengths``."""
        lengths = self.lengths[:rows]
        # (rows, kv_heads) places of D numbers: each row's own column in (slots + 1, kv_heads, columns, D).
        place = self.row[:rows], self.kv_head, lengths[:, None]
        shared = self.parts.heads // self.parts.kv_heads
        masks = {
            window: self._mask(lengths[:, None], columns, window)[:, None, None] for window in self._windows
        }  # (rows, 1, 1, columns)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[number]
            keys.index_put_(place, k)
            values.index_put_(place, v)
            # Grouped queries take the place of query positions: keys need no repetition per head.
            # (rows, heads, D) -> (rows, kv_heads, shared, D), and back.
            return self._attention(
                q.unflatten(1, (-1, shared)), keys[:rows, :, :columns], values[:rows, :, :columns],
                mask=masks[self.parts.layers[number].window],
            ).flatten(1, 2)  # fmt: skip

        with _plainly(self.cache.device):
            x = self._layers(self.tokens[:rows], lengths, attend)
            self.logits[:rows] = self.head(x)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int], *, piece: int) -> Tensor:
        """Computes prompts into ``slots``, ``piece`` columns at a time; returns the logits (prompts, V) after each."""
        device = self.cache.device
        width = max(map(len, prompts))
        # (prompts, width), padded with token 0.
        tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in prompts], device=device)
        at = torch.tensor(slots, device=device)
        last = torch.empty(len(prompts), self.packed.embedding.shape[1], dtype=torch.float32, device=device)
        with _plainly(device):
            for begin in range(0, width, piece):
                x = self._piece(tokens[:, begin : begin + piece], at, begin)
                # Prompts whose last token is in this piece, with its column there.
                ends = [(i, len(ids) - 1 - begin) for i, ids in enumerate(prompts) if begin < len(ids) <= begin + piece]
                if ends:
                    rows, places = torch.tensor(ends, device=device).t()
                    last[rows] = x[rows, places]
            return self.head(last)

    def _piece(self, tokens: Tensor, at: Tensor, begin: int) -> Tensor:
        """Returns the residual stream (P, T, H) of tokens (P, T) from column ``begin`` on. Prompts are padded on the
        right: causal attention never sees the padding, and decoding overwrites its keys."""
        end = begin + tokens.shape[1]
        positions = self.column[begin:end]
        masks: dict[int | None, Tensor | None] = {}
        for window in self._windows:
            # The causal kernel needs as many queries as keys, so only a first piece can use it; and it has no cap.
            causal = not begin and (window is None or window >= end) and not self.parts.attention_cap
            masks[window] = None if causal else self._mask(positions[:, None], end, window)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            both = []
            for buffer, new in zip(self.cache[number], (k, v), strict=True):
                buffer[at, :, begin:end] = new.transpose(1, 2)
                # (P, kv_heads, columns, D). Later pieces also attend to what earlier ones left in the cache.
                whole = buffer[at, :, :end] if begin else new.transpose(1, 2)
                # (P, heads, columns, D): a key head for each query head.
                both.append(whole.repeat_interleave(self.parts.heads // self.parts.kv_heads, dim=1))
            attended = self._attention(q.transpose(1, 2), *both, mask=masks[self.parts.layers[number].window])
            return attended.transpose(1, 2)

        return self._layers(tokens, positions, attend)

    def head(self, x: Tensor) -> Tensor:
        """Returns float32 logits (..., V) of the residual stream (..., H): products in ``dtype``, summed in float32."""
        h, head = self.packed.norm(x), self.packed.head
        if self.dtype == torch.float32:
            logits = head(h)
        else:
            # A product with bfloat16 results would round the logits: ask for float32 results, or convert the operands.
            if h.is_cuda:
                logits = torch.mm(h, head.weight.t(), out_dtype=torch.float32)
            else:
                logits = h.float() @ head.weight.float().t()
            logits = logits if head.bias is None else logits.add_(head.bias)
        cap = self.parts.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    @functools.cached_property
    def _windows(self) -> list[int | None]:
        return list(dict.fromkeys(layer.window for layer in self.parts.layers))

    def _layers(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the residual stream after all layers. ``positions`` belong to the last dimension of ``tokens``."""
        x = self.parts.embed(tokens)
        # (2, ..., 1, D): cosines and sines, broadcast over heads.
        turns = {name: table[:, positions, None] for name, table in self.tables.items()}
        for number, (layer, packed) in enumerate(zip(self.parts.layers, self.packed.layers, strict=True)):
            # (..., heads + 2 kv_heads, D).
            qkv = packed.qkv(packed.attention_norm(x)).unflatten(-1, (-1, self.parts.head_dim))
            turn = turns[layer.rope] if layer.rope else None
            attended = attend(number, *self._heads(qkv, packed, turn))
            x = _added(x, packed.o(attended.flatten(-2)), packed.attention_after)
            gate, up = packed.gate_up(packed.mlp_norm(x)).chunk(2, dim=-1)
            gated = F.silu(gate) if self.parts.activation == "silu" else F.gelu(gate, approximate="tanh")
            x = _added(x, packed.down(gated * up), packed.mlp_after)
        return x

    def _heads(self, qkv: Tensor, packed: PackedLayer, turn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the product (..., heads, D) into q, k and v; norms and rotates queries and keys together."""
        heads, kv_heads = self.parts.heads, self.parts.kv_heads
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=-2)
        if packed.heads_norm is not None:
            qk = packed.heads_norm(qk.float())
        if turn is not None:
            # Rotary embedding of halves: x cos + (-x_2, x_1) sin, in float32.
            one, two = qk.float().chunk(2, dim=-1)
            qk = qk * turn[0] + torch.cat((-two, one), dim=-1) * turn[1]
        q, k = qk.to(self.dtype).split((heads, kv_heads), dim=-2)
        return q, k, v

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
        """Returns (B, h, Q, D) for q (B, h, Q, D) and k, v (B, h, K, D). ``mask``: added to scores; None = causal."""
        cap, scaling = self.parts.attention_cap, self.parts.scaling
        if not cap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        assert mask is not None
        # cap tanh(s q k / cap), in two steps. Explicit, because the fused kernels know no cap.
        scores = (q @ k.mT).float() * (scaling / cap)
        return torch.softmax(scores.tanh_().mul_(cap) + mask, dim=-1).to(v.dtype) @ v

    def _mask(self, positions: Tensor, columns: int, window: int | None) -> Tensor:
        """Returns (..., columns) for positions (..., 1): 0 if a query at a position sees a column, else -inf."""
        column = self.column[:columns]
        seen = column <= positions
        if window is not None:
            seen = seen & (column > positions - window)
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _added(x: Tensor, delta: Tensor, after: RMSNorm | None) -> Tensor:
    return x + (delta if after is None else after(delta.float()))


@contextlib.contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """Disables autocast inside the block, as types are explicit here, and selects attention kernels without plans."""
    with torch.autocast(device.type, enabled=False), sdpa_kernel(_KERNELS):
        yield
