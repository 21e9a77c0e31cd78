"""Kills training runs at random instants of all phases, resumes them, and compares bytes with runs that were let alone.

    python benchmarks/crash.py --kills 50                      all configurations, benchmarks/results/crash.json
    python benchmarks/crash.py --kills 8 --kinds lora dapo     some of them; the others' results stay in the file
    python benchmarks/crash.py --cost                          what a checkpoint costs, written in the background or not

Every launch is ``trew train`` in a separate process group (forked from one that has imported everything, so that it
starts in milliseconds), killed with SIGKILL as a whole: half of them at a random
moment, half at a random one of the instants that are shorter than any clock would meet (between a rename and the
rotation, in the middle of a row of metrics). A killed run is resumed, and killed again, until it has had its share;
then it is let finish, and weights, optimizer state, rows and completions must be those of the run that was not killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "trew" / "rollout" / "vllm" / "plugin"))
import crashing
from demo import machine
from forks import Server
from trew import __version__

RESULTS = Path(__file__).parent / "results" / "crash.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=crashing.KINDS, default=list(crashing.KINDS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--cost", action="store_true", help="measure what checkpoints cost instead")
    parser.add_argument("--parameters", type=float, default=20e6, help="of the model that --cost takes, about")
    args = parser.parse_args()
    result = json.loads(args.json.read_text()) if args.json.exists() else {"kinds": {}}
    result |= {
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "versions": {"trew": __version__, "python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    if args.cost:
        result["cost"] = cost(int(args.parameters))
        print(json.dumps(result["cost"], indent=2))
    else:
        shares = [args.kills // len(args.kinds) + (i < args.kills % len(args.kinds)) for i in range(len(args.kinds))]
        with Server() as server, Progress() as progress:
            task = progress.add_task("kills", total=args.kills)
            for kind, share in zip(args.kinds, shares, strict=True):
                progress.update(task, description=kind)
                result["kinds"][kind] = one_kind(
                    server, kind, share, f"{args.seed}:{kind}", lambda: progress.advance(task)
                )
                save(args.json, result)
        print(table(result["kinds"]))
    save(args.json, result)
    failed = [kind for kind, row in result["kinds"].items() if row["differences"]]
    sys.exit(f"not the same run: {', '.join(failed)}" if failed else 0)


def save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def one_kind(server: Server, kind: str, kills: int, seed: str, advance: Any) -> dict[str, Any]:
    """One configuration: the run that is let alone, and the one that is killed so often."""
    draw, start = random.Random(seed), time.monotonic()
    phases: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, crashing.served(Path(name), kind):
        folder = Path(name)
        recipe = crashing.recipe(folder, kind)
        seconds = reference(server, folder, recipe)
        launches = met = 0
        while met < kills:
            if (folder / "cut" / "summary.json").exists():  # it got to its end between two kills: another one
                check(folder, kind)
                shutil.rmtree(folder / "cut")
            launches += 1
            phase = launch(server, folder, recipe, draw, seconds, crashing.instants_of(kind))
            if phase:
                met += 1
                phases[phase] += 1
                advance()
        code, output = crashing.run(server, folder, recipe, "--out", "cut", "--resume")
        if code:
            raise SystemExit(f"{kind}: did not finish (exit {code}):\n{output[-3000:]}")
        return {
            "kills": met, "launches": launches + 1, "phases": dict(sorted(phases.items())), "seed": seed,
            "differences": crashing.differences(folder / "whole", folder / "cut"),
            "seconds": round(time.monotonic() - start, 1),
        }  # fmt: skip


def reference(server: Server, folder: Path, recipe: Path) -> float:
    """The run that is not killed; how long it was at work after loading."""
    watched = crashing.Watched.start(server, folder, recipe, "--out", "whole")
    watched.wait_for(lambda run: run.phase[0] not in ("", "loading"))
    start = time.monotonic()
    if code := watched.command.wait():
        raise SystemExit(f"the run by itself fails (exit {code}):\n{watched.command.text()[-3000:]}")
    return time.monotonic() - start


def check(folder: Path, kind: str) -> None:
    if found := crashing.differences(folder / "whole", folder / "cut"):
        raise SystemExit(f"{kind}: not the same run: {found}")


def launch(
    server: Server, folder: Path, recipe: Path, draw: random.Random, seconds: float, instants: Sequence[str]
) -> str:
    """Starts or resumes the run and kills it; the phase that it died in, empty where it came to its end."""
    arguments = (recipe, "--out", "cut", "--resume")
    if draw.random() < 0.5:
        instant = f"{draw.choice(instants)}:{draw.randint(1, 4)}"
        watched = crashing.Watched.start(server, folder, *arguments, instant=instant)
        code = watched.command.wait()
        if code == -9:
            return instant.partition(":")[0]
    else:
        watched = crashing.Watched.start(server, folder, *arguments)
        if draw.random() < 0.95:
            watched.wait_for(lambda run: run.phase[0] not in ("", "loading"))
        end = time.monotonic() + draw.uniform(0, seconds)
        if watched.wait_for(lambda run: time.monotonic() >= end):
            main_thread, writer = watched.kill()
            return f"{main_thread or 'between phases'} (by time)" + (", checkpoint under way" if writer else "")
        code = watched.command.wait()
    if code:
        raise SystemExit(f"a run that was not killed failed (exit {code}):\n{watched.command.text()[-3000:]}")
    return ""


def table(kinds: dict[str, Any]) -> str:
    """The tally: per phase, and per configuration."""
    phases: Counter[str] = Counter()
    for row in kinds.values():
        phases.update(row["phases"])
    lines = [f"{count:>4}  killed in: {phase}" for phase, count in sorted(phases.items())]
    for kind, row in kinds.items():
        verdict = "identical to the bit" if not row["differences"] else f"DIFFERS: {row['differences']}"
        lines.append(f"{row['kills']:>4}  {kind}: {verdict}")
    total = sum(row["kills"] for row in kinds.values())
    return "\n".join([*lines, f"{total:>4}  kills in {len(kinds)} configurations"])


def cost(parameters: int) -> dict[str, Any]:
    """Seconds that a run is held up by its checkpoints, with and without the background, and what they weigh."""
    import re

    import tiny

    layers = max(1, parameters // 3_000_000)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, Server() as server:
        folder = Path(name)
        model = tiny.model(hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8)
        found["parameters"] = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
        (folder / "reward.py").write_text(crashing.REWARDS)
        for background in (True, False):
            recipe = crashing.recipe(
                folder,
                "waits",
                steps=6,
                checkpoint={"every": 1, "background": background},
                eval={"every": 0},
                rollout={"max_tokens": 32, "prompts": 4, "completions": 8},
            )
            start = time.monotonic()
            code, output = crashing.run(server, folder, recipe, "--out", "run", "--overwrite")
            if code:
                raise SystemExit(output[-3000:])
            said = re.findall(r": ([\d.,]+) MB in ([\d.]+) s, which the run waited ([\d.]+) s", output)
            rows = crashing.rows(folder / "run")
            found["in the background" if background else "the run waits"] = {
                "megabytes": float(said[0][0].replace(",", "")),
                "written_seconds": [float(s) for _, s, _ in said], "waited_seconds": [float(w) for *_, w in said],
                "steps": len([row for row in rows if "loss" in row]),
                "whole_seconds": round(time.monotonic() - start, 2),
            }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
