"""Uses a faster implementation only after comparing it with the plain one on real samples."""

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
"""What an untested architecture may raise, or a device that lacks an operation."""


@dataclass
class Verified(Generic[T]):
    """Chooses ``candidate`` until :meth:`compare` finds a mismatch; from then on ``plain``, with one warning.

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
        """The implementation to use from here on."""
        return self.plain if self.refused else self.candidate

    def compare(
        self, computed: Callable[[T], Tensor], want: Tensor, *, tolerance: float, what: str = "log-probs",
        unit: str = "nats", distance: Distance | None = None,
    ) -> bool:  # fmt: skip
        """Whether the candidate's result is within ``tolerance`` of ``want``, the plain one; refuses the candidate if
        it is not, or if computing it raises.

        ``distance`` maps the two to a number: by default, the largest difference. Entries of ``want`` that are not
        finite are skipped. Running out of memory is not a mismatch: that error is raised.
        """
        try:
            apart = float((distance or largest_difference)(computed(self.candidate), want))
        except torch.OutOfMemoryError:  # a RuntimeError, so it must come first
            raise
        except ERRORS as error:  # whatever an unknown architecture does, the plain way remains
            self._refuse(f"{self.subject} raise {kind_and_line(error)}")
            return False
        if not apart <= tolerance:  # not ">": NaN compares false either way, and must count as a mismatch
            self._refuse(f"{_possessive(self.subject)} {what} differ by {apart:.2g} {unit} from the plain ones")
        return not self.refused

    def _refuse(self, why: str) -> None:
        self.refused = True
        say(self.messages, f"{self.instead}, because {why}. Set {self.remedy} to do so without this warning.")


def largest_difference(got: Tensor, want: Tensor) -> Tensor:
    """Returns the largest absolute difference where ``want`` is finite; 0 if it is finite nowhere."""
    return torch.where(want.isfinite(), got - want, 0.0).abs().max()


def say(messages: list[str], message: str) -> None:
    """Warns, unless ``messages`` already holds the message; adds it there."""
    if message not in messages:
        messages.append(message)
        warnings.warn(message, stacklevel=2)


def kind_and_line(error: Exception) -> str:
    """Returns an error's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _possessive(subject: str) -> str:
    return subject + ("'" if subject.endswith("s") else "'s")
