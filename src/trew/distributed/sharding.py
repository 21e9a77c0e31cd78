"""Shards a model's weights over ranks by FSDP2: each rank holds some rows of every weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from ..learner.recompute import layers
from ..models.precision import converts_weights
from ..models.sharded import copy_into
from .ranks import Place, Ranks
from .shared_memory import AllGather, ReduceScatter, SharedMemory


def mesh(place: Place, device: str, how: str) -> DeviceMesh:
    """The ranks as a mesh: ``fsdp`` shards over all of them, ``hsdp`` inside each node, with replicas across nodes."""
    kind = torch.device(device).type
    if how == "hsdp":
        # (nodes, ranks of a node): those of a node have consecutive numbers, so that each row of the mesh is a node.
        return init_device_mesh(kind, (place.nodes, place.local_size), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (place.size,), mesh_dim_names=("shard",))


def shared_memory(over: DeviceMesh) -> SharedMemory | None:
    """The memory by which ranks on CPUs exchange shards; None on GPUs, or where those that shard do not share any. All
    ranks call this together."""
    return SharedMemory.of(over.get_group("shard")) if over.device_type == "cpu" else None


def shard(
    model: Any,
    over: DeviceMesh,
    *,
    offload: bool = False,
    low: torch.dtype | None = None,
    memory: SharedMemory | None = None,
) -> None:
    """Shards ``model`` in place, layer by layer, and moves it to the mesh's device. Shards are float32, and so are the
    gradients that are summed over ranks, never averaged.

    ``low``: the type of products (autocast), in which the weights of layers are gathered: the products of one process,
    with half of what is sent and held. Embedding, final norm and head are gathered in float32: their gradients add up
    over all tokens, and the residual stream begins with the embedding. ``offload``: shards, gradients and the
    optimizer's work stay in CPU memory. ``memory``: what :func:`shared_memory` gives; several models may use the same.
    Without it, the ranks' backend exchanges shards.
    """
    how: dict[str, Any] = {"mesh": over}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    # Inputs stay as they are: the residual stream is float32.
    precision = MixedPrecisionPolicy(low, torch.float32 if low else None, cast_forward_inputs=False)
    for layer in layers(model):
        fully_shard(layer, **how, mp_policy=precision)
        for module in layer.modules():
            if low and isinstance(module, torch.nn.LayerNorm):  # takes weights of its input's type alone
                converts_weights(module)
    fully_shard(model, **how)  # what is in no layer: embedding, final norm, head
    for module in _sharded(model):
        if memory:
            gather, scatter = AllGather(memory), ReduceScatter(memory)
            # Any: FSDP's base classes for them are private, and it calls what has their methods.
            module.set_custom_all_gather(cast(Any, gather))
            module.set_custom_reduce_scatter(cast(Any, scatter))
        # Denominators refer to the whole step, so a mean over ranks would be wrong; and gloo has no pre-multiplied sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name; tied weights once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def distribute(model: Any, source: Mapping[str, Tensor] | None, ranks: Ranks) -> None:
    """Gives all ranks their rows of the weights that rank 0 has loaded: ``source``, its :func:`tensors_of` from before
    it was sharded; None on the others. All ranks call this together."""
    for name, target in tensors_of(model).items():
        # One tensor at a time: beside its shards, no device holds more than one whole weight.
        if source is not None:
            whole = source[name].detach().to(ranks.device).contiguous()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
        ranks.broadcast_(whole)
        # Rank 0 had the weights before the model was sharded, and so has its rows already.
        if source is None:
            copy_into(target, whole)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Holds all weights whole on every rank, for passes that ranks run on their own. All ranks must enter together, and
    weights must not change inside."""
    # The root is the first.
    modules = list(_sharded(model))
    for module in modules:
        # Otherwise the first pass inside the block would give up what is gathered here.
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
        for module in modules[1:]:  # the root's stay gathered between forward and backward
            module.set_reshard_after_forward(True, recurse=False)


def _sharded(model: Any) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
