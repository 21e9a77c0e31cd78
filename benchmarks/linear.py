"""Linear layers by our products or by torch's: seconds of generation and of one optimizer step.

    python benchmarks/linear.py [--runs 5] [--json benchmarks/results/linear.json]

The layers are the model's own in both, as they are for every architecture that trew has no layers of its own for.
The work is that of one step of ``trew demo``: a SmolLM2-135M shaped model with random weights, 12 prompts of 40 tokens
with 16 completions of 10 tokens each, float32. Both paths take turns in one process; medians over the runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import trew
from demo import machine
from trew.config import LearnerConfig
from trew.learner import Learner, Sample
from trew.native.linears import packed_linears

PROMPTS, GROUP, PROMPT_TOKENS, TOKENS = 12, 16, 40, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = smollm2()
    phases: dict[str, Callable[[bool], None]] = {
        "decode 16 tokens, 192 rows, without cache reads": lambda fast: decode(model, fast),
        "optimizer step": step_of(model),
    }
    rows = []
    for name, work in phases.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for run in range(args.runs + 1):  # the first of each is a warm-up
            for fast in (True, False):
                start = time.perf_counter()
                work(fast)
                if run:
                    times[fast].append(time.perf_counter() - start)
        fast, plain = statistics.median(times[True]), statistics.median(times[False])
        rows.append({"phase": name, "trew_seconds": fast, "plain_seconds": plain, "ratio": plain / fast})
        print(f"{name}: trew {fast:.2f} s, plain {plain:.2f} s, ratio {plain / fast:.2f}")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trew": trew.__version__}
        result = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions,
                  "threads": torch.get_num_threads(), "runs": args.runs, "rows": rows}  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def smollm2() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def decode(model: LlamaForCausalLM, fast: bool) -> None:
    """The linear layers' share of decoding: one token a row, again and again."""
    ids = torch.zeros(PROMPTS * GROUP, 1, dtype=torch.int64)
    if fast:
        with packed_linears(model, autocast=None):
            for _ in range(16):
                model(ids, use_cache=False)
    else:
        for _ in range(16):
            model(ids, use_cache=False)


def step_of(model: LlamaForCausalLM) -> Callable[[bool], None]:
    g = np.random.default_rng(0)
    samples = []
    for group in range(PROMPTS):
        prompt = g.integers(0, 49152, PROMPT_TOKENS)
        samples += [Sample(prompt, g.integers(0, 49152, TOKENS), group) for _ in range(GROUP)]
    count = len(samples) * TOKENS
    batch = trew.TokenBatch(
        logprobs=torch.zeros(count), mask=torch.ones(count, dtype=torch.bool),
        sequence_ids=torch.arange(len(samples)).repeat_interleave(TOKENS),
        group_ids=torch.tensor([s.group for s in samples]), rewards=torch.arange(len(samples)) % 2.0,
    )  # fmt: skip
    learners = {}
    for fast in (True, False):
        objective = trew.preset("grpo", beta=0.0)
        learners[fast] = Learner(
            model, config=LearnerConfig(lr=1e-9), objective=objective, optimizer_steps=100, linear=fast, kernels=False
        )
    prepared = learners[True].objective.prepare(batch)
    return lambda fast: (learners[fast].step(samples, prepared), None)[1]


if __name__ == "__main__":
    main()
