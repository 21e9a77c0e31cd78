"""Runs under settings of a test's choice, what they leave behind, and the work that they do."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import string
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import tiny
import trew
from scorer_help import save_scorer
from trew.config import parse
from trew.errors import TrewError
from trew.learner import recompute
from trew.learner.autograd import AutogradRunner
from trew.learner.choose import VerifiedRunner
from trew.rollout import sync
from trew.rollout.torch_engine.decode import Schedule
from trew.runs.writer import Writer
from trew.training import policy_program, start
from trew.training.policy_program import PolicyProgram
from trew.utils.console import Display

BASE: dict[str, Any] = {
    "model": "lm", "steps": 1, "threads": 1,
    "data.task": "arithmetic", "data.args": {"ops": ["+"], "smallest": 1, "largest": 6},
    "rewards": [{"name": "soft_overlong", "args": {"max_completion_len": 8, "soft_punish_cache": 7}}],
    "rollout.stop": list(string.ascii_letters + string.digits),  # so that a random model's completions differ in length
    "rollout.prompts": 2, "rollout.completions": 3, "rollout.max_tokens": 8,
    "objective.beta": 0.0, "learner.lr": 1e-2, "learner.adam_eps": 1e-4, "eval.size": 2, "checkpoint.every": 0,
    "eval.max_tokens": 2, "checkpoint.background": False,
}  # fmt: skip
FUNCTIONS = """
import time
def calls(completions, **_): return [float(len(completions))] * len(completions)
def first(completion_ids, **_): return [float(ids[0] % 2) for ids in completion_ids]
def raises(completions, **_): raise ValueError("no")
def unsteady(completions, **_): return [time.time()] * len(completions)
def talk(row, seed, *, size=1):
    reply = yield str(seed % 10) * size
    while True:
        reply = yield {"role": "user", "content": reply.text + "x" * size}
def breaks(row, seed):
    yield "begin"
    raise ValueError("no")
"""


@dataclass
class Seen:
    """What a run left behind, and the work that it did."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of steps, without what clocks say
    evals: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)  # of the last evaluation
    files: set[str] = field(default_factory=set)
    said: str = ""
    refused: str = ""
    work: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[list[int]] = field(default_factory=list)
    folder: str = ""
    program: PolicyProgram | None = None

    @property
    def greedy(self) -> list[Any]:
        return [row["token_ids"] for row in self.answers]

    @property
    def scores(self) -> list[Any]:
        return [row["score"] for row in self.rollouts]

    @property
    def prompts(self) -> list[Any]:
        return [row["prompt"] for row in self.rollouts]

    @property
    def tokens(self) -> list[Any]:
        return [row["token_ids"] for row in self.rollouts]

    @property
    def shape(self) -> tuple[int, int, int]:
        uids = [row["uid"] for row in self.rollouts]
        longest = max((len(row["token_ids"]) for row in self.rollouts), default=0)
        return len(set(uids)), uids.count(uids[0]) if uids else 0, longest


def furnish(folder: Path) -> Path:
    """Models, data and rewards that the cases name."""
    tiny.save(folder / "lm")
    tiny.save(folder / "lm2", seed=1)
    wide = tiny.model("llama", **tiny.wide("llama"))
    wide.save_pretrained(folder / "wide")
    tiny.tokenizer().save_pretrained(folder / "wide")
    other = tiny.tokenizer()
    other.chat_template = tiny.CHATML.replace("<|im_start|>", "<|im_start|>the ")
    other.save_pretrained(folder / "tokenizer")
    save_scorer(folder / "scorer")
    (folder / "f.py").write_text(FUNCTIONS)
    for name, word in (("a", "what"), ("b", "which")):
        rows = [{"prompt": f"{word} {i}", "other": f"{word} else {i}", "gold": str(i)} for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = [{"prompt": f"{i} " + "x" * (100 if i % 2 else 4), "gold": "1"} for i in range(12)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    return folder


class Runs:
    """Makes runs and remembers those that several cases compare with."""

    base = BASE

    def __init__(self, place: Path):
        self.place, self.known, self.count = place, {}, 0

    def __call__(self, changes: Mapping[str, Any]) -> Seen:
        key = json.dumps(changes, sort_keys=True, default=str)
        if key not in self.known:
            self.known[key] = self.run({**self.base, **changes})
        return self.known[key]

    def run(self, settings: Mapping[str, Any]) -> Seen:
        self.count += 1
        seen, said = Seen(), io.StringIO()
        table: dict[str, Any] = {"out": f"run-{self.count}"}
        for key, value in settings.items():
            if key.startswith("data.") and "data" in settings:
                continue  # several data sets instead of one
            node = table
            *parents, last = key.split(".")
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place)
            watch_work(patch, seen)
            try:
                trew.train(parse(table), display=Display(Console(file=said, width=200)))
            except TrewError as error:
                seen.refused = str(error)
            seen.folder = table["out"]
            collect(Path(seen.folder), seen)
        seen.said = said.getvalue()
        return seen


def collect(run: Path, seen: Seen) -> None:
    """Reads a run's folder."""
    seen.files = {str(p.relative_to(run)) for p in run.rglob("*")}
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            row = {k: v for k, v in json.loads(line).items() if "second" not in k}
            (seen.evals if "eval_accuracy" in row else seen.rows).append(row)
    tables = {kind: sorted((run / kind).glob("*.parquet")) for kind in ("rollouts", "evals")}
    seen.rollouts = [row for path in tables["rollouts"] for row in pq.read_table(path).to_pylist()]
    seen.answers = pq.read_table(tables["evals"][-1]).to_pylist() if tables["evals"] else []
    if (run / "final" / "model.safetensors").exists():
        seen.weights = load_file(run / "final" / "model.safetensors")


def watch_work(patch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Counts the work of the real functions, which go on doing it."""
    work = seen.work

    def count(owner: Any, name: str, note: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(result, *args, **kwargs)
            return result

        patch.setattr(owner, name, counted)

    def packs(result: Any, *_: Any, **__: Any) -> None:
        work["passes"] = work.get("passes", 0) + len(result)
        work["tokens"] = work.get("tokens", 0) + sum(p.input_ids.size for p in result)

    def generated(result: Any, *_: Any, on_group: Any = None, **__: Any) -> None:
        work["early"] = work.get("early", False) or on_group is not None
        seen.prompt_ids += [group.rollouts[0].prompt_ids.tolist() for group in result]
        work["handlers"] = [s.name for s in signal.valid_signals() if callable(signal.getsignal(s))]

    count(start, "build", lambda program, *_, **__: setattr(seen, "program", program))
    for runner in (AutogradRunner, VerifiedRunner):
        count(runner, "packs", packs)
    count(recompute, "recomputing", lambda *_, **__: work.update(again=True))
    for caller in (sync, policy_program):
        count(caller, "generate", generated)
    count(Schedule, "__init__", lambda *_, slots, **__: work.update(slots=max(slots, work.get("slots", 0))))
    count(Writer, "save", lambda _, writer, *__, **___: work.update(waited=writer._thread is None))


# --------------------------------------------------------------------------------------------------------------------
# What a case says

Sees = Callable[[Seen, Seen], bool]


@dataclass(frozen=True)
class Case:
    """``to``: the value that the key gets in the second run, beside ``given`` in both; ``sees``: what tells them apart,
    the name of something seen, or a text that refuses the second."""

    to: Any
    sees: str | Sees
    given: Mapping[str, Any] = field(default_factory=dict)


def differ(a: Seen, b: Seen, what: str) -> bool:
    if what == "weights":
        return any(not torch.equal(weight, b.weights[name]) for name, weight in a.weights.items())
    return getattr(a, what) != getattr(b, what)


def last(name: str) -> Sees:
    """A metric of the last step has another value."""
    return lambda a, b: a.rows[-1].get(name) != b.rows[-1].get(name)


def same_result(*work: str) -> Sees:
    """The same weights but for rounding, by other work."""

    def sees(a: Seen, b: Seen) -> bool:
        alike = all(torch.allclose(a.weights[k], b.weights[k], atol=1e-3) for k in a.weights)
        return alike and any(a.work.get(name) != b.work.get(name) for name in work)

    return sees


def path(name: str) -> Sees:
    """The learner runs its samples in another way."""
    return lambda a, b: getattr(a.program.policy._runner.path, name) != getattr(b.program.policy._runner.path, name)


def other_products(a: Seen, b: Seen) -> bool:
    """The backend multiplies matrices in another way; without one there is only one way."""
    first, second = a.program.engine.backend, b.program.engine.backend
    return first is None or getattr(first, "products", False) != getattr(second, "products", False)


def says(text: str) -> Sees:
    """Only one of the two says it."""
    return lambda a, b: (text in a.said) != (text in b.said)


def holds(case: Case, before: Seen, after: Seen) -> bool:
    """Whether the case's change is seen; only one that is about refusals may be refused."""
    if isinstance(case.sees, str) and not hasattr(before, case.sees):
        return case.sees in after.refused and not before.refused
    if case.sees != "refused" and before.refused + after.refused:
        return False
    return differ(before, after, case.sees) if isinstance(case.sees, str) else case.sees(before, after)


OUTSIDE: list[Any] = []


def tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker's package that keeps what it is told in ``OUTSIDE``."""
    module = types.ModuleType("trackio")
    module.__spec__ = ModuleSpec("trackio", None)
    told = OUTSIDE.append
    vars(module).update(init=lambda **_: None, log=lambda values, step: told(values), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", module)


def keys(cls: type, where: str = "") -> list[str]:
    """Every key of a configuration, in the order of the class."""
    hints, found = typing.get_type_hints(cls), []
    for one in dataclasses.fields(cls):
        hint = hints[one.name]
        if isinstance(hint, types.UnionType):  # one table, or a list of tables: the keys of these
            hint = typing.get_args(typing.get_args(hint)[1])[0]
        if dataclasses.is_dataclass(hint):
            found += keys(hint, f"{where}{one.name}.")
        else:
            found.append(f"{where}{one.name}")
    return found
