"""Defines the verdict of one reward on one completion."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import ScoreStatus

NOT_JUDGED: frozenset[str] = frozenset(
    {"bad_gold", "timeout", "sandbox_error", "environment_error", "not_applicable", "other_set"}
)
"""Statuses with ``score = None``: nothing was learned about the completion."""

SHOWN = 200  # characters of an extracted answer that are kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """One reward's judgement of one completion.

    ``score`` is None exactly when the completion was *not judged* (``bad_gold``, ``timeout``, ``sandbox_error``,
    ``environment_error``, ``not_applicable``, ``other_set``). A completion that was judged wrong (``scored``) or
    without an answer (``no_answer``) has a number, normally 0. ``extracted`` is the answer found, ``detail`` explains
    the score, ``seconds`` is the time that grading took. ``steps`` holds (end, value) pairs if the reward scores steps;
    ``end`` counts tokens, see the module ``steps``.

    >>> Verdict(1.0, "scored", extracted="72").score
    1.0
    """

    score: float | None
    status: ScoreStatus = "scored"
    extracted: str | None = None
    detail: str = ""
    seconds: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        # A failure that carried a 0 would silently train the model on a fault of ours.
        if (self.score is None) != (self.status in NOT_JUDGED):
            raise ValueError(f"status {self.status!r} does not go with score {self.score!r}")


NOT_PLAYED = Verdict(None, "environment_error")
"""On an episode whose environment failed."""


def right_or_wrong(right: bool, *, extracted: str, detail: str = "") -> Verdict:
    """Returns the verdict 1 or 0 for an answer that was found and compared."""
    return Verdict(1.0 if right else 0.0, "scored", shown(extracted), detail)


def no_answer(detail: str, *, extracted: str | None = None) -> Verdict:
    """Returns the verdict 0 for a completion without an answer that could be compared."""
    return Verdict(0.0, "no_answer", None if extracted is None else shown(extracted), detail)


def bad_gold(detail: str) -> Verdict:
    """Returns the verdict for a faulty data row: not judged."""
    return Verdict(None, "bad_gold", None, detail)


def shown(text: str) -> str:
    """Makes ``text`` fit for a log: at most 200 characters, and encodable (lone surrogates become ``?``).

    >>> shown("a" * 300)[-3:], len(shown("a" * 300)), shown("\\ud800")
    ('aa…', 200, '?')
    """
    cut = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return cut.encode("utf-8", "replace").decode("utf-8")
