"""Fixtures of several files in this folder."""

from vllm_help import pair, two

__all__ = ["pair", "two"]
