"""Attention of the learner, forward and backward, against autograd in float64."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from trew.backends.cpu.build import kernel
from trew.backends.cpu.stack import RowLayout

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="there is no C compiler")


@dataclass
class Case:
    """``units``: a prompt's length and those of its completions."""

    heads: tuple[int, int, int]  # H, K, D
    units: list[tuple[int, list[int]]]
    window: int | None = None
    cap: float = 0.0


CASES = {
    "whole tiles": Case((8, 4, 32), [(96, [64] * 4), (32, [32, 16])]),
    "any lengths": Case((9, 3, 64), [(70, [1, 7, 63, 65]), (1, [1]), (5, [])]),
    "one token": Case((4, 1, 64), [(1, [])]),
    "one query to a key": Case((4, 4, 48), [(50, [4, 40])]),
    "queries of one token in several tiles": Case((32, 1, 16), [(9, [5])]),
    "eight queries to a key, odd sixteens": Case((8, 1, 80), [(33, [3, 20])]),
    "wide heads": Case((7, 1, 256), [(45, [3, 36])]),
    "more keys than at once": Case((4, 2, 32), [(611, [3, 120]), (191, [2]), (192, [2]), (193, [2])]),
    "window": Case((4, 2, 32), [(100, [1, 5, 90]), (3, [50])], window=17),
    "window of one": Case((4, 2, 16), [(20, [5])], window=1),
    "window over many keys": Case((4, 2, 32), [(500, [70])], window=290),
    "cap": Case((4, 2, 32), [(40, [30]), (300, [4])], cap=1.5),
    "cap and window": Case((6, 2, 64), [(90, [60])], cap=2.0, window=37),
}


@pytest.mark.parametrize("name", CASES)
def test_against_autograd_in_float64(name):
    case = CASES[name]
    got, expected = attended(case), exact(case)
    for which, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b).norm()
        scale = max(b.norm(), expected[-1].norm())  # a gradient may be exactly zero
        assert error < 2e-6 * scale, f"number {which} of out, dq, dk, dv"


def test_bfloat16_differs_by_its_rounding():
    case = CASES["any lengths"]
    got, expected = attended(case, torch.bfloat16), exact(case)
    for a, b in zip(got, expected, strict=True):
        assert 1e-4 < (a.double() - b).norm() / b.norm() < 1e-2


def test_the_number_of_threads_changes_no_bit():
    case, before = CASES["any lengths"], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = attended(case)
        torch.set_num_threads(4)
        assert all(map(torch.equal, one, attended(case)))
    finally:
        torch.set_num_threads(before)


def test_broken_numbers_come_through_to_those_that_see_them():
    case = CASES["window"]
    out = attended(case, broken=60)[0]
    assert out[60:77].isnan().all()
    assert out[:60].isfinite().all()
    assert out[101:].isfinite().all()


def segments(case: Case) -> list[tuple[int, int, int, int]]:
    found, at = [], 0
    for prompt, completions in case.units:
        found.append((at, prompt, 0, 0))
        end = at + prompt
        for length in completions:
            found.append((end, length, at, prompt))
            end += length
        at = end
    return found


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, (tokens, heads D)."""
    heads, kv_heads, dim = case.heads
    tokens = sum(prompt + sum(completions) for prompt, completions in case.units)
    generator = torch.Generator().manual_seed(0)
    q, k, v, d = (torch.randn(tokens, n * dim, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    return q, k, v, d


def attended(case: Case, dtype: torch.dtype = torch.float32, broken: int | None = None) -> list[Tensor]:
    """What the kernels give: out and the gradients of q, k, v. The key of the token ``broken`` is no number."""
    q, k, v, d = inputs(case)
    if broken is not None:
        k[broken] = float("nan")
    heads, kv_heads, dim = case.heads
    tokens = len(q)
    ids = np.zeros(tokens, dtype=np.int64)
    row = RowLayout(segments(case), ids=ids, positions=ids, read_at=ids, kv_heads=kv_heads).struct
    out, normaliser = torch.empty(q.shape, dtype=dtype), torch.empty(heads, tokens)
    sizes = case.window or 0, case.cap, dim**-0.5, heads, kv_heads, dim
    kernel("attention", dtype, "ppppp" "piii" "ffiii")(
        *(t.data_ptr() for t in (q, k, v, out, normaliser)), row.segments, row.segment_count, tokens, *sizes
    )  # fmt: skip
    d, dq, dk, dv = d.to(dtype), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    shares = torch.empty(row.shares - 1, 2, *k.shape)
    kernel("attention_backward", dtype, "ppppppppp" "ppiip" "ii" "ffiii")(
        *(t.data_ptr() for t in (d, out, q, k, v, normaliser, dq, dk, dv)), row.segments, row.units, row.unit_count,
        row.shares, shares.data_ptr(), tokens, *sizes,
    )  # fmt: skip
    return [out, dq, dk, dv]


def exact(case: Case) -> list[Tensor]:
    heads, kv_heads, dim = case.heads
    q, k, v, d = (x.double().requires_grad_() for x in inputs(case))
    out = torch.zeros_like(q)
    for start, length, prefix, prefix_length in segments(case):
        own = torch.arange(start, start + length)
        keys = torch.cat([torch.arange(prefix, prefix + prefix_length), own])
        kv = [x[keys].view(-1, kv_heads, dim).repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
        scores = torch.einsum("qhd,khd->hqk", q[own].view(-1, heads, dim), kv[0]) * dim**-0.5
        if case.cap:
            scores = case.cap * (scores / case.cap).tanh()
        back = torch.arange(prefix_length, len(keys))[:, None] - torch.arange(len(keys))
        seen = (back >= 0) & (back < (case.window or len(keys)))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = out.index_put((own,), torch.einsum("hqk,khd->qhd", weights, kv[1]).reshape(length, -1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d)]
