"""Prints a run for people: a line about the setup, a progress bar with the time left, a row per step."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import StorageError, output_problem
from ..types import ScoredGroup
from .metric_rows import is_evaluation
from .secrets import redact

# metric -> (heading, format)
COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("accuracy", "{:.3f}"),
    "entropy": ("entropy", "{:.3f}"),
    "kl": ("KL", "{:.4f}"),
    "ratio": ("ratio", "{:.3f}"),
    "clip_share": ("clipped", "{:.1%}"),
    "completion_length": ("length", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
}
OF_DEMONSTRATIONS = {
    "step": COLUMNS["step"],
    "epoch": ("epoch", "{:.2f}"),
    "loss": ("loss", "{:.4f}"),
    "lr": ("lr", "{:.1e}"),
    "grad_norm": ("gradient", "{:.3f}"),
    **{name: COLUMNS[name] for name in ("completion_length", "tokens_per_second", "seconds")},
}
OF_PAIRS = {
    **OF_DEMONSTRATIONS,
    "preference_accuracy": ("accuracy", "{:.3f}"),
    "preference_margin": ("margin", "{:.3f}"),
}
WIDTH = 9
HEADING_EVERY = 25


def columns_of(row: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    """What is shown of a step's row: heading and format by metric."""
    # Rows of trew sft have an epoch, and of pairs a margin as well.
    given = OF_PAIRS if "preference_margin" in row else OF_DEMONSTRATIONS
    return given if "epoch" in row else COLUMNS


class Display:
    """Prints a run to a terminal, or as plain lines if there is none.

    ``listeners`` are called with every row of metrics, after it was written to the run folder and shown. ``result``:
    what it prints is what a command is for, so that a StorageError ends it where standard output cannot be written.
    """

    def __init__(self, console: Console | None = None, *, result: bool = False):
        self.console = console or Console(highlight=False, file=cast(IO[str], _Steady(sys.stdout, result=result)))
        if console is None and not self.console.is_terminal:
            self.console.width = 160  # piped output has no width to respect; tables stay on one line
        self.rows = 0
        self.listeners: list[Callable[[Mapping[str, Any]], object]] = []
        self._progress: Progress | None = None

    def line(self, text: str) -> None:
        """One plain line; markup and control sequences in it are shown, not obeyed."""
        self.console.print(Text(_clean(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """A line that asks for attention."""
        self.console.print(Text(f"warning: {_clean(text)}", style="yellow"), soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int, *, done: int = 0) -> Iterator[Bar]:
        """A progress bar with the time left; a nested one appears below. Without a terminal, prints a line."""
        if not self.console.is_terminal:
            self.line(f"{name}: {total}")
            yield Bar(None, total, done)
            return
        outermost = self._progress is None
        # rich draws one live display at a time: a nested bar is another task of the outermost one.
        progress = self._progress or self._new_progress()
        self._progress = progress
        if outermost:
            progress.start()
        # Escaped: the name may have a path in it, whose brackets would be markup.
        task = progress.add_task(escape(name), total=total, completed=done, note="", left="")
        try:
            yield Bar(progress, total, done, task=task)
        finally:
            progress.remove_task(task)
            if outermost:
                progress.stop()
                self._progress = None

    def _new_progress(self) -> Progress:
        return Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}"),
            console=self.console, transient=True,
        )  # fmt: skip

    def row(self, row: Mapping[str, Any]) -> None:
        """Shows a row of metrics.jsonl, of a step or of an evaluation, and passes a copy to each listener."""
        if is_evaluation(row):
            self.evaluated(row)
        else:
            self.step(row)
        for listener in self.listeners:
            listener(dict(row))

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """An evaluation during the run. Lines do not show it: the run's end compares the first with the last."""

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of numbers."""
        columns = columns_of(row)
        if self.rows % HEADING_EVERY == 0:
            self.console.print(
                Text("".join(f"{h:>{WIDTH}}" for h, _ in columns.values()), style="bold"), soft_wrap=True
            )
        self.rows += 1
        cells = [_fitting(form, row[k]) if row.get(k) is not None else "-" for k, (_, form) in columns.items()]
        self.console.print(Text("".join(f"{c:>{WIDTH}}" for c in cells)), soft_wrap=True)

    def samples(self, groups: list[ScoredGroup], *, limit: int = 2) -> None:
        """Prints the last prompt with one correct and one wrong completion, if it has them."""
        for scored in groups:
            values = [s.value for s in scored.scores]
            # Best first; completions without a value last, behind every number.
            order = sorted(range(len(values)), key=lambda i: (values[i] is None, -(values[i] or 0.0)))
            picks = [order[0], order[-1]] if len(order) > 1 else order
            prompt = scored.group.prompt
            question = (
                prompt.text if prompt.text is not None else (prompt.messages or ({"content": ""},))[-1]["content"]
            )
            self.console.print(Text(f"  prompt            {_short(question or '')}", style="dim"), soft_wrap=True)
            for i in picks[:limit]:
                value = "none" if values[i] is None else f"{values[i]:.3g}"  # at most 10 characters
                self.console.print(
                    Text(f"  reward {value:<10} {_short(scored.group.rollouts[i].text)}", style="dim"), soft_wrap=True
                )
            return

    def before_after(self, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> None:
        """Accuracy with its 95 % interval, before and after."""
        table = Table(box=None, pad_edge=False)
        for heading in ("held-out prompts", "accuracy", "95 % interval", "length", "cut off"):
            table.add_column(heading, justify="left" if heading == "held-out prompts" else "right")
        for name, r in (("before training", before), ("after training", after)):
            if r is None:
                continue
            lengths = f"{r['mean_length']:.1f}", f"{r['truncated_share']:.1%}"
            table.add_row(f"{name} (n = {r['n']})", *accuracy_cells(r["accuracy"]), *lengths)
            for one, own in r.get("sets", {}).items():
                table.add_row(f"  {one} (n = {own['n']})", *accuracy_cells(own["accuracy"]))
        self.console.print()
        self.table(table)

    def losses(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """The held-out loss with its 95 % interval, before and after."""
        table = Table(box=None, pad_edge=False)
        paired = before.get("accuracy") is not None  # of preference pairs
        for heading in ("held-out rows", "loss", "95 % interval", "accuracy" if paired else "perplexity"):
            table.add_column(heading, justify="left" if heading == "held-out rows" else "right")
        for name, r in (("before training", before), ("after training", after)):
            loss = r["loss"]
            # Of one row alone, there is none.
            interval = "-" if loss["low"] is None else f"{rounded(loss['low'])} to {rounded(loss['high'])}"
            last = f"{r['accuracy']['mean']:.3f}" if paired else f"{r['perplexity']:.4g}"
            table.add_row(f"{name} (n = {r['rows']})", rounded(loss["mean"]), interval, last)
        self.console.print()
        self.table(table)

    def table(self, table: Table) -> None:
        """A table whose first column names its rows. A terminal that is too narrow for it gets a line for each value:
        rich would cut all columns to a few characters."""
        whole = self.console.options.update(max_width=10_000)
        for blanks in (3, 1):
            table.padding = (0, blanks)
            if self.console.measure(table, options=whole).maximum <= self.console.width:
                self.console.print(table)
                return
        names, *columns = table.columns
        headings = [str(column.header) for column in columns]
        self.console.print(str(names.header), style="bold", soft_wrap=True)
        for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
            self.console.print(name, soft_wrap=True)
            for heading, cell in zip(headings, cells, strict=True):
                if cell:
                    self.console.print(f"  {heading:<{max(map(len, headings))}}  {cell}", soft_wrap=True)

    def warned(self, texts: Sequence[str]) -> None:
        """Repeats the warnings of the run at its end."""
        if texts:
            self.console.print()
            self.line(f"warnings of this run (docs/health.md): {len(texts)}")
        for text in texts:
            self.line(f"  {text}")

    def files(self, files: Mapping[str, str]) -> None:
        """Prints where everything was written."""
        self.console.print()
        width = max(map(len, files))
        for name, path in files.items():
            self.console.print(f"  {escape(name):<{width}}  {escape(path)}", soft_wrap=True)


_lost: list[str] = []


def take_lost() -> str:
    """Why standard output did not get all that displays of this process printed, since this was last asked; empty if it
    did, or has a reader or terminal that is gone."""
    said = _lost[0] if _lost else ""
    _lost.clear()
    return said


class _Steady:
    """Standard output that may disappear (a closed terminal, a reader that ended): the run continues without it. So it
    does where the disk behind it is full, which :func:`take_lost` tells, unless the output is its ``result``."""

    def __init__(self, stream: TextIO, *, result: bool = False):
        self._stream, self._result = stream, result

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:  # an encoding that has not every character; a run must not end for that
                own = self._stream.encoding
                return self._stream.write(text.encode(own, "replace").decode(own))
        except OSError as error:
            self._leave(error)
            return len(text)

    # rich flushes after every line, so a stream that is gone may show here first.
    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        is_file = False
        with contextlib.suppress(OSError, ValueError):  # what is still buffered must not raise at exit either
            number = self._stream.fileno()
            is_file = stat.S_ISREG(os.fstat(number).st_mode)
            # In place of the descriptor, for every stream object that writes to it, Python's own at exit included.
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        # EIO is what a closed terminal gives, but of a file it is a disk that fails.
        if error.errno == errno.EPIPE or (error.errno == errno.EIO and not is_file):
            return
        if self._result:
            raise StorageError(output_problem(error)) from None
        _lost[:] = [output_problem(error)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Bar:
    """Advances one progress bar; estimates the time left from the mean pace so far."""

    def __init__(self, progress: Progress | None, total: int, done: int, *, task: Any = None):
        self.progress, self.total, self.done, self.task = progress, total, done, task
        self.start, self.first = time.monotonic(), done

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self.progress is not None:
            # From where this process began: a resumed run has not spent time on what was done before.
            pace = (time.monotonic() - self.start) / max(self.done - self.first, 1)
            left = duration(pace * (self.total - self.done))
            self.progress.update(self.task, completed=self.done, left=f"{left} left")

    def note(self, text: str) -> None:
        """Sets what the run is doing right now."""
        if self.progress is not None:
            self.progress.update(self.task, note=text)


class Silent(Display):
    """Prints nothing."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    whole = max(round(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _fitting(form: str, value: float) -> str:
    """A number for a column, with a blank before it: without one, it would run into the number on its left."""
    # Of the others, a KL below its places is rounding of the log-probs.
    first = rounded(value) if form == "{:.3f}" else form.format(value)
    texts = [first, *(each.format(value) for each in ("{:.5g}", "{:.1e}", "{:.0e}"))]
    return next((text for text in texts if len(text) < WIDTH), texts[-1])


def rounded(value: float) -> str:
    """A number with three places, or with two digits where these would say 0 of one that is not.

    >>> rounded(0.25), rounded(1e-9), rounded(-0.0004), rounded(0.0)
    ('0.250', '1e-09', '-0.0004', '0.000')
    """
    return f"{value:.2g}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"


def _clean(text: str) -> str:
    """Text from models and data must not steer the terminal: control and bidirectional characters become a mark.
    Secrets are masked: what a terminal shows ends in logs."""
    return "".join(c if c == "\n" or (c.isprintable() and c not in _BIDI) else "�" for c in redact(text))


_BIDI = {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}


def _short(text: str, limit: int = 100) -> str:
    line = " ⏎ ".join(_clean(text).strip().splitlines())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def accuracy_cells(interval: Mapping[str, Any]) -> tuple[str, str]:
    """An accuracy and its interval; dashes where no completion got a verdict."""
    if interval["mean"] is None or math.isnan(interval["mean"]):
        return "-", "no verdicts"
    return f"{interval['mean']:.3f}", f"{interval['low']:.3f} to {interval['high']:.3f}"
