"""Decodes through CUDA graphs with a static cache."""
