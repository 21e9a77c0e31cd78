"""How many tokens a second the learner takes on one GPU, at the size at which prime-rl publishes its trainer's rate.

    python benchmarks/long_gpu.py [--json FILE]              on a GPU
    python benchmarks/long_gpu.py --device cpu --small       whether it runs

A model shaped as Qwen3-0.6B in bfloat16 learns from ``--rows`` sequences of 16,384 tokens each, one in a micro-batch,
with layers computed again in the backward pass and without. A step is everything that follows rollouts: forward and
backward passes, clipping, AdamW. prime-rl's row is from its repository's benchmarks/results/BENCHMARKS.md of 16 January
2026: Qwen3-0.6B, "RL Full", 16,384 tokens, recomputation, FlashAttention 3, one H100; not run here.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import step
from trew.config import LearnerConfig
from trew.learner import Learner
from trew.objective import TokenBatch, preset
from trew.types import TrainingSample

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
PROMPT = 512
PEER = {"name": "prime-rl", "gpu": "NVIDIA H100", "tokens_per_second": 11_896, "peak_memory_gib": 12.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and short sequences")
    parser.add_argument("--rows", type=int, default=4, help="sequences in a step, each its own micro-batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.threads, args.peer = 0, "none"
    tokens = 768 if args.small else 16_384
    rows = []
    for again in (True, False):
        rows.append(measured(args, SMALL if args.small else SHAPE, tokens, again=again))
        print(shown(rows[-1]), flush=True)
        if args.json:
            found = {"peer": PEER, "tokens": tokens, "rows": rows}
            args.json.write_text(json.dumps(step.head(args) | found, indent=1) + "\n")


def measured(args: argparse.Namespace, shape: dict[str, Any], tokens: int, *, again: bool) -> dict[str, Any]:
    """Seconds of the quickest step after the first, tokens per second, and the peak of what torch had allocated.
    ``again``: layers are computed again in the backward pass (gradient checkpointing)."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=2 * tokens))
    config = LearnerConfig(dtype="bfloat16", microbatch_tokens=tokens, gradient_checkpointing=again)
    learner = Learner(model, config=config, objective=preset("dr-grpo"), optimizer_steps=args.repeats + 1)
    samples, batch = rollouts(args.rows, tokens, shape["vocab_size"])
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(args.repeats + 1):  # the first one warms up
        start = now(args.device)
        learner.step(samples, learner.objective.prepare(batch))
        seconds.append(now(args.device) - start)
    best = min(seconds[1:])
    return {
        "gradient_checkpointing": again, "seconds": best, "tokens_per_second": args.rows * tokens / best,
        "over_peer": args.rows * tokens / best / PEER["tokens_per_second"],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if args.device != "cpu" else None,
    }  # fmt: skip


def rollouts(rows: int, tokens: int, vocabulary: int) -> tuple[list[TrainingSample], TokenBatch]:
    """Random tokens: ``rows`` prompts with one completion each, two of them in a group."""
    rng = np.random.default_rng(0)
    count = tokens - PROMPT
    samples = [
        TrainingSample(rng.integers(0, vocabulary, PROMPT), rng.integers(0, vocabulary, count), row // 2)
        for row in range(rows)
    ]
    batch = TokenBatch(
        logprobs=torch.zeros(rows * count), mask=torch.ones(rows * count, dtype=torch.bool),
        sequence_ids=torch.arange(rows).repeat_interleave(count), group_ids=torch.arange(rows) // 2,
        rewards=torch.arange(rows).float() % 2, max_length=count,
    )  # fmt: skip
    return samples, batch


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def shown(row: dict[str, Any]) -> str:
    memory = row["peak_memory_bytes"]
    layers = "computed again" if row["gradient_checkpointing"] else "kept"
    return (
        f"layers {layers:<15}{row['seconds']:.3f} s a step, "
        f"{row['tokens_per_second']:,.0f} tokens/s = {row['over_peer']:.2f} x prime-rl's on an H100"
        + (f"; {memory / 2**30:.1f} GiB" if memory else "")
    )


if __name__ == "__main__":
    main()
