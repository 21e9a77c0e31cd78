"""Small models that vLLM's build for CPUs can run: it has no attention for the narrow heads of other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny

HEADS_OF_64 = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}


def save(folder: Path, kind: str = "qwen2", **overrides: Any) -> Path:
    """Writes a model with its tokenizer into ``folder``, which it returns."""
    model = tiny.model(kind, **HEADS_OF_64, initializer_range=0.1, max_position_embeddings=1024, **overrides)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
