"""Turns calls of users' functions into verdicts, and decides what a failed call means for the run.

An exception ends the run and names the completion, or with ``skip`` leaves the affected completions without a value.
A function that hangs is ended, and the completions that it hangs on get no value in either mode: a run must not wait
forever, nor die of one bad request. The same holds if the system killed the function's process.
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
from .session import CallOutcome, Fault, FunctionCall, FunctionHost

SEARCH_SECONDS = 10.0  # to find the completion that made a function fail
SHARE_SECONDS = 1.0  # least time for a single completion after the call with all of them hung
SAVED = 64  # most completions kept as evidence


@dataclass(frozen=True, slots=True)
class Ask:
    """One function, the completions of one call, its limit in seconds, and what to do if it fails."""

    function: UserFunction
    samples: Sequence[Sample]
    limit: float
    on_failure: OnFailure = "abort"


def verdicts_of(
    host: FunctionHost,
    asks: Sequence[Ask],
    *,
    step: int = 0,
    warn: Callable[[UserFunction, str], None] = lambda function, text: None,
    search_seconds: float = SEARCH_SECONDS,
) -> list[list[Verdict]]:
    """Returns the verdicts of every ask in the order of its completions; calls ``warn`` for completions not judged.

    Raises RewardError if the run must end. It names function, line and completion, and carries them as evidence.
    """
    outcomes = host.call([FunctionCall(ask.function, ask.samples, ask.limit) for ask in asks], step=step)
    judged = []
    for ask, outcome in zip(asks, outcomes, strict=True):
        if (fault := outcome.whole) is not None:
            outcome = _apart(host, ask, outcome, fault, step=step, search_seconds=search_seconds)
        for i, fault in sorted(outcome.faults.items()):
            if not _passes(ask, fault):
                raise _ended(fault, [ask.samples[i]], named=f"; for {ask.samples[i]}")
        if outcome.faults:
            # One warning per call, with its first fault: a server that is down would fail every completion alike.
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
    """Returns whether the run continues without a value."""
    # "returned" never passes: a result of the wrong length is a bug of the function, not a failed completion.
    return fault.kind in ("hung", "killed") or (ask.on_failure == "skip" and fault.kind != "returned")


def _verdicts(ask: Ask, outcome: CallOutcome) -> Iterator[Verdict]:
    each = outcome.seconds / max(len(ask.samples), 1)  # one call judges all, so each counts for an equal share
    for i, value in enumerate(outcome.values):
        fault = outcome.faults.get(i)
        if fault is not None:
            status = "timeout" if fault.kind == "hung" else "sandbox_error"
            yield Verdict(None, status, None, fault.text, each)
        else:
            status = "not_applicable" if value is None else "scored"
            yield Verdict(value, status, seconds=each, steps=outcome.steps.get(i, ()))


def _apart(
    host: FunctionHost, ask: Ask, outcome: CallOutcome, fault: Fault, *, step: int, search_seconds: float
) -> CallOutcome:
    """Repeats a call that failed as a whole for each completion alone, and merges the outcomes.

    Raises RewardError if the run must end.
    """
    count = len(ask.samples)
    # A single completion needs no search: it is the one.
    if count == 1 and fault.kind != "returned":
        return replace(outcome, values=[None], faults={0: fault}, whole=None)
    if not _passes(ask, fault):
        if fault.kind == "returned":
            raise _ended(fault, ask.samples)
        raise _located(host, ask, fault, step=step, search_seconds=search_seconds)
    # An async function that awaits can be cancelled at its limit, so all completions run at once. One that hangs in a
    # sync call takes the process with it each time, so they run in turn.
    if ask.function.is_async and not fault.blocked:
        calls = [FunctionCall(ask.function, [sample], ask.limit) for sample in ask.samples]
        outcomes = host.call(calls, step=step)
    else:
        # Each gets a share of the call's limit: however many hang, all together take about as long as the call did. In
        # verl's form the limit is that of one completion.
        share = ask.limit if ask.function.verl else max(ask.limit / count, min(SHARE_SECONDS, ask.limit))
        outcomes = [host.call([FunctionCall(ask.function, [s], share)], step=step)[0] for s in ask.samples]
    return _merged(outcomes, seconds=outcome.seconds)


def _merged(outcomes: Sequence[CallOutcome], *, seconds: float) -> CallOutcome:
    """The outcomes of one completion each as one outcome; ``seconds`` is the time taken before."""
    values: list[float | None] = []
    faults, steps = {}, {}
    for i, one in enumerate(outcomes):
        values.append(one.values[0] if one.values else None)
        if alone := one.whole or one.faults.get(0):
            faults[i] = alone
        if 0 in one.steps:
            steps[i] = one.steps[0]
    return CallOutcome(values, faults, seconds=seconds + sum(one.seconds for one in outcomes), steps=steps)


def _located(host: FunctionHost, ask: Ask, fault: Fault, *, step: int, search_seconds: float) -> RewardError:
    """Returns the error of a failed call, naming the completion: calls the function with one completion at a time."""
    end = time.monotonic() + search_seconds
    count = len(ask.samples)
    for sample in ask.samples:
        left = end - time.monotonic()
        if left <= 0:
            named = f"; which of its {count} completions it was could not be found quickly"
            return _ended(fault, ask.samples, named=named)
        [alone] = host.call([FunctionCall(ask.function, [sample], min(left, ask.limit))], step=step)
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
    evidence = {"error": text, "traceback": fault.trace, "completions": rows}
    return RewardError(text, evidence=evidence, skippable=fault.kind != "returned")
