"""Why a text has no exact value: the errors of exact algebra and of the readers before it."""

from __future__ import annotations


class NotExact(ValueError):
    """The text has no value that this algebra can hold; the message says why."""


class Malformed(NotExact):
    """The text is no formula at all."""


class TooLarge(NotExact):
    """The value exists, but it is larger than what is computed here."""


class Undefined(NotExact):
    """There is no value at all: a division by zero."""
