"""Groups of completions from any engine, for callers that wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import EngineError
from ..types import Group, Prompt, Rollout, Sampling
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
    waiting = _Waiting(prompts, n, sampling)
    engine.submit(list(waiting.requests.values()))
    # From here on requests are open, which an exception must not leave behind.
    try:
        while waiting.requests:
            reports = _own(engine.poll(), waiting.requests)
            finished = [report for report in reports if isinstance(report, Finished)]
            if progress is not None and finished:
                progress(len(finished))
            for number in waiting.completed(finished):
                if on_group is not None:
                    on_group(number, waiting.groups[number])
            if again := waiting.repeated([report for report in reports if isinstance(report, Lost)]):
                engine.submit(again)
    except BaseException:  # KeyboardInterrupt too: leftovers would fail the next call as foreign requests
        engine.cancel(list(waiting.requests))
        raise
    return [waiting.groups[number] for number in range(len(prompts))]


class _Waiting:
    """The requests that a call of :func:`generate` still waits for, and the groups that are complete."""

    def __init__(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> None:
        # By index, not by uid: a caller may pass the same prompt twice, and request ids must differ.
        places = {f"{number}/{sample}": (number, sample) for number in range(len(prompts)) for sample in range(n)}
        self.requests = {id: Request(id, prompts[number], sample, sampling) for id, (number, sample) in places.items()}
        self.groups: dict[int, Group] = {}
        self._prompts, self._n = prompts, n
        self._number = {id: number for id, (number, _) in places.items()}
        self._rollouts: list[dict[int, Rollout]] = [{} for _ in prompts]
        self._losses: Counter[str] = Counter()  # by request id

    def completed(self, finished: Iterable[Finished]) -> Iterator[int]:
        """Takes finished completions in; yields the index of each prompt whose group this completes."""
        for each in finished:
            request, number = self.requests.pop(each.id), self._number[each.id]
            rollouts = self._rollouts[number]
            rollouts[request.sample] = each.rollout
            if len(rollouts) == self._n:
                # Completions finish in any order; a group lists them by sample number, so that it is reproducible.
                self.groups[number] = Group(self._prompts[number], tuple(rollouts.pop(s) for s in range(self._n)))
                yield number

    def repeated(self, lost: Sequence[Lost]) -> list[Request]:
        """Returns the requests to submit again; raises EngineError if one of them was lost too often."""
        self._losses.update(report.id for report in lost)
        _refuse_repeated([report for report in lost if self._losses[report.id] >= TRIES], self.requests)
        return [self.requests[report.id] for report in lost]


def _own(reports: Iterable[Finished | Lost], wanted: Mapping[str, Request]) -> list[Finished | Lost]:
    """Returns the reports; raises EngineError if a request belongs to another caller."""
    reports = list(reports)
    if foreign := [report.id for report in reports if report.id not in wanted]:
        raise EngineError(
            f"the engine reported request {foreign[0]!r}, which is not of this call; wait for its other requests, or "
            "cancel them, before you call generate"
        )
    return reports


def _refuse_repeated(lost: Sequence[Lost], wanted: Mapping[str, Request]) -> None:
    """Raises EngineError if there are requests that were lost too often."""
    if not lost:
        return
    said = []
    for report in lost[:3]:
        request = wanted[report.id]
        said.append(f"prompt {request.prompt.uid!r}, sample {request.sample}: {report.reason}")
    more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
    raise EngineError(f"the engine lost {len(lost)} completions {TRIES} times: {'; '.join(said)}{more}")
