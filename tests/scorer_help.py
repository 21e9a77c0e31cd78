"""Small random reward models for tests, and groups of completions made from texts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import tiny
from rollouts_help import rollout
from trew.types import Group, Prompt


def save_scorer(
    folder: Path, *, labels: int = 1, head: str = "sequence", kind: str = "llama", pad: bool = True, chat: bool = True,
    seed: int = 0, **overrides: int,
) -> Path:  # fmt: skip
    """Writes a random sequence or token classifier with its tokenizer; ``overrides`` of its configuration."""
    auto = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}[head]
    config = tiny.config(kind, num_labels=labels, pad_token_id=259 if pad else None, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny.tokenizer(chat=chat, pad=pad).save_pretrained(folder)
    return folder


def group(*texts: str, uid: str = "p", asked: str = "hi", chat: bool = True, **columns: object) -> Group:
    """Completions of one prompt, one token per byte and an end token behind."""
    prompt = (
        Prompt(uid, messages=({"role": "user", "content": asked},), columns=columns)
        if chat
        else Prompt(uid, text=asked, columns=columns)
    )
    tokenizer = tiny.tokenizer()

    return Group(prompt, tuple(rollout([*tokenizer(text)["input_ids"], 258], text=text) for text in texts))
