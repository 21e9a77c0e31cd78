"""A step of a reward model's training, plain and packed: the model's own forward on padded rows, and trew's kernels.

    python benchmarks/pairs.py [--shape B] [--pairs 16] [--repeats 3] [--json FILE]

Both ways run the same pairs in turn in one process, forward, backward and the optimizer, as `trew train-reward` does.
Prompts are of 24 to 48 tokens, answers of 8 to 64. ``ratio`` is the plain way's seconds over the packed one's, medians
both; ``apart`` says how far the losses and gradients of the two are from each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import trew
import work as shapes
from demo import machine
from trew.config import LearnerConfig
from trew.learner.optimizer import make_optimizer, trainable
from trew.models import backends, loading
from trew.reward_training.data import Encoded
from trew.reward_training.packed import PackedPairs
from trew.reward_training.plain import Pairs, PlainPairs
from trew.rewards.model.scorer import Encoder, Scorer

RESULT = Path(__file__).parent / "results" / "pairs.json"
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="B")
    parser.add_argument("--pairs", type=int, default=16, help="of one step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        shapes.save_model(Path(folder), shapes.SHAPES[args.shape])
        rows = [row(Path(folder), args, dtype) for dtype in DTYPES]
    result = {
        "what": "seconds of a step of a reward model's training, by the model's own forward and by trew's kernels",
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "versions": {"trew": trew.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(), "repeats": args.repeats, "rows": rows,
    }  # fmt: skip
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def row(folder: Path, args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Both ways on the same pairs."""
    pairs = some_pairs(args.pairs, vocabulary=shapes.SHAPES[args.shape]["vocab_size"])
    ways = {name: way(folder, name, dtype) for name in ("plain", "packed")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for repeat in range(1 + args.repeats):  # the first one warms up
        for name, (runner, model) in ways.items():
            parameters = trainable(model)
            optimizer = make_optimizer(parameters, LearnerConfig(lr=0.0))
            start = time.perf_counter()
            losses[name], _ = runner.accumulate(pairs, centre=0.0)
            optimizer.step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
            gradients[name] = torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])
            optimizer.zero_grad(set_to_none=True)
    plain, packed = gradients["plain"], gradients["packed"]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found = {
        "shape": args.shape, "dtype": dtype, "pairs": len(pairs), "tokens": sum(map(len, pairs)), "seconds": medians,
        "runs": seconds, "ratio": medians["plain"] / medians["packed"],
        "apart": {"loss": abs(losses["plain"] - losses["packed"]),
                  "gradient": float((plain - packed).norm() / plain.norm())},
    }  # fmt: skip
    apart = found["apart"]["gradient"]
    print(
        f"{args.shape} {dtype:<9} {len(pairs)} pairs of {found['tokens']:,} tokens: plain {medians['plain']:.2f} s, "
        f"packed {medians['packed']:.2f} s a step, ratio {found['ratio']:.1f}; gradients {apart:.1g} apart",
        flush=True,
    )
    return found


def way(folder: Path, name: str, dtype: str) -> tuple[Pairs, Any]:
    """A separate model with the same weights and a random head, and how pairs run through it."""
    model: Any = loading.load_scorer(str(folder), new_head=True)
    torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    model.config.pad_token_id = model.config.vocab_size - 1
    autocast = torch.bfloat16 if dtype == "bfloat16" else None
    scorer = Scorer(model, Encoder.load(str(folder)), budget=8192, autocast=autocast)
    if name == "plain":
        return PlainPairs(scorer), model
    backend = backends.find("cpu", layers=True, products=False)
    assert backend is not None
    packed = PackedPairs.of(scorer, backend)
    assert not isinstance(packed, str), packed
    return packed, model


def some_pairs(count: int, *, vocabulary: int) -> list[Encoded]:
    """Always the same ones: two answers to each prompt."""
    draw = np.random.default_rng(0)

    def tokens(least: int, most: int) -> list[int]:
        return draw.integers(0, vocabulary - 1, draw.integers(least, most + 1)).tolist()

    pairs = []
    for i in range(count):
        prompt = tokens(24, 48)
        pairs.append(Encoded(str(i), [*prompt, *tokens(8, 64)], [*prompt, *tokens(8, 64)]))
    return pairs


if __name__ == "__main__":
    main()
