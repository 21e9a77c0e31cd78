"""Whether a configuration is that of a causal language model: each token sees those before it, and only them."""

from __future__ import annotations

import json
from typing import Any

from .positions import OWN_POSITIONS

_NOT_GENERATIVE = ("ForMaskedLM", "Classification", "ForQuestionAnswering", "RewardModel", "ForMultipleChoice")
_ENCODERS = (
    "bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert", "roformer"
)  # fmt: skip
_CAUSAL_IF = {
    **dict.fromkeys(_ENCODERS, ("is_decoder", True)),
    "xlm": ("causal", True), "flaubert": ("causal", True), "xlnet": ("attn_type", "uni"),
}  # fmt: skip
"""Kinds of models that are causal only where their configuration says so, and how it does."""


def causal_problems(config: dict[str, Any], name: str) -> list[str]:
    """Says why a configuration does not describe a causal language model; empty if it does."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    architectures = config.get("architectures") or []
    generative = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not any(
        isinstance(a, str) and (a.endswith(_NOT_GENERATIVE)) for a in architectures
    )
    if not generative:
        what = ", ".join(map(str, architectures)) or kind
        return [f"model: {name} is {what}, not a causal language model; use a model of a ...ForCausalLM kind"]
    if why := _looks_ahead(config):
        return [
            f"model: {name} has {why} in config.json: its tokens see those after them, so that their log-probs are "
            "not those of writing one after the other; use a causal model"
        ]
    if kind in OWN_POSITIONS:
        return [
            f"model: {name} is of type {kind}, which numbers positions itself: its log-probs would depend on what is "
            "computed beside a sequence, or be those at other positions; use a decoder-only model"
        ]
    return []


def _looks_ahead(config: dict[str, Any]) -> str:
    """What in a configuration lets tokens see later ones; empty if nothing does."""
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        if table.get("is_causal") is False:
            return "is_causal = false"
        if table.get("use_bidirectional_attention") in (True, "all"):  # "vision": images alone
            return f"use_bidirectional_attention = {json.dumps(table['use_bidirectional_attention'])}"
    key, wanted = _CAUSAL_IF.get(str(config.get("model_type")), ("", None))
    if key and config.get(key) != wanted:
        return f"model_type {config['model_type']!r} without {key} = {json.dumps(wanted)}"
    return ""
