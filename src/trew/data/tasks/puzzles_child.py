"""The process behind ``puzzles``: makes reasoning-gym's problems, run as a script, imports nothing of trew.

    python -P puzzles_child.py   with a JSON object (task, config, seed, count, most) on stdin

One JSON line per problem comes out: ``{"index", "question", "answer", "metadata"}``; or one line ``{"error": ...}``.
A process of its own, with PYTHONHASHSEED=0 and problems made in order, because some of the package's tasks follow the
order of sets or the state of earlier problems: only so does a seed mean the same problems every time.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from typing import Any

EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")  # where problems with many answers keep one
MOST_FAILED = 20  # problems in a row that the package failed to make


def tagged(value: Any) -> Any:
    """A value as JSON that keeps what JSON has no word for: tuples, sets, and keys that are no strings."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: tagged(item) for key, item in value.items()}
        return {"__dict__": [[tagged(key), tagged(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        name = "__tuple__" if isinstance(value, tuple) else "__set__"
        return {name: [tagged(item) for item in (value if isinstance(value, tuple) else sorted(value, key=repr))]}
    if value is None or isinstance(value, (str, bool)):
        return str(value) if isinstance(value, str) else value
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return tagged(value.tolist())
    if isinstance(value, (int, float)):
        return value
    return str(value)


def main() -> None:
    wanted = json.loads(sys.stdin.read())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some of the package's tasks print dots while they work

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        say({"error": "missing", "detail": str(error)})
        return
    if wanted["task"] not in DATASETS:
        say({"error": "unknown", "names": sorted(DATASETS)})
        return
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    try:
        made = dataset(reasoning_gym, wanted)
        failed = 0
        for index in range(made.size):
            try:
                entry = made[index]
            except Exception:
                failed += 1
                if failed == MOST_FAILED:
                    raise
                continue
            answer = answer_of(entry)
            if answer is not None and made.score_answer(answer, copy.deepcopy(entry)) < 1 - 1e-9:
                failed += 1  # the package's own answer does not satisfy its own grader
                continue
            failed = 0
            entry = {**entry, "answer": answer}
            say({"index": index, **{name: tagged(entry[name]) for name in ("question", "answer", "metadata")}})
        if failed == made.size:
            say({"error": "failed", "detail": "no answer of the package satisfies its own grader"})
    except BrokenPipeError:
        os._exit(0)  # enough was read
    except Exception as error:
        say({"error": "failed", "detail": f"{type(error).__name__}: {error}"})


def answer_of(entry: dict[str, Any]) -> str | None:
    """The right answer; of many, the one that the metadata keep; None where the package tells none."""
    metadata = entry["metadata"] or {}
    answers = [entry["answer"], *(metadata.get(name) for name in EXAMPLES)]
    answer = next((answer for answer in answers if answer is not None), None)
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


def dataset(package: Any, wanted: dict[str, Any]) -> Any:
    """The package's task with room for repeats; with none where it cannot make so many."""
    settings = {**wanted["config"], "seed": wanted["seed"]}
    try:
        return package.create_dataset(wanted["task"], **settings, size=wanted["most"])
    except ValueError:
        return package.create_dataset(wanted["task"], **settings, size=wanted["count"])


if __name__ == "__main__":
    main()
