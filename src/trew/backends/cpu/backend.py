"""The compiled CPU kernels as a :class:`trew.models.backend.Backend`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...learner.autograd import AutogradRunner
from ...learner.body import Body
from ...learner.fused_head import FusedHead
from ...learner.runner import ModelRunner
from ...models.anatomy import Transformer, describe
from ...rollout.torch_engine.decoder import Decoder, Decoding
from ...rollout.torch_engine.plain import ForwardDecoder
from ...rollout.torch_engine.sampler import Draw
from ...types import Sampling
from ...utils.memory import return_freed
from . import arena, build
from . import decoder as native
from .arena import Arena
from .head import CompiledHead
from .linears import Forward, exchanged, linears, packed_forwards
from .planning import CpuPlanning
from .runner import CpuBody, KernelRunner, NativeBody, reason_against, weights_in_files
from .sampling import drawn


@dataclass
class CpuBackend:
    """``layers``: the kernels run whole models of known families, the output head's rows and draws. ``products``: they
    compute matrix products, also in models that run through their own forward."""

    layers: bool = True
    products: bool = True
    name: str = "cpu"
    arena: Arena = field(default_factory=Arena)
    in_heap: bool = False  # passes of the learner go through the model's own forward, whose memory is of the heap

    def missing(self) -> str:
        found = build.library()
        # Who switched the library off needs no advice to install a compiler.
        if not isinstance(found, str) or build.switched_off():
            return found if isinstance(found, str) else ""
        advice = "install gcc or clang (Debian, Ubuntu: apt install gcc)"
        return f"{found}; {'correct CC, or unset it,' if os.environ.get('CC') else advice} for trew's own"

    def start(self) -> None:
        arena.keep_freed_memory()

    def runner(self, model: Any, *, plain: AutogradRunner) -> ModelRunner | str:
        if (why := unusable(model)) is not None:
            return why
        settings, compiled = plain.settings, not isinstance(build.library(), str)
        if self.layers and self.products:
            found = KernelRunner.of(model, settings, self.arena)
            if not isinstance(found, str):
                return found
        # From here on autograd keeps activations of this model in the heap: see _turn.
        self.in_heap = True
        # Without a compiler all of it is torch's: plain head, plain linear layers.
        head = functools.partial(CompiledHead, products=self.products, arena=self.arena) if compiled else FusedHead
        files = weights_in_files(model, None) if settings.release_after_use else None
        return AutogradRunner(
            model, settings, head=head, products=linears if compiled and self.products else None,
            release=files.release_all if files is not None else lambda: None,
        )  # fmt: skip

    def body(self, model: Any, *, autocast: torch.dtype | None, recompute: bool) -> Body | str:
        if (why := unusable(model)) is not None:
            return why
        found = NativeBody.of(model, dtype=autocast or torch.float32, recompute=recompute)
        return found if isinstance(found, str) else CpuBody(found, self.arena)

    def decoder(self, model: Any, work: Decoding) -> AbstractContextManager[Decoder] | str:
        # First, before anything is allocated for generation.
        self._turn()
        if (why := unusable(model)) is not None:
            return why
        if isinstance(found := build.library(), str):
            return found
        parts = describe(model, adapters=True) if self.layers else "its layers are to run as they are"
        if not isinstance(parts, str) and native.unsupported(parts, autocast=work.autocast) is None:
            return self._native(parts, work, apart=_few_are_trained(model))
        return self._through_forward(model, work)

    @contextmanager
    def _native(self, parts: Transformer, work: Decoding, *, apart: bool) -> Iterator[Decoder]:
        with self.arena.lease() as arena:
            made = native.CompiledDecoder(
                parts, positions=work.columns, autocast=work.autocast, arena=arena, apart=apart
            )  # fmt: skip
            yield made
            made.close()  # the engine may hold it longer
        self._turn()

    @contextmanager
    def _through_forward(self, model: Any, work: Decoding) -> Iterator[Decoder]:
        # Packs the weights as they are when the block is entered, which is when a generator's code begins to run.
        packed = packed_forwards(model, autocast=work.autocast) if self.products else {}
        made = CompiledForward(model, slots=work.slots, max_tokens=work.max_tokens, packed=packed, draws=self.layers)
        yield made
        packed.clear()  # the engine may hold the decoder longer
        self._turn()

    def reads_by_layer(self, model: Any) -> bool:
        return self.layers and self.products and build.sharded(model) is None and reason_against(model) is None

    def memory(self) -> CpuPlanning:
        return CpuPlanning(self.layers, self.products)

    def zeros(self, shapes: Sequence[Sequence[int]]) -> list[Tensor] | None:
        return arena.zeros(shapes)

    def release(self) -> None:
        """Frees memory that the learner shares, too: both allocate again when they need it."""
        self.arena.give_back()
        return_freed()

    def _turn(self) -> None:
        """From the learner to generation or back. The kernels' passes take arena and heap as generation leaves them.
        What autograd makes is of other sizes and dies in another order: it would not fit into what weights laid out
        had, nor they into what it had, and a process would hold more at every turn."""
        if self.in_heap:
            self.release()


class CompiledForward(ForwardDecoder):
    """Decodes through the model's own forward pass with ``packed`` linear layers; ``draws``: draws with the kernels."""

    def __init__(
        self, model: Any, *, slots: int, max_tokens: int, packed: Mapping[nn.Linear, Forward], draws: bool
    ) -> None:
        super().__init__(model, slots=slots, max_tokens=max_tokens)
        self.packed, self.draws = packed, draws

    def active(self) -> AbstractContextManager[object]:
        return exchanged(self.packed)

    def draw(self, logits: Tensor, *, keys: Tensor, positions: Tensor, sampling: Sampling) -> Draw:
        if not self.draws:
            return super().draw(logits, keys=keys, positions=positions, sampling=sampling)
        return drawn(logits, keys=keys, positions=positions, sampling=sampling)


def _few_are_trained(model: Any) -> bool:
    """Whether gradients are too small to take the room in the heap that weights laid out for generation had. There the
    weights would not find it again either, once a step has left something small in it."""
    # Fewer than half of all numbers, as with LoRA.
    every = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return 2 * sum(n for n, trained in every if trained) < sum(n for n, _ in every)


def unusable(model: Any) -> str | None:
    """Says why the kernels, which read parameters as raw memory, cannot be used with this model's; else None."""
    if model.device.type != "cpu":
        return f"the kernels are for CPUs and it is on {model.device}"
    return build.sharded(model)


def backend(*, layers: bool, products: bool) -> CpuBackend:
    """Makes the backend, as far as a recipe's ``kernels`` and ``linear`` allow it."""
    return CpuBackend(layers=layers, products=products)
