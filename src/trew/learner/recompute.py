"""Activation checkpointing: activations inside a layer are recomputed in the backward pass, not stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ModelError


def check(model: PreTrainedModel) -> None:
    """Raises ModelError where the architecture does not support activation checkpointing."""
    if not model.supports_gradient_checkpointing or not layers(model):
        raise ModelError(
            f"learner.gradient_checkpointing: got true, but {type(model).__name__} does not support it; set it to "
            "false, and learner.microbatch_tokens lower if memory is short"
        )


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Makes layers recompute inside the block, which must enclose the backward pass.

    transformers recomputes in training mode only, which would also turn dropout on. So the mode is set on the layers
    themselves and not on the modules inside them, and taken back while a layer computes: some (OPT, Falcon) apply
    dropout in the layer itself. It is restored after the block: generation needs the key-value cache, which
    recomputation forbids.
    """
    found = layers(model)
    before = [(layer.training, layer.gradient_checkpointing) for layer in found]
    try:
        for layer in found:
            # Assigned directly: layer.train() would set the mode of the modules inside, too.
            layer.training = layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_recomputed, layer)  # pyrefly: ignore[bad-argument-type]
        yield
    finally:
        for layer, (training, on) in zip(found, before, strict=True):
            layer.training, layer.gradient_checkpointing = training, on
            # It refers to the layer, which would then wait for the garbage collector.
            layer.__dict__.pop("_gradient_checkpointing_func", None)


def _recomputed(layer: GradientCheckpointingLayer, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Computes a layer without dropout, now and in the backward pass."""

    def run(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    # The reentrant variant gives no gradients where none of a layer's inputs requires one, as under frozen embeddings.
    return checkpoint(run, *args, use_reentrant=False, **options)


def layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The model's layers, in order."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
