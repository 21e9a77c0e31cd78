"""Matrix products by the compiled kernels, in T (float32 or bfloat16) with sums in float32.

A :class:`WeightMatrix` describes the layout of W: the model's own, float32 or bfloat16, which every product casts to T
and packs again (this costs next to nothing with many rows); or packed once, for the few rows of decoding steps.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...models.anatomy import Activation
from .build import SUFFIX, kernel

_PACKED, _FLAT, _TRANSPOSED = range(3)  # as in product.h
_WRITE, _WRITE_FLOAT, _ADD_FLOAT = range(3)
_SHALLOW = 1024  # DEEPEST of product.h


class _Struct(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("form", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("then", ctypes.c_void_p),
    )


class WeightMatrix:
    """W (n, depth) and a bias (n,) float32 or None, for products x W^T + bias of x (rows, depth)."""

    __slots__ = ("_kept", "_struct", "alone", "depth", "n", "packed_for", "pointer")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, n: int, depth: int, form: int) -> None:
        assert weight.dtype in SUFFIX, weight.dtype
        assert weight.device.type == "cpu", weight.device
        weight = weight.detach().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        self.n, self.depth = n, depth
        self.packed_for = weight.dtype if form == _PACKED else None
        self.alone = form == _PACKED and depth <= _SHALLOW  # no scratch memory is needed
        # detach() shares the model's memory, contiguous() may copy: either way the structure's addresses need an owner.
        self._kept = (weight, bias)
        self._struct = _Struct(
            weight.data_ptr(), None if bias is None else bias.data_ptr(), n, depth, form, weight.dtype == torch.bfloat16
        )
        self.pointer = ctypes.addressof(self._struct)

    def then(self, following: WeightMatrix | None) -> None:
        """Lets the kernel prefetch the first columns of ``following`` while it multiplies with this matrix's last. Both
        must be packed, and the caller keeps both alive."""
        assert following is None or self.packed_for == following.packed_for is not None
        self._struct.then = following and following.pointer

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> WeightMatrix:
        """Refers to a matrix in place, float32 or bfloat16; ``transposed``: x is multiplied with W, not with W^T."""
        n, depth = weight.shape[::-1] if transposed else weight.shape
        return WeightMatrix(weight, bias, n=n, depth=depth, form=_TRANSPOSED if transposed else _FLAT)

    @staticmethod
    def packed(
        weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype, out: Tensor | None = None
    ) -> WeightMatrix:
        """Makes a copy in ``dtype``, packed for the products, in ``out`` (:func:`packed_size`,) or else in the heap;
        ``depth`` must be even for bfloat16."""
        n, depth = weight.shape
        assert fits(depth, dtype)
        if out is None:
            out = torch.empty(packed_size(n, depth), dtype=dtype)
        given = WeightMatrix.of(weight)
        kernel("pack", dtype, "pp")(given.pointer, out.data_ptr())
        return WeightMatrix(out, bias, n=n, depth=depth, form=_PACKED)


def packed_size(n: int, depth: int) -> int:
    """The count of numbers of a packed matrix (n, depth)."""
    return -(-n // 16) * 16 * depth


def fits(depth: int, dtype: torch.dtype) -> bool:
    """Whether matrices of this depth can be multiplied: bfloat16 kernels take two numbers at a time."""
    # Of an odd depth, the last number would be left out of every sum without an error.
    return dtype == torch.float32 or depth % 2 == 0


def product(x: Tensor, w: WeightMatrix) -> Tensor:
    """Returns x W^T + bias (rows, n) of T, for x (rows, depth) of T. If W is not packed, x may be columns of a wider
    matrix of even width."""
    out = torch.empty(len(x), w.n, dtype=x.dtype)
    _product(x, w, out, _WRITE)
    return out


def product_into(x: Tensor, w: WeightMatrix, out: Tensor, *, add: bool = False) -> None:
    """Computes ``out`` (rows, n) float32 = or += x W^T + bias, for x (rows, depth) of T."""
    _product(x, w, out, _ADD_FLOAT if add else _WRITE_FLOAT)


def gated_product(x: Tensor, gate: WeightMatrix, up: WeightMatrix, out: Tensor, *, activation: Activation) -> None:
    """Computes ``out`` (rows, n) of T = act(x G^T) * (x U^T); both matrices are packed and have the same shape."""
    assert gate.n == up.n
    assert gate.packed_for is not None
    for w in (gate, up):
        _check(x, w, out)
    function = kernel("gated_product", x.dtype, "ppppii")
    function(x.data_ptr(), gate.pointer, up.pointer, out.data_ptr(), len(x), activation == "gelu_tanh")


def _product(x: Tensor, w: WeightMatrix, out: Tensor, mode: int) -> None:
    _check(x, w, out)
    scratch = None
    if not w.alone:  # allocated by torch: if memory runs out, that raises an error, where malloc in C would crash
        scratch = torch.empty(kernel("product_scratch", x.dtype, "pi")(w.pointer, len(x)), dtype=torch.float32)
    # Numbers from one row of x to the next.
    apart = w.depth if x.is_contiguous() else x.stride(0)
    kernel("product_of", x.dtype, "pippiip")(
        x.data_ptr(), apart, w.pointer, out.data_ptr(), len(x), mode, None if scratch is None else scratch.data_ptr()
    )


def _check(x: Tensor, w: WeightMatrix, out: Tensor) -> None:
    """Checks that the memory the kernels read has the type and layout they expect."""
    assert w.packed_for in (None, x.dtype), (w.packed_for, x.dtype)
    assert x.shape[1] == w.depth, (x.shape, w.depth)
    assert out.shape == (len(x), w.n), (out.shape, w.n)
    # An even stride: a row of bfloat16 begins at a whole pair.
    assert x.is_contiguous() or (x.stride(1) == 1 and x.stride(0) % 2 == 0 and w.packed_for is None)
    assert out.is_contiguous()
