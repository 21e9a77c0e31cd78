"""Products of our own against float64, at every edge: rows, columns and depths that fill no tile, all forms of W."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiers
from trew.backends.cpu import build
from trew.backends.cpu.products import WeightMatrix, fits, gated_product, product, product_into
from trew.backends.cpu.training import head_round

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="the kernels cannot be compiled here")
TYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # n, depth
    (1, 1), (7, 4), (16, 16), (33, 70), (48, 64), (64, 16), (112, 32), (200, 8), (257, 250), (50, 2500),
]  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, exact: torch.Tensor, depth: int) -> float:
    """The largest difference, where 1 is what rounding may make: of sums in float32, and of a result in bfloat16."""
    relative = 1e-6 if got.dtype == torch.float32 else 2**-8
    apart = (got.double() - exact).abs() / (1e-7 * depth + 1e-5 + relative * exact.abs())
    return max(apart.flatten().tolist(), default=0.0)


@pytest.mark.parametrize(
    ("shape", "dtype", "stored", "threads"), tiers.thinned(SHAPES, TYPES, TYPES, [1, 5, 2], keep=3)
)
def test_every_shape_and_form(shape, dtype, stored, threads):
    n, depth = shape
    if not fits(depth, dtype):
        assert (depth % 2, dtype) == (1, torch.bfloat16)
        return
    weight, bias, before = random(n, depth).to(stored), random(n, seed=1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (0, 1, 2, 3, 8, 13, 31, 300):
            x = random(rows, depth, seed=2).to(dtype)
            exact = x.double() @ weight.to(dtype).double().t()
            lying = weight.t().contiguous()
            forms = (
                WeightMatrix.of(weight),
                WeightMatrix.packed(weight, dtype=dtype),
                WeightMatrix.of(lying, transposed=True),
            )
            for w in forms:
                assert (w.n, w.depth) == shape
                assert distance(product(x, w), exact, depth) <= 1
                out = torch.full((rows, n), 0.5)
                product_into(x, w, out, add=True)
                assert distance(out, exact + 0.5, depth) <= 1
                product_into(x, w, out)
                assert distance(out, exact, depth) <= 1
            for w in (WeightMatrix.of(weight, bias), WeightMatrix.packed(weight, bias, dtype=dtype)):
                assert distance(product(x, w), exact + bias.double(), depth) <= 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_depth_like_that_of_the_head(dtype):
    weight, bias, x = random(40, 20_000), random(40, seed=1), random(9, 20_000, seed=2).to(dtype)
    exact = x.double() @ weight.to(dtype).double().t()
    for w in (WeightMatrix.of(weight, bias), WeightMatrix.of(weight.t().contiguous(), bias, transposed=True)):
        out = torch.ones(9, 40)
        product_into(x, w, out, add=True)
        assert distance(out, exact + bias.double() + 1, 20_000) <= 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 77])
def test_a_row_is_the_same_whatever_its_neighbours_and_the_threads_are(rows, dtype):
    w, x = WeightMatrix.packed(random(112, 64), dtype=dtype), random(rows, 64).to(dtype)
    whole, before = product(x, w), torch.get_num_threads()
    for i in range(rows):
        assert torch.equal(product(x[i : i + 1], w)[0], whole[i])
    torch.set_num_threads(before + 1)
    try:
        assert torch.equal(product(x, w), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 11, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_products(rows, dtype, biased):
    n, depth = 80, 48
    weights = [random(n, depth, seed=seed) for seed in (1, 2)]
    biases = [random(n, seed=seed) if biased else None for seed in (3, 4)]
    x = random(rows, depth).to(dtype)
    gate, up = (
        x.double() @ w.to(dtype).double().t() + (0 if b is None else b.double())
        for w, b in zip(weights, biases, strict=True)
    )
    packed = [WeightMatrix.packed(w, b, dtype=dtype) for w, b in zip(weights, biases, strict=True)]
    for activation, exact in (
        ("silu", nn.functional.silu(gate)), ("gelu_tanh", nn.functional.gelu(gate, approximate="tanh")),
    ):  # fmt: skip
        out = torch.empty(rows, n, dtype=dtype)
        gated_product(x, *packed, out, activation=activation)
        relative = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), exact * up, rtol=relative, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), 1e30, -1e30, -300.0, 300.0])
def test_gates_of_extreme_values(value):
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = value, 1.0
    gate, up = torch.zeros(16, 16), torch.zeros(16, 16)
    gate[:, 0], up[:, 1] = 1, 1
    out = torch.empty(1, 16)
    gated_product(x, *(WeightMatrix.packed(w, dtype=torch.float32) for w in (gate, up)), out, activation="silu")
    expected = nn.functional.silu(torch.full((1, 16), value))
    torch.testing.assert_close(out, expected, equal_nan=True, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_broken_stays_visible_and_where_it_is(dtype, broken):
    weight, x = random(40, 32), random(9, 32).to(dtype)
    x[4, 3] = broken
    for w in (
        WeightMatrix.of(weight),
        WeightMatrix.packed(weight, dtype=dtype),
        WeightMatrix.of(weight.t().contiguous(), transposed=True),
    ):
        bad = ~product(x, w).isfinite()
        assert bad[4].all()
        assert bad.sum() == 40


def test_a_matrix_sees_the_weight_as_it_is_now_and_a_packed_one_as_it_was():
    weight, x = nn.Parameter(torch.ones(16, 16)), torch.ones(1, 16)
    lying, packed = WeightMatrix.of(weight), WeightMatrix.packed(weight, dtype=torch.float32)
    weight.data *= 2
    assert product(x, lying)[0, 0] == 32
    assert product(x, packed)[0, 0] == 16


def test_what_is_not_as_the_kernels_read_it_is_refused():
    weight, x = torch.ones(16, 16), torch.ones(4, 16)
    for wrong in (weight.half(), weight.double()):
        with pytest.raises(AssertionError):
            WeightMatrix.of(wrong)
    packed = WeightMatrix.packed(weight, dtype=torch.bfloat16)
    wide = torch.ones(4, 32)
    for given, w in ((x, packed), (wide, WeightMatrix.of(weight)), (wide[:, ::2], WeightMatrix.of(weight))):
        with pytest.raises(AssertionError):
            product(given, w)
    with pytest.raises(AssertionError):
        product_into(x, WeightMatrix.of(weight), torch.empty(4, 15))


@pytest.mark.parametrize("dtype", TYPES)
def test_columns_of_a_wider_matrix(dtype):
    weight, wide = random(40, 30), random(9, 62, seed=2).to(dtype)
    for w, exact in (
        (WeightMatrix.of(weight), weight.t()),
        (WeightMatrix.of(weight.t().contiguous(), transposed=True), weight.t()),
    ):
        x = wide[:, :30]
        assert not x.is_contiguous()
        assert distance(product(x, w), x.double() @ exact.to(dtype).double(), 30) <= 1
    with pytest.raises(AssertionError):
        product(wide[:, :30], WeightMatrix.packed(weight, dtype=dtype))
    with pytest.raises(AssertionError):
        product(random(9, 61).to(dtype)[:, :30], WeightMatrix.of(weight))


@pytest.mark.parametrize("columns", [1, 15, 16, 37, 4096])
def test_numbers_are_rounded_where_they_lie_as_torch_rounds_them(columns):
    z = random(7, columns) * 100
    z[0, 0], z[-1, -1] = float("nan"), float("inf")
    want = z.to(torch.bfloat16)
    got = head_round(z)
    assert got.data_ptr() == z.data_ptr()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
