"""The kernel of weight gradients against float64."""

from __future__ import annotations

import math

import pytest
import torch

from trew.backends.cpu import build
from trew.backends.cpu import training as kernels

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = [  # tokens, n, k
    (0, 5, 16), (1, 1, 16), (2, 8, 32), (7, 5, 16), (33, 23, 48), (8, 16, 64), (130, 9, 80),
    (1300, 300, 32),  # several blocks of rows for each thread
    (1345, 7, 16), (2701, 17, 48),  # more tokens than one pass takes
    (1344, 9, 1552),  # more columns than the scratch memory holds at once
]  # fmt: skip


def operands(tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns inside wider matrices, and rows inside longer ones, whose other numbers are NaN."""
    generator = torch.Generator().manual_seed(tokens + n + k)
    found = []
    for width, before in ((n, 3), (k, 16)):
        whole = torch.full((tokens + 2, before + width + 5), math.nan, dtype=dtype)
        inner = whole[1:-1, before : before + width]
        inner.copy_(torch.randn(tokens, width, generator=generator))
        found.append(inner)
    return found[0], found[1]


def close(got: torch.Tensor, want: torch.Tensor, tokens: int) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 * max(1, tokens))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_equals_the_product_in_float64(shape, dtype):
    tokens, n, k = shape
    a, b = operands(tokens, n, k, dtype)
    want = a.double().T @ b.double()
    room = torch.full((n * k + 64,), math.nan)
    into = room[32:-32].view(n, k)
    kernels.add_outer(a, b, into, add=False)
    close(into, want, tokens)
    before = torch.arange(float(n * k)).reshape(n, k) / (n * k)
    into.copy_(before)
    kernels.add_outer(a, b, into)
    close(into, want + before.double(), tokens)
    assert room[:32].isnan().all()
    assert room[-32:].isnan().all()


@DTYPES
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    a, b = operands(1301, 107, 256, dtype)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            into = torch.ones(107, 256)
            kernels.add_outer(a, b, into)
            found.append(into)
    finally:
        torch.set_num_threads(threads)
    close(found[0], 1 + a.double().T @ b.double(), 1301)
    for other in found[1:]:
        assert torch.equal(found[0], other)


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_comes_through_where_it_belongs(dtype, bad):
    a, b = operands(35, 21, 64, dtype)
    a[34, 20] = bad
    b[3, 50] = bad
    into = torch.zeros(21, 64)
    kernels.add_outer(a, b, into)
    finite = into.isfinite()
    assert not finite[20].any()
    assert not finite[:, 50].any()
    finite[20] = finite[:, 50] = True
    assert finite.all()
