"""Models that keep more of earlier tokens than keys and values: not sampled here, nor trained if they read padding."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import run_help
import tiny
from trew.errors import ConfigError, EngineError, ModelError
from trew.learner.autograd import AutogradRunner, by_sample
from trew.learner.runner import RunnerSettings
from trew.models import decodable
from trew.rollout import Renderer
from trew.rollout.torch_engine import TorchEngine
from trew.training import planning
from trew.types import TrainingSample

SIZES = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4}, "rwkv": {"attention_hidden_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def built(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind])).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_refuses_a_model_whose_layers_keep_a_state(kind):
    """It sampled each token as if none stood before it, or ended in an IndexError."""
    with pytest.raises(EngineError, match=r"cannot be sampled by the embedded engine.*cluster.rollout = 'vllm'"):
        TorchEngine(built(kind), Renderer(tiny.tokenizer()))


@pytest.mark.parametrize(("kind", "settings"), [
    ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4}),
    ("roformer", {"is_decoder": True}), ("roberta", {"is_decoder": True, "pad_token_id": 1}),
])  # fmt: skip
def test_the_engine_refuses_a_model_that_numbers_positions_itself(kind, settings):
    """Log-probs of a completion depended on the prompts beside it, or were those at other positions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()
    with pytest.raises(EngineError, match=f"because models of type {kind} number positions themselves; use a model"):
        TorchEngine(model, Renderer(tiny.tokenizer()))


def test_a_plan_refuses_it_before_it_is_loaded(tmp_path):
    built("mamba").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    config = run_help.configured(tmp_path, tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be sampled by the embedded engine, because its forward takes"):
        planning.plan(config)
    served = run_help.configured(tmp_path, tmp_path / "model", cluster={"rollout": "vllm", "servers": 1})
    assert decodable.problems(served) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral", "gpt2", "gpt_neox", "qwen3_moe", "mixtral"])
def test_attention_is_sampled(kind):
    model = tiny.model(kind)
    assert decodable.undecodable(type(model), model.config) is None


def test_a_hybrid_kind_whose_layers_are_all_attention_is_sampled():
    model = AutoConfig.for_model("granitemoehybrid", **SIZES, mamba_n_heads=8, layer_types=["attention"] * 2)
    assert decodable.undecodable(AutoModelForCausalLM._model_mapping[type(model)], model) is None


@pytest.mark.parametrize(("kind", "refused"), [("rwkv", True), ("mamba", False), ("lfm2", False)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_model_whose_layers_read_padding_is_not_trained(kind, refused, fused):
    """Log-probs of a sequence depended on the length of those beside it."""
    rng = np.random.default_rng(0)
    samples = [TrainingSample(rng.integers(3, 250, n), rng.integers(3, 250, 6), g) for g, n in enumerate((2, 9))]
    runner = AutogradRunner(built(kind), RunnerSettings(share_prompts=False, fused=fused))
    if refused:
        with pytest.raises(ModelError, match="its layers read the padding"):
            runner.packs(samples)
    else:
        together, alone = by_sample(runner, samples), by_sample(runner.exact(), samples)
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
