"""What becomes of a call of a user's function that goes wrong: which completions it concerns, and what then.

An exception ends the run, with the completion that it came for, or (``skip``) leaves those completions without a value.
A function that does not return is ended, and the completions that it hangs at have no value either way: a run is not to
wait for ever, and not to die of one bad request. The same holds where the system killed its process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import OnFailure
from ...errors import RewardError
from ..verdict import Verdict
from .functions import Sample, UserFunction
from .session import Call, Fault, Outcome, Runner

SEARCH_SECONDS = 10.0  # spent on finding the completion that made a function fail
SHARE_SECONDS = 1.0  # the least time a completion gets by itself after the call with all of them hung
SAVED = 64  # completions that are kept as evidence at most


@dataclass(frozen=True, slots=True)
class Ask:
    """One function, the completions it is to judge in one call, its limit in seconds and what to do if it fails."""

    function: UserFunction
    samples: Sequence[Sample]
    limit: float
    on_failure: OnFailure = "abort"


def verdicts_of(
    runner: Runner,
    asks: Sequence[Ask],
    *,
    step: int = 0,
    warn: Callable[[UserFunction, str], None] = lambda function, text: None,
    search_seconds: float = SEARCH_SECONDS,
) -> list[list[Verdict]]:
    """Verdicts of every ask, in its completions' order. ``warn`` is told of what was not judged.

    Raises RewardError where the run is to end: it names function, line and completion, and has them as evidence.
    """
    outcomes = runner.call([Call(ask.function, ask.samples, ask.limit) for ask in asks], step=step)
    judged = []
    for ask, outcome in zip(asks, outcomes, strict=True):
        if (fault := outcome.whole) is not None:
            outcome = _apart(runner, ask, outcome, fault, step=step, search_seconds=search_seconds)
        for i, fault in sorted(outcome.faults.items()):
            if not _passes(ask, fault):
                raise _ended(fault, [ask.samples[i]], named=f"; for {ask.samples[i]}")
        if outcome.faults:
            first = min(outcome.faults)
            fault = outcome.faults[first]
            named = "" if fault.kind == "value" else f"; for {ask.samples[first]}"
            warn(
                ask.function,
                f"{fault.text}{named}. {len(outcome.faults)} of {len(ask.samples)} completions have no value for it"
                + ("; raise its timeout_s if it needs longer" if fault.kind == "hung" else ""),
            )
        judged.append(list(_verdicts(ask, outcome)))
    return judged


def _passes(ask: Ask, fault: Fault) -> bool:
    """Whether the run goes on without a value."""
    return fault.kind in ("hung", "killed") or (ask.on_failure == "skip" and fault.kind != "returned")


def _verdicts(ask: Ask, outcome: Outcome) -> Iterator[Verdict]:
    each = outcome.seconds / max(len(ask.samples), 1)
    for i, value in enumerate(outcome.values):
        fault = outcome.faults.get(i)
        if fault is not None:
            status = "timeout" if fault.kind == "hung" else "sandbox_error"
            yield Verdict(None, status, None, fault.text, each)
        else:
            status = "not_applicable" if value is None else "scored"
            yield Verdict(value, status, seconds=each, steps=outcome.steps.get(i, ()))


def _apart(runner: Runner, ask: Ask, outcome: Outcome, fault: Fault, *, step: int, search_seconds: float) -> Outcome:
    """The outcome of a call that failed as a whole, taken apart: every completion by itself.

    Raises RewardError where the run is to end.
    """
    count = len(ask.samples)
    if count == 1 and fault.kind != "returned":
        return replace(outcome, values=[None], faults={0: fault}, whole=None)
    if not _passes(ask, fault):
        if fault.kind == "returned":
            raise _ended(fault, ask.samples)
        raise _located(runner, ask, fault, step=step, search_seconds=search_seconds)
    if ask.function.is_async and not fault.blocked:
        calls = [Call(ask.function, [sample], ask.limit) for sample in ask.samples]
        outcomes = runner.call(calls, step=step)
    else:
        # The share of its call's limit: however many of them hang, all together take about as long as the call did.
        share = max(ask.limit / count, min(SHARE_SECONDS, ask.limit))
        outcomes = [runner.call([Call(ask.function, [s], share)], step=step)[0] for s in ask.samples]
    values: list[float | None] = []
    faults, steps = {}, {}
    for i, one in enumerate(outcomes):
        values.append(one.values[0] if one.values else None)
        if alone := one.whole or one.faults.get(0):
            faults[i] = alone
        if 0 in one.steps:
            steps[i] = one.steps[0]
    seconds = outcome.seconds + sum(one.seconds for one in outcomes)
    return Outcome(values, faults, seconds=seconds, steps=steps)


def _located(runner: Runner, ask: Ask, fault: Fault, *, step: int, search_seconds: float) -> RewardError:
    """The error of a call as one that names the completion, which is looked for by calling with one at a time."""
    end = time.monotonic() + search_seconds
    count = len(ask.samples)
    for sample in ask.samples:
        left = end - time.monotonic()
        if left <= 0:
            named = f"; which of its {count} completions it was could not be found quickly"
            return _ended(fault, ask.samples, named=named)
        [alone] = runner.call([Call(ask.function, [sample], min(left, ask.limit))], step=step)
        found = alone.whole or alone.faults.get(0)
        if found is not None and found.kind in ("raised", "died"):
            return _ended(fault, [sample], named=f"; for {sample}")
    uids = ", ".join(dict.fromkeys(repr(s.prompt.uid) for s in ask.samples))
    named = f"; only for all {count} completions together, for none alone (prompts {uids})"
    return _ended(fault, ask.samples, named=named)


def _ended(fault: Fault, samples: Sequence[Sample], *, named: str = "") -> RewardError:
    text = fault.text if fault.kind in ("value", "returned") else fault.text + named
    rows: list[Mapping[str, Any]] = [
        {
            "uid": sample.prompt.uid,
            "prompt": sample.prompt.text if sample.prompt.messages is None else list(sample.prompt.messages),
            "completion": sample.text,
            "columns": dict(sample.prompt.columns),
        }
        for sample in samples[:SAVED]
    ]
    return RewardError(text, evidence={"error": text, "traceback": fault.trace, "completions": rows})
