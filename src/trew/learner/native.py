"""A decoder of the Llama kind over a packed row, forward and backward by hand: :mod:`trew.native`'s kernels around
matrix products. Little is kept between the two passes: norms, turned queries and keys and gated products are computed
again, and weight gradients go straight into ``grad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..adapters import split
from ..native import Layer, Norm, Transformer, build, describe
from ..native import training as kernels
from ..native.products import Matrix, fits, product
from ..native.training import Layout, Rotary
from .fused_head import add_to_grad
from .packing import Pack


@dataclass(slots=True)
class Kept:
    """What the backward pass of a layer needs, T its tokens: residual ``x`` and ``middle`` (T, H) float32, and what
    products gave. Without the rest (``q`` is None) it is computed from ``x`` again."""

    x: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    normaliser: Tensor | None = None
    attended: Tensor | None = None
    middle: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


@dataclass(slots=True)
class Tape:
    """A forward pass that can be gone back: the layers' :class:`Kept`, and what came out."""

    pack: Pack
    ids: Tensor  # (T,)
    layout: Layout
    rotary: dict[str | None, Rotary]
    layers: list[Kept] = field(default_factory=list)
    last: Tensor | None = None  # (K, H) at the positions that are read, before the last norm


@dataclass
class NativeBody:
    """Everything below the output head. ``dtype``: of the products, which cast the weights on the way. ``linear``: by
    the kernels; False: torch's. ``recompute``: only the residual at each layer's beginning is kept."""

    parts: Transformer
    dtype: torch.dtype = torch.float32
    linear: bool = True
    recompute: bool = False
    _tables: dict[str | None, Rotary] = field(default_factory=dict)
    _longest: int = 0  # positions of the tables

    @staticmethod
    def of(model: PreTrainedModel, *, dtype: torch.dtype, linear: bool, recompute: bool) -> NativeBody | str:
        """For this model, or why not, in words that complete "because ..."."""
        if model.device.type != "cpu":
            return "the kernels are for a CPU"
        parts = describe(model, adapters=True)
        if isinstance(parts, str):
            return parts
        for p in model.parameters():  # a frozen matrix may be kept in the type that it is cast to
            if p.dtype != torch.float32 and (p.requires_grad or p.dtype != torch.bfloat16):
                return f"it has weights of {p.dtype}"
        reason = kernels.unsupported(parts)
        if reason is not None:
            return reason
        found = build.library()
        if isinstance(found, str):
            return found
        return NativeBody(parts, dtype, linear, recompute)

    @property
    def kept_bytes(self) -> int:
        """What one token keeps for the way back, in all layers."""
        hidden, size = self.parts.embedding.weight.shape[1], self.dtype.itemsize
        if self.recompute:
            return 4 * hidden * len(self.parts.layers)
        products = sum(
            2 * m.out_features
            for x in self.parts.layers
            for m in (x.q, x.gate)  # q and what is attended; gate and up
        ) + sum(2 * x.k.out_features for x in self.parts.layers)
        return 4 * 2 * hidden * len(self.parts.layers) + size * products

    @torch.no_grad()
    def forward(self, pack: Pack, *, keep: bool) -> tuple[Float[Tensor, "K H"], Tape]:
        """Hidden states at ``pack.read_at``, float32, as the head takes them; what :meth:`backward` needs, if it is to
        be kept."""
        ids, positions = torch.from_numpy(pack.input_ids[0]), torch.from_numpy(pack.position_ids[0])
        segments = [(s.start, s.length, s.prefix_start, s.prefix_length) for s in pack.segments]
        tape = Tape(pack, ids, Layout.of(segments, positions), self._rotary(int(positions.max()) + 1))
        x = self.parts.embed(ids).contiguous()
        delta: Tensor | None = None
        after: Norm | None = None
        for layer in self.parts.layers:
            x, normed = kernels.residual_norm(x, delta, after=after, norm=layer.attention_norm, dtype=self.dtype)
            assert normed is not None
            kept = self._layer(layer, x, normed, tape)
            assert kept.middle is not None
            x, delta, after = kept.middle, kept.down, layer.mlp_after
            if keep:
                tape.layers.append(Kept(kept.x) if self.recompute else self._slim(layer, kept))
        assert delta is not None
        read = torch.from_numpy(pack.read_at)
        last = (x[read], delta[read])
        tape.last, _ = kernels.residual_norm(*last, after=after, norm=self.parts.norm, dtype=self.dtype, wanted=False)
        _, hidden = kernels.residual_norm(tape.last, None, after=None, norm=self.parts.norm, dtype=torch.float32)
        assert hidden is not None
        return hidden, tape

    @torch.no_grad()
    def backward(self, tape: Tape, gradient: Float[Tensor, "K H"]) -> None:
        """Adds to the weights' ``grad``, given the gradient by what :meth:`forward` returned. The tape is used up."""
        assert tape.last is not None
        at_read = torch.zeros_like(tape.last)
        _collect(self.parts.norm, kernels.norm_backward([gradient], tape.last, self.parts.norm, at_read))
        dx = torch.zeros(len(tape.ids), at_read.shape[1])
        dx.index_add_(0, torch.from_numpy(tape.pack.read_at), at_read)
        for layer in reversed(self.parts.layers):
            kept = tape.layers.pop()
            if kept.q is None:
                _, h = kernels.residual_norm(kept.x, None, after=None, norm=layer.attention_norm, dtype=self.dtype)
                assert h is not None
                kept = self._layer(layer, kept.x, h, tape)
            self._mlp_backward(layer, kept, dx)
            self._attention_backward(layer, kept, dx, tape)
        embedding = self.parts.embedding.weight
        if embedding.requires_grad:
            if embedding.grad is None:
                embedding.grad = torch.zeros_like(embedding)
            embedding.grad.index_add_(0, tape.ids, dx, alpha=self.parts.embed_scale)

    def _rotary(self, positions: int) -> dict[str | None, Rotary]:
        """Tables for at least so many positions; they are not parameters, and kept."""
        if self._longest < positions:
            tables = self.parts.rotary(positions, device=torch.device("cpu"))
            self._tables = {None: Rotary(None)} | {name: Rotary(table.contiguous()) for name, table in tables.items()}
            self._longest = positions
        return self._tables

    def _layer(self, layer: Layer, x: Tensor, h: Tensor, tape: Tape) -> Kept:
        parts = self.parts
        q, k, v = (self._linear(h, m) for m in (layer.q, layer.k, layer.v))
        out, normaliser = kernels.attention(
            *self._turned(layer, q, k, v, tape), tape.layout, parts, window=layer.window, dtype=self.dtype
        )
        attended = self._linear(out, layer.o)
        middle, normed = kernels.residual_norm(
            x, attended, after=layer.attention_after, norm=layer.mlp_norm, dtype=self.dtype
        )
        assert normed is not None
        gate, up = self._linear(normed, layer.gate), self._linear(normed, layer.up)
        down = self._linear(kernels.gate(gate, up, parts.activation), layer.down)
        return Kept(x, q, k, v, out, normaliser, attended, middle, gate, up, down)

    @staticmethod
    def _slim(layer: Layer, kept: Kept) -> Kept:
        """Without what only a norm behind the half layers reads."""
        if layer.attention_after is None:
            kept.attended = None
        if layer.mlp_after is None:
            kept.down = None
        return kept

    def _turned(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        rotary, size = tape.rotary[layer.rope], self.parts.head_dim
        return (
            kernels.turned(q, rotary, layer.q_norm, tape.layout, size),
            kernels.turned(k, rotary, layer.k_norm, tape.layout, size),
            v.float(),
        )

    def _mlp_backward(self, layer: Layer, kept: Kept, dx: Tensor) -> None:
        """From the gradient by the layer's output to that by its middle, in place."""
        assert kept.middle is not None
        assert kept.gate is not None
        assert kept.up is not None
        down = kept.down if kept.down is not None else dx  # not read without a norm
        dy, dweight = kernels.after_backward(dx, down, layer.mlp_after, self.dtype)
        _collect(layer.mlp_after, dweight)
        product = self._back(dy, layer.down)
        kernels.gate_backward(product, kept.gate, kept.up, self.parts.activation)
        self._gradient(layer.down, dy, product)
        _, h = kernels.residual_norm(kept.middle, None, after=None, norm=layer.mlp_norm, dtype=self.dtype)
        assert h is not None
        self._gradient(layer.gate, kept.gate, h)
        self._gradient(layer.up, kept.up, h)
        dhs = [self._back(kept.gate, layer.gate), self._back(kept.up, layer.up)]
        _collect(layer.mlp_norm, kernels.norm_backward(dhs, kept.middle, layer.mlp_norm, dx))

    def _attention_backward(self, layer: Layer, kept: Kept, dx: Tensor, tape: Tape) -> None:
        """From the gradient by the layer's middle to that by its input, in place."""
        assert kept.out is not None
        assert kept.normaliser is not None
        assert kept.q is not None
        assert kept.k is not None
        assert kept.v is not None
        attended = kept.attended if kept.attended is not None else dx  # not read without a norm
        dy, dweight = kernels.after_backward(dx, attended, layer.attention_after, self.dtype)
        _collect(layer.attention_after, dweight)
        self._gradient(layer.o, dy, kept.out)
        turned = self._turned(layer, kept.q, kept.k, kept.v, tape)
        dq, dk, dv = kernels.attention_backward(
            self._back(dy, layer.o), kept.out, kept.normaliser, *turned, tape.layout, self.parts, window=layer.window
        )
        rotary, size = tape.rotary[layer.rope], self.parts.head_dim
        dq, dweight = kernels.turned_backward(dq, kept.q, rotary, layer.q_norm, tape.layout, size)
        _collect(layer.q_norm, dweight)
        dk, dweight = kernels.turned_backward(dk, kept.k, rotary, layer.k_norm, tape.layout, size)
        _collect(layer.k_norm, dweight)
        _, h = kernels.residual_norm(kept.x, None, after=None, norm=layer.attention_norm, dtype=self.dtype)
        assert h is not None
        dhs = []
        for module, d in ((layer.q, dq), (layer.k, dk), (layer.v, dv.to(self.dtype))):
            self._gradient(module, d, h)
            dhs.append(self._back(d, module))
        _collect(layer.attention_norm, kernels.norm_backward(dhs, kept.x, layer.attention_norm, dx))

    def _linear(self, x: Tensor, module: nn.Module) -> Tensor:
        """x W^T + bias, and scale (x A^T) B^T where the layer has an adapter."""
        base, low = split(module)
        out = self._product(x, base.weight, base.bias)
        if low is not None:
            out += self._product(self._product(x, low.a).mul_(low.scale), low.b)
        return out

    def _back(self, dy: Tensor, module: nn.Module) -> Tensor:
        """dy W, and scale (dy B) A."""
        base, low = split(module)
        out = self._transposed(dy, base.weight)
        if low is not None:
            out += self._transposed(self._transposed(dy, low.b).mul_(low.scale), low.a)
        return out

    def _gradient(self, module: nn.Module, dy: Tensor, x: Tensor) -> None:
        """Adds dy^T x to the weight's gradient in place, and the sum of dy to the bias's. Of an adapter:
        scale (dy B)^T x to that of A, and scale dy^T (x A^T) to that of B."""
        base, low = split(module)
        if base.bias is not None and base.bias.requires_grad:
            add_to_grad(base.bias, dy.sum(0, dtype=torch.float32))
        if base.weight.requires_grad:
            _add_outer(base.weight, dy, x)
        if low is not None:
            _add_outer(low.a, self._transposed(dy, low.b).mul_(low.scale), x)
            turned = torch.empty(low.b.shape[::-1])
            kernels.add_outer(self._product(x, low.a).mul_(low.scale), dy, turned, add=False)
            add_to_grad(low.b, turned.t().contiguous())

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (T, K) times weight (N, K) transposed, plus bias."""
        if self.linear and fits(weight.shape[1], x.dtype):
            return product(x, Matrix.of(weight, bias))
        return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _transposed(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy (T, N) times weight (N, K)."""
        if self.linear and fits(len(weight), dy.dtype):
            return product(dy, Matrix.of(weight, transposed=True))
        return dy @ weight.to(dy.dtype)


def _add_outer(weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
    add = weight.grad is not None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    kernels.add_outer(dy, x, weight.grad, add=add)


def _collect(norm: Norm | None, gradient: Tensor | None) -> None:
    if norm is not None and gradient is not None:
        add_to_grad(norm.weight, gradient)
