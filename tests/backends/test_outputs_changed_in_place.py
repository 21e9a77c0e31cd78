"""Models that change the output of a linear layer in place train through the compiled products too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import cpu_help as cpu
import learner_help as help
from trew.backends.cpu import build
from trew.backends.cpu.linears import linears
from trew.models.loading import apply_cap
from trew.objective import preset

needs_library = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
BASE: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def model(kind: str) -> Any:
    """Of two layers, which look at whole sequences."""
    if kind == "gemma3n":
        config = transformers.Gemma3nTextConfig(
            **BASE, intermediate_size=[96, 96], hidden_size_per_layer_input=16, vocab_size_per_layer_input=260,
            num_kv_shared_layers=0, laurel_rank=8, layer_types=["full_attention"] * 2,
            activation_sparsity_pattern=[0.0, 0.0],
        )  # fmt: skip
    else:
        config = transformers.Llama4TextConfig(
            **BASE, intermediate_size=96, intermediate_size_mlp=96, num_local_experts=2, num_experts_per_tok=1,
            interleave_moe_layer_step=1, attention_chunk_size=512,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in net.parameters():
                p += 0.02 * torch.randn(p.shape)
    net.generation_config = transformers.GenerationConfig()
    apply_cap(net)
    return net.eval()


@needs_library
@pytest.mark.filterwarnings("ignore:.*prompts are computed once per completion:UserWarning")  # Llama 4's chunks
@pytest.mark.parametrize("kind", ["gemma3n", "llama4"])
def test_all_weights_train_with_the_kernels_products(kind):
    net, items = model(kind), help.samples()
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    got = cpu.gradients(net, objective, items, data)
    want = cpu.gradients(net, objective, items, data, kernels=False, share_prompts=False)
    assert want.norm() > 0
    assert help.relative(got, want) < 1e-5


@needs_library
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_of_a_product_may_be_changed_in_place(bias):
    """As that of nn.Linear, with the same gradients."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48, bias=bias), torch.randn(2, 5, 32)

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        given = x.clone().requires_grad_()
        out = layer(given)
        out *= 2
        out[..., :3].add_(out[..., 3:6].detach())
        out.square().sum().backward()
        assert given.grad is not None
        return [given.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    want = gradients()
    with linears(nn.Sequential(layer)):
        assert "forward" in layer.__dict__
        got = gradients()
    assert len(got) == len(want) == 2 + bias
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
