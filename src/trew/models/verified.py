"""Something faster stands in for the plain way only after it has shown, on real samples, that it computes the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Distance = Callable[[Tensor, Tensor], Tensor]
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
"""What an architecture that nobody has tried may raise, and a device that lacks an operation."""


@dataclass
class Verified(Generic[T]):
    """``candidate`` is :attr:`chosen` until :meth:`compare` finds that it computes something else than the plain way;
    from then on ``plain`` is, and the user is told once.

    The warning reads "``instead``, because ``subject``'s ... differ by ... Set ``remedy`` to do so without this
    warning"; ``messages`` keeps it.
    """

    candidate: T
    plain: T
    instead: str
    subject: str
    remedy: str
    messages: list[str] = field(default_factory=list)
    refused: bool = False

    @property
    def chosen(self) -> T:
        """What to use from here on."""
        return self.plain if self.refused else self.candidate

    def compare(
        self, computed: Callable[[T], Tensor], want: Tensor, *, tolerance: float, what: str = "log-probs",
        unit: str = "nats", distance: Distance | None = None,
    ) -> bool:  # fmt: skip
        """Whether what is ``computed`` by the candidate is within ``tolerance`` of ``want``, the plain way's; where it
        is not, or where computing raises, the candidate is refused.

        ``distance``: of the two, a number; the largest difference unless given. Entries of ``want`` that are not finite
        compare with nothing. Running out of memory is no difference: it is raised.
        """
        try:
            apart = float((distance or largest_difference)(computed(self.candidate), want))
        except torch.OutOfMemoryError:
            raise
        except ERRORS as error:  # whatever an unknown architecture does, the plain way remains
            self._refuse(f"{self.subject} raise {kind_and_line(error)}")
            return False
        if not apart <= tolerance:  # NaN is a difference
            self._refuse(f"{_possessive(self.subject)} {what} differ by {apart:.2g} {unit} from the plain ones")
        return not self.refused

    def _refuse(self, why: str) -> None:
        self.refused = True
        say(self.messages, f"{self.instead}, because {why}. Set {self.remedy} to do so without this warning.")


def largest_difference(got: Tensor, want: Tensor) -> Tensor:
    """The largest absolute difference where ``want`` is finite; 0 where it is so nowhere."""
    return torch.where(want.isfinite(), got - want, 0.0).abs().max()


def say(messages: list[str], message: str) -> None:
    """Warns, once: ``messages`` is what was said."""
    if message not in messages:
        messages.append(message)
        warnings.warn(message, stacklevel=2)


def kind_and_line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _possessive(subject: str) -> str:
    return subject + ("'" if subject.endswith("s") else "'s")
