"""Whether the keys and values of earlier tokens, and its positions, are all that a model needs of them."""

from __future__ import annotations

import inspect
from typing import Any

from ..config import Config
from . import loading
from .positions import OWN_POSITIONS

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Kinds of layers that keep keys and values; others (recurrent, linear, convolutional ones) keep a state."""


def undecodable(kind: type, config: Any) -> str | None:
    """Why a model of the class ``kind`` cannot be decoded from cached keys and values, in words that complete "because
    ..."; None if it can. Each token would be computed as if none stood before it, or at another position, or fail.

    >>> from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
    >>> undecodable(LlamaForCausalLM, LlamaConfig()), undecodable(MambaForCausalLM, MambaConfig())
    (None, 'its forward takes no past_key_values')
    """
    if "past_key_values" not in inspect.signature(kind.forward).parameters:  # type: ignore[attr-defined]
        return "its forward takes no past_key_values"
    if config.model_type in (*OWN_POSITIONS, "roformer"):  # RoFormer only with a cache: it is trained
        return f"models of type {config.model_type} number positions themselves"
    others = {*(getattr(config.get_text_config(), "layer_types", None) or ())} - ATTENTION
    return f"it has layers that keep a state ({', '.join(sorted(others))})" if others else None


def refusal(name: str, why: str) -> str:
    """The message that a model is refused with."""
    return (
        f"model: {name} cannot be sampled by the embedded engine, because {why}; use a model whose layers are all "
        "attention and that takes position_ids, or have it sampled by vLLM (cluster.rollout = 'vllm')"
    )


def problems(config: Config) -> list[str]:
    """Why the embedded engine of a run, if it has one, could not sample its model, which is here; empty if it can."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.cluster.rollout == "vllm" or config.demonstrates:  # demonstrations are read, and nothing is sampled
        return []
    shape = loading.load_config(config.model)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(shape), None)
    why = undecodable(kind, shape) if isinstance(kind, type) else None
    return [refusal(config.model, why)] if why else []
