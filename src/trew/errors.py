"""The hierarchy of all errors that trew raises on purpose.

A message names the problem, the value found, the values accepted and what to do next. The command line prints only the
message and exits with ``exit_code``: 2 for wrong input, 1 for a failure at run time.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class TrewError(Exception):
    """Base of all errors below; ``str(error)`` is a complete message for the user."""

    exit_code = 1


class ConfigError(TrewError):
    """A configuration that cannot be run; holds *all* problems found, one line each in ``problems``.

    ``config`` is the part that could be read, with defaults for the rest, so that data, model and rewards can be
    checked too before the error is shown.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], *, config: Any = None):
        self.config = config
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(TrewError):
    """Data that cannot be read or does not have what the run needs; names file, row and columns."""

    exit_code = 2


class ModelError(TrewError):
    """A model or tokenizer that is missing, unreadable or unfit for the run."""

    exit_code = 2


class RewardError(TrewError):
    """A reward function that raised, or returned something that is not a list of numbers and None.

    ``evidence`` is what its author needs to reproduce it: the completions with their prompts and columns, and the
    traceback, as plain values; empty if there is none. ``skippable``: on_failure = "skip" would have gone on.
    """

    def __init__(self, message: str, *, evidence: Mapping[str, Any] | None = None, skippable: bool = False):
        self.evidence: Mapping[str, Any] = evidence or {}
        self.skippable = skippable
        super().__init__(message)


class EpisodeError(TrewError):
    """An environment that failed where the run must not go on, or whose episodes cannot be compared."""


class SandboxError(TrewError):
    """The sandbox for untrusted code is missing, or failed its own test."""


class EngineError(TrewError):
    """Generation failed, or produced something that cannot be trained on."""


class CheckpointError(TrewError):
    """No usable checkpoint, or one that does not belong to this run."""


class ResumeError(CheckpointError):
    """A run that cannot be continued from what is in its folder. Nothing in the folder was changed."""

    exit_code = 2


class ReplayError(TrewError):
    """Recorded rollouts that are missing, damaged, or of something else than the run that is to learn from them."""

    exit_code = 2


class StorageError(TrewError):
    """The run folder cannot be written: disk full, read-only, gone. What was complete before stays complete."""


class NumericsError(TrewError):
    """A loss, gradient, reward or log-probability that is not finite; the optimizer step was not applied.

    ``cause`` is the message without names, ``quantity`` the metric concerned. ``samples`` are the positions of the
    samples at fault in the list that was given; ``values`` has their numbers by position. ``evidence`` holds further
    information as plain values.
    """

    def __init__(
        self,
        cause: str,
        *,
        names: str = "",
        quantity: str = "loss",
        samples: Sequence[int] = (),
        values: Mapping[int, Sequence[float]] | None = None,
        evidence: Sequence[Mapping[str, Any]] = (),
    ):
        self.cause, self.names, self.quantity = cause, names, quantity
        self.samples, self.values, self.evidence = tuple(samples), dict(values or {}), tuple(evidence)
        super().__init__(f"{cause}, in samples {names}; the optimizer step was not applied" if names else cause)

    def among(self, positions: Sequence[int]) -> NumericsError:
        """Translates positions for a caller whose list was only the ``positions`` of a longer one."""
        self.samples = tuple(positions[i] for i in self.samples)
        self.values = {positions[i]: v for i, v in self.values.items()}
        return self

    def to_json(self) -> dict[str, Any]:
        """A JSON-compatible form for other processes, without ``evidence``."""
        values = [[position, list(numbers)] for position, numbers in self.values.items()]
        return {
            "cause": self.cause, "names": self.names, "quantity": self.quantity, "samples": list(self.samples),
            "values": values,
        }  # fmt: skip

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> NumericsError:
        """Restores the result of :meth:`to_json`.

        >>> error = NumericsError("no number", names="3", samples=[3], values={3: [1.0]})
        >>> NumericsError.from_json(error.to_json()).values
        {3: [1.0]}
        """
        made: dict[str, Any] = {**found, "values": dict(found["values"])}
        return NumericsError(**made)


class RankError(TrewError):
    """A rank of a run died or computed something else than the others."""


class LostRankError(RankError):
    """The connection to another rank broke, most likely because that one died."""


class MissingResources(TrewError):
    """A cluster has no place for processes of a run, and got none in the time that was given; another try may succeed.
    The exit code is EX_TEMPFAIL."""

    exit_code = 75


class MemoryShortage(TrewError):
    """The machine's or the GPU's memory ran out; what is in checkpoints is complete."""


class Problems(list[str]):
    """A list of problems to report together: ``attempt`` collects an action's errors instead of raising them."""

    def attempt(self, action: Callable[[], T]) -> T | None:
        """The action's result; None when it raised a TrewError or a path's OSError, whose message is added."""
        try:
            return action()
        except ConfigError as error:
            self.extend(error.problems)
        except TrewError as error:
            self.append(str(error))
        except OSError as error:
            if not (message := path_problem(error)):
                raise
            self.append(message)
        return None


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`` (did you mean 'x'?)`` for the closest of ``known``, or an empty string when nothing is close: none has
    difflib's ratio, 1 for equal words, of at least ``cutoff``.

    >>> nearest("temprature", ["temperature", "top_p"])
    " (did you mean 'temperature'?)"
    >>> nearest("zzz", ["temperature"])
    ''
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


_OF_PATHS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.EROFS,
     errno.ENAMETOOLONG, errno.ELOOP}
)  # fmt: skip


def path_problem(error: OSError) -> str:
    """The message for a path that cannot be accessed at all (too long, no permission, ...); empty for other errors.

    >>> path_problem(OSError(errno.ENAMETOOLONG, "File name too long", "aaaa"))
    "'aaaa': cannot be used: File name too long"
    """
    known = error.filename and error.errno in _OF_PATHS
    return f"{error.filename!r}: cannot be used: {error.strerror}" if known else ""


def output_problem(error: OSError) -> str:
    """The message for standard output that cannot be written.

    >>> output_problem(OSError(errno.ENOSPC, "No space left on device"))
    'standard output: cannot be written: No space left on device; free some space, or send it to another place'
    """
    todo = "free some space, or send it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "send it"
    return f"standard output: cannot be written: {error.strerror or error}; {todo} to another place"


@contextmanager
def output_file(path: Any) -> Iterator[None]:
    """Turns an OSError inside into a message about a file that the user asked for: a ConfigError if the path is at
    fault (an existing folder, no permission), a StorageError if the disk is."""
    try:
        yield
    except OSError as error:
        wrong_place = error.errno in _OF_PATHS
        todo = "choose another file" if wrong_place else "free some space, or choose another file"
        message = f"{path}: cannot be written: {error.strerror or error}; {todo}"
        raise (ConfigError if wrong_place else StorageError)(message) from None
