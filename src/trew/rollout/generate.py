"""Groups of completions from any engine, for callers that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import EngineError
from ..types import Group, Prompt, Rollout, Sampling, Turn
from .engine import Engine, Finished, Lost, Request


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

    Raises EngineError when a prompt is invalid or the engine loses a completion, NumericsError when the model's output
    is not finite. On any exception, these requests are removed from the engine.
    """
    if n < 1:
        raise EngineError(f"n: got {n}, accepts a whole number of at least 1 completion for each prompt")
    # By index, not by uid: a caller may pass the same prompt twice, and request ids must differ.
    wanted = {f"{number}/{sample}": (number, sample) for number in range(len(prompts)) for sample in range(n)}
    turns: list[dict[int, Turn]] = [{} for _ in prompts]
    groups: dict[int, Group] = {}
    engine.submit([Request(id, prompts[number], sample, sampling) for id, (number, sample) in wanted.items()])
    try:
        while wanted:
            finished = _finished(engine.poll(), wanted, prompts)
            if progress is not None and finished:
                progress(len(finished))
            for each in finished:
                number, sample = wanted.pop(each.id)
                turns[number][sample] = each.turn
                if len(turns[number]) == n:
                    # Completions finish in any order; a group lists them by sample number, so that it is reproducible.
                    groups[number] = Group(prompts[number], tuple(_rollout(turns[number].pop(s)) for s in range(n)))
                    if on_group is not None:
                        on_group(number, groups[number])
    except BaseException:  # KeyboardInterrupt too: leftovers would fail the next call as foreign requests
        engine.cancel(list(wanted))
        raise
    return [groups[number] for number in range(len(prompts))]


def _finished(
    reports: Iterable[Finished | Lost], wanted: dict[str, tuple[int, int]], prompts: Sequence[Prompt]
) -> list[Finished]:
    """Returns the finished reports; raises EngineError if a request was lost or belongs to another caller."""
    reports = list(reports)
    if foreign := [report.id for report in reports if report.id not in wanted]:
        raise EngineError(
            f"the engine reported request {foreign[0]!r}, which is not of this call; wait for its other requests, or "
            "cancel them, before you call generate"
        )
    if lost := [report for report in reports if isinstance(report, Lost)]:
        said = []
        for report in lost:
            number, sample = wanted.pop(report.id)
            said.append(f"prompt {prompts[number].uid!r}, sample {sample}: {report.reason}")
        more = f" (and {len(said) - 3} more)" if len(said) > 3 else ""
        raise EngineError(f"the engine lost {len(said)} completions: {'; '.join(said[:3])}{more}")
    return [report for report in reports if isinstance(report, Finished)]


def _rollout(turn: Turn) -> Rollout:
    return Rollout((turn,), status="truncated" if turn.finish_reason == "length" else "finished")
