"""Describes a Llama-family decoder from Hugging Face: its modules by their role.

    x_0 = scale embed(token)
    x  <- x + after_1(o(attend(rope(q), rope(k), v))),   q, k, v of norm_1(x);  q, k optionally normed per head
    x  <- x + after_2(down(act(gate) up)),               gate, up of norm_2(x)
    z   = cap(head(norm(x)))

Copies nothing: a :class:`Transformer` refers to the model's parameters, so that it sees every weight update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .sharded import full

Activation = Literal["silu", "gelu_tanh"]

FAMILIES = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
})  # fmt: skip
CLASSIFIERS = frozenset({
    "LlamaForSequenceClassification", "MistralForSequenceClassification", "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification", "SmolLM3ForSequenceClassification", "GemmaForSequenceClassification",
    "Gemma2ForSequenceClassification",
})  # fmt: skip
"""The same architectures with a head that scores a text: reward models."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend only on the position: one table serves all sequences. Others change with the longest
sequence of a batch, so a token's keys would depend on its neighbours."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm: x (offset + weight) / sqrt(mean(x^2) + eps)."""

    weight: nn.Parameter
    eps: float
    offset: float  # 1 for Gemma, whose weights are differences from 1


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's modules.

    ``window`` is the number of positions that a query sees, including its own; None = all before it. ``rope`` is the
    name of the layer's rotary table; None = no rotary embedding.
    """

    attention_norm: Norm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    attention_after: Norm | None
    mlp_norm: Norm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    mlp_after: Norm | None
    window: int | None
    rope: str | None


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model's parts. ``heads`` query heads share ``kv_heads`` key and value heads of size ``head_dim``."""

    model: Any
    layers: tuple[Layer, ...]
    embedding: nn.Embedding
    norm: Norm
    head: nn.Linear
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    scaling: float  # factor of attention scores
    embed_scale: float
    attention_cap: float  # scores become cap tanh(score / cap); 0 = off
    logit_cap: float

    @property
    def norms(self) -> list[Norm]:
        """Every norm of the model, including those of heads."""
        of_layers = (
            (x.attention_norm, x.q_norm, x.k_norm, x.attention_after, x.mlp_norm, x.mlp_after) for x in self.layers
        )
        return [self.norm, *(norm for norms in of_layers for norm in norms if norm is not None)]

    def rotary(self, positions: int, *, device: torch.device) -> dict[str, Float[Tensor, "2 positions D"]]:
        """The cosines and sines of each rotary table, from the model's own module."""
        inner = self.model.model
        ids = torch.arange(positions, device=device)[None]
        # The module rounds its tables to the type of this tensor. It is the model's own, so that any scaling of
        # frequencies is applied as the model applies it.
        like = torch.empty(0, dtype=torch.float32, device=device)
        tables = {}
        for name in {layer.rope for layer in self.layers} - {None}:
            assert name is not None
            both = inner.rotary_emb(like, ids, name) if _by_layer_type(inner) else inner.rotary_emb(like, ids)
            # cos and sin, each (1, positions, D) -> (2, positions, D).
            tables[name] = torch.stack([t[0] for t in both])
        return tables

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens (...,): x_0 (..., D), float32."""
        x = nn.functional.embedding(tokens, self.embedding.weight).float()
        return x * self.embed_scale if self.embed_scale != 1 else x


def describe(model: Any, *, adapters: bool = False) -> Transformer | str:
    """Returns the model's parts, or why it is not a supported model, in words that complete "because ...".

    ``adapters`` also accepts peft's LoRA layers as linear layers; :func:`weight_of` gives their combined weight.
    """
    # The class first: what follows reads attributes that only known classes have.
    if why_not := _unknown(model) or _unsupported_config(model):
        return why_not
    config, inner = model.config, model.model
    # Head size and factor of scores are those of every layer.
    attention = inner.layers[0].self_attn
    made = Transformer(
        model=model,
        layers=tuple(_layer(layer, number, config, inner) for number, layer in enumerate(inner.layers)),
        embedding=inner.embed_tokens,
        norm=_norm(inner.norm),
        head=model.score if type(model).__name__ in CLASSIFIERS else model.lm_head,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        activation=ACTIVATIONS[_activation(config)],
        scaling=float(attention.scaling),
        embed_scale=float(getattr(inner.embed_tokens, "scalar_embed_scale", 1.0)),
        attention_cap=_attention_cap(model),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
    return _unsupported_parts(made, adapters=adapters) or made


def _unknown(model: Any) -> str:
    """Says why the model's code is not code that this module knows; empty if it is."""
    # The module's name too: remote code may define a class of the same name with another forward pass.
    if type(model).__name__ not in FAMILIES | CLASSIFIERS or not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is not one of {', '.join(sorted(FAMILIES))}"
    for name, module in model.named_modules():
        # A hook may change what a module computes, and only the model's own forward pass would call it.
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return f"its module {name or 'itself'} is hooked or wrapped"
    return ""


def _unsupported_config(model: Any) -> str:
    """Says why a known model's configuration is not supported; empty if it is."""
    config = model.config
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is not one of {', '.join(ACTIVATIONS)}"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention looks ahead"
    types = {r.get("rope_type") for r in _ropes(config)}
    if not types <= FIXED_ROPES:
        return f"its rotary embedding ({', '.join(map(str, types - FIXED_ROPES))}) depends on the sequence length"
    if _attention_cap(model) and config._attn_implementation != "eager":
        return f"its attention {config._attn_implementation!r} leaves out the cap of its scores"
    return ""


def _unsupported_parts(made: Transformer, *, adapters: bool) -> str:
    """Says why a model's layers are not supported; empty if they are."""
    linears = [m for x in made.layers for m in (x.q, x.k, x.v, x.o, x.gate, x.up, x.down)]
    if other := next((m for m in [*linears, made.head] if not _is_linear(m, adapters=adapters)), None):
        return f"it has linear layers of another kind ({type(other).__module__}.{type(other).__name__})"
    # From the frequencies, one for each pair of numbers: older transformers cannot compute the tables on "meta".
    buffers = made.model.model.rotary_emb.named_buffers()
    widths = {2 * buffer.shape[-1] for name, buffer in buffers if name.endswith("inv_freq")}
    return "" if widths <= {made.head_dim} else "its rotary embedding covers only part of a head"


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")


def _attention_cap(model: Any) -> float:
    """The cap of attention scores; 0 = none. Only Gemma 2's attention applies it, though others have the setting."""
    if not type(model).__name__.startswith("Gemma2"):
        return 0.0
    return float(getattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None) or 0.0)


def weight_of(module: Any, *, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
    """Returns the matrix (out, in) that a linear layer applies: its weight, or W + (alpha / rank) B A with adapters, in
    float32 memory that ``empty`` gives on the CPU."""
    # type() and not isinstance: a subclass may multiply in another way.
    if type(module) is nn.Linear:
        return module.weight.detach()
    weight = module.get_base_layer().weight.detach()
    # Disabled, the base alone counts; merged, its weight contains B A already.
    if module.disable_adapters or module.merged:
        return weight
    # A copy: the addition below must not change the base. float32: bfloat16 would round a small update away.
    if weight.is_cpu:
        weight = empty(*weight.shape, dtype=torch.float32).copy_(weight)
    else:
        weight = weight.to(torch.float32, copy=True)
    for adapter in module.active_adapters:
        add_low_rank(weight, module, adapter)
    return weight


def add_low_rank(weight: Tensor, module: Any, adapter: str) -> None:
    """Adds (alpha / rank) B A of peft's layer ``module`` to ``weight`` (float32). In one operation: matrices made on
    the way and released would leave holes in the heap."""
    a, b = full(module.lora_A[adapter].weight.detach()), full(module.lora_B[adapter].weight.detach())
    into = weight.t() if getattr(module, "fan_in_fan_out", False) else weight  # GPT-2's layers are transposed
    into.addmm_(b.float(), a.float(), alpha=module.scaling[adapter])


def _is_linear(module: Any, *, adapters: bool) -> bool:
    if type(module) is nn.Linear:
        return True
    # By name, so that peft need not be installed.
    lora = type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"
    return adapters and lora and type(module.get_base_layer()) is nn.Linear


def _layer(layer: Any, number: int, config: Any, inner: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    # Gemma 2 and 3 norm before and after each block. There post_attention_layernorm is the norm after attention; in
    # Llama the module of the same name is the norm before the MLP.
    sandwiched = hasattr(layer, "pre_feedforward_layernorm")
    kinds = getattr(config, "layer_types", None)
    kind = kinds[number] if kinds else "full_attention"
    # Most classes with a window keep it per layer. Mistral reads it from the configuration, for all layers; Llama and
    # Gemma have none, whatever their configuration says of one.
    window = getattr(attention, "sliding_window", None)
    if type(attention).__name__ == "MistralAttention":
        window = config.sliding_window
    rope = kind if _by_layer_type(inner) else "all"
    return Layer(
        attention_norm=_norm(layer.input_layernorm),
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=attention.o_proj,
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        attention_after=_norm(layer.post_attention_layernorm) if sandwiched else None,
        mlp_norm=_norm(layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm),
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        mlp_after=_norm(layer.post_feedforward_layernorm) if sandwiched else None,
        window=window,
        # SmolLM3 leaves the rotary embedding out of some layers.
        rope=rope if getattr(attention, "use_rope", True) else None,
    )


def _norm(module: Any) -> Norm:
    # Gemma's weight is stored as the difference from 1, and its epsilon under another name.
    gemma = type(module).__name__.startswith("Gemma")
    return Norm(module.weight, float(module.eps if gemma else module.variance_epsilon), 1.0 if gemma else 0.0)


def _by_layer_type(inner: Any) -> bool:
    """Whether the rotary module has one table per layer type (Gemma 3: local and global), selected by an argument."""
    return isinstance(getattr(inner.rotary_emb, "rope_type", None), dict)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of the rotary embeddings: one table, or one per layer type."""
    given = config.rope_parameters
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or [given]
