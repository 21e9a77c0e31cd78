"""Linear layers of any model by the compiled products: the same numbers, used where they can be, gone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from trew.backends.cpu.linears import available, exchanged, linears, packed_forwards


def layers_of(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


needs_packing = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="the kernels cannot be compiled here"
)


@needs_packing
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])  # the last two have biases
@torch.no_grad()
def test_the_same_products_from_packed_weights(kind):
    model, ids = tiny.model(kind), torch.arange(30).view(3, 10)
    plain = model(ids).logits
    with exchanged(packed_forwards(model, autocast=None)):
        assert all("forward" in layer.__dict__ for layer in layers_of(model))
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)
        for layer in layers_of(model):
            layer.weight.zero_()  # the packed copies are in use, not these
        torch.testing.assert_close(model(ids).logits[..., :5], plain[..., :5], atol=1e-5, rtol=1e-4)
    assert not any("forward" in layer.__dict__ for layer in layers_of(model))
    assert not torch.allclose(model(ids).logits, plain)


@needs_packing
@torch.no_grad()
def test_a_layer_that_somebody_else_wrapped_is_left_alone():
    model = tiny.model()
    layer = layers_of(model)[0]
    layer.forward = wrapper = lambda x: nn.functional.linear(x, layer.weight) + 1  # type: ignore[method-assign]
    with exchanged(packed_forwards(model, autocast=None)):
        assert layer.forward is wrapper
        assert "forward" in layers_of(model)[1].__dict__
    assert layer.forward is wrapper


def test_nothing_happens_where_there_is_no_such_product():
    assert not available(torch.device("cuda"), torch.float32)
    assert not available(torch.device("cpu"), torch.float16)
    model = tiny.model().double()
    with exchanged(packed_forwards(model, autocast=None)):
        assert not any("forward" in layer.__dict__ for layer in layers_of(model))


@needs_packing
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_the_same_gradients(kind):
    model, ids = tiny.model(kind), torch.arange(60).view(3, 20)
    plain = torch.autograd.grad(model(ids).logits.square().mean(), list(model.parameters()))
    with linears(model):
        assert all("forward" in layer.__dict__ for layer in layers_of(model))
        loss = model(ids).logits.square().mean()
    assert not any("forward" in layer.__dict__ for layer in layers_of(model))
    for got, want in zip(torch.autograd.grad(loss, list(model.parameters())), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@needs_packing
def test_gradients_equal_finite_differences_in_exact_arithmetic():
    """Small whole numbers: every product and sum is exact in float32, so the backward pass must be exact too."""
    g = torch.Generator().manual_seed(0)
    layer = nn.Linear(7, 5)
    x = torch.randint(-4, 5, (3, 4, 7), generator=g).float().requires_grad_()
    dy = torch.randint(-4, 5, (3, 4, 5), generator=g).float()
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-4, 5, (5, 7), generator=g))
        layer.bias.copy_(torch.randint(-4, 5, (5,), generator=g))
    with linears(nn.Sequential(layer)):
        y = layer(x)
    y.backward(dy)
    assert torch.equal(y, x @ layer.weight.T + layer.bias)
    assert torch.equal(x.grad, dy @ layer.weight)
    assert torch.equal(layer.weight.grad, dy.flatten(0, 1).T @ x.flatten(0, 1))
    assert torch.equal(layer.bias.grad, dy.sum((0, 1)))
