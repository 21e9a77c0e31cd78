"""The learner's compiled kernels, called with tensors: what stands between a decoder's matrix products in a forward
and a backward pass, and the rows of the output head. T is the type of what products take and give, float32 or
bfloat16; arithmetic, the residual stream, queries, keys and values are float32. Widths are multiples of 16, but the
head's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .build import kernel
from .family import Activation, Norm, Transformer

TILE = 32
"""Query rows of one tile, as in train_attention.h: so many queries may share a key."""
TASKS, MOST_SHARES = 16, 4
"""The backward pass of attention is divided into about so many tasks, and a prompt's completions into so many at most:
not by the number of threads, since gradients would depend on it."""
WIDEST = 256
"""Numbers of the widest head, as in train.h."""
SHARED, OWN = 1 << 20, 1 << 17
"""Numbers packed for a weight's gradient, by all threads and by each: OUTER_RIGHT and OUTER_LEFT of outer.h."""

_ARGUMENTS = {
    "residual_norm": "pppffpffppii",
    "norm_backward": "pppppffppii",
    "after_backward": "pppffppii",
    "gate": "pppii",
    "gate_backward": "pppii",
    "turned": "pppippffiii",
    "turned_backward": "ppppippffpiii",
    "outer": "pipipiiiip",
    "attention": "pppppp" "iiiff" "iii",
    "attention_backward": "ppppppppp" "ppiip" "iiff" "iii",
}  # fmt: skip
_UNTYPED = {"head_normalise": "pppiiff", "head_differentiate": "pppppiiff"}


def unsupported(parts: Transformer) -> str | None:
    """Why the kernels cannot run this model, in words that complete "because ..."; else None."""
    widths = {"hidden size": parts.embedding.weight.shape[1], "head size": parts.head_dim,
              "intermediate size": parts.layers[0].gate.out_features}  # fmt: skip
    for name, width in widths.items():
        if width % 16:
            return f"its {name} of {width} is not a multiple of 16"
    if parts.head_dim > WIDEST:
        return f"its head size of {parts.head_dim} is above {WIDEST}"
    if parts.heads // parts.kv_heads > TILE:
        return f"more than {TILE} of its heads share keys"
    return None


def _call(name: str, dtype: torch.dtype | None, *arguments: Any) -> None:
    for a in arguments:
        assert not isinstance(a, Tensor) or a.is_contiguous()
    letters = _UNTYPED[name] if dtype is None else _ARGUMENTS[name]
    kernel(name, dtype, letters)(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of a row see which. ``segments`` (S, 4) int64: start, length, prefix start, prefix length;
    ``units`` (U + 1,) int64: bounds of the runs of segments that share a prefix."""

    segments: Tensor
    units: Tensor
    positions: Tensor  # (T,) int64

    @staticmethod
    def of(segments: Sequence[tuple[int, int, int, int]], positions: Tensor) -> Layout:
        """A segment that reads a prefix follows the one that computes it, in the same run."""
        starts = [i for i, (_, _, _, prefix) in enumerate(segments) if prefix == 0]
        return Layout(torch.tensor(segments), torch.tensor([*starts, len(segments)]), positions)


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary table (2, positions, D), or none."""

    table: Tensor | None

    @property
    def positions(self) -> int:
        return 0 if self.table is None else self.table.shape[1]


def residual_norm(
    x: Tensor, delta: Tensor | None, *, after: Norm | None, norm: Norm, dtype: torch.dtype, wanted: bool = True
) -> tuple[Tensor, Tensor | None]:
    """x + delta (or its norm ``after``), float32, and the ``norm`` of that in ``dtype`` where it is ``wanted``."""
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty(x.shape, dtype=dtype) if wanted else None
    _call(
        "residual_norm", dtype, x, delta, after and after.weight.data_ptr(), after.offset if after else 0.0,
        after.eps if after else 0.0, norm.weight, norm.offset, norm.eps, total, out, *x.shape,
    )  # fmt: skip
    return total, out


def norm_backward(dys: Sequence[Tensor], x: Tensor, norm: Norm, into: Tensor) -> Tensor | None:
    """Adds the gradient by x to ``into`` (float32), where that of norm(x) is the sum of one to three ``dys`` of T;
    returns that of the weight."""
    sums = _partial_sums(norm)
    padded = [*dys, None, None][:3]
    _call("norm_backward", dys[0].dtype, *padded, x, norm.weight, norm.offset, norm.eps, into, sums, *x.shape)
    return _summed(sums)


def after_backward(dy: Tensor, x: Tensor, norm: Norm | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The gradient by x in ``dtype``, where that of norm(x) is ``dy``, float32; and that of the weight. Without a norm
    it is ``dy`` itself."""
    if norm is None:
        return (dy if dtype == torch.float32 else dy.to(dtype)), None
    sums = _partial_sums(norm)
    out = torch.empty(dy.shape, dtype=dtype)
    _call("after_backward", dtype, dy, x, norm.weight, norm.offset, norm.eps, out, sums, *dy.shape)
    return out, _summed(sums)


def gate(gated: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gated) up."""
    out = torch.empty_like(gated)
    _call("gate", gated.dtype, gated, up, out, gated.numel(), activation == "gelu_tanh")
    return out


def gate_backward(d: Tensor, gated: Tensor, up: Tensor, activation: Activation) -> None:
    """In place: ``d``, the gradient of the product, becomes the product; the others become their gradients."""
    _call("gate_backward", d.dtype, d, gated, up, d.numel(), activation == "gelu_tanh")


def turned(x: Tensor, rotary: Rotary, norm: Norm | None, layout: Layout, head_dim: int) -> Tensor:
    """Heads (T, heads D) of T, normed and turned by position, float32."""
    if rotary.table is None and norm is None and x.dtype == torch.float32:
        return x
    out = torch.empty(x.shape, dtype=torch.float32)
    _call(
        "turned", x.dtype, x, out, rotary.table, rotary.positions, layout.positions, norm and norm.weight.data_ptr(),
        norm.offset if norm else 0.0, norm.eps if norm else 0.0, len(x), x.shape[1] // head_dim, head_dim,
    )  # fmt: skip
    return out


def turned_backward(
    d: Tensor, x: Tensor, rotary: Rotary, norm: Norm | None, layout: Layout, head_dim: int
) -> tuple[Tensor, Tensor | None]:
    """The gradient by x in its type from that of :func:`turned`, and that of the norm's weight."""
    sums = None if norm is None else _partial_sums(norm)
    out = torch.empty_like(x)
    _call(
        "turned_backward", x.dtype, d, x, out, rotary.table, rotary.positions, layout.positions,
        norm and norm.weight.data_ptr(), norm.offset if norm else 0.0, norm.eps if norm else 0.0, sums, len(x),
        x.shape[1] // head_dim, head_dim,
    )  # fmt: skip
    return out, _summed(sums)


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, parts: Transformer, *, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """softmax(q K) V in ``dtype`` (T, heads D), and the log normalisers (heads, T); q, k, v float32."""
    out = torch.empty(q.shape, dtype=dtype)
    normaliser = torch.empty(parts.heads, len(q))
    _call(
        "attention", dtype, q, k, v, out, normaliser, layout.segments, len(layout.segments), len(q), window or 0,
        parts.attention_cap, parts.scaling, parts.heads, parts.kv_heads, parts.head_dim,
    )  # fmt: skip
    return out, normaliser


def attention_backward(
    dout: Tensor, out: Tensor, normaliser: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: Layout,
    parts: Transformer, *, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by q, k, v, float32."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    units = len(layout.units) - 1
    shares = min(MOST_SHARES, -(-TASKS // (units * parts.kv_heads)))
    scratch = torch.empty(shares - 1, 2, *k.shape)
    _call(
        "attention_backward", dout.dtype, dout, out, q, k, v, normaliser, dq, dk, dv, layout.segments, layout.units,
        units, shares, scratch, len(q), window or 0, parts.attention_cap, parts.scaling, parts.heads, parts.kv_heads,
        parts.head_dim,
    )  # fmt: skip
    return dq, dk, dv


def head_normalise(z: Tensor, *, cap: float, temperature: float, entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Products z (n, V) become logits, capped and over the temperature, in place; their log sum exp and entropies."""
    normaliser = torch.empty(len(z))
    entropy = torch.empty(len(z)) if entropies else None
    _call("head_normalise", None, z, normaliser, entropy, *z.shape, cap, temperature)
    return normaliser, entropy


def head_differentiate(
    z: Tensor, normaliser: Tensor, *, weight: Tensor, slope: Tensor | None, entropy: Tensor | None, cap: float,
    temperature: float,
) -> None:  # fmt: skip
    """In place: - p (weight + slope (log p + entropy)), through the cap."""
    _call("head_differentiate", None, z, normaliser, weight, slope, entropy, *z.shape, cap, temperature)


def add_outer(a: Tensor, b: Tensor, into: Tensor, *, add: bool = True) -> None:
    """``into`` (N, K) float32 = or += a^T b, where a (T, N) and b (T, K) are of one type and may be columns of wider
    matrices; K is a multiple of 16."""
    assert a.stride(1) == b.stride(1) == 1
    scratch = torch.empty(SHARED + OWN * torch.get_num_threads())
    kernel("outer", a.dtype, _ARGUMENTS["outer"])(
        a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), into.data_ptr(), len(a), a.shape[1], b.shape[1], add,
        scratch.data_ptr(),
    )  # fmt: skip


def _partial_sums(norm: Norm) -> Tensor | None:
    """Room for one sum per thread, where the weight is trained."""
    return torch.zeros(torch.get_num_threads(), len(norm.weight)) if norm.weight.requires_grad else None


def _summed(sums: Tensor | None) -> Tensor | None:
    return None if sums is None else sums.sum(0)
