"""A model's numbers, read off a copy without weights: how many of which kind, how wide, how deep."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config import Config, LoraConfig
from ..models import loading
from ..models.lora import insert, linear_layers

FOUR_BIT = 0.5 + 4 / 64
"""Bytes of a weight in nf4: 4 bits, and a float32 scale for 64 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of numbers, not bytes. ``linear`` and ``head`` are matrices of products: the layers' and the output's;
    a tied head is counted in ``weights`` once. ``largest``: of a trained parameter."""

    weights: int
    linear: int
    head: int
    trained: int
    largest: int
    hidden: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


def sizes_of(config: Config) -> Sizes:
    """Of the model that ``config`` names and of its adapters: rank (in + out) numbers in each linear layer."""
    return _sizes(config.model, config.lora)


@functools.lru_cache(maxsize=8)
def _sizes(name: str, lora: LoraConfig) -> Sizes:
    model: Any = loading.skeleton(loading.load_config(name))
    layers = linear_layers(model)
    matrices = {n: layer.get_parameter("weight").shape for n, layer in layers.items()}
    head: Any = model.get_output_embeddings()
    vocabulary, hidden = head.weight.shape
    trained = [p.numel() for p in model.parameters()]
    if lora.rank:
        chosen = [s for n, s in matrices.items() if not lora.targets or n.rpartition(".")[2] in lora.targets]
        trained = [lora.rank * width for shape in chosen for width in shape]
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads
    return Sizes(
        weights=sum(p.numel() for p in model.parameters()),
        linear=sum(p.numel() for layer in layers.values() for p in layer.parameters(recurse=False)),
        head=head.weight.numel(),
        trained=sum(trained),
        largest=max(trained),
        hidden=hidden,
        vocabulary=vocabulary,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        intermediate=getattr(text, "intermediate_size", None) or max(max(s) for s in matrices.values()),
    )


@dataclass(frozen=True)
class Copy:
    """A model as it will be, adapters included, but with ``layers`` layers, made of tensors that have shapes and no
    memory; they belong to ``mode``."""

    mode: FakeTensorMode
    model: Any
    layers: int


def copy_of(config: Config, *, device: str, layers: int) -> Copy:
    """The model that ``config`` names, cut to ``layers``. A 4-bit base stands as one of 16 or 32 bits."""
    shape = copy.deepcopy(loading.load_config(config.model))
    text: Any = shape.get_text_config()
    layers = min(layers, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    model = loading.skeleton(shape).eval()
    if config.lora.rank:
        if config.lora.base != "float32" and config.learner.dtype == "bfloat16":
            for layer in linear_layers(model).values():
                layer.to(torch.bfloat16)
        insert(model, config.lora, name=config.model)
    return Copy(_without_memory(model, device), model, layers)


def _without_memory(model: nn.Module, device: str) -> FakeTensorMode:
    """Puts the parameters and buffers of a model on meta onto ``device``, in the mode that is returned: there they have
    shapes and no memory, and operations choose the kernels of the device. Tied ones stay tied."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        tables: list[Any] = [module._parameters, module._buffers]
        for table in tables:
            for name, t in table.items():
                if t is None:
                    continue
                if id(t) not in made:
                    with mode:
                        fake = torch.empty(t.shape, dtype=t.dtype, device=device)
                        made[id(t)] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
                table[name] = made[id(t)]
    return mode
