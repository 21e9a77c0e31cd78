"""Mutation testing of src/trew/objective: how many small wrong changes do the tests notice?

    make mutation                                     a sample of mutants, the same each time
    python benchmarks/mutation.py --share 1           all of them (hours)
    python benchmarks/mutation.py --only 'objective/scale.py::BatchStd'     those whose key contains this

Writes benchmarks/results/mutation.json. Exits with 1 where a mutant survives that has no verdict there yet: write a
test that kills it, or say in the file's ``verdicts`` why none can ("equivalent") or need ("accepted"). What has a
verdict is not run again: remove the verdict to try.

How it runs: one process imports torch, collects the tests, and notes which test runs which line. For each mutant it
forks; the child exchanges the code of the function in question and runs the tests that pass through the changed
statement, sharp and quick ones first, until one fails. Changes outside of functions' bodies (defaults, fields, tables)
take a fork that has not imported trew yet. Both leave the files on disk alone.

mutmut 3 runs here, too, but changes nothing outside of functions, and no property; and it takes all text for code.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from demo import machine
from mutants import Mutant, mutants, mutated

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trew"
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
SUITES = (  # in the order in which they run; seconds of each that a mutant is given at most
    ("tests/golden", 10.0),
    ("tests/unit/test_objective", 10.0),
    ("src/trew/objective", 10.0),
    ("tests/property/test_objective", 3.0),
    ("tests/oracle", 5.0),
)
PATHS = ("tests/golden", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/unit").glob("test_objective*.py")),
         "src/trew/objective", "tests/property/test_objective_identities.py", "tests/property/test_objective_turns.py",
         "tests/oracle")  # fmt: skip
FOREVER = 1e6
STAGES = ("tests/unit", ("tests/golden", "src"), ("tests/property", "tests/oracle"))
NOTHING: dict[str, Any] = {"lines": {}, "seconds": {}, "failing": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=0.2, help="of each module's mutants")
    parser.add_argument("--least", type=int, default=25, help="mutants of a module, where it has so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="run mutants whose key contains this, and write no result")
    parser.add_argument(
        "--after", type=Path, help="keep what this log says is killed: tests have only been added since"
    )
    parser.add_argument(
        "--log", type=Path, default=ROOT / "runs" / "mutation.jsonl", help="one line per mutant, as it runs"
    )
    parser.add_argument(
        "--coverage", type=Path, help="keep here which test runs which line; delete it when the code has changed"
    )
    parser.add_argument("--minutes", type=float, default=FOREVER, help="start no mutant later than this")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    everything = [m for path in sorted((PACKAGE / "objective").rglob("*.py")) for m in of_file(path)]
    chosen = sample(everything, share=args.share, least=args.least, seed=args.seed)
    if args.only:
        chosen = [m for m in everything if args.only in m.key]
    keys = {m.key for m in chosen}
    kept = [row for row in read(args.after) if row["by"] and row["mutant"] in keys] if args.after else []
    verdicts = json.loads(RESULT.read_text())["verdicts"] if RESULT.exists() else []
    kept += [{"mutant": v["mutant"], "by": None} for v in verdicts if v["mutant"] in keys]
    settled = {row["mutant"] for row in kept}
    open_ones = [m for m in chosen if m.key not in settled]
    args.log.parent.mkdir(parents=True, exist_ok=True)
    args.log.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    torch.set_num_threads(1)
    start = time.monotonic()
    known = json.loads(args.coverage.read_text()) if args.coverage and args.coverage.exists() else NOTHING
    covered = in_child(lambda: Session().run(lambda items: coverage(items, known)), minutes=30)
    if args.coverage:
        args.coverage.write_text(json.dumps(covered))
    failing = covered["failing"]
    print(
        f"{time.monotonic() - start:.0f} s: {len(covered['seconds'])} tests pass, these do not: {failing}", flush=True
    )
    print(f"{len(chosen)} of {len(everything)} mutants, {len(open_ones)} to run", flush=True)
    until = time.monotonic() + 60 * args.minutes
    parts = [open_ones[i :: args.workers] for i in range(args.workers)]
    children = [fork(lambda part=part: run_all(part, covered, args.log, until)) for part in parts]
    stopped = [child for child in children if os.waitpid(child, 0)[1]]
    rows = read(args.log)
    assert not stopped, "a worker has stopped"
    assert args.minutes < FOREVER or len(rows) == len(chosen), f"{len(rows)} results for {len(chosen)} mutants"
    report = summary(rows, verdicts, everything, share=args.share, least=args.least, seed=args.seed)
    report["sampling"] |= {"chosen": len(chosen), "run": len(rows)}
    report |= {"tests": len(covered["seconds"]), "tests_that_fail_unchanged": failing,
               "seconds": None if args.after else round(time.monotonic() - start)}  # fmt: skip
    if not args.only:
        RESULT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(table(report))
    for row in report["undecided"]:
        print("survived:", row)
    sys.exit(bool(report["undecided"]))


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def of_file(path: Path) -> list[Mutant]:
    return mutants(path.read_text(), str(path.relative_to(PACKAGE)))


def sample(everything: list[Mutant], *, share: float, least: int, seed: int) -> list[Mutant]:
    """By a hash of each one's name: ``share`` of all, and the first ``least`` of each module."""
    chosen = []
    for module in dict.fromkeys(m.module for m in everything):
        ranked = sorted((m for m in everything if m.module == module), key=lambda m: m.drawn(seed))
        chosen += [m for i, m in enumerate(ranked) if i < least or m.drawn(seed) < share]
    return chosen


# --- processes -------------------------------------------------------------------------------------------------------


def fork(work, *, quiet: bool = False) -> int:
    """The id of a child that does ``work`` and ends with the status that it returns."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    status = 70
    try:
        if quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        status = int(work() or 0)
    except BaseException:
        if not quiet:
            import traceback

            traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def in_child(work, *, minutes: float = 10) -> Any:
    """What ``work`` returns, made in a child and sent as JSON; None where it ran into the limit or was killed."""
    read, write = os.pipe()

    def child() -> None:
        os.close(read)
        # Processor time and not the clock's: others may be using the machine.
        signal.setitimer(signal.ITIMER_PROF, minutes * 60)
        value = json.dumps(work())
        with os.fdopen(write, "w") as pipe:
            pipe.write(value)

    process = fork(child)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(process, 0)[1]
    if os.WIFSIGNALED(status):
        return None
    assert status == 0, "see above"
    return json.loads(text)


class Session:
    """A pytest session whose tests are run by us, and which says which one fails."""

    def __init__(self) -> None:
        self.failed = False
        self.work: Any = None
        self.value: Any = None

    def run(self, work, paths: tuple[str, ...] | list[str] = PATHS) -> Any:
        self.work = work
        os.chdir(ROOT)
        hypothesis.settings.register_profile(
            "mutation",
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.settings.load_profile("mutation")
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            options = ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not gpu"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            status = pytest.main([*options, *paths], plugins=[self])
        return {"broken": str(status)} if self.value is None else self.value

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return True  # a test file cannot be imported
        self.value = self.work(session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def passes(self, item: pytest.Item) -> bool:
        self.failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed


def passes(item: pytest.Item) -> bool:
    plugin = next(p for p in item.config.pluginmanager.get_plugins() if isinstance(p, Session))
    return plugin.passes(item)


# --- which test runs which line --------------------------------------------------------------------------------------


def coverage(items: list[pytest.Item], known: dict[str, Any]) -> dict[str, Any]:
    """{"lines": {module: {line: [test]}}, "seconds": {test: ...}, "failing": [test]}, a test by its id: ``known``, and
    what is not in it."""
    inside = str(PACKAGE / "objective") + os.sep
    lines: dict[str, dict[str, list[str]]] = known["lines"]
    seconds, failing = known["seconds"], known["failing"]
    for item in items:
        if item.nodeid in seconds or item.nodeid in failing:
            continue
        hit: set[tuple[str, int]] = set()

        def local(frame: types.FrameType, event: str, _: Any, hit=hit):
            hit.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        def trace(frame: types.FrameType, event: str, _: Any, local=local):
            return local(frame, event, _) if frame.f_code.co_filename.startswith(inside) else None

        start = time.process_time()
        sys.settrace(trace)
        good = passes(item)
        sys.settrace(None)
        if not good:
            failing.append(item.nodeid)
            continue
        seconds[item.nodeid] = time.process_time() - start
        for file, line in hit:
            lines.setdefault(str(Path(file).relative_to(PACKAGE)), {}).setdefault(str(line), []).append(item.nodeid)
    there = {item.nodeid for item in items}
    seconds = {name: value for name, value in seconds.items() if name in there}
    return {"lines": lines, "seconds": seconds, "failing": failing}


def tests_for(mutant: Mutant, covered: dict[str, Any]) -> list[str]:
    """The tests that run a line of the mutant's statement, sharp ones first; of many, some from all over the suite."""
    lines = covered["lines"].get(mutant.module, {})
    good = covered["seconds"]
    reach = {
        test
        for line, tests in lines.items()
        if mutant.first <= int(line) <= mutant.last
        for test in tests
        if test in good
    }
    if not mutant.in_function:  # what runs on import, and what a test may read without running it
        reach = set(good) if not reach or not mutant.where else reach | {t for t in good if t.startswith("tests/unit")}
    chosen = []
    for suite, limit in SUITES:
        here = [test for test in good if test in reach and test.startswith(suite)]
        total = sum(good[test] for test in here)
        step = max(1, -(-int(total * 1000) // int(limit * 1000)))
        chosen += sorted(here[::step], key=lambda test: good[test])
    return chosen


# --- one mutant ------------------------------------------------------------------------------------------------------


def run_all(chosen: list[Mutant], covered: dict[str, Any], log: Path, until: float) -> None:
    chosen = sorted(chosen, key=lambda m: m.drawn(1))  # what is done when time is up is a sample, too
    if inner := [m for m in chosen if m.in_function]:
        session = Session()
        last = until - 0.3 * (until - time.monotonic())
        done = in_child(lambda: session.run(lambda items: judge_inner(inner, items, covered, log, last)), minutes=1e4)
        assert done == {"done": True}, done
    for mutant in chosen:
        if mutant.in_function or time.monotonic() > until:
            continue
        names = tests_for(mutant, covered)
        done = None if names else {"by": None}
        for stage in STAGES:  # importing all tests again takes longer than running the quick ones
            here = [name for name in names if name.startswith(stage)]
            if here and (done := in_child(lambda m=mutant, n=here: imported(m, n), minutes=2)) != {"by": None}:
                break
        write(log, mutant, names, done)


def judge_inner(
    chosen: list[Mutant], items: list[pytest.Item], covered: dict[str, Any], log: Path, until: float
) -> dict[str, bool]:
    by_name = {item.nodeid: item for item in items}
    functions = [f for f in gc.get_objects() if type(f) is types.FunctionType]
    for mutant in chosen:
        if time.monotonic() > until:
            break
        names = tests_for(mutant, covered)

        def work(mutant: Mutant = mutant, names: list[str] = names) -> dict[str, Any]:
            exchange(mutant, functions)
            return first_failure([by_name[name] for name in names])

        write(log, mutant, names, in_child(work, minutes=2) if names else {"by": None})
    return {"done": True}


def first_failure(items: list[pytest.Item]) -> dict[str, Any]:
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        return {"by": next((item.nodeid for item in items if not passes(item)), None)}


def imported(mutant: Mutant, names: list[str]) -> dict[str, Any]:
    """Runs the tests with the module imported from the mutant's text."""
    target, original = str(PACKAGE / mutant.module), importlib.machinery.SourceFileLoader.get_code
    source = mutated(Path(target).read_text(), mutant)

    def get_code(self: Any, fullname: str):
        if self.get_filename(fullname) == target:
            return self.source_to_code(source.encode(), target)
        return original(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code
    wanted = set(names)
    order = {name: i for i, name in enumerate(names)}

    def work(items: list[pytest.Item]) -> dict[str, Any]:
        found = sorted((item for item in items if item.nodeid in wanted), key=lambda item: order[item.nodeid])
        return first_failure(found)

    done = Session().run(work, paths=sorted({name.split("::")[0] for name in names}))
    return done if "by" in done else {"by": f"import: {done['broken']}"}


def exchange(mutant: Mutant, functions: list[types.FunctionType]) -> None:
    """Gives each function of the mutant's module the code that it would have had."""
    path = str(PACKAGE / mutant.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = {code.co_qualname: code for code in codes(compile(mutated(Path(path).read_text(), mutant), path, "exec"))}
    outer = mutant.where.split(".<locals>")[0]  # a function's inner ones are made by its own code
    affected = [f for f in functions if f.__code__.co_filename == path and f.__code__.co_qualname == outer]
    assert affected, f"no function {outer} in {mutant.module}"
    for function in affected:
        assert new[outer].co_freevars == function.__code__.co_freevars
        function.__code__ = new[outer]


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes(constant)


def write(log: Path, mutant: Mutant, names: list[str], done: dict[str, Any] | None) -> None:
    row: dict[str, Any] = {"mutant": mutant.key, "lines": [mutant.first, mutant.last], "tests": len(names)}
    row |= {"by": "time or memory"} if done is None else done
    with log.open("a") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- the result ------------------------------------------------------------------------------------------------------


def summary(
    rows: list[dict[str, Any]], verdicts: list[dict[str, str]], everything: list[Mutant], **sampling: Any
) -> dict[str, Any]:
    said = {v["mutant"]: v["verdict"] for v in verdicts}
    survivors = [r["mutant"] for r in rows if r["by"] is None]
    total = Counter(m.module for m in everything)
    modules = {}
    for module in sorted({r["mutant"].split("::")[0] for r in rows}):
        here = [r for r in rows if r["mutant"].startswith(module + "::")]
        modules[module] = {"of": total[module], **counts(here, said)}
    versions = {name: __import__(name).__version__ for name in ("torch", "pytest", "hypothesis", "jaxtyping")}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": sys.version.split()[0], **versions},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "sampling": {"of": len(everything), **sampling},
        **counts(rows, said),
        "modules": modules,
        "verdicts": [v for v in verdicts if v["mutant"] in {m.key for m in everything}],
        "undecided": [s for s in survivors if s not in said],
    }


def counts(rows: list[dict[str, Any]], said: dict[str, str]) -> dict[str, Any]:
    """The score leaves out equivalent mutants, and counts accepted survivors as survivors."""
    survivors = [r["mutant"] for r in rows if r["by"] is None]
    equivalent = sum(said.get(s) == "equivalent" for s in survivors)
    killed, judged = len(rows) - len(survivors), len(rows) - equivalent
    return {"mutants": len(rows), "killed": killed, "survived": len(survivors) - equivalent, "equivalent": equivalent,
            "score": round(killed / judged, 4) if judged else None}  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = ["| module | mutants | killed | survived | equivalent | score |", "|---|---|---|---|---|---|"]
    for name, row in [*report["modules"].items(), ("all", report)]:
        score = "" if row["score"] is None else f"{100 * row['score']:.1f} %"
        lines.append(
            f"| {name} | {row['mutants']} | {row['killed']} | {row['survived']} | {row['equivalent']} | {score} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
