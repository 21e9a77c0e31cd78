"""Attention over the pages of a cache, against the same in float64."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trew.backends.cpu.build import kernel
from trew.backends.cpu.layers import DecoderStruct, LayerStruct
from trew.backends.cpu.pages import PAGE, PagedCache, PagedRows, Sequences

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="there is no C compiler")


@dataclass
class Case:
    """``rows``: (prompt, position) of each; a row of a completion has a sequence of its own, a row of a prompt not."""

    heads: tuple[int, int, int]  # H, K, D
    prompts: list[int]  # lengths
    rows: list[tuple[int, int]]
    window: int | None = None
    cap: float = 0.0


def decoding(heads: tuple[int, int, int], prompts: list[int], own: list[list[int]], **options) -> Case:
    """``own``: of each prompt, how many tokens each of its completions has."""
    return Case(heads, prompts, [(p, prompts[p] + n - 1) for p, rows in enumerate(own) for n in rows], **options)


def prefill(heads: tuple[int, int, int], prompts: list[int], start: int = 0, **options) -> Case:
    rows = [(p, position) for p, length in enumerate(prompts) for position in range(length)]
    return Case(heads, prompts, rows[start:], **options)


CASES = {
    "equal rows": decoding((8, 4, 32), [96, 96, 40], [[5] * 8, [33] * 8, [64] * 8]),
    "rows of any length": decoding((9, 3, 64), [PAGE, 1, 70], [[1, 2, 31, 32, 33], [90], [1, 7, 64, 65]]),
    "one row": decoding((4, 1, 64), [3], [[1]]),
    "one query to a key": decoding((4, 4, 48), [50, 9], [[4, 40, 17], [20]]),
    "eight queries to a key, odd sixteens": decoding((8, 1, 80), [33], [[3, 1, 5, 70, 8]]),
    "wide heads": decoding((7, 1, 256), [45], [[3, 36]]),
    "narrow heads": decoding((10, 2, 16), [45], [[3, 36, 50]]),
    "more queries than are read at once": decoding((48, 1, 16), [20], [[9, 9]]),
    "long": decoding((4, 2, 32), [611, 256, 255], [[3, 3, 300, 7], [257, 256], [1]]),
    "window": decoding((4, 2, 32), [300, 20], [[1, 5, 60, 90], [3, 50]], window=40),
    "window over many pages": decoding((4, 2, 32), [700], [[1, 5, 400, 300]], window=290),
    "cap": decoding((4, 2, 32), [40, 300], [[1, 5], [60]], cap=1.5),
    "prompts": prefill((8, 4, 32), [70, 1, 33]),
    "prompts, window, cap": prefill((6, 2, 64), [90, 400], window=37, cap=2.0),
    "the rest of a long prompt": prefill((4, 4, 32), [600], start=333),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, dtype):
    got, expected = attended(CASES[name], dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)
    else:
        torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=2**-8)


def test_large_scores_and_broken_numbers():
    case = decoding((2, 1, 32), [40, 300], [[9], [70]])
    got, expected = attended(case, torch.float32, factor=100.0)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)  # of scores of hundreds, in float32
    got, _ = attended(case, torch.float32, broken=True)
    assert got[0].isnan().all(), "the first row sees a key that is no number"
    assert got[1].isfinite().all()


def test_what_a_row_does_not_see_may_be_anything():
    """Places after a row's own position hold what was there before."""
    case = decoding((4, 2, 32), [20, 100], [[3, 3], [40, 40]])
    for dirt in (1e30, -1e30):
        got, expected = attended(case, torch.float32, dirt=dirt)
        torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)


def attended(
    case: Case, dtype: torch.dtype, *, factor: float = 1.0, broken: bool = False, dirt: float = 7.0
) -> tuple[Tensor, Tensor]:
    """What the kernel gives and the exact result, of random numbers."""
    heads, kv_heads, dim = case.heads
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache(layers=2, kv_heads=kv_heads, head_dim=dim, dtype=dtype, chunk_bytes=1 << 16)
    cache.take(3)  # pages of others
    layer, n = 1, len(case.rows)
    q = torch.randn(n, heads, dim, generator=generator) * factor / dim**0.5
    shared = [cache.take(-(-length // PAGE)) for length in case.prompts]
    own = [cache.take(-(-max(0, position + 1 - case.prompts[p]) // PAGE)) for p, position in case.rows]
    for chunk in cache.chunks:
        chunk.fill_(dirt)
    prompts = [torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype) for length in case.prompts]
    if broken:
        prompts[0][0, 0] = float("nan")
    for numbers, kv in zip(shared, prompts, strict=True):
        write(cache, layer, numbers, kv)
    expected = torch.empty(n, heads * dim, dtype=torch.float64)
    for row, (p, position) in enumerate(case.rows):
        fresh = torch.randn(2, max(0, position + 1 - case.prompts[p]), kv_heads, dim, generator=generator).to(dtype)
        write(cache, layer, own[row], fresh)
        kv = torch.cat([prompts[p], fresh], 1)[:, : position + 1]
        expected[row] = exact(q[row], kv[:, -case.window :] if case.window else kv, case.cap)
    width = max(len(shared[p]) + len(o) for (p, _), o in zip(case.rows, own, strict=True))
    table = [(shared[p] + o + [0] * width)[:width] for (p, _), o in zip(case.rows, own, strict=True)]
    sequences = Sequences(
        int32(table), int32([case.prompts[p] for p, _ in case.rows]), int32([len(shared[p]) for p, _ in case.rows])
    )
    positions, unused = int32([position for _, position in case.rows]), torch.zeros(n, dtype=torch.int32)
    rows = PagedRows(sequences, torch.arange(n, dtype=torch.int32), positions, unused, unused)
    out = torch.full((n, heads * dim), 9.0, dtype=dtype)
    decoder = DecoderStruct(heads=heads, kv_heads=kv_heads, head_dim=dim, cap=case.cap)
    given = decoder, LayerStruct(window=case.window or 0), cache.struct(), rows.struct()
    of_model, of_layer, pages, tokens = map(ctypes.addressof, given)
    kernel("attend", dtype, "pppippp")(of_model, of_layer, pages, layer, tokens, q.data_ptr(), out.data_ptr())
    return out, expected


def write(cache: PagedCache, layer: int, numbers: list[int], kv: Tensor) -> None:
    """Keys and values (2, T, K, D) into pages, as layers.h says."""
    _, length, kv_heads, dim = kv.shape
    for at, number in enumerate(numbers):
        chunk = cache.chunks[number // cache.per_chunk].view(-1, cache.page_numbers // cache.layer_numbers, kv_heads, 2,
                                                             PAGE * dim)  # fmt: skip
        page = chunk[number % cache.per_chunk, layer]
        have = kv[:, at * PAGE : min((at + 1) * PAGE, length)]
        keys = page[:, 0].view(kv_heads, PAGE // 16, dim, 16)
        for t in range(have.shape[1]):
            keys[:, t // 16, :, t % 16] = have[0, t]
        page[:, 1].view(kv_heads, PAGE, dim)[:, : have.shape[1]] = have[1].transpose(0, 1)


def exact(q: Tensor, kv: Tensor, cap: float) -> Tensor:
    """q (H, D) over keys and values (2, T, K, D)."""
    keys, values = (x.double().repeat_interleave(len(q) // kv.shape[2], 1) for x in kv)
    scores = torch.einsum("hd,thd->ht", q.double(), keys)
    if cap:
        scores = cap * (scores / cap).tanh()
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
