"""What a reward says about one completion."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import ScoreStatus

NOT_JUDGED: frozenset[str] = frozenset({"bad_gold", "timeout", "sandbox_error", "not_applicable"})
"""Statuses that come with ``score = None``: nothing was learned about the completion."""

SHOWN = 200  # characters of an extracted answer that are kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """One reward's judgement of one completion.

    ``score`` is None exactly when the completion was *not judged* (``bad_gold``, ``timeout``, ``sandbox_error``,
    ``not_applicable``). A completion that was judged and is wrong (``scored``) or holds no answer (``no_answer``) has
    a number, normally 0. ``extracted`` is the answer that was found, ``detail`` says in words why the score is what
    it is, ``seconds`` is how long the judgement took. ``steps`` are (end, value) of the completion's steps, where the
    reward scores steps; ``end`` counts its tokens, see ``steps``.

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
        if (self.score is None) != (self.status in NOT_JUDGED):
            raise ValueError(f"status {self.status!r} does not go with score {self.score!r}")


def right_or_wrong(right: bool, *, extracted: str, detail: str = "") -> Verdict:
    """1 or 0 for an answer that was found and compared."""
    return Verdict(1.0 if right else 0.0, "scored", shown(extracted), detail)


def no_answer(detail: str, *, extracted: str | None = None) -> Verdict:
    """0: the completion was read, and holds nothing that could be compared."""
    return Verdict(0.0, "no_answer", None if extracted is None else shown(extracted), detail)


def bad_gold(detail: str) -> Verdict:
    """Not judged: the data row itself is at fault."""
    return Verdict(None, "bad_gold", None, detail)


def shown(text: str) -> str:
    """``text`` fit for a log: at most 200 characters, and encodable (lone surrogates become ``?``).

    >>> shown("a" * 300)[-3:], len(shown("a" * 300)), shown("\\ud800")
    ('aa…', 200, '?')
    """
    cut = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return cut.encode("utf-8", "replace").decode("utf-8")
