"""Attention over a packed row: every segment sees its prefix and its own past, nothing else.

A dense mask over the row would cost T x T. On a GPU in half precision, FlashAttention takes segments of any lengths:
only each segment's keys and values are gathered, behind those of its prefix. Elsewhere queries, keys and values are
gathered into a few rectangular blocks of segments with similar lengths; each block is one ordinary attention call (the
model's own: sdpa or eager), and the outputs are scattered back to the row. Padding exists only inside the blocks.

The function is registered with transformers under :data:`NAME` and active only inside :func:`shared_prefix`, which
must therefore enclose the backward pass too: activation checkpointing calls it again there.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .packing import Segment

NAME = "trew_shared_prefix"
_RAGGED = {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()
"""Whether this torch's varlen_attn takes a model's scale, as from torch 2.11 on; before, blocks attend."""


@dataclass(frozen=True, slots=True)
class Block:
    """B segments of at most Q tokens with prefixes of at most M: queries (B, Q) and keys (B, L) as indices into the
    row, L = M + Q. Padding points to the segment's first token; the mask hides padded keys from every real query."""

    queries: Int[Tensor, "B Q"]
    keys: Int[Tensor, "B L"]
    visible: Tensor  # (B, 1, Q, L) bool
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Float[Tensor, "B 1 Q L"]:
        """The mask as a term added to the scores; built once per dtype, not once per layer."""
        if dtype not in self._bias:
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias[dtype] = zeros.masked_fill_(~self.visible, torch.finfo(dtype).min)
        return self._bias[dtype]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a packed row and, for each of its T tokens, the index of its output among theirs."""

    blocks: tuple[Block, ...]
    places: Int[Tensor, "T"]


@dataclass(frozen=True, slots=True)
class Ragged:
    """The segments of a packed row, N1 - 1, in order, without padding: segment n has the queries ``query_starts[n]``
    to ``query_starts[n + 1]`` of the row, and the keys ``key_starts[n]`` to ``key_starts[n + 1]`` of the K in ``keys``
    (indices into the row): those of its prefix and then its own. Its last query sees all of them."""

    keys: Int[Tensor, "K"]
    query_starts: Int[Tensor, "N1"]
    key_starts: Int[Tensor, "N1"]
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Plan:
    """How the segments of a packed row attend; each form is made when a layer first asks for it."""

    segments: tuple[Segment, ...]
    device: torch.device | str = "cpu"
    flash: bool = True  # FlashAttention where torch has a kernel for the heads

    @functools.cached_property
    def blocks(self) -> Blocks:
        return blocks(self.segments, device=self.device)

    @functools.cached_property
    def ragged(self) -> Ragged:
        return ragged(self.segments, device=self.device)


def ragged(segments: Sequence[Segment], *, device: torch.device | str = "cpu") -> Ragged:
    """
    >>> r = ragged([Segment(0, 3), Segment(3, 2, 0, 3), Segment(5, 1, 0, 3)])
    >>> r.query_starts.tolist(), r.key_starts.tolist(), r.keys.tolist()
    ([0, 3, 5, 6], [0, 3, 8, 12], [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5])
    """
    order = sorted(segments, key=lambda s: s.start)
    lengths = np.array([s.length for s in order])
    starts = np.concatenate([[0], lengths.cumsum()])
    assert [s.start for s in order] == starts[:-1].tolist(), "segments must cover the row"
    key_lengths = lengths + [s.prefix_length for s in order]
    ranges = [((s.prefix_start, s.prefix_length), (s.start, s.length)) for s in order]
    keys = np.concatenate([np.arange(first, first + count) for pair in ranges for first, count in pair])

    def there(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    return Ragged(
        keys=there(keys, torch.int64), query_starts=there(starts, torch.int32),
        key_starts=there(np.concatenate([[0], key_lengths.cumsum()]), torch.int32),
        longest_query=int(lengths.max()), longest_key=int(key_lengths.max()),
    )  # fmt: skip


def blocks(segments: Sequence[Segment], *, device: torch.device | str = "cpu") -> Blocks:
    """Groups segments into blocks by the next power of two of length and prefix length: padding stays below 2x.

    >>> p = blocks([Segment(0, 3), Segment(3, 2, 0, 3), Segment(5, 1, 0, 3)])
    >>> [tuple(b.visible.shape) for b in p.blocks], p.places.tolist()
    ([(1, 1, 3, 3), (1, 1, 2, 5), (1, 1, 1, 4)], [0, 1, 2, 3, 4, 5])
    """
    buckets: dict[tuple[int, int], list[Segment]] = {}
    for s in segments:
        # (-1).bit_length() is 1: a segment without a prefix shares its bucket with prefixes of 2 tokens.
        buckets.setdefault(((s.length - 1).bit_length(), (s.prefix_length - 1).bit_length()), []).append(s)
    found = []
    places = np.empty(sum(s.length for s in segments), dtype=np.int64)
    offset = 0
    for members in buckets.values():
        starts = np.array([s.start for s in members])[:, None]
        prefix_starts = np.array([s.prefix_start for s in members])[:, None]
        prefix_lengths = np.array([s.prefix_length for s in members])[:, None]
        width, prefix = max(s.length for s in members), max(s.prefix_length for s in members)
        inside = np.arange(width)[None] < np.array([s.length for s in members])[:, None]
        # Padded entries need an index that is valid; the segment's own first token is. Their outputs are never placed.
        queries = np.where(inside, starts + np.arange(width), starts)
        in_prefix = np.arange(prefix)[None] < prefix_lengths
        prefix_keys = np.where(in_prefix, prefix_starts + np.arange(prefix), prefix_starts)
        # Padding is on the right, where the causal mask hides it from every real query. The diagonal stays visible for
        # padded queries too: a row of scores that is masked throughout has no valid softmax.
        causal = np.broadcast_to(np.tril(np.ones((width, width), dtype=bool)), (len(members), width, width))
        prefix_visible = np.broadcast_to(in_prefix[:, None], (len(members), width, prefix))
        found.append(
            Block(
                queries=torch.as_tensor(queries, device=device),
                keys=torch.as_tensor(np.concatenate([prefix_keys, queries], axis=1), device=device),
                visible=torch.as_tensor(np.concatenate([prefix_visible, causal], axis=2)[:, None], device=device),
            )
        )
        # The blocks' outputs will be concatenated with their padding; real tokens point to their row in that.
        places[queries[inside]] = (offset + np.arange(inside.size).reshape(inside.shape))[inside]
        offset += inside.size
    return Blocks(tuple(found), torch.as_tensor(places, device=device))


@dataclass(slots=True)
class _Active:
    """The plan in use, set by :func:`shared_prefix`. A global, since transformers calls the registered function with
    its own arguments only; one at a time."""

    plan: Plan | None = None
    eager: bool = False


_active = _Active()


@torch.compiler.disable
def attend(
    module: torch.nn.Module,
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 h T D"],
    value: Float[Tensor, "1 h T D"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T H D"], None]:
    """Attention of one packed row by the active plan, with the signature that transformers calls. The mask comes from
    the plan; ``attention_mask`` is not read. Never part of a compiled graph: the number of blocks varies per pack."""
    plan = _active.plan
    assert plan is not None, "attention of packed rows outside shared_prefix()"
    assert query.shape[0] == 1
    assert query.shape[2] == sum(s.length for s in plan.segments)
    if plan.flash and not _active.eager and flash_takes(query, key, value):
        return _by_ragged(query, key, value, plan.ragged, kwargs.get("scaling")), None
    return _by_blocks(module, query, key, value, plan.blocks, kwargs), None


def flash_for(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether torch has FlashAttention for segments here: from 2.11 on, in half precision, on GPUs of compute
    capability 8 (Ampere) or more."""
    return (
        _RAGGED and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )  # fmt: skip


def flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether it has a kernel for such heads. Under autocast, values alone have its type already."""
    size = value.shape[-1]
    return flash_for(value.device, value.dtype) and query.shape[-1] == key.shape[-1] == size <= 256 and size % 8 == 0


def _by_ragged(
    query: Float[Tensor, "1 H T D"], key: Float[Tensor, "1 h T D"], value: Float[Tensor, "1 h T D"], plan: Ragged,
    scale: float | None,
) -> Float[Tensor, "1 T H D"]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]

    def rows(x: Tensor) -> Float[Tensor, "K H D"]:  # each head of keys and values serves several of queries
        x = x[0].transpose(0, 1).to(value.dtype).index_select(0, plan.keys)
        return x.repeat_interleave(groups, dim=1) if groups > 1 else x

    # This window is causal from the end: a segment's last query sees all of its keys.
    out = varlen_attn(
        query[0].transpose(0, 1).to(value.dtype), rows(key), rows(value), plan.query_starts, plan.key_starts,
        plan.longest_query, plan.longest_key, scale=scale, window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None]


def _by_blocks(
    module: torch.nn.Module, query: Float[Tensor, "1 H T D"], key: Float[Tensor, "1 h T D"],
    value: Float[Tensor, "1 h T D"], plan: Blocks, kwargs: dict[str, Any],
) -> Float[Tensor, "1 T H D"]:  # fmt: skip
    inner = eager_attention(module) if _active.eager else sdpa_attention_forward
    assert inner is not None
    dtype = value.dtype
    slow = query.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if slow:  # the CPU's bfloat16 attention kernels take several times as long as the float32 ones
        query, key, value = query.float(), key.float(), value.float()
    outputs = []
    # Autocast would convert the float32 inputs back to bfloat16.
    with torch.autocast(query.device.type, enabled=False) if slow else nullcontext():
        for block in plan.blocks:
            q = _gather(query, block.queries)
            k, v = _gather(key, block.keys), _gather(value, block.keys)
            outputs.append(inner(module, q, k, v, block.bias(q.dtype), **kwargs)[0].flatten(0, 1))
    # index_select both drops the padding's outputs and restores the order of the row; its backward adds.
    return torch.cat(outputs).index_select(0, plan.places)[None].to(dtype)


def _gather(x: Float[Tensor, "1 H T D"], index: Int[Tensor, "B Q"]) -> Float[Tensor, "B H Q D"]:
    return x[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)


AttentionInterface.register(NAME, attend)


def eager_attention(module: torch.nn.Module) -> Callable[..., tuple[Tensor, Any]] | None:
    """The eager attention function of the file that defines ``module``, where transformers keeps it."""
    return getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)


def unsupported(model: PreTrainedModel) -> str | None:
    """Why packed rows cannot be used with this architecture, as far as its code and configuration tell; else None."""
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "attention_mask", "logits_to_keep") if name not in parameters]
    if missing:
        return f"its forward does not take {', '.join(missing)}"
    # Layers of other kinds (recurrent, linear or chunked attention) would mix the segments of a row. Sliding windows
    # are accepted here: they have no effect while sequences are shorter, and the caller asks window() for that.
    for config in _configs(model):
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            return f"it has layers of another kind ({', '.join(sorted(kinds))})"
    if model.config._attn_implementation == "eager" and eager_attention(model) is None:
        return "its eager attention is not a function of its own"
    return None


def window(model: PreTrainedModel) -> int | None:
    """The smallest sliding attention window of the model, in tokens; None when all its layers attend globally."""
    windows = []
    for config in _configs(model):
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if isinstance(size, int) and size > 0 and (kinds is None or "sliding_attention" in kinds):
            windows.append(size)
    return min(windows, default=None)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Returns each distinct configuration object that a module of the model reads."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return list(found.values())


@contextmanager
def shared_prefix(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """Makes ``model`` attend by ``plan`` inside the block and restores its own attention afterwards."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    _active.plan, _active.eager = plan, model.config._attn_implementation == "eager"
    try:
        # The public setter also writes to all sub-configurations; each one is set, and restored, by itself here.
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        _active.plan = None
