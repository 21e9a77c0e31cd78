"""Weights in bfloat16 compute in float32 what the same numbers in float32 compute, in every kind of module."""

from __future__ import annotations

import copy

import pytest
import torch

import learner_help as help
from trew.config import LoraConfig
from trew.models import lora
from trew.models.precision import converts_weights, in_float32


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2", "gpt_neox"])
def test_modules_convert_their_weights_inside_the_block_only(kind, rank):
    low = copy.deepcopy(help.model(kind))
    if rank:
        lora.attach(low, LoraConfig(rank=rank), name="tiny", seed=0)
        for layer in lora.lora_layers(low).values():
            torch.nn.init.normal_(layer.lora_B[lora.NAME].weight)  # of 0 it would hide a rounded input
    for p in low.parameters():
        p.data = p.data.to(torch.bfloat16)
    high = copy.deepcopy(low)
    for p in high.parameters():
        p.data = p.data.float()
    ids = torch.arange(12)[None]
    with in_float32(low):
        got = low(input_ids=ids).logits
        got.square().sum().backward()
    want = high(input_ids=ids).logits
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    want.square().sum().backward()
    gradients = {name: p.grad for name, p in high.named_parameters() if p.grad is not None}
    for name, p in low.named_parameters():
        assert p.dtype == torch.bfloat16
        if name in gradients:
            assert p.grad is not None
            rounding = 2e-2 * float(gradients[name].abs().max())  # of a weight that is used twice, twice
            torch.testing.assert_close(p.grad.float(), gradients[name], rtol=1e-2, atol=rounding, msg=name)
    assert not any("forward" in module.__dict__ for module in low.modules())
    assert all(getattr(module, "cast_input_dtype_enabled", True) for module in low.modules())


def test_a_norm_that_converts_its_weights_takes_float32():
    norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError):
        norm(x)
    converts_weights(norm)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (4,)))
