"""Weights of which each rank holds some rows (DTensors, as FSDP2 makes them), and weights that are whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@runtime_checkable
class Rows(Protocol):
    """A tensor of a checkpoint that is read on demand, some rows at a time."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` to ``stop`` (exclusive); the whole tensor where it has no dimension."""
        ...


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank holds only a part of the tensor."""
    # Importing DTensor costs a second and loads the compiler; if no module has imported it, no tensor is one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor. Where it is sharded, all ranks must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """``part``, which belongs to this rank's part of ``tensor``, sharded in the same way."""
    # A scalar, such as an optimizer's count of steps, is whole on every rank.
    if is_sharded(part) or not is_sharded(tensor) or part.shape != tensor.to_local().shape or not part.dim():
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def row_range(tensor: Tensor) -> tuple[int, int]:
    """The rows (from, up to) that this rank holds; all of them if the tensor is whole."""
    if not is_sharded(tensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    mesh, (placement,) = tensor.device_mesh, [p for p in tensor.placements if p.is_shard()]
    assert placement.is_shard(0)  # how FSDP2 shards
    dimension = tensor.placements.index(placement)
    count, rank = mesh.size(dimension), mesh.get_local_rank(dimension)
    size = -(-tensor.shape[0] // count)  # torch.chunk: equal parts, the last ones shorter or empty
    return min(rank * size, tensor.shape[0]), min((rank + 1) * size, tensor.shape[0])


def is_replica(tensor: Tensor) -> bool:
    """Whether another rank holds the same rows and has a lower number: weights may be sharded inside each node, with
    replicas across nodes."""
    if not is_sharded(tensor):
        return False
    mesh = tensor.device_mesh
    return any(mesh.get_local_rank(i) > 0 for i, placement in enumerate(tensor.placements) if placement.is_replicate())


def copy_into(target: Tensor, source: Tensor | Rows) -> None:
    """Copies the rows that this rank holds of ``target``. Shapes and dtypes are checked before."""
    if is_sharded(target):
        start, stop = row_range(target)
        local(target).copy_(source[start:stop] if isinstance(source, Tensor) else source.rows(start, stop))
    else:
        target.copy_(whole(source))


def whole(source: Tensor | Rows) -> Tensor:
    """All rows of a tensor of a checkpoint."""
    return source if isinstance(source, Tensor) else source.rows(0, source.shape[0] if source.shape else 1)
