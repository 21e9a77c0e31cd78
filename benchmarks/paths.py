"""What each fast path gains: a step with it and by the plain path that it replaces, in turn.

    python benchmarks/paths.py [--models A] [--paths kernels,...] [--repeats 2] [--json benchmarks/results/paths.json]

The work and the processes are those of step.py, at fixed lengths; ``kernels=plain`` stands for the architectures that
trew has no layers of its own for. ``ratio`` is the plain path's seconds over the fast one's, ``memory_ratio`` likewise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import step
from work import BATCHES, SHAPES, Work, save_model

OWN = "kernels=plain"  # the model's own forward
PATHS: dict[str, tuple[list[str], list[str]]] = {
    # what is set for the plain path, and for the fast one
    "kernels": ([OWN], []),
    "linear": ([OWN, "linear=plain"], [OWN]),
    "learner.share_prompts": (["learner.share_prompts=false"], []),
    "learner.compile": ([OWN], [OWN, "learner.compile=true"]),
    "learner.gradient_checkpointing": ([], ["learner.gradient_checkpointing=true"]),
}
DTYPES = ("float32", "bfloat16")


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trew-paths-") as scratch:
        for model in args.models.split(","):
            folder = Path(scratch) / model
            save_model(folder, SHAPES[model])
            for path in args.paths.split(","):
                for dtype in DTYPES:
                    rows.append(row(model, path, dtype, folder, args))
                    print(shown(rows[-1]), flush=True)
                    if args.json:
                        args.json.write_text(json.dumps(step.head(args) | {"rows": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="A")
    parser.add_argument("--paths", default=",".join(PATHS), help="all by default: %(default)s")
    parser.add_argument("--repeats", type=int, default=2, help="how often each side runs, in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait, before each run, for quiet")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    for name, known in (("models", SHAPES), ("paths", PATHS)):
        if unknown := set(getattr(args, name).split(",")) - set(known):
            parser.error(f"--{name}: got {', '.join(sorted(unknown))}, accepts {', '.join(known)}")
    args.peer = "none"
    return args


def row(model: str, path: str, dtype: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a path."""
    prompts, group = BATCHES[model]
    sides: dict[str, list[dict[str, Any]]] = {"plain": [], "fast": []}
    works = {
        side: Work(
            shape=SHAPES[model], prompts=prompts, group=group, steps=step.STEPS[model], threads=args.threads,
            device=args.device, dtype=dtype, overrides=tuple(overrides),
        )
        for side, overrides in zip(sides, PATHS[path], strict=True)
    }  # fmt: skip
    for _ in range(args.repeats):
        for side, work in works.items():
            sides[side].append(step.measure(work, folder, "none", args.patience))
    of = {side: step.row(model, path, "none", works[side], pairs) for side, pairs in sides.items()}
    found: dict[str, Any] = {"model": model, "path": path, "dtype": dtype}
    for side, measured in of.items():
        found[side] = {"seconds": measured["seconds"]["ours"], "phases": measured["phases"]["ours"],
                       "peak_bytes": measured["memory"]["ours"]["peak_bytes"], "set": list(works[side].overrides),
                       "foreign_cpu": measured["foreign_cpu"]["ours"]}  # fmt: skip
    for key, name in (("ratio", "seconds"), ("memory_ratio", "peak_bytes")):
        found[key] = found["plain"][name] / found["fast"][name]
    return found


def shown(found: dict[str, Any]) -> str:
    sides = (
        f"{side} {found[side]['seconds']:6.2f} s ({found[side]['phases']['train']:5.2f} of them training) "
        f"{found[side]['peak_bytes'] / 2**20:6,.0f} MiB"
        for side in ("plain", "fast")
    )
    name = f"{found['model']} {found['path']} {found['dtype']}"
    return f"{name:<42}{'   '.join(sides)}   ratio {found['ratio']:.2f}, memory {found['memory_ratio']:.2f}"


if __name__ == "__main__":
    main()
