"""The process behind ``puzzles``: generates reasoning-gym's problems. Runs as a script and imports nothing of trew.

    python -P puzzles_child.py   with a JSON object (task, config, seed, count, most,
                                 cpu_s, memory_bytes) on stdin

Writes one JSON line per problem: ``{"index", "question", "answer", "metadata"}``; or one line ``{"error": ...}``.
Some of the package's tasks depend on the order of sets or on the state left by earlier problems. So that a seed gives
the same problems every time, this is a separate process with PYTHONHASHSEED=0 that generates problems in order.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")  # metadata of problems with many answers
MOST_FAILED = 20  # consecutive problems that the package may fail to generate


def tagged(value: Any) -> Any:
    """Converts a value to JSON; tags types that JSON does not have: tuples, sets, and keys that are not strings."""
    if isinstance(value, dict):
        return _tagged_dict(value)
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [tagged(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        # In a fixed order: that of a set differs between processes.
        return {"__set__": [tagged(item) for item in sorted(value, key=repr)]}
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return tagged(value.tolist())
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)  # also turns subclasses of str into plain ones


def _tagged_dict(value: dict[Any, Any]) -> dict[str, Any]:
    # A key that begins with __ could be taken for a tag.
    if all(isinstance(key, str) and not key.startswith("__") for key in value):
        return {key: tagged(item) for key, item in value.items()}
    return {"__dict__": [[tagged(key), tagged(item)] for key, item in value.items()]}


def main() -> None:
    wanted = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some of the package's tasks print to stdout, which would break the JSON lines

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()
        signal.setitimer(signal.ITIMER_PROF, wanted["cpu_s"])  # from one problem to the next; the signal ends us

    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        say({"error": "missing", "detail": str(error)})
        return
    if wanted["task"] not in DATASETS:
        say({"error": "unknown", "names": sorted(DATASETS)})
        return
    # Settings such as a grid of a million lines may run for ever, or eat all memory, inside one call of the package.
    if used := addresses():
        most = used + wanted["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, wanted["cpu_s"])
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    try:
        generate(dataset(reasoning_gym, wanted), say)
    except BrokenPipeError:
        os._exit(0)  # the reader has enough problems
    except MemoryError:
        say({"error": "failed", "detail": f"it needs more than {wanted['memory_bytes'] >> 20:,} MiB of memory"})
    except Exception as error:
        say({"error": "failed", "detail": f"{type(error).__name__}: {error}"})


def addresses() -> int:
    """The size of this process's address space in bytes; 0 if there is no /proc."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def generate(made: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Says every problem that the package can generate and whose answer satisfies its own grader."""
    failed = 0
    for index in range(made.size):
        try:
            entry = made[index]
        except MemoryError:
            raise  # the next one would need as much
        except Exception:
            failed += 1
            if failed >= MOST_FAILED:
                raise
            continue
        answer = answer_of(entry)
        # A copy, so that a grader cannot change what is written.
        if answer is not None and made.score_answer(answer, copy.deepcopy(entry)) < 1 - 1e-9:
            failed += 1  # the package's own answer does not satisfy its own grader
            continue
        failed = 0
        entry = {**entry, "answer": answer}
        say({"index": index, **{name: tagged(entry[name]) for name in ("question", "answer", "metadata")}})
    if failed == made.size:
        say({"error": "failed", "detail": "no answer of the package satisfies its own grader"})


def answer_of(entry: dict[str, Any]) -> str | None:
    """The correct answer, or the example from the metadata if there are many; None if there is none."""
    metadata = entry["metadata"] or {}
    answers = [entry["answer"], *(metadata.get(name) for name in EXAMPLES)]
    answer = next((answer for answer in answers if answer is not None), None)
    # A grader reads text; an example from the metadata may be something else.
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


def dataset(package: Any, wanted: dict[str, Any]) -> Any:
    """The package's task with spare problems to replace repeats; without them if it has no more problems."""
    settings = {**wanted["config"], "seed": wanted["seed"]}
    try:
        return package.create_dataset(wanted["task"], **settings, size=wanted["most"])
    except ValueError:
        return package.create_dataset(wanted["task"], **settings, size=wanted["count"])


if __name__ == "__main__":
    main()
