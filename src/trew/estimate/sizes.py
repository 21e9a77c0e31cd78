"""Reads a model's parameter counts, widths and depth from a copy without weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config import Config, LoraConfig
from ..models import loading
from ..models.lora import insert, linear_layers

FOUR_BIT = 0.5 + 4 / 64
"""Bytes per weight in nf4: 4 bits, plus one float32 scale per 64 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Counts of numbers, not bytes. ``linear`` covers the layers' matrices, ``head`` the output matrix; ``weights``
    counts a tied head once. ``largest`` is the size of the largest trained parameter; ``tied``: the head is the
    embedding."""

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
    tied: bool


def sizes_of(config: Config) -> Sizes:
    """Counts the model that ``config`` names and its adapters: rank (in + out) numbers in each linear layer."""
    return _sizes(config.model, config.lora)


def sizes_of_teacher(config: Config) -> Sizes | None:
    """Counts the teacher that is loaded beside the policy; None without one."""
    return _sizes(config.teacher.model, LoraConfig()) if config.teacher.model else None


def sizes_of_critic(config: Config) -> Sizes:
    """Counts the model that a critic begins as, the policy's unless another is named; without adapters."""
    return _sizes(config.critic.model or config.model, LoraConfig())


def in_passes(own: Sizes | None, of: Sizes) -> float:
    """A pass of a model over the tokens of a step, in passes of one of sizes ``of``; 0 without one."""
    return 0.0 if own is None else (own.linear + own.head) / (of.linear + of.head)


@functools.lru_cache(maxsize=8)
def _sizes(name: str, lora: LoraConfig) -> Sizes:
    # On meta: shapes without memory.
    model: Any = loading.skeleton(loading.load_config(name))
    layers = linear_layers(model)
    matrices = {n: layer.get_parameter("weight").shape for n, layer in layers.items()}
    head: Any = model.get_output_embeddings()
    vocabulary, hidden = head.weight.shape
    # By parameter: the optimizer's temporaries follow the largest one.
    trained = _adapters(matrices, lora) if lora.rank else [p.numel() for p in model.parameters()]
    # Of a multimodal model the text part; several architectures leave out what follows from other entries.
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
        tied=head.weight is model.get_input_embeddings().weight,
    )


def _adapters(matrices: Mapping[str, torch.Size], lora: LoraConfig) -> list[int]:
    """Returns the sizes of the adapters' matrices: two for each chosen layer, rank x in and out x rank."""
    chosen = [s for n, s in matrices.items() if not lora.targets or n.rpartition(".")[2] in lora.targets]
    return [lora.rank * width for shape in chosen for width in shape]


@dataclass(frozen=True)
class Copy:
    """The run's model including adapters, cut to ``layers`` layers. Its tensors have shapes but no memory, and
    belong to ``mode``."""

    mode: FakeTensorMode
    model: Any
    layers: int


def copy_of(config: Config, *, device: str, layers: int) -> Copy:
    """Builds the model that ``config`` names, cut to ``layers``, with weights in the type in which a pass finds them.
    16 or 32 bits stand in for a 4-bit base."""
    shape = copy.deepcopy(loading.load_config(config.model))
    text: Any = shape.get_text_config()
    layers = min(layers, text.num_hidden_layers)
    # One entry per layer, which transformers checks against the number of layers.
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    model = loading.skeleton(shape).eval()
    gathered = config.cluster.learner > 1 and config.cluster.shard != "none"  # in the type of products
    small = gathered or (config.lora.rank and config.lora.base != "float32")
    if small and config.learner.dtype == "bfloat16":
        for layer in linear_layers(model).values():
            layer.to(torch.bfloat16)
    if config.lora.rank:
        insert(model, config.lora, name=config.model)
    return Copy(_without_memory(model, device), model, layers)


def _without_memory(model: nn.Module, device: str) -> FakeTensorMode:
    """Moves a meta model's parameters and buffers to ``device`` as fake tensors of the returned mode.

    They have shapes but no memory, and operations pick the device's kernels, which tensors on meta would not. Tied
    parameters stay tied.
    """
    mode = _Shapes(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}  # by identity, so that a tied parameter is replaced by the same fake everywhere
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


class _Shapes(FakeTensorMode):
    """Knows the shapes of grouped products, by which transformers computes experts, in every type: torch's own are for
    bfloat16 alone, although the products themselves are not."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return super().dispatch(func, types, args, kwargs)
        a, b = args[:2]
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        if a.dim() == b.dim() == 2:  # the weights' gradient: a matrix for each group
            shape = (offsets.shape[0], a.shape[0], b.shape[1])
        else:  # rows or columns in groups
            shape = (a.shape[-2], b.shape[-1])
        return super().dispatch(torch.ops.aten.new_empty.default, types, (a, shape), {})
