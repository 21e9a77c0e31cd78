"""Runs Llama-family models over packed rows, with hand-written forward and backward passes: see :mod:`.stack`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...learner.autograd import head_of, with_tokens
from ...learner.head import Beside, LossCallback
from ...learner.packing import Pack, pack_shared
from ...learner.path import ExecutionPath
from ...learner.runner import RunnerSettings
from ...learner.token_values import TokenValues
from ...models.anatomy import Transformer, describe
from ...models.lora import split
from ...models.verified import say
from ...types import TrainingSample
from . import build
from .arena import Arena
from .file_backed import FileBacked
from .head import CompiledHead
from .stack import ALL, INPUTS, NOTHING, Passed, RowLayout, Stack, unsupported

PACK_TOKENS = 1024
"""Tokens per pack: larger packs would take more memory and be no faster ..."""
PACK_BYTES = 32 << 20
"""... unless they keep less than this for the backward pass: larger packs suffer less from other processes ..."""
PACK_PROMPTS = 3
"""... or are shorter than this many of the longest prompt: a group that is split computes its prompt again per pack.
Several groups share a pack only up to half as many tokens, or twice as many bytes: not splitting a group gains more."""


@dataclass(frozen=True, slots=True)
class Tape:
    """What one backward pass needs of a forward pass. Serves a single backward pass."""

    row: RowLayout
    last: Tensor  # (K, H) residuals at the positions that the head reads, before the last norm
    memory: Tensor


def reason_against(model: PreTrainedModel) -> str | None:
    """Says why the kernels cannot run such a model, in words that complete "because ..."; weights may be on "meta"."""
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
    """Everything below the output head. ``dtype``: the type of products, which cast the weights on the fly.
    ``recompute``: keeps only the residual at each layer's input (gradient checkpointing)."""

    parts: Transformer
    dtype: torch.dtype = torch.float32
    recompute: bool = False

    def __post_init__(self) -> None:
        self._stack = Stack(self.parts, dtype=self.dtype, split=split)

    @staticmethod
    def of(model: PreTrainedModel, *, dtype: torch.dtype, recompute: bool) -> NativeBody | str:
        """Returns the body for this model, or why there is none, in words that complete "because ..."."""
        if model.device.type != "cpu":
            return "the kernels are for a CPU"
        parts = _parts(model)
        return parts if isinstance(parts, str) else NativeBody(parts, dtype, recompute)

    def weights(self) -> list[list[Tensor]]:
        """The weights that products read, layer by layer."""
        # Linear layers with adapters are left out: weights_in_files counts their weights among the others.
        return [
            [m.weight for m in (x.q, x.k, x.v, x.o, x.gate, x.up, x.down) if type(m) is nn.Linear]
            for x in self.parts.layers
        ]

    @property
    def kept_bytes(self) -> int:
        """The bytes that one token keeps for the backward pass, in all layers."""
        hidden, size = self.parts.embedding.weight.shape[1], self.dtype.itemsize
        if self.recompute:
            # One residual per layer, float32.
            return 4 * hidden * len(self.parts.layers)
        products = sum(
            2 * m.out_features
            for x in self.parts.layers
            for m in (x.q, x.gate)  # q and what is attended; gate and up
        ) + sum(2 * x.k.out_features for x in self.parts.layers)
        # Two residuals per layer, float32: at its input and in its middle. Results of products are of T.
        return 4 * 2 * hidden * len(self.parts.layers) + size * products

    @torch.no_grad()
    def forward(
        self, pack: Pack, *, keep: bool, arena: Arena, passed: Passed | None = None
    ) -> tuple[Float[Tensor, "K H"], Tape]:
        """Returns float32 hidden states at ``pack.read_at`` for the head, and what :meth:`backward` needs if ``keep``;
        the latter is valid while ``arena`` is leased."""
        row, what = self.row(pack), self._keeps if keep else NOTHING
        last, hidden, memory = self._stack.forward(row, keep=what, arena=arena, passed=passed)
        return hidden, Tape(row, last, memory)

    def backward(self, tape: Tape, gradient: Float[Tensor, "K H"]) -> None:
        """Adds to the weights' ``grad``, given the gradient with respect to the hidden states of :meth:`forward`."""
        embedding = self.parts.embedding
        # As nn.Embedding does: the row of ``padding_idx`` gets no gradient from inputs, even where the token is part of
        # a text. What it has already, from a head that is tied to it, stays.
        before = None if embedding.weight.grad is None else embedding.weight.grad[self._padding].clone()
        self._stack.backward(tape.row, keep=self._keeps, memory=tape.memory, last=tape.last, gradient=gradient)
        if embedding.weight.grad is not None:
            embedding.weight.grad[self._padding] = 0 if before is None else before

    def row(self, pack: Pack) -> RowLayout:
        """Converts the pack to the kernels' layout."""
        segments = [(s.start, s.length, s.prefix_start, s.prefix_length) for s in pack.segments]
        return RowLayout(segments, ids=pack.input_ids[0], positions=pack.position_ids[0], read_at=pack.read_at,
                      kv_heads=self.parts.kv_heads)  # fmt: skip

    @property
    def _padding(self) -> list[int]:
        """The row of the embedding that no gradient reaches from inputs, or none."""
        padding = self.parts.embedding.padding_idx
        return [] if padding is None else [padding]

    @property
    def _keeps(self) -> int:
        return INPUTS if self.recompute else ALL


def pack_tokens(kept: int) -> int:
    """Returns the number of tokens per pack if each keeps ``kept`` bytes for the backward pass."""
    return max(PACK_TOKENS, PACK_BYTES // kept)


@dataclass
class CpuBody:
    """The layers alone. Implements :class:`trew.learner.body.Body`."""

    layers: NativeBody
    arena: Arena

    @property
    def parts(self) -> Transformer:
        return self.layers.parts

    @property
    def pack_tokens(self) -> int:
        return pack_tokens(self.layers.kept_bytes)

    def states(self, pack: Pack) -> Float[Tensor, "K H"]:
        with self.arena.lease() as arena:
            return self.layers.forward(pack, keep=False, arena=arena)[0]

    @contextmanager
    def differentiable(self, pack: Pack) -> Iterator[Float[Tensor, "K H"]]:
        with self.arena.lease() as arena:
            hidden, tape = self.layers.forward(pack, keep=True, arena=arena)
            # A leaf: autograd ends at the head's input, and the compiled backward pass takes over from its gradient.
            hidden = hidden.detach().requires_grad_()
            yield hidden
            assert hidden.grad is not None
            # Inside the lease, which the tape's memory belongs to.
            self.layers.backward(tape, hidden.grad)

    def exact(self) -> CpuBody:
        return CpuBody(NativeBody(self.parts), self.arena)


class KernelRunner(TokenValues):
    """Runs samples with the compiled kernels. Implements :class:`trew.learner.runner.ModelRunner`.

    ``files``: the model's weights, whose pages are released after use where the settings say so.
    """

    verified = True  # its own settings leave nothing open

    def __init__(
        self, model: PreTrainedModel, settings: RunnerSettings, *, body: NativeBody, head: CompiledHead, arena: Arena
    ) -> None:
        self.model, self.settings = model, settings
        self.body, self._head, self._arena = body, head, arena
        self.messages: list[str] = []
        self._files = weights_in_files(model, body) if settings.release_after_use else None
        if settings.accelerator is not None:
            say(
                self.messages,
                f"learner.{settings.accelerator.key}: got true, which does nothing where {type(model).__name__} is "
                "trained by trew's own kernels. Set it to false; or, to train through the model's own forward, "
                "kernels = 'plain'.",
            )

    @staticmethod
    def of(model: PreTrainedModel, settings: RunnerSettings, arena: Arena) -> KernelRunner | str:
        """Returns a runner for this model, or why there is none, in words that complete "because ..."."""
        if not settings.fused:
            return "the head's logits are to be made for all tokens"
        body = NativeBody.of(
            model, dtype=settings.autocast or torch.float32, recompute=settings.gradient_checkpointing
        )  # fmt: skip
        if isinstance(body, str):
            return body
        head = head_of(model, settings, CompiledHead)
        if head is None:
            return "its head is not one plain matrix"
        assert isinstance(head, CompiledHead)
        return KernelRunner(model, settings, body=body, head=head, arena=arena)

    @property
    def path(self) -> ExecutionPath:
        return ExecutionPath(layers="cpu", shared=self.settings.share_prompts, fused=True)

    def packs(self, samples: Sequence[TrainingSample], *, among: Sequence[int] | None = None) -> list[Pack]:
        chosen = with_tokens(self.model, samples, among)
        layers = len(self.body.parts.layers)
        # A copy with fewer layers plans packs for the real model: its tokens keep as much as the real model's.
        kept = self.body.kept_bytes * (self.settings.layers or layers) // layers
        prompt = max((len(samples[i].prompt_ids) for i in chosen), default=0)
        budget = min(self.settings.budget, max(pack_tokens(kept), PACK_PROMPTS * prompt))
        join = min(budget, max(PACK_TOKENS // 2, 2 * PACK_BYTES // kept))
        share, ranks = self.settings.share_prompts, self.settings.ranks
        return pack_shared(samples, budget=budget, join=join, among=chosen, share=share, ranks=ranks)

    @torch.no_grad()
    def _values(self, pack: Pack, *, beside: Beside | None = None) -> tuple[Tensor, Tensor | None]:
        # A layer's pages are released as soon as it has been computed, not after the whole pass.
        passed = None if self._files is None else self._files.release_pages
        rows, tokens = torch.as_tensor(pack.read_rows), torch.as_tensor(pack.targets)
        with self._arena.lease() as arena:
            hidden, _ = self.body.forward(pack, keep=False, arena=arena, passed=passed)
            # Takes its chunks from the lease, which may be of another arena than self._arena.
            head = replace(self._head, arena=arena)
            return head.values(hidden, rows=rows, tokens=tokens, beside=beside)

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        # One lease for both passes: the tape's memory would be invalid after its end.
        given = {"rows": torch.as_tensor(pack.read_rows), "tokens": torch.as_tensor(pack.targets)}
        with self._arena.lease() as arena:
            hidden, tape = self.body.forward(pack, keep=True, arena=arena)
            head = replace(self._head, arena=arena)
            self.body.backward(tape, head.accumulate(hidden, rule, **given, entropies=entropies, lengths=lengths))

    def idle(self, *, gradient: bool) -> None:
        # Sharded weights rule the kernels out, so other ranks never wait for this one.
        pass

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        return self._head.holds(lengths)

    def release(self) -> None:
        if self._files is not None:
            self._files.release_all()

    def exact(self) -> KernelRunner:
        """The same kernels on the same weights, with products in float32."""
        settings = replace(
            self.settings, autocast=None, budget=1 << 30, ranks=1, gradient_checkpointing=False, accelerator=None,
            release_after_use=False,
        )  # fmt: skip
        body, head = NativeBody(self.body.parts), replace(self._head, low=None)
        return KernelRunner(self.model, settings, body=body, head=head, arena=self._arena)


def weights_in_files(model: PreTrainedModel, body: NativeBody | None) -> FileBacked:
    """Returns the model's weights by layer, as far as the kernels read them layer by layer, then all others."""
    layers = [] if body is None else body.weights()
    known = {id(p) for layer in layers for p in layer}
    # The last part has no layer's number, so ``passed`` never names it: release_all alone releases it.
    return FileBacked([*layers, [p for p in model.parameters() if id(p) not in known]])
