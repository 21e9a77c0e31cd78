"""Models on disk and in memory: checks, loading, the default model, LoRA adapters, Llama-family anatomy."""
