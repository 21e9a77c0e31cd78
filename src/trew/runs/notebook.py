"""A run in a notebook: progress and curves below the cell while it trains, and curves of runs as pictures.

Everything is HTML and SVG without scripts, so that a saved notebook shows it too. What models wrote is text in it.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError, nearest
from ..types import ScoredGroup
from ..utils.console import Bar, Display, Silent, accuracy_cells, columns_of, duration
from ..utils.metric_rows import is_evaluation
from ..utils.secrets import redact
from .report.read import RunData, load_run, names_of
from .report.svg import Series, line_chart, running_mean
from .report.text import shorten, visible

SAMPLES, LONGEST = 2, 600
REFRESH_S = 0.2
WINDOW = 5
_HELD_OUT = {
    "accuracy": ("eval_accuracy", "eval_low", "eval_high"), "loss": ("eval_loss", "eval_loss_low", "eval_loss_high"),
}  # fmt: skip
"""Metrics that evaluations measure on held-out data, too: the value there, and the ends of its interval."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a notebook shows as the value of a cell; ``svg`` is its text."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes it as an .svg file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def curves(
    *runs: str | Path | RunData, metrics: Sequence[str] = ("reward", "accuracy"), window: int = WINDOW
) -> Picture:
    """Metrics of one or several runs over the steps: means of the last ``window`` steps, the values themselves faintly
    behind them, and with ``accuracy`` the held-out accuracy with its 95 % interval, with ``loss`` that of trew sft.

        trew.curves("runs/first")
        trew.curves("runs/a", "runs/b", metrics=["reward"]).save("reward.svg")

    Every name in metrics.jsonl is a metric (docs/runs.md lists them). Raises ConfigError for one that no row has, and
    without a run.
    """
    if not runs:
        raise ConfigError('trew.curves: got no run, accepts folders of runs: trew.curves("runs/first")')
    loaded = [run if isinstance(run, RunData) else load_run(run) for run in runs]
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)  # one name is no list of letters
    _refuse_unknown(metrics, loaded)
    if window < 1:
        raise ConfigError(f"window: got {window}, accepts a number of steps of at least 1, which smooths nothing")
    series: list[Series] = []
    for run, name in zip(loaded, names_of([run.folder for run in loaded]), strict=True):
        named = f"{name} " if len(loaded) > 1 else ""
        for metric in metrics:
            # Each metric adds three series of one colour.
            series += _series(run.rows, metric, colour=len(series) // 3, named=named, window=window)
    return Picture(line_chart(series, y_label="" if len(metrics) > 1 else metrics[0], width=720, height=300))


def _refuse_unknown(metrics: Sequence[str], runs: Sequence[RunData]) -> None:
    """Raises ConfigError without a metric, and for one that no row has: its line would only be missing."""
    rows = [row for run in runs for row in run.rows]
    known = dict.fromkeys(name for row in rows for name in row if name != "step")
    if not metrics:
        raise ConfigError("metrics: got none, accepts names of metrics.jsonl, such as 'reward'")
    # Of a run that has just begun not every name is known; and the default is for runs of all kinds.
    if all(is_evaluation(row) for row in rows):
        return
    for metric in metrics:
        if metric not in known and metric not in ("reward", "accuracy"):
            raise ConfigError(f"metrics: got {metric!r}{nearest(metric, known)}, accepts {', '.join(known)}")


def _series(
    rows: Sequence[Mapping[str, Any]], metric: str, *, colour: int, named: str, window: int
) -> tuple[Series, Series, Series]:
    """A metric as faint values, their running mean, and the evaluations that belong to it."""
    # Rows without the metric leave gaps in the steps, not zeros.
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    x, y = [step for step, _ in points], [value for _, value in points]
    names = _HELD_OUT.get(metric, _HELD_OUT["accuracy"])
    evals = [row for row in rows if row.get(names[0]) is not None] if metric in _HELD_OUT else []
    # An evaluation without an interval is a point without a bar.
    held_out = [[row[names[0]] if row.get(name) is None else row[name] for row in evals] for name in names]
    # Neither one row nor the loss of a reward model has any.
    known = any(row.get(name) is not None for row in evals for name in names[1:])
    label = f"{named}held out{', 95 %' * known}" if evals else ""
    return (
        Series("", x, y, style="faint", colour=colour),
        Series(f"{named}{metric}", x, running_mean(y, window=window, steps=x), colour=colour),
        Series(label, [row["step"] for row in evals], *held_out, style="points", colour=colour),
    )


def display() -> Display:
    """The display for the place where this runs: below the cell in a notebook, else standard output."""
    return Notebook() if in_notebook() else Display()


def in_notebook() -> bool:
    """Whether this is a cell of a notebook (Jupyter, VS Code, Colab), not a terminal, with IPython or without."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # In a terminal, IPython's shell has no kernel.
    return getattr(shell, "kernel", None) is not None


class Notebook(Silent):
    """Shows a run as one block below the cell, which changes in place: progress, curves, the last row, samples,
    warnings, and accuracy before and after."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._warnings: list[str] = []
        self._rows: list[Mapping[str, Any]] = []
        self._bars: list[_CellBar] = []
        self._samples = ""
        self._table = ""
        self._handle: Any = None
        self._shown_at = 0.0

    def line(self, text: str) -> None:
        self._lines.append(text)
        self.show()

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self.show()

    def warned(self, texts: Sequence[str]) -> None:
        """The warnings are on the page already."""

    @contextmanager
    def bar(self, name: str, total: int, *, done: int = 0) -> Iterator[Bar]:
        bar = _CellBar(self, name, total, done)
        self._bars.append(bar)
        self.show()
        try:
            yield bar
        finally:
            self._bars.remove(bar)
            self.show()

    def step(self, row: Mapping[str, Any]) -> None:
        self._add(row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        step, kind = row["step"], is_evaluation(row)
        # A second run begins at 0, a resumed one behind its checkpoint: curves of both would run back and forth.
        if self._rows and self._rows[-1]["step"] >= step:
            self._rows = [r for r in self._rows if r["step"] < step or (r["step"] == step and is_evaluation(r) != kind)]
        self._rows.append(row)
        self.show()

    def samples(self, groups: list[ScoredGroup], *, limit: int = SAMPLES) -> None:
        for scored in groups:
            ranked = sorted(
                zip(scored.scores, scored.group.rollouts, strict=True),
                key=lambda pair: (pair[0].value is None, -(pair[0].value or 0.0)),
            )
            # The best ones, and the worst.
            picked = ranked[: limit - 1] + ranked[-1:] if len(ranked) > 1 else ranked
            cells = [(("none" if s.value is None else f"{s.value:.3g}"), r.text) for s, r in picked]
            prompt = scored.group.prompt
            question = (
                prompt.text if prompt.text is not None else (prompt.messages or ({"content": ""},))[-1]["content"]
            )
            self._samples = _samples(question or "", cells)
        self.show()

    def before_after(self, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> None:
        rows = []
        for name, result in (("before training", before), ("after training", after)):
            if result:
                own = {name: result} | {f"– {one}": of for one, of in result.get("sets", {}).items()}
                rows += [(f"{what} (n = {of['n']})", *accuracy_cells(of["accuracy"])) for what, of in own.items()]
        self._table = _html_table(("held-out prompts", "accuracy", "95 % interval"), rows)
        self.show()

    def losses(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        rows = []
        paired = before.get("accuracy") is not None  # of preference pairs
        for name, result in (("before training", before), ("after training", after)):
            loss = result["loss"]
            ends = "-" if loss["low"] is None else f"{loss['low']:.3f} to {loss['high']:.3f}"
            last = f"{result['accuracy']['mean']:.3f}" if paired else f"{result['perplexity']:.4g}"
            rows.append((f"{name} (n = {result['rows']})", f"{loss['mean']:.3f}", ends, last))
        self._table = _html_table(
            ("held-out rows", "loss", "95 % interval", "accuracy" if paired else "perplexity"), rows
        )
        self.show()

    def files(self, files: Mapping[str, str]) -> None:
        self._lines += [f"{name}: {path}" for name, path in files.items()]
        self.show()

    # ---- the block below the cell

    def show(self, *, least_s: float = 0.0) -> None:
        """Draws the block again, unless that was done within ``least_s`` seconds."""
        # Every update is sent to the browser, and a progress bar would send hundreds in a second.
        if time.monotonic() - self._shown_at < least_s:
            return
        from IPython.display import HTML  # type: ignore[import-not-found]
        from IPython.display import display as show_in_cell  # type: ignore[import-not-found]

        block = HTML(self.html())
        # The first time makes the block; later ones replace its content.
        if self._handle is None:
            self._handle = show_in_cell(block, display_id=True)
        else:
            self._handle.update(block)
        self._shown_at = time.monotonic()

    def html(self) -> str:
        """The block as it is now."""
        parts = [f'<div style="font-weight:600">{_text(line)}</div>' for line in self._lines[:1]]
        parts += [f'<div style="opacity:.75">{_text(line)}</div>' for line in self._lines[1:]]
        parts += [bar.html() for bar in self._bars]
        parts.append(self._chart())
        parts.append(self._last_row())
        parts += [f'<div style="color:#b45309">warning: {_text(text)}</div>' for text in self._warnings]
        parts += [self._samples, self._table]
        return f'<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:760px">{"".join(parts)}</div>'

    def _chart(self) -> str:
        # Rows of trew sft have an epoch, and no reward.
        metrics = ("loss",) if any("epoch" in row for row in self._rows) else ("reward", "accuracy")
        steps = [row for row in self._rows if row.get(metrics[0]) is not None]
        if len(steps) < 2:
            return ""
        series: list[Series] = []
        for colour, metric in enumerate(metrics):
            series += _series(self._rows, metric, colour=colour, named="", window=WINDOW)
        # As an image: viewers of notebooks that nobody trusts remove styles and SVG from HTML.
        svg = base64.b64encode(line_chart(series, width=720, height=260).encode()).decode()
        return f'<img alt="{" and ".join(metrics)} over the steps" src="data:image/svg+xml;base64,{svg}">'

    def _last_row(self) -> str:
        rows = [row for row in self._rows if not is_evaluation(row)]
        if not rows:
            return ""
        columns = columns_of(rows[-1]).items()
        shown = [(head, form.format(v)) for k, (head, form) in columns if (v := rows[-1].get(k)) is not None]
        return _html_table([head for head, _ in shown], [[value for _, value in shown]])


class _CellBar(Bar):
    """A progress bar inside a :class:`Notebook`."""

    def __init__(self, owner: Notebook, name: str, total: int, done: int) -> None:
        super().__init__(None, total, done)
        self._owner, self._name, self._note = owner, name, ""

    def advance(self, count: int = 1) -> None:
        super().advance(count)
        self._owner.show(least_s=0.0 if self.done >= self.total else REFRESH_S)

    def note(self, text: str) -> None:
        self._note = text
        self._owner.show(least_s=REFRESH_S)

    def html(self) -> str:
        spent = time.monotonic() - self.start
        left = spent / max(self.done - self.first, 1) * (self.total - self.done)
        time_left = f", {duration(left)} left" if self.done > self.first else ""
        note = f", {_text(self._note)}" if self._note else ""
        return (
            f'<div>{_text(self._name)}: <progress value="{self.done}" max="{max(self.total, 1)}" '
            f'style="width:240px;vertical-align:middle"></progress> {self.done} of {self.total}{time_left}{note}</div>'
        )


def _samples(question: str, cells: Sequence[tuple[str, str]]) -> str:
    pre = 'style="white-space:pre-wrap;text-align:left;vertical-align:top;padding:2px 8px"'
    rows = "".join(
        f"<tr><td {pre}>reward {_text(v)}</td><td {pre}>{_text(shorten(t, LONGEST))}</td></tr>" for v, t in cells
    )
    return (
        f"<details><summary>a prompt of this step, with its best and its worst completion</summary><table>"
        f"<tr><td {pre}>prompt</td><td {pre}>{_text(shorten(question, LONGEST))}</td></tr>{rows}</table></details>"
    )


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = 'style="text-align:right;padding:2px 8px"'
    heads = "".join(f"<th {cell}>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td {cell}>{_text(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{heads}</tr>{body}</table>"


def _text(text: str) -> str:
    """Text of models, data and libraries as HTML that shows it; secrets masked, control characters visible."""
    return escape(visible(redact(text)))
