"""A decoder of the Llama kind over packed rows, forward and backward by hand, with :mod:`trew.backends.cpu.stack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...models.lora import split
from . import Transformer, build, describe
from .arena import Room
from .stack import ALL, INPUTS, NOTHING, Layout, Passed, Stack, unsupported

if TYPE_CHECKING:
    from ...learner.packing import Pack


@dataclass(frozen=True, slots=True)
class Tape:
    """A forward pass that can be gone back, once."""

    row: Layout
    last: Tensor  # (K, H) at the positions that are read, before the last norm
    memory: Tensor


def reason_against(model: PreTrainedModel) -> str | None:
    """Why the kernels cannot run such a model, in words that complete "because ..."; its weights need not be there."""
    parts = _parts(model)
    return parts if isinstance(parts, str) else None


def _parts(model: PreTrainedModel) -> Transformer | str:
    parts = describe(model, adapters=True)
    if isinstance(parts, str):
        return parts
    reason = unsupported(parts)
    if reason is not None:
        return reason
    found = build.library()
    return found if isinstance(found, str) else parts


@dataclass
class NativeBody:
    """Everything below the output head. ``dtype``: of the products, which cast the weights on the way. ``recompute``:
    only the residual at each layer's beginning is kept."""

    parts: Transformer
    dtype: torch.dtype = torch.float32
    recompute: bool = False

    def __post_init__(self) -> None:
        self._stack = Stack(self.parts, dtype=self.dtype, split=split)

    @staticmethod
    def of(model: PreTrainedModel, *, dtype: torch.dtype, recompute: bool) -> NativeBody | str:
        """For this model, or why not, in words that complete "because ..."."""
        if model.device.type != "cpu":
            return "the kernels are for a CPU"
        parts = _parts(model)
        return parts if isinstance(parts, str) else NativeBody(parts, dtype, recompute)

    def weights(self) -> list[list[Tensor]]:
        """What products read, layer by layer."""
        return [
            [m.weight for m in (x.q, x.k, x.v, x.o, x.gate, x.up, x.down) if type(m) is nn.Linear]
            for x in self.parts.layers
        ]

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
    def forward(
        self, pack: Pack, *, keep: bool, room: Room, passed: Passed | None = None
    ) -> tuple[Float[Tensor, "K H"], Tape]:
        """Hidden states at ``pack.read_at``, float32, as the head takes them; what :meth:`backward` needs, if it is to
        be kept, as long as ``room`` is held."""
        row, what = self.row(pack), self._keeps if keep else NOTHING
        last, hidden, memory = self._stack.forward(row, keep=what, room=room, passed=passed)
        return hidden, Tape(row, last, memory)

    def backward(self, tape: Tape, gradient: Float[Tensor, "K H"]) -> None:
        """Adds to the weights' ``grad``, given the gradient by what :meth:`forward` returned."""
        self._stack.backward(tape.row, keep=self._keeps, memory=tape.memory, last=tape.last, gradient=gradient)

    def row(self, pack: Pack) -> Layout:
        """The pack as the kernels take it."""
        segments = [(s.start, s.length, s.prefix_start, s.prefix_length) for s in pack.segments]
        return Layout(segments, ids=pack.input_ids[0], positions=pack.position_ids[0], read_at=pack.read_at,
                      kv_heads=self.parts.kv_heads)  # fmt: skip

    @property
    def _keeps(self) -> int:
        return INPUTS if self.recompute else ALL
