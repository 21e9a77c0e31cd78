"""Parameters that are sharded over processes: the kernels, which read whole tensors, refuse them by name."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import learner_help as help
import tiny
from trew.backends.cpu import build
from trew.backends.cpu.backend import CpuBackend
from trew.learner.optimizer import begin
from trew.rollout.torch_engine.decoder import Decoding


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def sharded(mesh):
    net = help.model(**tiny.wide("llama"))
    layer = net.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return net


def test_sharded_parameters_are_refused_by_name(mesh):
    net, backend = sharded(mesh), CpuBackend()
    assert not isinstance(build.sharded(help.model()), str)
    found = (
        backend.runner(net, plain=help.runner(net)),
        backend.body(net, autocast=None, recompute=False),
        backend.decoder(net, Decoding(slots=1, longest_prompt=2, max_tokens=2)),
    )
    for why in found:
        assert isinstance(why, str)
        assert "layers.1.mlp.up_proj.weight is sharded over processes (DTensor)" in why
    assert not backend.reads_by_layer(net)


def test_their_moments_are_the_optimizer_s(mesh):
    p = sharded(mesh).model.layers[1].mlp.up_proj.weight
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW([p])
    begin(optimizer, CpuBackend().zeros)
    assert not optimizer.state
