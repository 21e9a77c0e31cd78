"""Tasks of the reasoning-gym package: ``reasoning-gym:NAME``, about a hundred families of seeded problems.

The package (trew's extra ``reasoning-gym``) generates the problems in a separate process. The reward
``reasoning_gym`` grades them, and never lets the package execute what a model wrote.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import RewardConfig
from ...errors import ConfigError, DataError, nearest
from ...types import Prompt
from ...utils import children
from ...utils.installing import install_extra
from ..draws import key_of
from ..messages import user_turn
from ..rows import BadRow, Row, Split, require_columns, show, text_column, to_prompts
from .base import Task

PREFIX = "reasoning-gym"
EXTRA = "reasoning-gym"
INSTRUCTION = "Think step by step, and put the final answer alone between <answer> and </answer>."
UNGRADED = {
    "composite": "it mixes other tasks; prepare those one by one",
    "boxnet": "it has no reference answers to check its grader with",
    "rush_hour": "it has no reference answers to check its grader with",
}
_NO_ANSWER = ("Integral(",)  # in an answer, it shows that the package did not solve its own problem
CPU_S = 60.0  # for one problem that can be used; those of most tasks take milliseconds
MEMORY_BYTES = 8 << 30  # of addresses, beyond what the package itself takes
_VAIN = 1000  # consecutive repeats after which a task counts as exhausted
_SPARE = 3  # the most problems generated per problem wanted: some tasks keep them all in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzles(Task):
    """Arguments of the task."""

    puzzle: str = ""  # the package's name for the task; from data.task = "reasoning-gym:NAME"
    size: int = 1000  # the most training problems; all differ
    config: Mapping[str, Any] = field(default_factory=dict)  # settings of the package's task: min_digits, ...
    instruction: str = INSTRUCTION  # appended to every problem; empty = nothing
    system: str = ""  # a system message; empty = none

    def problems(self) -> list[str]:
        found = []
        if not self.puzzle:
            found.append(
                f"data.task: got '{PREFIX}' without a name, accepts '{PREFIX}:NAME', such as '{PREFIX}:chain_sum'"
            )
        if self.puzzle in UNGRADED:
            found.append(f"data.task: '{PREFIX}:{self.puzzle}' is not supported: {UNGRADED[self.puzzle]}")
        if self.size < 1:
            found.append(f"data.args.size: got {self.size}, accepts a whole number of at least 1")
        for name in ("seed", "size"):
            if name in self.config:
                found.append(f"data.args.config.{name}: is set from the recipe's seed and data.args.size; remove it")
        return found

    def makes(self, train: str) -> bool:
        return not train

    def prompts(self, split: Split) -> list[Prompt]:
        """Reads rows written by ``trew data prepare reasoning-gym:NAME``: ``question``, ``gold`` and ``puzzle``."""
        names = ("question", "gold", "puzzle")
        require_columns(split, names, hint=f"write such rows with: trew data prepare {PREFIX}:{self.puzzle}")
        return to_prompts(split, self._row_prompt)

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="reasoning_gym"),)

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        return {"uid": prompt.uid} | {name: prompt.columns[name] for name in ("question", "gold", "puzzle")}

    def generate(
        self, *, eval_size: int, seed: int, progress: Callable[[int], None] | None = None
    ) -> tuple[list[Prompt], list[Prompt], list[str]]:
        """Returns (train, eval, notes): all different, the first ones held out; equal arguments give equal problems.

        Calls ``progress`` with the number of problems found since the last call.
        """
        wanted = eval_size + self.size
        found: dict[str, Prompt] = {}
        vain = 0
        for entry in self._entries(seed, wanted):
            # White space alone does not make another problem.
            key = " ".join(entry["question"].split())
            vain += 1
            if key not in found and not any(mark in str(entry["answer"]) for mark in _NO_ANSWER):
                vain = 0
                found[key] = self._prompt(f"{self.puzzle}:{seed}:{entry['index']}", _columns(entry, self))
                if progress is not None:
                    progress(1)
            if len(found) == wanted or vain == _VAIN:
                break
        if len(found) <= eval_size:
            raise DataError(
                f"{PREFIX}:{self.puzzle}: makes only {len(found)} different problems with these settings, and "
                f"eval.size = {eval_size} of them are to be held out; change data.args.config, or lower eval.size"
            )
        made = list(found.values())
        train, evaluation = made[eval_size:], made[:eval_size]
        only = f"only {len(train)} different" if len(train) < self.size else f"{len(train)}"
        return train, evaluation, [f"{PREFIX}:{self.puzzle}: {only} training problems"]

    def _entries(self, seed: int, wanted: int) -> Iterator[dict[str, Any]]:
        """Yields the package's problems in order, as the separate process generates them."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                f"data.task: '{PREFIX}:{self.puzzle}' needs the reasoning-gym package: {install_extra(EXTRA)}"
            )
        # The package seeds problem i with seed + i: neighbouring seeds would share nearly all problems.
        start = key_of(PREFIX, self.puzzle, seed) % 2**31
        order = {
            "task": self.puzzle,
            "config": dict(self.config),
            "seed": start,
            "count": wanted,
            "most": _SPARE * wanted,
            "cpu_s": CPU_S,
            "memory_bytes": MEMORY_BYTES,
        }
        # -P: without it, the modules of this folder could be imported in place of the package's.
        child = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("puzzles_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=children.environment(PYTHONHASHSEED="0", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
            text=True,
            encoding="utf-8",
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(order))
            child.stdin.close()
            count = 0
            for line in child.stdout:
                entry = json.loads(line)
                if "error" in entry:
                    raise self._error(entry)
                count += 1
                yield {**entry, "seed": start}
            ended = child.wait()
            if ended == -signal.SIGPROF:
                took = f"one problem takes more than {CPU_S:g} s of processor time; choose smaller sizes"
                raise self._error({"error": "failed", "detail": took})
            # Fewer problems than there are to be would train on other prompts without a word.
            if ended != 0 or not count:
                how = (
                    f"ended with exit status {ended}"
                    if ended > 0
                    else f"was ended by signal {-ended}"
                    if ended
                    else "ended"
                )
                raise DataError(
                    f"{PREFIX}:{self.puzzle}: the process that generates problems {how} after {count} of them; if the "
                    "machine is short of memory, choose smaller sizes"
                )
        finally:
            # Reached early too: the caller stops reading when it has enough, while the process waits to write.
            child.kill()
            child.stdout.close()
            child.wait()

    def _error(self, entry: Mapping[str, Any]) -> ConfigError:
        if entry["error"] == "missing":
            return ConfigError(
                f"data.task: the reasoning-gym package cannot be imported ({entry['detail']}): {install_extra(EXTRA)}"
            )
        if entry["error"] == "unknown":
            names = [name for name in entry["names"] if name not in UNGRADED]
            hint = nearest(self.puzzle, names)
            return ConfigError(f"data.task: reasoning-gym has no task {self.puzzle!r}{hint}; it has {', '.join(names)}")
        return ConfigError(
            f"data.args.config: reasoning-gym cannot make {self.puzzle!r} with {json.dumps(dict(self.config))}: "
            f"{entry['detail']}"
        )

    def _prompt(self, uid: str, columns: Mapping[str, Any]) -> Prompt:
        question = columns["question"].strip()
        text = f"{question}\n\n{self.instruction}" if self.instruction else question
        return Prompt(uid, messages=user_turn(text, system=self.system), columns=dict(columns))

    def _row_prompt(self, row: Row, uid: str) -> Prompt:
        text_column(row, "question")
        for name in ("gold", "puzzle"):
            if not isinstance(row.values.get(name), str):
                raise BadRow(f"column {name!r} must be a string, got {show(row.values.get(name))}")
        try:
            facts = json.loads(row.values["puzzle"])
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict) or "task" not in facts:
            raise BadRow(
                f"column 'puzzle' must hold a JSON object with the task's name, got {show(row.values['puzzle'])}"
            )
        if self.puzzle and facts["task"] != self.puzzle:
            raise BadRow(f"is a problem of reasoning-gym's {facts['task']!r}, but data.task says {self.puzzle!r}")
        return self._prompt(uid, row.values)


def _columns(entry: Mapping[str, Any], task: Puzzles) -> dict[str, Any]:
    """question, gold, and the rest as one JSON string: metadata differ between rows, and a table needs one type."""
    gold = entry["answer"]
    if gold is None:
        raise DataError(f"{PREFIX}:{task.puzzle}: problem {entry['index']} has no answer; the task cannot be used")
    facts = {
        "task": task.puzzle,
        "seed": entry["seed"],
        "index": entry["index"],
        "version": importlib.metadata.version("reasoning-gym"),
        "config": dict(task.config),
        "metadata": entry["metadata"],
    }
    return {"question": entry["question"], "gold": str(gold), "puzzle": json.dumps(facts)}
