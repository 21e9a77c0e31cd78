"""The output head, from hidden states to the gradient of the loss, without ever holding [tokens, vocabulary].

With z = softcap(h W^T + b) / tau, p = softmax(z), and the derivatives of the loss by a token's log-prob and by the
entropy of its distribution, c and s, the gradient by z is

    c onehot - p (c + s (log p + H))

A rule (an objective) computes c and s from the log-probs and entropies. So the logits of a few positions at a time are
computed, overwritten with that gradient, and multiplied back: three products, with nothing computed twice or kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .head import LOWEST, Beside, LossCallback, score_norms

ELEMENTS = 1 << 21
"""Logits per chunk: enough for the products to run at full speed."""
ROWS, GPU_ROWS = 128, 256
"""Least positions per chunk: each chunk reads and writes the whole gradient of the weight, whatever its size."""
WHOLE = 1024
"""Sequences up to this many positions fit into one chunk on request, whatever the vocabulary."""
BLOCK = 8192
"""Rows of the weight's gradient that are computed at once."""


def at_once(vocabulary: int, *, gpu: bool) -> int:
    """Positions of one chunk."""
    return max(GPU_ROWS if gpu else ROWS, ELEMENTS // vocabulary)


@dataclass(frozen=True)
class FusedHead:
    """z = cap tanh((h W^T + b) / cap) / tau, without the cap where it is 0. ``low``: the type of the gradient's
    products where it is not float32; the logits are always float32.

    A backend may override the methods with an underscore: each is one operation on one chunk.
    """

    weight: Tensor
    bias: Tensor | None = None
    cap: float = 0.0
    temperature: float = 1.0
    low: torch.dtype | None = None

    def working(self) -> AbstractContextManager[FusedHead]:
        """The head for one pass: it may hold memory inside the block."""
        return nullcontext(self)

    def with_weights(self, weight: Tensor, bias: Tensor | None) -> FusedHead:
        """The same head with other weights."""
        return dataclasses.replace(self, weight=weight, bias=bias)

    @torch.no_grad()
    def values(
        self,
        hidden: Float[Tensor, "K H"],
        *,
        rows: Int[Tensor, "n"],
        tokens: Int[Tensor, "n"],
        beside: Beside | None = None,
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"] | None]:
        """Log-probs of tokens and, if asked for, what ``beside`` names, float32, without gradient."""
        out = torch.empty(len(tokens), dtype=torch.float32, device=hidden.device)
        more = torch.empty_like(out) if beside else None
        for part in self.chunks(len(tokens)):
            with self._chunk():  # rows that several tokens read are computed once
                mine, inverse = _used(rows[part])
                z = self._products(hidden[mine])
                normaliser, entropy = self._normalise(z, beside == "entropies")
                out[part] = z[inverse, tokens[part]] - normaliser[inverse]
                if more is not None and entropy is not None:
                    more[part] = entropy[inverse]
                elif more is not None:
                    more[part] = score_norms(z.sub_(normaliser[:, None]), rows=inverse, tokens=tokens[part])
        return out, more

    @torch.no_grad()
    def accumulate(
        self,
        hidden: Float[Tensor, "K H"],
        rule: LossCallback,
        *,
        rows: Int[Tensor, "n"],
        tokens: Int[Tensor, "n"],
        entropies: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> Float[Tensor, "K H"]:
        """Returns the gradient of the loss by ``hidden``; adds the gradients of weight and bias to their ``grad``.

        ``rule`` is called once per chunk; with ``lengths``, no sequence of these lengths is split over two calls.
        """
        out = torch.zeros_like(hidden, dtype=torch.float32)
        for part in self.chunks(len(tokens), lengths):
            with self._chunk():
                # Several tokens may read one row (the first tokens of a group's completions read the prompt's last
                # position), so each row's logits are computed once, and its tokens' derivatives are summed.
                mine, inverse = _used(rows[part])
                h = hidden[mine]
                z = self._products(h)
                normaliser, entropy = self._normalise(z, entropies)
                logprobs = z[inverse, tokens[part]] - normaliser[inverse]
                # (n,) by token, while z is (R, V) by row.
                c, s = rule(part, logprobs, None if entropy is None else entropy[inverse])
                self._differentiate(z, (inverse, tokens[part]), c, s, normaliser, entropy)
                # Added, not assigned: a row may be read from several chunks.
                out.index_add_(0, mine, self._back(z, h))
        return out

    def chunks(self, count: int, lengths: Sequence[int] | None = None) -> Iterator[slice]:
        """Slices of ``count`` tokens; with ``lengths``, each holds one or more whole sequences."""
        size = self._at_once()
        if lengths is None:
            yield from (slice(i, min(i + size, count)) for i in range(0, count, size))
            return
        start = end = 0
        for length in lengths:
            if end > start and end + length - start > size:
                yield slice(start, end)
                start = end
            end += length
        if end > start:
            yield slice(start, end)

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether each sequence fits into the memory of a few chunks, so that a rule may see it whole."""
        return max(lengths, default=0) <= max(WHOLE, 4 * self._at_once())

    # ---- one chunk

    def _at_once(self) -> int:
        return at_once(len(self.weight), gpu=self.weight.device.type != "cpu")

    def _chunk(self) -> AbstractContextManager[Any]:
        """Encloses the work on one chunk."""
        return nullcontext()

    def _products(self, h: Tensor) -> Tensor:
        """h W^T + b, float32."""
        # Even with bfloat16 inputs the logits come out in float32: bfloat16 numbers near 20 are 0.125 apart, an error
        # in nats that every importance ratio would carry.
        if h.is_cuda and self.low is not None:
            z = torch.mm(h.to(self.low), self.weight.to(self.low).t(), out_dtype=torch.float32)
        else:
            z = h.float() @ self.weight.detach().t()
        return z if self.bias is None else z.add_(self.bias.detach())

    def _normalise(self, z: Tensor, entropies: bool) -> tuple[Tensor, Tensor | None]:
        """Turns products into logits, in place; returns the log-sum-exp and the entropy of each row."""
        if self.cap:
            z.div_(self.cap).tanh_().mul_(self.cap)
        if self.temperature != 1:
            z.div_(self.temperature)
        normaliser = torch.logsumexp(z, dim=-1)
        if not entropies:
            return normaliser, None
        log_p = (z - normaliser[:, None]).clamp_(min=LOWEST)
        return normaliser, -(log_p.exp() * log_p).sum(dim=-1)

    def _differentiate(
        self,
        z: Tensor,
        at: tuple[Tensor, Tensor],
        c: Tensor,
        s: Tensor | None,
        normaliser: Tensor,
        entropy: Tensor | None,
    ) -> None:
        """Turns logits into the gradient by h W^T + b (before cap and temperature), in place. ``at``: indices of the
        tokens' logits."""
        c = c / self.temperature
        # The cap's derivative is 1 - tanh^2 with tanh = z tau / cap. The tokens' own terms are read from z before it is
        # overwritten, and added afterwards.
        own = c * (1 - (z[at] * (self.temperature / self.cap)) ** 2) if self.cap else c
        # (n,) -> (R,): the tokens of a row share its -p.
        weight = torch.zeros_like(normaliser).index_add_(0, at[0], c)
        slope = None if s is None else torch.zeros_like(normaliser).index_add_(0, at[0], s / self.temperature)
        self._slope(z, normaliser, entropy, weight=weight, slope=slope)
        z.index_put_(at, own, accumulate=True)

    def _slope(
        self, z: Tensor, normaliser: Tensor, entropy: Tensor | None, *, weight: Tensor, slope: Tensor | None
    ) -> None:
        """Turns logits into - p (weight + slope (log p + entropy)), times the cap's derivative, in place."""
        # Before z is overwritten: the cap's derivative is a function of the capped logits.
        through = 1 - (z * (self.temperature / self.cap)) ** 2 if self.cap else None
        z.sub_(normaliser[:, None])
        if slope is None:
            z.exp_().mul_(weight.neg_()[:, None])
        else:
            assert entropy is not None
            z.clamp_(min=LOWEST)
            p = z.exp()
            z.mul_(slope[:, None]).add_((weight + slope * entropy)[:, None]).mul_(p.neg_())
        if through is not None:
            z.mul_(through)

    def _back(self, dz: Tensor, h: Tensor) -> Tensor:
        """Returns dz W, float32, and adds dz^T h and the sum of dz to the gradients of weight and bias. May overwrite
        dz."""
        if self.bias is not None and self.bias.requires_grad:
            add_to_grad(self.bias, dz.sum(0))
        if self.low is not None:
            dz, h = self._rounded(dz, self.low), h.to(self.low)
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            self._add_outer(dz, h, self.weight.grad)
        return self._back_product(dz)

    def _rounded(self, dz: Tensor, low: torch.dtype) -> Tensor:
        """dz in ``low``; may overwrite dz."""
        return dz.to(low)

    def _back_product(self, dz: Tensor) -> Tensor:
        """dz W, float32."""
        return (dz @ self.weight.detach().to(dz.dtype)).float()

    def _add_outer(self, dz: Tensor, h: Tensor, gradient: Tensor) -> None:
        """Adds dz^T h to ``gradient``, the weight's gradient."""
        # In blocks: the whole product would be as large as the weight, allocated and freed for every chunk.
        for i in range(0, len(self.weight), BLOCK):
            gradient[i : i + BLOCK] += dz[:, i : i + BLOCK].t() @ h


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Adds ``gradient`` to ``parameter.grad`` (float32), which may take over its memory."""
    if parameter.grad is None:
        parameter.grad = gradient.float()
    else:
        parameter.grad += gradient


def _used(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ``rows``, and the index of each one among them."""
    return torch.unique(rows, return_inverse=True)
