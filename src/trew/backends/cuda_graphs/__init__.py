"""Decoding through CUDA graphs with a static cache."""

from ...rollout import torch_engine  # noqa: F401  (it imports this package: whoever comes first loads both)
