"""How far a GRPO step is from what this machine could do at best.

    python benchmarks/floor.py [--models A,B] [--dtypes float32,bfloat16] [--json benchmarks/results/floor.json]

Measures the rate of matrix products and the bandwidth of a copy, counts the arithmetic that a step cannot do without
(a group's prompt once; no padding; logits of completion positions alone, in float32 at either precision), runs a step,
and prints for each phase the floor, our seconds, and their quotient. The rate is that of the quickest product at hand,
oneDNN's, ours or torch's own; ``step_by_torch`` is the whole step by the rate of torch's own ``a @ b``, through which a
step made of torch's operations would go. The floor of decoding is that of its products or of the bytes it reads
(weights once per token, and the cache), whichever is longer. What is not in the floor: the optimizer, sampling, norms,
softmax and everything else that is no product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import step
from work import BATCHES, SHAPES, Work, save_model

BYTES = {"float32": 4, "bfloat16": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="A,B")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait, before each run, for a quiet machine"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our recipe")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.threads, args.peer = 0, "none"
    limits = machine_limits(args.device)
    rows = []
    with tempfile.TemporaryDirectory(prefix="trew-floor-") as scratch:
        for model in args.models.split(","):
            save_model(Path(scratch) / model, SHAPES[model])
            for dtype in args.dtypes.split(","):
                prompts, group = BATCHES[model]
                work = Work(
                    shape=SHAPES[model], prompts=prompts, group=group, dtype=dtype, device=args.device,
                    overrides=tuple(args.set),
                )  # fmt: skip
                pairs = step.measured(work, Path(scratch) / model, args)
                limits = best(limits, machine_limits(args.device))  # neighbours come and go: the best that was seen
                rows.append((model, work, step.row(model, dtype, "none", work, pairs)))
    print(limits_table(limits))
    out = []
    for model, work, measured in rows:
        out.append(distances(model, work, measured, limits))
        print(shown(out[-1]))
    if args.json:
        args.json.write_text(json.dumps(step.head(args) | {"limits": limits, "rows": out}, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------- what a machine can


def machine_limits(device: str) -> dict[str, Any]:
    """Products in FLOP/s by type and threads (on a GPU under its name), copies in bytes read and written per second."""
    rates: dict[str, dict[str, float]] = {}
    own: dict[str, dict[str, float]] = {}
    before = torch.get_num_threads()
    every = sorted({1, before})
    for dtype in BYTES:
        rates[dtype], own[dtype] = {}, {}
        for threads in every if device == "cpu" else [0]:
            if threads:
                torch.set_num_threads(threads)
            where = str(threads) if threads else device
            rates[dtype][where], own[dtype][where] = product_rates(getattr(torch, dtype), device)
    torch.set_num_threads(before)
    return {"products": rates, "torch": own, "copy": copy_rate(device)}


def product_rates(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Of the quickest product at hand, and of torch's own."""
    from trew.backends.cpu import products

    best = own = 0.0
    for size in (1024, 2048) if device == "cpu" else (4096, 8192):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        own = max(own, 2 * size**3 / seconds_of(lambda a=a, b=b: a @ b, device))
        if device == "cpu":
            for work in (
                lambda a=a, b=b: onednn(a, b),
                lambda a=a, b=b: products.product(a, products.WeightMatrix.of(b)),
            ):
                best = max(best, 2 * size**3 / seconds_of(work, device))
    return max(best, own), own


def onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By the operator that torch.compile uses for linear layers."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


def copy_rate(device: str) -> float:
    source = torch.ones(1 << (26 if device == "cpu" else 29))  # far more than any cache
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source), device)


def seconds_of(work: Callable[[], object], device: str, repeats: int = 7) -> float:
    """The quickest of several runs."""
    best = float("inf")
    for _ in range(repeats + 1):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def best(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    rates = {
        kind: {t: {k: max(v, b[kind][t][k]) for k, v in of.items()} for t, of in a[kind].items()}
        for kind in ("products", "torch")
    }
    return {**rates, "copy": max(a["copy"], b["copy"])}


# ------------------------------------------------------------------------------------------------- what a step needs


def weights(shape: dict[str, Any]) -> tuple[int, int]:
    """How many weights a token is multiplied with in the layers, and how many in the output head."""
    d, kv = shape["hidden_size"], shape["hidden_size"] * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * d * d + 2 * d * kv + 3 * d * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer, d * shape["vocab_size"]


def arithmetic(work: Work) -> dict[str, dict[str, float]]:
    """FLOPs (those of the logits, in float32, among them), and for decoding bytes, of each phase of one step at fixed
    lengths; beta = 0 and one update.

        products of a token with n weights: 2 n forward, 6 n in training;   attention: 4 d per layer and visible token

    Training sees a group's prompt once, then of every completion all tokens but the last; decoding feeds as many. The
    head is read at the prompt's last token and wherever a token is fed after that.
    """
    s, b = work.shape, BYTES[work.dtype]
    d, layers = s["hidden_size"], s["num_hidden_layers"]
    kv = d * s["num_key_value_heads"] // s["num_attention_heads"]
    body, head = weights(s)
    p, c, rows = work.prompt_tokens, work.completion_tokens, work.sequences
    fed = rows * (c - 1)
    # Visible tokens, summed over positions: the prompt's own past; for completions, the prompt and their own past.
    prompt_pairs = work.prompts * p * (p + 1) / 2
    completion_pairs = rows * ((c - 1) * p + (c - 1) * c / 2)
    pair = 4 * d * layers
    prefill = 2 * body * work.prompts * p + 2 * head * work.prompts + pair * prompt_pairs
    decode = 2 * (body + head) * fed + pair * completion_pairs
    train = 6 * body * (work.prompts * p + fed) + 6 * head * (work.prompts + fed)
    train += 3 * pair * (prompt_pairs + completion_pairs)
    # Each decoding step reads all weights, each group's prompt once and every row's own past.
    cached = 2 * kv * layers * b * ((c - 1) * work.prompts * p + rows * (c - 1) * c / 2)
    read = (c - 1) * (body * b + head * BYTES["float32"]) + cached
    return {
        "prefill": {"flops": prefill, "logits": 2 * head * work.prompts},
        "decode": {"flops": decode, "logits": 2 * head * fed, "bytes": read},
        "train": {"flops": train, "logits": 2 * head * (work.prompts + fed)},
    }


def distances(model: str, work: Work, measured: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    needs = arithmetic(work)

    def floors(kind: str) -> dict[str, float]:
        rate, exact = (max(limits[kind][dtype].values()) for dtype in (work.dtype, "float32"))
        return {
            name: max((n["flops"] - n["logits"]) / rate + n["logits"] / exact, n.get("bytes", 0.0) / limits["copy"])
            for name, n in needs.items()
        }

    floor, by_torch = floors("products"), floors("torch")
    ours = measured["phases"]["ours"]
    phases = {
        "generate": {"floor": floor["prefill"] + floor["decode"], "seconds": ours["generate"]},
        "train": {"floor": floor["train"], "seconds": ours["train"]},
        "step": {"floor": sum(floor.values()), "seconds": measured["seconds"]["ours"]},
        "step_by_torch": {"floor": sum(by_torch.values()), "seconds": measured["seconds"]["ours"]},
    }
    for values in phases.values():
        values["share"] = values["floor"] / values["seconds"]
    return {
        "model": model, "dtype": work.dtype, "phases": phases, "needs": needs, "floor": floor,
        "work": measured["work"], "foreign_cpu": measured["foreign_cpu"]["ours"],
        "spread": [statistics.median(run) for run in measured["runs"]["ours"]],
    }  # fmt: skip


def limits_table(limits: dict[str, Any]) -> str:
    lines = [
        f"products {dtype:<9} " + ", ".join(f"{rate / 1e9:.0f} GFLOP/s on {where}" for where, rate in of.items())
        + (" threads" if "1" in of else "")
        for dtype, of in limits["products"].items()
    ] + [
        f"torch's  {dtype:<9} {max(of.values()) / 1e9:.0f} GFLOP/s" for dtype, of in limits["torch"].items()
    ]  # fmt: skip
    return "\n".join([*lines, f"copy               {limits['copy'] / 1e9:.1f} GB/s, read and write"])


def shown(row: dict[str, Any]) -> str:
    cells = [f"{name} {v['floor']:.2f} of {v['seconds']:.2f} s = {v['share']:.0%}" for name, v in row["phases"].items()]
    return f"{row['model']} {row['dtype']:<9} " + ";  ".join(cells) + f"   (foreign CPU {row['foreign_cpu']:.2f})"


if __name__ == "__main__":
    main()
