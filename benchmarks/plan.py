"""Is `trew plan` right? Runs a few settings for real and compares its estimate with the peaks that were measured.

    python benchmarks/plan.py [--only NAME ...] [--estimate | --again] [--json FILE]

Each setting is estimated by `trew plan --json` and then run, both in separate processes: the model is loaded, two
steps are generated and learned, and adapters are merged and saved. The peak of each phase is the process's resident
memory (VmHWM, reset between phases), or on a GPU what torch had allocated at most. All prompts and completions are as
long as they may be, as the estimate assumes.

``--estimate`` runs nothing: it compares new estimates with the peaks that the file holds. ``--again`` runs each setting
once more and keeps the peaks of all its runs; the error is that of the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import trew
import work as shapes
from demo import machine
from trew.config import dumps

HERE = Path(__file__).parent
RESULT = HERE / "results" / "plan.json"
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """A shape of work.py, an amount of work, and settings of the recipe."""

    shape: str
    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    sets: tuple[str, ...] = ()
    beta: float = 0.0


LOW_LORA = ("lora.rank=16", "lora.base=bfloat16", "learner.dtype=bfloat16")

SETTINGS = {
    "5 M": Setting("A", 16, 8, 96, 64),
    "5 M, small micro-batches": Setting("A", 16, 8, 96, 64, ("learner.microbatch_tokens=1024",)),
    "5 M, long prompts": Setting("A", 8, 8, 768, 64, ("learner.microbatch_tokens=8192",)),
    "5 M, long completions": Setting("A", 4, 8, 96, 512, ("learner.microbatch_tokens=8192",)),
    "5 M, its own forward": Setting("A", 16, 8, 96, 64, ("kernels=plain",)),
    "135 M": Setting("B", 2, 8, 96, 64),
    "135 M, several micro-batches": Setting("B", 8, 8, 96, 32, ("learner.microbatch_tokens=1024",)),
    "135 M, reference": Setting("B", 2, 8, 96, 32, beta=0.04),
    "135 M, bfloat16": Setting("B", 2, 8, 96, 64, ("learner.dtype=bfloat16",)),
    "135 M, checkpointing": Setting("B", 4, 8, 96, 64, ("learner.gradient_checkpointing=true",)),
    "135 M, 8-bit moments": Setting("B", 2, 8, 96, 32, ("learner.optimizer=adamw-8bit",)),
    "135 M, its own forward": Setting("B", 2, 8, 96, 32, ("kernels=plain",)),
    "135 M, its own forward, checkpointing": Setting(
        "B", 2, 8, 96, 32, ("kernels=plain", "learner.gradient_checkpointing=true")
    ),
    "135 M, LoRA": Setting("B", 2, 8, 96, 32, ("lora.rank=16",), beta=0.04),
    "135 M, LoRA over bfloat16": Setting("B", 2, 8, 96, 32, LOW_LORA),
    "135 M, LoRA over 4 bits": Setting("B", 2, 8, 64, 8, ("lora.rank=16", "lora.base=nf4")),
    "44 M, vocabulary of 151,936": Setting("V", 2, 4, 96, 96),
    "44 M, vocabulary of 151,936, its own forward": Setting("V", 2, 4, 96, 96, ("kernels=plain",)),
    "44 M, vocabulary of 151,936, LoRA": Setting("V", 2, 4, 96, 96, ("lora.rank=16",)),
    "44 M, vocabulary of 151,936, LoRA over bfloat16": Setting("V", 2, 4, 96, 96, LOW_LORA),
    "0.5 B, vocabulary of 151,936, LoRA over bfloat16": Setting("C", 2, 4, 96, 96, LOW_LORA),
}
OTHERS = {
    "0.5 B, bfloat16": Setting("C", 8, 8, 96, 96, ("learner.dtype=bfloat16",)),
    "tiny": Setting("tiny", 2, 4, 16, 8),
}
"""Run only when they are asked for: for a GPU, and to see whether everything runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS, *OTHERS], default=list(SETTINGS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=RESULT, help="rows of settings that are run again replace the old")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--estimate", action="store_true", help="only estimate, for settings that the file has peaks of")
    how.add_argument("--again", action="store_true", help="keep the peaks of earlier runs in addition to this one's")
    args = parser.parse_args()
    rows = {row["setting"]: row for row in json.loads(args.json.read_text())["rows"]} if args.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        compare(rows, args, Path(folder))
    worst = max(abs(row["error"]) for row in rows.values())
    print(f"largest error of a peak: {worst:.0%} over {len(rows)} settings")


def compare(rows: dict[str, dict[str, Any]], args: argparse.Namespace, folder: Path) -> None:
    """Replaces or adds the row of every chosen setting, writes the file after each; makes models in ``folder``."""
    print(f"{'':<40}{'phase':<12}{'estimate':>10}{'measured':>10}{'error':>8}     s/step")
    for name in args.only if not args.estimate else [name for name in args.only if name in rows]:
        recipe = recipe_of((SETTINGS | OTHERS)[name], folder, device=args.device)
        runs = rows[name]["runs"] if args.estimate or (args.again and name in rows) else []
        if not args.estimate:
            seen = json.loads(child(__file__, "--run", str(recipe)).splitlines()[-1])
            runs = [*runs, {"date": datetime.date.today().isoformat()} | seen]
        row = rows[name] = row_of(name, json.loads(child("-m", "trew", "plan", str(recipe), "--json")), runs)
        for phase, (told, seen) in row["phases"].items():
            mark = " <- peak" if phase == row["phase"] else ""
            print(f"{name:<40}{phase:<12}{told / MIB:>10,.0f}{seen / MIB:>10,.0f}{told / seen - 1:>+8.0%}{mark}")
        print(
            f"{name:<40}{'PEAK':<12}{row['estimate'] / MIB:>10,.0f}{row['measured'] / MIB:>10,.0f}{row['error']:>+8.0%}"
            f"     {row['seconds_estimate']:.2g} / {row['seconds_measured']:.2g}",
            flush=True,
        )
        ordered = [rows[known] for known in SETTINGS | OTHERS if known in rows]
        args.json.write_text(json.dumps(result(ordered, args.device), indent=1) + "\n")


def row_of(name: str, told: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """An estimate next to the largest peaks of the setting's runs."""
    peaks = {phase: max(seen["peaks"][phase] for seen in runs) for phase in runs[-1]["peaks"]}
    phases = {phase: [sum(parts.values()), peaks[phase]] for phase, parts in told["memory"].items()}
    measured = max(peaks.values())  # loading too, although it is not estimated
    return {
        "setting": name, "sets": (SETTINGS | OTHERS)[name].sets, "phases": phases, "phase": told["peak_phase"],
        "estimate": told["peak_bytes"], "measured": measured, "error": told["peak_bytes"] / measured - 1,
        "seconds_estimate": told["seconds_per_step"], "seconds_measured": runs[-1]["seconds"],
        "seconds_by_phase": [told["seconds"], runs[-1]["by_phase"]], "runs": runs,
    }  # fmt: skip


def child(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=HERE, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout


def recipe_of(setting: Setting, folder: Path, *, device: str) -> Path:
    """Writes the setting's recipe, and its model where no other setting has written one of that shape."""
    from work_trew import config_of

    job = shapes.Work(
        shape=shapes.SHAPES[setting.shape], prompts=setting.prompts, group=setting.group, beta=setting.beta,
        prompt_tokens=setting.prompt_tokens, completion_tokens=setting.completion_tokens, device=device,
        overrides=setting.sets,
    )  # fmt: skip
    model = folder / setting.shape
    if not model.exists():
        model.mkdir()
        shapes.save_model(model, job.shape)
    recipe = model / "recipe.toml"
    recipe.write_text(dumps(config_of(job, model)))
    return recipe


# ------------------------------------------------------------------------------------------------- the measured process


def run(recipe: Path) -> dict[str, Any]:
    """Peaks in bytes by phase, and seconds of the second step."""
    from trew.config import load
    from trew.rollout.generate import generate
    from trew.rollout.sync import sampling
    from trew.training import planning
    from trew.training.summary import export
    from work_trew import built, learn

    plan = planning.plan(load(recipe))
    peaks: dict[str, int] = {}
    times: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(name: str):
        reset(plan.device)
        start = time.perf_counter()
        yield
        times[name] = time.perf_counter() - start
        peaks[name] = max(peaks.get(name, 0), peak(plan.device))

    with phase("loading"):
        program = built(plan)
    program.plan.renderer.stop_ids = frozenset()
    program.model.generation_config.eos_token_id = None
    for step in range(2):
        with phase("generating"):
            groups = generate(
                program.engine, plan.train[: plan.config.rollout.prompts], n=plan.config.rollout.completions,
                sampling=sampling(plan.config, step, 0),
            )  # fmt: skip
        with phase("training"):
            learn(program, groups)
    if program.adapters is not None:
        with phase("exporting"):
            final = SimpleNamespace(final=Path(plan.config.out) / "final")
            kept = {"model": program.model, "adapters": program.adapters, "backend": program.backend}
            as_run: Any = SimpleNamespace(plan=plan, folder=final, **kept)
            export(as_run)
    steps = {name: times[name] for name in ("generating", "training")}
    return {"peaks": peaks, "seconds": sum(steps.values()), "by_phase": steps}


def reset(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def result(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    return {
        "what": "trew plan against measured peaks, bytes; error = estimate / measured - 1",
        "device": device, "machine": machine(),
        "versions": {"trew": trew.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(), "largest_error": max(abs(row["error"]) for row in rows), "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(Path(sys.argv[2]))))
    else:
        main()
