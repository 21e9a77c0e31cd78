"""Groups of completions from any engine, for callers that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import EngineError
from ..types import Group, Prompt, Rollout, Sampling, Turn
from .engine import Engine, Finished, Lost, Request

TRIES = 5
"""How often a completion is asked for: a server that dies or answers badly must not end a run while others live."""


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    n: int,
    sampling: Sampling,
    progress: Callable[[int], None] | None = None,
    on_group: Callable[[int, Group], None] | None = None,
) -> list[Group]:
    """``n`` completions for each of ``prompts``, in their order.

    ``progress`` receives the number of newly finished completions. ``on_group`` receives a prompt's index and its
    group as soon as all its completions are finished, while others are still being generated; it is the same object
    that is returned. Prompts of equal uid get equal draws. The engine must have no unfinished requests from elsewhere.

    A completion that the engine loses is asked for again, with the same draws, up to ``TRIES`` times in all.

    Raises EngineError when a prompt is invalid or the engine keeps losing a completion, NumericsError when the model's
    output is not finite. On any exception, these requests are removed from the engine.
    """
    if n < 1:
        raise EngineError(f"n: got {n}, accepts a whole number of at least 1 completion for each prompt")
    # By index, not by uid: a caller may pass the same prompt twice, and request ids must differ.
    wanted = {
        f"{number}/{sample}": (number, Request(f"{number}/{sample}", prompt, sample, sampling))
        for number, prompt in enumerate(prompts)
        for sample in range(n)
    }
    turns: list[dict[int, Turn]] = [{} for _ in prompts]
    groups: dict[int, Group] = {}
    losses: Counter[str] = Counter()  # by request id
    engine.submit([request for _, request in wanted.values()])
    try:
        while wanted:
            reports = _own(engine.poll(), wanted)
            finished = [report for report in reports if isinstance(report, Finished)]
            if progress is not None and finished:
                progress(len(finished))
            for each in finished:
                number, request = wanted.pop(each.id)
                turns[number][request.sample] = each.turn
                if len(turns[number]) == n:
                    # Completions finish in any order; a group lists them by sample number, so that it is reproducible.
                    groups[number] = Group(prompts[number], tuple(_rollout(turns[number].pop(s)) for s in range(n)))
                    if on_group is not None:
                        on_group(number, groups[number])
            if lost := [report for report in reports if isinstance(report, Lost)]:
                losses.update(report.id for report in lost)
                _refuse_repeated([report for report in lost if losses[report.id] >= TRIES], wanted)
                engine.submit([wanted[report.id][1] for report in lost])
    except BaseException:  # KeyboardInterrupt too: leftovers would fail the next call as foreign requests
        engine.cancel(list(wanted))
        raise
    return [groups[number] for number in range(len(prompts))]


def _own(reports: Iterable[Finished | Lost], wanted: Mapping[str, tuple[int, Request]]) -> list[Finished | Lost]:
    """Returns the reports; raises EngineError if a request belongs to another caller."""
    reports = list(reports)
    if foreign := [report.id for report in reports if report.id not in wanted]:
        raise EngineError(
            f"the engine reported request {foreign[0]!r}, which is not of this call; wait for its other requests, or "
            "cancel them, before you call generate"
        )
    return reports


def _refuse_repeated(lost: Sequence[Lost], wanted: Mapping[str, tuple[int, Request]]) -> None:
    """Raises EngineError if there are requests that were lost too often."""
    if not lost:
        return
    said = []
    for report in lost[:3]:
        request = wanted[report.id][1]
        said.append(f"prompt {request.prompt.uid!r}, sample {request.sample}: {report.reason}")
    more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
    raise EngineError(f"the engine lost {len(lost)} completions {TRIES} times: {'; '.join(said)}{more}")


def _rollout(turn: Turn) -> Rollout:
    return Rollout((turn,), status="truncated" if turn.finish_reason == "length" else "finished")
