"""Decoder-only transformers of the Llama kind, bound to a Hugging Face model's own parameters (``family``), and the
loops over their rows as compiled C (``kernels.c``). Rollouts and the learner both stand on it."""

from ...models.anatomy import Layer, Norm, Transformer, describe

__all__ = ["Layer", "Norm", "Transformer", "describe"]
