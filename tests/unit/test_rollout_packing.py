"""Packed linear layers: the same numbers, used where they can be, gone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from trew.rollout.torch_engine.packing import available, packed_linears


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


needs_packing = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="this torch build has no oneDNN products"
)


@needs_packing
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])  # the last two have biases
@torch.no_grad()
def test_the_same_products_from_packed_weights(kind):
    model, ids = tiny.model(kind), torch.arange(30).view(3, 10)
    plain = model(ids).logits
    with packed_linears(model, rows=30, autocast=None):
        assert all("forward" in layer.__dict__ for layer in linears(model))
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)
        for layer in linears(model):
            layer.weight.zero_()  # the packed copies are in use, not these
        torch.testing.assert_close(model(ids).logits[..., :5], plain[..., :5], atol=1e-5, rtol=1e-4)
    assert not any("forward" in layer.__dict__ for layer in linears(model))
    assert not torch.allclose(model(ids).logits, plain)


@needs_packing
@torch.no_grad()
def test_a_layer_that_somebody_else_wrapped_is_left_alone():
    model = tiny.model()
    layer = linears(model)[0]
    layer.forward = wrapper = lambda x: nn.functional.linear(x, layer.weight) + 1  # type: ignore[method-assign]
    with packed_linears(model, rows=4, autocast=None):
        assert layer.forward is wrapper
        assert "forward" in linears(model)[1].__dict__
    assert layer.forward is wrapper


def test_nothing_happens_where_there_is_no_such_product():
    assert not available(torch.device("cuda"), torch.float32)
    assert not available(torch.device("cpu"), torch.float16)
    model = tiny.model().double()
    with packed_linears(model, rows=4, autocast=None):
        assert not any("forward" in layer.__dict__ for layer in linears(model))
