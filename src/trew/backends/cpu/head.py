"""The output head with compiled kernels: :class:`.fused_head.FusedHead` with its operations replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...learner.fused_head import FusedHead
from . import training as kernels
from .arena import Arena
from .products import WeightMatrix, fits, product_into


@dataclass(frozen=True)
class CompiledHead(FusedHead):
    """``products``: the kernels compute matrix products too, not torch. ``arena``: holds the logits of a chunk."""

    products: bool = True
    arena: Arena = field(default_factory=Arena)

    @contextmanager
    def working(self) -> Iterator[CompiledHead]:
        # The lease may be of another arena than self.arena, so a head that allocates from that one does the work.
        with self.arena.lease() as arena:
            yield replace(self, arena=arena)

    def _chunk(self) -> AbstractContextManager[None]:
        # Chunks take turns in the same memory.
        return self.arena.again()

    def _products(self, h: Tensor) -> Tensor:
        if not self.products:
            return super()._products(h)
        z = self.arena.alloc(len(h), len(self.weight), dtype=torch.float32)
        # Logits are float32 whatever the type of the gradient's products: see FusedHead.
        product_into(h.float(), WeightMatrix.of(self.weight), z)
        return z if self.bias is None else z.add_(self.bias.detach())

    def _normalise(self, z: Tensor, entropies: bool) -> tuple[Tensor, Tensor | None]:
        return kernels.head_normalise(z, cap=self.cap, temperature=self.temperature, entropies=entropies)

    def _slope(
        self, z: Tensor, normaliser: Tensor, entropy: Tensor | None, *, weight: Tensor, slope: Tensor | None
    ) -> None:
        kernels.head_differentiate(
            z, normaliser, weight=weight, slope=slope, entropy=entropy, cap=self.cap, temperature=self.temperature
        )

    def _rounded(self, dz: Tensor, low: torch.dtype) -> Tensor:
        # Strided rows instead of a copy (n, V): the compiled products and add_outer accept them.
        in_place = self.products and low == torch.bfloat16
        return kernels.head_round(dz) if in_place else super()._rounded(dz, low)

    def _back_product(self, dz: Tensor) -> Tensor:
        # The vocabulary is the depth of dz W. It may be odd, and bfloat16 kernels take pairs.
        if not (self.products and fits(len(self.weight), dz.dtype)):
            return super()._back_product(dz)
        back = torch.empty(len(dz), self.weight.shape[1], dtype=torch.float32)
        product_into(dz, WeightMatrix.of(self.weight, transposed=True), back)
        return back

    def _add_outer(self, dz: Tensor, h: Tensor, gradient: Tensor) -> None:
        if self.products and h.shape[1] % 16 == 0:
            kernels.add_outer(dz, h, gradient)
        else:
            super()._add_outer(dz, h, gradient)
