"""Compiled kernels for Llama-family models on CPUs (``kernels.c``), and the memory that they work in."""
