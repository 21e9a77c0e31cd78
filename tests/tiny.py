"""Small random models and tokenizers for tests: made in milliseconds, without network or files.

Weights are drawn with a large standard deviation, so that next-token distributions are far from flat and a wrong
position, mask or cache entry changes log-probabilities visibly.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from trew.models.loading import apply_cap

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2", "smollm")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB = 256 + len(SPECIAL)


def tokenizer(*, chat: bool = True, eos: bool = True, pad: bool = False, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token per byte, 256 + 4 special ones, the same ids whatever is asked.

    With ``chat`` it has a ChatML template and its eos is ``<|im_end|>``, else ``<|endoftext|>``; ``bos`` makes it put
    ``<|endoftext|>`` before every text, as Llama and Gemma tokenizers do.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    special: dict[str, Any] = {}
    if eos:
        special["eos_token"] = "<|im_end|>" if chat else "<|endoftext|>"
    if pad:
        special["pad_token"] = "<|pad|>"
    if bos:
        special["bos_token"] = "<|endoftext|>"
        inner.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
        )
    result = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **special)
    if chat:
        result.chat_template = CHATML
    return result


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters that spells all others in bytes, as Llama 2's and Mistral's do: ids 3 to 258."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, eos_token="</s>")


def wide(kind: str) -> dict[str, int]:
    """Overrides that make all widths multiples of 16, as the native decoder and learner need them."""
    if kind in ("gpt2", "gpt_neox", "smollm"):
        return {}
    return {"hidden_size": 64, **({} if kind in ("llama", "qwen2") else {"head_dim": 16})}


def config(kind: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """The configuration of :func:`model`."""
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    head = {"head_dim": 8}
    window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}  # shorter than the prompts
    smollm = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    table: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", {}),
        "smollm": ("LlamaConfig", {**smollm, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", head),
        "gemma": ("GemmaConfig", {**head, "initializer_range": 0.1}),
        "gemma2": ("Gemma2Config", {**head, **window, "query_pre_attn_scalar": 8}),
        "gemma3": ("Gemma3TextConfig", {**head, **window, "query_pre_attn_scalar": 8}),
        "mistral": ("MistralConfig", {"sliding_window": 8}),
        "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
        "mixtral": ("MixtralConfig", {"num_local_experts": 2}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {**head, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ),
        "gpt_neox": ("GPTNeoXConfig", {}),
        "gpt2": ("GPT2Config", {}),
    }
    cls, extra = table[kind]
    return getattr(transformers, cls)(**{**base, **extra, **overrides})


def model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random causal language model of two layers in float32, in eval mode; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = AutoModelForCausalLM.from_config(config(kind, **overrides), dtype=torch.float32)
    result.generation_config = GenerationConfig()
    apply_cap(result)
    return result.eval()


def save(folder: str | os.PathLike, kind: str = "llama", *, seed: int = 0, **tokenizer_options: bool) -> Path:
    """Writes model and tokenizer into ``folder`` in Hugging Face layout."""
    folder = Path(folder)
    model(kind, seed=seed).save_pretrained(folder)
    tokenizer(**tokenizer_options).save_pretrained(folder)
    return folder
