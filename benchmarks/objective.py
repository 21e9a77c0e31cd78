"""Coefficients of 1 M tokens in 4,096 sequences for every preset, next to a forward pass over as many tokens.

    python benchmarks/objective.py [--runs 5] [--presets grpo,dapo] [--json benchmarks/results/objective.json]

``prepare`` makes advantages, denominators and token weights from rewards, ``loss`` the coefficients and the loss,
``metrics`` what a run logs. The forward pass is that of a 135 M parameter model (random weights, float32), measured
on 2,048 tokens in sequences of 256 and scaled. All in one process; medians over the runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import trew
from demo import machine
from work import SHAPES, model_of

SEQUENCES, GROUP, TOKENS = 4096, 16, 1 << 20
FORWARD_TOKENS, LENGTH = 2048, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--presets", default=",".join(trew.presets()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    forward = forward_ms(args.runs)
    print(f"forward pass over {TOKENS:,} tokens: {forward / 1000:.1f} s (135 M parameters, float32)")
    print(f"{'preset':<24}{'prepare':>10}{'loss':>10}{'metrics':>10}   ms; share of a forward pass (prepare + loss)")
    rows = []
    for name in args.presets.split(","):
        objective, batch = trew.preset(name), make(name)
        prepared = objective.prepare(batch)
        row = {
            "preset": name,
            "prepare_ms": median_ms(lambda o=objective, b=batch: o.prepare(b), args.runs),
            "loss_ms": median_ms(lambda o=objective, b=prepared: o.loss(b), args.runs),
            "metrics_ms": median_ms(lambda o=objective, b=prepared: o.loss(b).metrics, args.runs),
        }
        row["metrics_ms"] = max(row["metrics_ms"] - row["loss_ms"], 0.0)
        row["share_of_forward"] = (row["prepare_ms"] + row["loss_ms"]) / forward
        rows.append(row)
        print(
            f"{name:<24}{row['prepare_ms']:>10.1f}{row['loss_ms']:>10.1f}{row['metrics_ms']:>10.1f}   "
            f"{row['share_of_forward']:.2%}",
            flush=True,
        )
    if args.json:
        result = {
            "date": datetime.date.today().isoformat(), "machine": machine(),
            "versions": {"torch": torch.__version__, "trew": trew.__version__}, "threads": torch.get_num_threads(),
            "runs": args.runs, "tokens": TOKENS, "sequences": SEQUENCES, "forward_ms": forward, "rows": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def median_ms(work: Callable[[], object], runs: int) -> float:
    times = []
    for run in range(runs + 1):  # the first is a warm-up
        start = time.perf_counter()
        work()
        if run:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def forward_ms(runs: int) -> float:
    model = model_of(SHAPES["B"])
    ids = torch.randint(0, 49152, (FORWARD_TOKENS // LENGTH, LENGTH))
    with torch.no_grad():
        return median_ms(lambda: model(ids, use_cache=False), runs) * TOKENS / FORWARD_TOKENS


def make(name: str) -> trew.TokenBatch:
    """A ragged step in which the policy has moved a little; half of the answers are right."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * LENGTH, (SEQUENCES,), generator=g)
    lengths[-1] += TOKENS - int(lengths.sum()) if int(lengths.sum()) < TOKENS else 0
    n = int(lengths.sum())
    logprobs = -torch.rand(n, generator=g) * 3

    def near(scale: float) -> torch.Tensor:
        return logprobs + scale * torch.randn(n, generator=g)

    rewards = torch.randint(0, 2, (SEQUENCES,), generator=g).float()
    batch = trew.TokenBatch(
        logprobs=logprobs, mask=torch.ones(n, dtype=torch.bool),
        sequence_ids=torch.arange(SEQUENCES).repeat_interleave(lengths),
        group_ids=torch.arange(SEQUENCES) // GROUP, rewards=rewards, old_logprobs=near(0.1),
        rollout_logprobs=near(0.1), ref_logprobs=near(0.2), teacher_logprobs=near(0.2),
        entropies=torch.rand(n, generator=g), score_norms=torch.rand(n, generator=g),
        truncated=torch.zeros(SEQUENCES, dtype=torch.bool),
        baselines=torch.zeros(SEQUENCES), max_length=4 * LENGTH,
        values=torch.rand(n, generator=g),
    )  # fmt: skip
    if name == "ppo-clip":
        return batch.replace(advantages=torch.randn(n, generator=g))
    if name == "grpo-process":
        return batch.replace(step_rewards=eight_steps(lengths, g))
    if name in ("gigpo", "mt-grpo", "turn-returns"):
        return batch.replace(turns=eight_turns(lengths, g))
    if name == "gdpo":
        return batch.replace(rewards=torch.stack([rewards, torch.rand(SEQUENCES, generator=g)], dim=1))
    return batch


def eight_turns(lengths: torch.Tensor, g: torch.Generator) -> object:
    """Eight turns of equal length in every sequence, in twenty states."""
    from trew.objective.turns import Turns

    ends = (lengths[:, None] * torch.arange(1, 9) // 8).flatten()
    rewards = torch.rand(len(ends), generator=g, dtype=torch.float64)
    states = torch.randint(0, 20, (len(ends),), generator=g)
    return Turns(rewards, torch.arange(SEQUENCES).repeat_interleave(8), ends, states)


def eight_steps(lengths: torch.Tensor, g: torch.Generator) -> object:
    """Eight steps of equal length in every sequence."""
    from trew.objective.batch import ReasoningSteps

    ends = (lengths[:, None] * torch.arange(1, 9) // 8).flatten()
    values = torch.rand(len(ends), generator=g, dtype=torch.float64)
    return ReasoningSteps(values, torch.arange(SEQUENCES).repeat_interleave(8), ends)


if __name__ == "__main__":
    main()
