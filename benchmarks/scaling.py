"""What a completion token costs, against group size, prompt length, completion length and model size.

    python benchmarks/scaling.py [--axes group,prompt,completion,size] [--json benchmarks/results/scaling.json]

Our step alone, with model A (5 M parameters), 4 prompts of 96 tokens, 8 completions of 64 tokens, unless the axis says
otherwise; GRPO with beta = 0, one update. Microseconds per completion token, of generation and of training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import step
from work import SHAPES, Work, save_model

SIZES: dict[str, dict[str, int]] = {
    "1 M": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2},
    "5 M": {},  # A itself
    "20 M": {"hidden_size": 448, "intermediate_size": 1200, "num_hidden_layers": 8, "num_attention_heads": 7,
             "num_key_value_heads": 7},
    "60 M": {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10,
             "num_key_value_heads": 5},
    "135 M": SHAPES["B"],
}  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "group": (2, 4, 8, 16, 32),
    "prompt": (32, 96, 256, 512, 1024),
    "completion": (16, 32, 64, 128, 256),
    "size": tuple(SIZES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait, before each run, for a quiet machine"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our recipe")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.threads, args.peer = 0, "none"
    rows = []
    print(f"{'axis':<12}{'value':>8}{'type':>10}{'generate':>10}{'train':>10}{'total':>10}   us per completion token")
    for axis in args.axes.split(","):
        for value in AXES[axis]:
            for dtype in args.dtypes.split(","):
                rows.append(point(axis, value, dtype, args))
                cells = "".join(f"{rows[-1]['per_token_us'][k]:>10.1f}" for k in ("generate", "train", "total"))
                print(f"{axis:<12}{value!s:>8}{dtype:>10}{cells}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps(step.head(args) | {"rows": rows}, indent=1) + "\n")


def point(axis: str, value: Any, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    work = Work(
        shape=SHAPES["A"], prompts=4, group=8, dtype=dtype, device=args.device, steps=args.steps,
        overrides=tuple(args.set),
    )  # fmt: skip
    changed: dict[str, Any] = {
        "group": {"group": value}, "prompt": {"prompt_tokens": value}, "completion": {"completion_tokens": value},
        "size": {"shape": SHAPES["A"] | SIZES.get(str(value), {})},
    }  # fmt: skip
    work = dataclasses.replace(work, **changed[axis])
    with tempfile.TemporaryDirectory(prefix="trew-scaling-") as scratch:
        folder = Path(scratch) / "model"
        save_model(folder, work.shape)
        measured = step.row("A", axis, "none", work, step.measured(work, folder, args))
    tokens = work.sequences * work.completion_tokens
    phases = measured["phases"]["ours"]
    seconds = {"generate": phases["generate"], "train": phases["train"], "total": measured["seconds"]["ours"]}
    return {
        "axis": axis, "value": value, "dtype": dtype, "work": measured["work"], "seconds": seconds,
        "per_token_us": {name: 1e6 * s / tokens for name, s in seconds.items()},
        "memory": measured["memory"]["ours"], "foreign_cpu": measured["foreign_cpu"]["ours"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
