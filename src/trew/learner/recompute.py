"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ModelError


def enable_recomputing(model: PreTrainedModel) -> None:
    """Switches activation checkpointing on, or raises ModelError where the architecture has none."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise ModelError(
            f"learner.gradient_checkpointing: got true, but {type(model).__name__} does not support it; set it to "
            "false, and learner.microbatch_tokens lower if memory is short"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def recomputing(model: PreTrainedModel, on: bool) -> Iterator[None]:
    """Lets checkpointed layers recompute inside the block.

    They do so in training mode only, which would also turn dropout on. So the flag is set on the layers themselves
    and not on the modules inside them, where dropout looks.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if on else []
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        for layer in layers:
            layer.training = False
