"""Optional fast implementations: compiled CPU kernels and CUDA graphs."""
