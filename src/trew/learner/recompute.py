"""Activation checkpointing: activations inside a layer are recomputed in the backward pass, not stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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
    themselves and not on the modules inside them, where dropout reads it. It is restored after the block: generation
    needs the key-value cache, which recomputation forbids.
    """
    found = layers(model)
    before = [(layer.training, layer.gradient_checkpointing) for layer in found]
    # The reentrant variant gives no gradients where none of a layer's inputs requires one, as under frozen embeddings.
    recompute = partial(checkpoint, use_reentrant=False)
    try:
        for layer in found:
            # Assigned directly: layer.train() would set the mode of the modules inside, too.
            layer.training = layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = recompute  # pyrefly: ignore[bad-argument-type]
        yield
    finally:
        for layer, (training, on) in zip(found, before, strict=True):
            layer.training, layer.gradient_checkpointing = training, on


def layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The model's layers, in order."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
