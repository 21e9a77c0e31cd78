"""Runs the calls of a reply. Whatever is wrong with a call becomes one observation for the policy."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import SandboxError, nearest
from ...utils.user_files import describe
from ..protocol import Call, Tool
from . import arguments
from .builtin import ToolError

LONGEST_ERROR = 500  # characters of an exception's message


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a call. ``failed`` says that it is an error message instead of what the tool returned."""

    call: Call
    text: str
    failed: bool = False


class _Late(BaseException):
    """The tool's time is over. Not an Exception: a tool that handles every error would go on."""


def run(calls: Sequence[Call], tools: Mapping[str, Tool], *, seconds: float) -> list[Result]:
    """Runs calls one after another, within ``seconds`` together, and returns their results in order.

    A tool's own exception is a result. Raises SandboxError if the sandbox fails, which is no fault of the policy.
    """
    until = time.monotonic() + seconds
    return [_result(call, tools, until=until, seconds=seconds) for call in calls]


def _result(call: Call, tools: Mapping[str, Tool], *, until: float, seconds: float) -> Result:
    # Checked in this order: the tool's name, its arguments, the time that is left. Only then it runs.
    tool = tools.get(call.name)
    if tool is None or tool.function is None:
        name = call.name[:60]
        why = f"there is no tool {name!r}{nearest(name, tools)}; tools: {', '.join(tools)}"
    elif wrong := arguments.problems(call.arguments, tool.parameters):
        why = f"{call.name}: {'; '.join(wrong)}"[:LONGEST_ERROR]
    elif until <= time.monotonic():
        why = f"{call.name}: not run, because the calls before it took {seconds:g} s"
    else:
        try:
            given = arguments.converted(call.arguments, tool.parameters)
            with _within(until - time.monotonic()):
                return Result(call, _text(tool.function(**given)))
        except _Late:
            why = f"{call.name}: took longer than {seconds:g} s"
        except ToolError as error:
            if error.whole is not None:
                return Result(call, error.whole, failed=True)
            why = f"{call.name}: {error}"
        except SandboxError:
            raise
        # SystemExit too: a tool that exits is an observation, not the end of the episode's process.
        except (Exception, SystemExit) as error:
            why = f"{call.name}: {describe(error)[:LONGEST_ERROR]}"
    return Result(call, f"error: {why}", failed=True)


def _text(value: Any) -> str:
    """What a tool returned, as text: text as it is, plain values as JSON, anything else as Python prints it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises _Late inside the block after ``seconds``. Outside the main thread, where Python allows no handlers, only
    the limit of the whole step holds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    # Repeats, for code that handles even this and goes on.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 0.1)
    try:
        yield
    finally:
        # The timer goes first: a late alarm under the default handler would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
