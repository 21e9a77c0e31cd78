"""One GRPO step through trew and through a peer, in turn, each in a separate process.

    python benchmarks/step.py --peer trl        whole steps, against TRL in .venv-trl (make .venv-trl/.installed)
    python benchmarks/step.py --peer hf         generation alone, against generate of transformers
    python benchmarks/step.py --peer vllm       generation alone, against vLLM's build for CPUs in .venv-vllm
    python benchmarks/step.py --peer none       ours alone

    --models A,B  --settings fixed-fp32,...  --repeats 3  --json FILE  --set key=value (of our recipe; for plain paths)

The same work on both sides: the same model with random weights (A: 5 M parameters, B: as SmolLM2-135M), the same
prompts of 96 tokens, 64 completion tokens each (``fixed``: no end token stops one) or fewer (``ragged``: our side
draws an end token with probability 1/40 a token; the peer's completions are made to end at the same lengths), the same
rewards, objective (GRPO with sequence means, clip 0.2) and optimizer. Both sides must have seen the same number of
tokens. The peer's first step, a warm-up, learns from our completions: in float32 its gradient norm must be ours.

``ratio`` is the peer's seconds over ours, of medians over all steps and repeats (steps during which other processes
used a quarter of a core or more are left out, unless there are no others); ``memory_ratio`` the peer's peak
memory over ours (of the whole process; ``memory_ratio_above_loaded``: of what came on top once the model was loaded).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

import trew
from demo import machine
from work import BATCHES, SHAPES, Work, save_model, wait_until_quiet

HERE = Path(__file__).parent
ROOT = HERE.parent
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed-fp32": {},
    "ragged-fp32": {"ragged": True},
    "fixed-bf16": {"dtype": "bfloat16"},
    "ragged-bf16": {"ragged": True, "dtype": "bfloat16"},
    "kl-fp32": {"beta": 0.04},
    "kl-bf16": {"beta": 0.04, "dtype": "bfloat16"},
    "inner2-fp32": {"inner": 2},
    "inner2-bf16": {"inner": 2, "dtype": "bfloat16"},
    "kl-inner2-fp32": {"beta": 0.04, "inner": 2},
    # The peer as it comes: its own precision, checkpointing and micro-batch; ours in bfloat16.
    "fixed-default": {"dtype": "bfloat16", "peer_defaults": True},
    "ragged-default": {"ragged": True, "dtype": "bfloat16", "peer_defaults": True},
}
GENERATION = ("fixed-fp32", "ragged-fp32", "fixed-bf16", "ragged-bf16")
"""Settings that differ in generation, for ``--peer hf``."""

SERVED: dict[str, dict[str, Any]] = {
    "2x8-fp32": {},
    "2x8-bf16": {"dtype": "bfloat16"},
    "16x8-fp32": {"prompts": 16},
    "16x8-bf16": {"prompts": 16, "dtype": "bfloat16"},
}
"""Settings for ``--peer vllm``: prompts x completions."""

OPENMP = ROOT / ".venv-vllm" / "lib" / "libiomp5.so"
"""Intel's OpenMP, which vLLM's documentation has one preload for speed on CPUs."""

PEER_ROWS = {"A": 16, "B": 8, "C": 32, "tiny": 32}
"""Sequences in one of TRL's micro-batches at equal precision: with these it is quickest (C, for GPUs: not tried)."""

STEPS = {"A": 2, "B": 1, "C": 3, "tiny": 2}

PHASES = {
    "generate": ("generate",),
    "old, ref": ("old", "ref"),
    "forward": ("forward",),
    "backward": ("backward", "optimizer"),
    "train": ("train", "forward", "backward", "optimizer"),
}
"""Columns: the second row of the table sums up what the third and fourth have where the sides differ."""


def main() -> None:
    args = arguments()
    settings = {name: known(args.peer)[name] for name in args.settings}
    rows = kept(args)
    with tempfile.TemporaryDirectory(prefix="trew-step-") as scratch:
        print(heading(), flush=True)
        for model in args.models:
            folder = Path(scratch) / model
            save_model(folder, SHAPES[model])
            for setting, given in settings.items():
                prompts, group = BATCHES[model]
                sizes: dict[str, Any] = {"prompts": prompts, **given}
                work = Work(
                    shape=SHAPES[model], group=group, steps=args.steps or STEPS[model], threads=args.threads,
                    device=args.device, peer_rows=args.peer_rows or PEER_ROWS[model],
                    train=args.peer not in ("hf", "vllm"), overrides=tuple(args.set),
                    **sizes,
                )  # fmt: skip
                pairs = measured(work, folder, args)
                rows.append(row(model, setting, args.peer, work, pairs))
                print(shown(rows[-1]), flush=True)
                if args.json:
                    order = list(known(args.peer))
                    rows.sort(key=lambda r: (list(SHAPES).index(r["model"]), order.index(r["setting"])))
                    args.json.write_text(json.dumps(head(args) | {"rows": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])

    def names(known: Iterable[str]) -> Any:
        def read(text: str) -> list[str]:
            found = text.split(",")
            if unknown := [name for name in found if name not in known]:
                raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, accepts {', '.join(known)}")
            return found

        return read

    parser.add_argument("--peer", choices=("trl", "hf", "vllm", "none"), default="none")
    models = "A and B by default; next to vLLM, which has no attention for the narrow heads of A, B alone"
    parser.add_argument("--models", type=names(SHAPES), help=models)
    settings = f"of {', '.join(SETTINGS)}; with --peer vllm of {', '.join(SERVED)}; all by default"
    parser.add_argument("--settings", type=names(SETTINGS | SERVED), help=settings)
    parser.add_argument("--repeats", type=int, default=3, help="how often each side runs, in turn")
    parser.add_argument("--steps", type=int, default=0, help=f"measured steps of each run, after a warm-up: {STEPS}")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer-rows", type=int, default=0, help="sequences in one micro-batch of the peer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our recipe")
    patience = (
        "seconds to wait, before each run, for a quiet machine; where none of a side's steps was quiet, runs again"
    )
    parser.add_argument("--patience", type=float, default=0, help=patience)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="rows of FILE that are not measured now stay in it")
    args = parser.parse_args()
    args.models = args.models or (["B"] if args.peer == "vllm" else ["A", "B"])
    args.settings = args.settings or list(GENERATION if args.peer == "hf" else known(args.peer))
    if unknown := [name for name in args.settings if name not in known(args.peer)]:
        parser.error(f"--settings: got {', '.join(unknown)}, --peer {args.peer} accepts {', '.join(known(args.peer))}")
    if args.peer in ("trl", "vllm") and python_of(args.peer) is None:
        name = {"trl": "TRL", "vllm": "vLLM"}[args.peer]
        parser.error(f"--peer {args.peer}: {name}'s environment .venv-{args.peer} is not there; make it with: make "
                     f".venv-{args.peer}/.installed")  # fmt: skip
    return args


def python_of(peer: str) -> Path | None:
    """The Python that has a peer: that of its environment, for TRL else this one; None where neither has it."""
    if (ROOT / f".venv-{peer}" / ".installed").exists():
        return ROOT / f".venv-{peer}" / "bin" / "python"
    return Path(sys.executable) if peer == "trl" and importlib.util.find_spec(peer) else None


def known(peer: str) -> dict[str, dict[str, Any]]:
    return SERVED if peer == "vllm" else SETTINGS


# --------------------------------------------------------------------------------------------------------- measuring


def measured(work: Work, model: Path, args: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """``args.repeats`` runs of each side; with patience up to twice as many where a side was always disturbed."""
    most = 2 * args.repeats if args.patience else args.repeats
    pairs: list[dict[str, dict[str, Any]]] = []
    while len(pairs) < args.repeats or (len(pairs) < most and not all(map(quiet, sides_of(pairs)))):
        pairs.append(measure(work, model, args.peer, args.patience))
    return pairs


def sides_of(pairs: list[dict[str, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The measured steps of each side."""
    return [[step for pair in pairs for step in pair[side]["steps"][1:]] for side in pairs[0]]


def totals(steps: list[dict[str, Any]]) -> list[float]:
    return [step["phases"]["total"] for step in steps]


def quiet(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps during which others used less than a quarter of a core."""
    return [step for step in steps if step["foreign_cpu"] < 0.25]


def measure(work: Work, model: Path, peer: str, patience: float = 0) -> dict[str, dict[str, Any]]:
    """One run of our side, then one of the peer's; both results, checked to be of the same work."""
    wait_until_quiet(patience)
    spec, ours, theirs = (model.parent / name for name in ("work.json", "ours.json", "peer.json"))
    work.write(spec)
    run([sys.executable, HERE / "work_trew.py", spec, model, ours])
    found = {"ours": json.loads(ours.read_text())}
    if peer != "none":
        wait_until_quiet(patience)
    if peer in ("trl", "vllm"):
        run([python_of(peer), HERE / f"work_{peer}.py", spec, model, theirs, ours],
            preload=OPENMP if peer == "vllm" else None)  # fmt: skip
    elif peer == "hf":
        run([sys.executable, HERE / "work_hf.py", spec, model, theirs, ours])
    if peer != "none":
        found["peer"] = json.loads(theirs.read_text())
        check_same(found, work)
    return found


def run(command: list[Any], *, preload: Path | None = None) -> None:
    env = os.environ | ({"LD_PRELOAD": str(preload)} if preload else {})
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{Path(command[1]).name} failed:\n" + "\n".join(done.stderr.splitlines()[-25:]))


def check_same(found: dict[str, dict[str, Any]], work: Work) -> None:
    """Stops where the two sides did not do the same work."""
    a, b = found["ours"]["steps"], found["peer"]["steps"]
    for key in ("prompt_tokens", "completion_tokens"):
        counts = [[step[key] for step in side] for side in (a, b)]
        if counts[0] != counts[1]:
            sys.exit(f"not the same work: {key} per step are {counts[0]} on our side, {counts[1]} on the peer's")
    if b[0].get("grad_norm") is not None and work.dtype == "float32":
        mine, other = a[0]["grad_norm"], b[0]["grad_norm"]
        if abs(mine - other) > 1e-3 * other:
            sys.exit(f"not the same work: on the same completions the gradient norm is {mine} here, {other} there")


def kept(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an earlier run that this one does not measure again."""
    if not (args.keep and args.json and args.json.exists()):
        return []
    rows = json.loads(args.json.read_text())["rows"]
    return [r for r in rows if not (r["model"] in args.models and r["setting"] in args.settings)]


def row(model: str, setting: str, peer: str, work: Work, pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    sides = list(pairs[0])
    found: dict[str, Any] = {"model": model, "setting": setting, "peer": peer, "work": described(work, pairs)}
    found["date"] = datetime.date.today().isoformat()
    for key in ("seconds", "phases", "tokens_per_second", "memory", "foreign_cpu", "measured_steps", "runs"):
        found[key] = {}
    for side, steps in zip(sides, sides_of(pairs), strict=True):
        steps = quiet(steps) or steps
        total = statistics.median(totals(steps))
        names = dict.fromkeys(name for step in steps for name in step["phases"] if name != "total")
        phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in steps) for name in names}
        found["seconds"][side] = total
        found["phases"][side] = phases | {"rest": max(total - sum(phases.values()), 0.0)}
        found["tokens_per_second"][side] = statistics.median(
            step["completion_tokens"] / step["phases"]["total"] for step in steps
        )
        found["memory"][side] = {
            key: statistics.median(pair[side][key] for pair in pairs) for key in ("loaded_bytes", "peak_bytes")
        }
        found["foreign_cpu"][side] = statistics.median(step["foreign_cpu"] for step in steps)
        found["measured_steps"][side] = len(steps)
        found["runs"][side] = [totals(pair[side]["steps"][1:]) for pair in pairs]
    if "peer" in sides:
        found |= compared(found, pairs)
    return found


def described(work: Work, pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    tokens = statistics.mean(step["completion_tokens"] for step in sides_of(pairs)[0])
    names = ("prompts", "group", "prompt_tokens", "completion_tokens", "ragged", "beta", "inner", "dtype", "train",
             "peer_defaults", "peer_rows", "overrides")  # fmt: skip
    return {name: getattr(work, name) for name in names} | {"mean_completion": tokens / work.sequences}


def compared(found: dict[str, Any], pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The ratios, with the lowest and the highest of the repeats (of those that were undisturbed, if there are)."""
    each = [sides_of([pair]) for pair in pairs]
    each = [sides for sides in each if all(map(quiet, sides))] or each
    single = [
        statistics.median(totals(quiet(theirs) or theirs)) / statistics.median(totals(quiet(ours) or ours))
        for ours, theirs in each
    ]
    ours, peer = found["memory"]["ours"], found["memory"]["peer"]
    above = {side: m["peak_bytes"] - m["loaded_bytes"] for side, m in found["memory"].items()}
    same = {}
    for key in ("loss", "grad_norm"):
        if (theirs := pairs[0]["peer"]["steps"][0].get(key)) is not None:
            same[key] = {"ours": pairs[0]["ours"]["steps"][0][key], "peer": theirs}
    return {
        "ratio": found["seconds"]["peer"] / found["seconds"]["ours"], "ratio_range": [min(single), max(single)],
        "memory_ratio": peer["peak_bytes"] / ours["peak_bytes"],
        "memory_ratio_above_loaded": above["peer"] / max(above["ours"], 1), "same_completions": same,
    }  # fmt: skip


def head(args: argparse.Namespace) -> dict[str, Any]:
    versions = {"trew": trew.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    if args.peer in ("trl", "vllm"):
        own = map(str, (ROOT / f".venv-{args.peer}" / "lib").glob("python*/site-packages"))
        there = importlib.metadata.distributions(path=[*own, *sys.path])
        peer = next(found for found in there if found.name.startswith(args.peer))
        versions[peer.name] = peer.version
    return {
        "date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions, "device": args.device,
        "threads": args.threads or torch.get_num_threads(), "repeats": args.repeats,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the table


def heading() -> str:
    cells = "".join(f"{name:>10}" for name in (*PHASES, "rest", "total", "tokens/s"))
    return f"{'seconds, medians':<26}{cells}{'peak MiB':>10}{'- loaded':>10}{'foreign':>9}"


def shown(row: dict[str, Any]) -> str:
    lines = []
    for side, phases in row["phases"].items():
        name = {"ours": "trew", "peer": row["peer"]}[side]
        cells = [
            sum(phases[k] for k in keys if k in phases) if any(k in phases for k in keys) else None
            for keys in PHASES.values()
        ]
        cells += [phases["rest"], row["seconds"][side]]
        memory = row["memory"][side]
        sizes = [memory["peak_bytes"] / 2**20, (memory["peak_bytes"] - memory["loaded_bytes"]) / 2**20]
        label = f"{row['model']} {row['setting']}" if side == "ours" else ""
        lines.append(
            f"{label:<21}{name:<5}" + "".join(f"{c:>10.3f}" if c is not None else f"{'-':>10}" for c in cells)
            + f"{row['tokens_per_second'][side]:>10.0f}" + "".join(f"{s:>10.0f}" for s in sizes)
            + f"{row['foreign_cpu'][side]:>9.2f}"
        )  # fmt: skip
    if "ratio" in row:
        low, high = row["ratio_range"]
        lines.append(
            f"{'':<21}ratio {row['ratio']:.2f} ({low:.2f} to {high:.2f}); peak memory {row['memory_ratio']:.2f}, above "
            f"the loaded model {row['memory_ratio_above_loaded']:.2f}"
            + "".join(f"; {k} {v['ours']:.6g} and {v['peer']:.6g}" for k, v in row["same_completions"].items())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
