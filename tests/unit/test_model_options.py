"""Options of configurations that change what a model computes: dropout, own heads, sight of later tokens, limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import learner_help as help
import tiny
from trew.config import LoraConfig
from trew.errors import ModelError
from trew.learner.recompute import layers
from trew.models import files, loading, lora, positions
from trew.models.causality import causal_problems
from trew.objective import preset

BASE: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def model(config: Any) -> Any:
    """A random model of this configuration in float32, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    net.generation_config = transformers.GenerationConfig()
    loading.apply_cap(net)
    return net.eval()


# --------------------------------------------------------------------------------------------------------------------
# Dropout under activation checkpointing


def with_dropout(kind: str) -> Any:
    """A model whose layers themselves apply dropout in training mode."""
    sizes: dict[str, Any] = {name: BASE[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if kind == "opt":
        return model(transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64, init_std=0.2, dropout=0.1))
    return model(transformers.FalconConfig(**sizes, ffn_hidden_size=96, hidden_dropout=0.1, attention_dropout=0.1))


@pytest.mark.parametrize("kind", ["opt", "falcon"])
def test_layers_that_recompute_apply_no_dropout(kind):
    net, items = with_dropout(kind), help.samples()
    objective = preset("grpo", beta=0.0)
    data = objective.prepare(help.batch(items))
    plain = help.gradients(net, objective, items, data, share_prompts=False)
    assert plain.norm() > 0
    # Unshared: Falcon's attention knows no shared prompts.
    for budget in (1000, 40):
        again = help.gradients(
            net, objective, items, data, gradient_checkpointing=True, share_prompts=False, microbatch_tokens=budget
        )
        assert help.relative(again, plain) < 1e-5


def test_layers_do_recompute_and_are_in_eval_mode_afterwards():
    net, items = with_dropout("opt"), help.samples()
    seen: list[bool] = []
    for layer in layers(net):
        layer.self_attn.register_forward_pre_hook(lambda *_, layer=layer: seen.append(layer.training))
    own = help.learner(net, preset("grpo", beta=0.0), gradient_checkpointing=True)
    own.logprobs(items)
    seen.clear()
    own.step(items, own.objective.prepare(help.batch(items)))
    assert len(seen) == 2 * len(layers(net))  # a layer's attention runs once, and once more in the backward pass
    assert not any(seen)
    assert not any(module.training for module in net.modules())


# --------------------------------------------------------------------------------------------------------------------
# A head of its own where config.json says that it is tied


def saved(folder: Path, *, own_head: bool) -> Path:
    """A model that config.json calls tied."""
    help.model("llama", tie_word_embeddings=True).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    if own_head:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        assert "lm_head.weight" not in tensors
        draw = torch.Generator().manual_seed(4)
        tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=draw)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=torch.arange(40).reshape(2, 20)).logits


@pytest.mark.parametrize("own_head", [True, False], ids=["own head", "tied head"])
def test_an_export_of_merged_adapters_has_the_head_of_the_model(own_head, tmp_path):
    folder = saved(tmp_path / "model", own_head=own_head)
    assert loading.check(str(folder)) == []
    net = loading.load_model(str(folder))
    assert (net.lm_head.weight is net.model.embed_tokens.weight) is not own_head
    own = lora.attach(net, LoraConfig(rank=4, base="float32"), name="base", seed=1)
    base = logits(net)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in lora.lora_layers(net).values():
            layer.lora_B["default"].weight.normal_(std=0.05, generator=draw)
    want = logits(net)
    assert (want - base).abs().max() > 0.1
    own.export(tiny.tokenizer(), tmp_path / "final")
    table = json.loads((tmp_path / "final" / "config.json").read_text())
    assert table["tie_word_embeddings"] is not own_head
    names = set(load_file(tmp_path / "final" / "model.safetensors"))
    assert ("lm_head.weight" in names) is own_head
    for back in (
        loading.load_model(str(tmp_path / "final")),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval(),
    ):
        assert (back.lm_head.weight is back.model.embed_tokens.weight) is not own_head
        assert (logits(back) - want).abs().max() < 1e-4 * want.abs().max()
    assert net.config.tie_word_embeddings is True  # what is trained keeps its own configuration


# --------------------------------------------------------------------------------------------------------------------
# Models whose tokens see later ones

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertLMHeadModel"]}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (LLAMA | {"is_causal": False}, "is_causal = false"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        (GEMMA | {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all"'),
        (
            {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
            "use_bidirectional_attention = true",
        ),
        ({"model_type": "gemma3", "text_config": {"is_causal": False}}, "is_causal = false"),
        (BERT, "model_type 'bert' without is_decoder = true"),
        (BERT | {"is_decoder": False}, "model_type 'bert' without is_decoder = true"),
        ({"model_type": "electra"}, "model_type 'electra' without is_decoder = true"),
        ({"model_type": "roformer", "is_decoder": None}, "model_type 'roformer' without is_decoder = true"),
    ],
    ids=str,
)
def test_a_model_whose_tokens_see_later_ones_is_refused(config, what):
    (problem,) = causal_problems(config, "mine")
    assert problem.startswith(f"model: mine has {what} in config.json: its tokens see those after them")
    assert problem.endswith("use a causal model")


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"is_causal": True},
        LLAMA | {"is_causal": None},
        GEMMA | {"use_bidirectional_attention": False},
        GEMMA | {"use_bidirectional_attention": "vision"},
        GEMMA | {"use_bidirectional_attention": None},
        {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": "vision"}},
        {"model_type": "gemma3", "text_config": None},
        BERT | {"is_decoder": True},
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "is_decoder": False},
    ],
    ids=str,
)
def test_a_causal_model_is_accepted_whatever_its_configuration_says_of_images_or_decoders(config):
    assert causal_problems(config, "mine") == []


def test_a_folder_with_such_a_model_is_refused_in_one_line(tmp_path):
    folder = tiny.save(tmp_path / "model")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"is_causal": False}))
    (problem,) = loading.check(str(folder))
    assert "has is_causal = false in config.json" in problem
    assert "\n" not in problem


def test_why_later_tokens_move_the_logits_of_earlier_ones_in_a_model_that_is_not_causal():
    """transformers obeys ``is_causal``; and a BERT sees later tokens but for ``is_decoder``."""
    ids = torch.arange(12)[None]
    sizes = {name: BASE[name] for name in BASE if name not in ("num_key_value_heads", "head_dim")}

    def moved(net: Any) -> float:
        with torch.no_grad():
            return float((net(ids).logits[0, 5] - net(ids[:, :6]).logits[0, 5]).abs().max())

    assert moved(model(transformers.BertConfig(**sizes))) > 1e-2
    assert moved(model(transformers.BertConfig(**sizes, is_decoder=True))) < 1e-4


# --------------------------------------------------------------------------------------------------------------------
# Positions up to which log-probs do not depend on what stands beside

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
LIMITED: dict[str, tuple[dict[str, Any], int, str]] = {
    "temperature": ({"attn_temperature_tuning": True, "floor_scale": 1024}, 1023, "attn_temperature_tuning"),
    "temperature of four": ({"attn_temperature_tuning": 4, "floor_scale": 1024.0}, 1023, "attn_temperature_tuning"),
    "index": ({"index_topk": 2048}, 2048, "index_topk"),
    "window": ({"keep_window_size": 2048}, 2048, "keep_window_size"),
    "two rotary tables": ({"rope_parameters": LONG}, 4096, "longrope"),
    "the shortest of several": ({"rope_parameters": LONG, "index_topk": 2048}, 2048, "index_topk"),
}


@pytest.mark.parametrize("case", LIMITED)
def test_a_model_is_used_up_to_the_position_from_which_others_would_count(case):
    table, limit, why = LIMITED[case]
    table = {"max_position_embeddings": 131072, **table}
    assert positions.positions_of(table) == limit
    (note,) = positions.notes(table)
    assert note.startswith(f"model: of its 131072 positions, {limit} are used: beyond them it")
    assert why in note


@pytest.mark.parametrize("case", LIMITED)
def test_a_limit_beyond_the_context_length_changes_nothing(case):
    table = {"max_position_embeddings": 512, **LIMITED[case][0]}
    assert positions.positions_of(table) == 512
    assert positions.notes(table) == []


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"attn_temperature_tuning": False, "floor_scale": 1024},
        {"floor_scale": 1024},
        {"attn_temperature_tuning": True},
        {"attn_temperature_tuning": True, "floor_scale": None},
        {"index_topk": None},
        {"rope_parameters": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_a_model_without_such_a_limit_has_all_its_positions(table):
    assert positions.positions_of({"max_position_embeddings": 131072, **table}) == 131072
    assert positions.notes({"max_position_embeddings": 131072, **table}) == []
    assert positions.positions_of(table) is None
    assert positions.notes(table) == []


@pytest.mark.parametrize("tuned", [True, False])
def test_llama_4_has_the_positions_before_its_temperature_grows(tuned):
    config = transformers.Llama4TextConfig(
        **BASE, intermediate_size_mlp=96, num_local_experts=2, floor_scale=16, attn_temperature_tuning=tuned
    )
    assert positions.positions_of(config.to_dict()) == (15 if tuned else 512)
    assert bool(positions.notes(config.to_dict())) is tuned


@pytest.mark.parametrize(("length", "same"), [(15, True), (16, False)])
def test_the_temperature_of_llama_4_is_1_up_to_that_position(length, same):
    """Within the limit the scale of attention changes nothing; with one more token it does."""
    sizes = {**BASE, "num_hidden_layers": 1, "intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": []}
    tuned, plain = (
        model(transformers.Llama4TextConfig(**sizes, no_rope_layers=[0], floor_scale=16, attn_scale=5.0,
                                            attn_temperature_tuning=on))
        for on in (True, False)
    )  # fmt: skip
    ids = torch.arange(40, 40 + length)[None]
    with torch.no_grad():
        assert torch.allclose(tuned(ids).logits, plain(ids).logits, atol=1e-5) is same


# --------------------------------------------------------------------------------------------------------------------
# Adapters beside experts


def experts(kind: str) -> Any:
    if kind == "glm4_moe":
        return model(transformers.Glm4MoeConfig(**BASE, **EXPERTS))
    heads = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
    rotary = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    return model(transformers.DeepseekV3Config(**{**BASE, **EXPERTS, **heads, **rotary}))


def last_names(net: Any) -> set[str]:
    return {name.rpartition(".")[2] for name in lora.lora_layers(net)}


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_where_peft_moves_adapters_to_fused_experts_other_targets_are_asked_for(kind):
    net = experts(kind)
    with pytest.raises(ModelError, match=r"^lora\.targets: got all linear layers, .*outside of the experts") as error:
        lora.attach(net, LoraConfig(rank=4), name="base", seed=1)
    message = str(error.value)
    assert "\n" not in message
    assert type(net).__name__ in message
    assert "mlp.down_proj" in message
    assert "'o_proj'" in message  # what to choose instead


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("glm4_moe", ("q_proj", "v_proj")), ("glm4_moe", ("q_proj", "k_proj", "v_proj", "o_proj")),
     ("deepseek_v3", ("o_proj",)), ("deepseek_v3", ("q_a_proj", "q_b_proj"))],
)  # fmt: skip
def test_layers_outside_of_the_experts_can_be_adapted(kind, targets):
    net = experts(kind)
    before = logits(net)
    lora.attach(net, LoraConfig(rank=4, targets=targets), name="base", seed=1)
    assert last_names(net) == set(targets)
    assert len(lora.lora_layers(net)) == 2 * len(targets)
    assert torch.equal(logits(net), before)


def test_one_of_two_matrices_that_peft_fuses_is_refused_in_one_line():
    with pytest.raises(ModelError, match=r"of these layers of Glm4MoeForCausalLM: .*up_proj") as error:
        lora.attach(experts("glm4_moe"), LoraConfig(rank=4, targets=("gate_proj",)), name="base", seed=1)
    assert "\n" not in str(error.value)


def test_the_router_of_llama_4_is_not_adapted():
    """It is a linear layer that returns more than a product."""
    net = model(
        transformers.Llama4TextConfig(
            **BASE, intermediate_size_mlp=96, num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=1
        )
    )
    router = net.model.layers[0].feed_forward.router
    assert isinstance(router, torch.nn.Linear)
    assert not any("router" in name for name in lora.linear_layers(net))
    (problem,) = lora.target_problems(net, ("router",))
    assert problem.startswith("lora.targets: got 'router', accepts down_proj, ")
    before = logits(net)
    lora.attach(net, LoraConfig(rank=4), name="base", seed=1)
    assert net.model.layers[0].feed_forward.router is router
    assert last_names(net) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert torch.equal(logits(net), before)


# --------------------------------------------------------------------------------------------------------------------
# Messages


def test_the_cause_of_a_missing_key_is_more_than_the_key():
    assert files.cause(KeyError("nope")) == "'nope' is not known"
    assert files.cause(ValueError("nope")) == "nope"


def test_the_linear_layers_of_falcon_are_adapted():
    """They are a subclass of nn.Linear."""
    net = model(transformers.FalconConfig(vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
    lora.attach(net, LoraConfig(rank=4), name="base", seed=1)
    assert last_names(net) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


@pytest.mark.parametrize(("kind", "key", "causal"), [("xlm", "causal", True), ("xlnet", "attn_type", "uni")])
def test_models_that_are_causal_on_request_are_refused_otherwise(kind: str, key: str, causal: object):
    assert causal_problems({"model_type": kind, key: causal}, "m") == []
    (told,) = causal_problems({"model_type": kind}, "m")
    assert f"without {key} = " in told
