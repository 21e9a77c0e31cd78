"""Log-probs and entropies of tokens from logits, with a single [positions, vocabulary] tensor in memory.

With p = softmax(z / tau) of the logits z, the gradient of a token's log-prob by z is ``(onehot - p) / tau``, and the
gradient of the entropy H is ``-p (log p + H) / tau``. The backward pass writes both over the logits, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

Beside = Literal["entropies", "score_norms"]
"""What a forward pass may compute in addition to log-probs."""

LossCallback = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Maps the log-probs (n,) and entropies (n,) of the tokens in a slice to the derivatives of the loss by them."""

CHUNK_ELEMENTS = 1 << 21
"""Logits per chunk: 8 MB of float32, small enough for caches, large enough for all threads."""

LOWEST = -200.0
"""Lower bound of log-probs in p log p: below -104, p is 0 in float32 anyway, and 0 * inf would be NaN."""


def token_logprobs(
    logits: Float[Tensor, "K V"], *, rows: Int[Tensor, "N"], tokens: Int[Tensor, "N"], temperature: float = 1.0
) -> Float[Tensor, "N"]:
    """Log-probabilities of tokens, in nats, float32.

        l_i = z[rows_i, tokens_i] / tau - log sum_v exp(z[rows_i, v] / tau)

    Several tokens may read one row. Takes over the memory of ``logits``: the backward pass overwrites it with the
    gradient (so it can run only once; autograd raises on a second one).

    >>> z = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> token_logprobs(z, rows=torch.tensor([0, 1, 1]), tokens=torch.tensor([1, 0, 1]))
    tensor([-0.6931, -0.3133, -1.3133])
    """
    return _TokenLogprobs.apply(logits, rows, tokens, temperature)


def token_logprobs_and_entropies(
    logits: Float[Tensor, "K V"], *, rows: Int[Tensor, "N"], tokens: Int[Tensor, "N"], temperature: float = 1.0
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """:func:`token_logprobs` and the entropies of the tokens' distributions, both with a gradient.

        H_i = - sum_v p_v log p_v,   p = softmax(z[rows_i] / tau),   dH / dz_v = -p_v (log p_v + H) / tau

    Takes over the memory of ``logits`` as :func:`token_logprobs` does.

    >>> z = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> token_logprobs_and_entropies(z, rows=torch.tensor([0, 1]), tokens=torch.tensor([1, 0]))[1]
    tensor([0.6931, 0.5822])
    """
    return _TokenLogprobsAndEntropies.apply(logits, rows, tokens, temperature)


def score_norms(log_p: Float[Tensor, "K V"], *, rows: Int[Tensor, "N"], tokens: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """1 - 2 p_i + sum_v p_v^2 = (1 - p_i)^2 + sum_(v != i) p_v^2, the squared length of d log p_i / dz, given log p for
    each row. Overwrites ``log_p``.

    >>> score_norms(torch.tensor([[0.5, 0.25, 0.25]]).log(), rows=torch.tensor([0, 0]), tokens=torch.tensor([0, 1]))
    tensor([0.3750, 0.8750])
    """
    own = log_p[rows, tokens]
    squares = log_p.mul_(2).exp_().sum(dim=-1)
    # In this form the two parts of a likely token do not cancel; what is left of rounding is cut off.
    return own.expm1().square() + (squares[rows] - (2 * own).exp()).clamp_(min=0)


@torch.no_grad()
def token_logprobs_and_score_norms(
    logits: Float[Tensor, "K V"], *, rows: Int[Tensor, "N"], tokens: Int[Tensor, "N"], temperature: float = 1.0
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """:func:`token_logprobs` and :func:`score_norms`, a few rows at a time, without gradient."""
    normaliser = _log_normaliser(logits, temperature)
    norms = torch.empty(len(tokens), dtype=torch.float32, device=logits.device)
    for part in _chunks(logits):
        # Chunks are of rows, results of tokens: those that read a row of this chunk.
        here = ((rows >= part.start) & (rows < part.stop)).nonzero().squeeze(1)
        log_p = _scaled(logits[part], temperature) - normaliser[part, None]
        norms[here] = score_norms(log_p, rows=rows[here] - part.start, tokens=tokens[here])
    return logits[rows, tokens].float() / temperature - normaliser[rows], norms


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(i, i + step) for i in range(0, len(logits), step))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    z = logits.float()
    return z if temperature == 1 else z / temperature


def _log_normaliser(logits: Tensor, temperature: float) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for part in _chunks(logits):
        out[part] = torch.logsumexp(_scaled(logits[part], temperature), dim=-1)
    return out


class _TokenLogprobs(torch.autograd.Function):
    # Saves the logits and one normaliser per row; a plain log_softmax would save a second [positions, vocabulary].
    @staticmethod
    def forward(ctx, logits, rows, tokens, temperature):
        normaliser = _log_normaliser(logits, temperature)
        ctx.save_for_backward(logits, rows, tokens, normaliser)
        ctx.temperature = temperature
        return logits[rows, tokens].float() / temperature - normaliser[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, rows, tokens, normaliser = ctx.saved_tensors
        scaled = grad / ctx.temperature
        # -p is the same for all tokens that read a row: it is scaled by the sum of their gradients, once per row.
        weight = torch.zeros_like(normaliser).index_add_(0, rows, scaled)
        for part in _chunks(logits):
            z = logits[part] if logits.dtype == torch.float32 else logits[part].float()
            if ctx.temperature != 1:
                z.div_(ctx.temperature)
            z.sub_(normaliser[part, None]).exp_().mul_(weight[part, None].neg())
            if logits.dtype != torch.float32:  # else z is a view of them
                logits[part] = z
        # Added last, over -p; ``accumulate`` because two completions of a group may have the same first token.
        logits.index_put_((rows, tokens), scaled.to(logits.dtype), accumulate=True)
        return logits, None, None, None


class _TokenLogprobsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, rows, tokens, temperature):
        normaliser = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(normaliser)
        for part in _chunks(logits):
            z = _scaled(logits[part], temperature)
            normaliser[part] = torch.logsumexp(z, dim=-1)
            log_p = (z - normaliser[part, None]).clamp_(min=LOWEST)
            entropy[part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(logits, rows, tokens, normaliser, entropy)
        ctx.temperature = temperature
        return logits[rows, tokens].float() / temperature - normaliser[rows], entropy[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy):
        logits, rows, tokens, normaliser, entropy = ctx.saved_tensors
        scaled = grad / ctx.temperature
        # (n,) -> (K,): the derivatives by log-prob and by entropy, summed over the tokens that read a row.
        weight = torch.zeros_like(normaliser).index_add_(0, rows, scaled)
        slope = torch.zeros_like(normaliser).index_add_(0, rows, grad_entropy / ctx.temperature)
        offset = weight + slope * entropy
        for part in _chunks(logits):  # - p (weight + slope (log p + H)), beside one chunk of p
            z = logits[part] if logits.dtype == torch.float32 else logits[part].float()
            if ctx.temperature != 1:
                z.div_(ctx.temperature)
            z.sub_(normaliser[part, None]).clamp_(min=LOWEST)
            p = z.exp()
            z.mul_(slope[part, None]).add_(offset[part, None]).mul_(p.neg_())
            if logits.dtype != torch.float32:
                logits[part] = z
        logits.index_put_((rows, tokens), scaled.to(logits.dtype), accumulate=True)
        return logits, None, None, None
