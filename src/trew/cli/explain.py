"""``trew explain``: describes objectives by their equations, numbers and a plot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import tyro

from ..config import apply_overrides
from ..errors import ConfigError, output_file

_MOST_DRAWN = 7
"""The colours of a plot but for the last, which its signs have."""


def explain(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    list: bool = False,
    plot: Path | None = None,
    ratios: tuple[float, float] | None = None,
    set: tuple[str, ...] = (),
) -> int:
    """Show objectives: equation with its numbers, settings, source, deviations, when to use which. Without a name: all.

    For example: trew explain dapo, trew explain grpo gspo sapo --plot w.svg, trew explain dapo --set eps_high=0.3,
    trew explain my.py:own

    Args:
        names: Presets, or FILE.py:NAME of your own; several are explained one after the other and drawn into one plot.
        list: One line each: advantage, ratio, weight, average, KL, paper.
        plot: Draw the weight w(r, A) and the coefficient over the ratio r, for A > 0 and A < 0, into this SVG file.
        ratios: The range of r, for example 0.9 1.1; default: what shows the objectives' trust regions.
        set: key=value, a setting of the objective over its default: --set eps_high=0.3 beta=0.01
    """
    from .describe import describe, known, listed, text

    overrides = _overrides(set)
    _check(names, list=list, plot=plot, ratios=ratios, overrides=overrides)
    columns = shutil.get_terminal_size((100, 40)).columns
    if list or not names:
        # Cut to the terminal's width; a pipe gets whole lines.
        print(listed(known(names) or None, width=columns if sys.stdout.isatty() else None))
        return 0
    width = min(columns, 100)
    described = [describe(name, **overrides) for name in known(names)]
    if plot is not None:
        from .curves import figure

        picture = figure([d.objective for d in described], ratios=ratios)
        with output_file(plot):
            plot.write_text(picture, encoding="utf-8")
    print(f"\n\n{'-' * width}\n\n".join(text(d, width=width) for d in described))
    if plot is not None:
        print(f"\nw(r, A) and the coefficient drawn into {plot}")
    return 0


def _overrides(settings: tuple[str, ...]) -> dict[str, object]:
    table: dict[str, object] = {}
    apply_overrides(table, settings)
    return table


def _check(
    names: tuple[str, ...],
    *,
    list: bool,
    plot: Path | None,
    ratios: tuple[float, float] | None,
    overrides: dict[str, object],
) -> None:
    """Refuses options that would have no effect."""
    problems = []
    given = {"--plot": plot is not None, "--ratios": ratios is not None, "--set": bool(overrides)}
    for option in (option for option, is_given in given.items() if is_given):
        if not names:
            problems.append(
                f"{option}: needs an objective: trew explain NAME {option} ...; trew explain --list shows all"
            )
        elif list:
            problems.append(f"{option}: has no effect with --list, which shows defaults; remove one of them")
    if plot is not None and len(names) > _MOST_DRAWN:
        problems.append(
            f"--plot: got {len(names)} objectives, accepts at most {_MOST_DRAWN}: there are no more colours; draw them "
            "into several files"
        )
    if ratios is not None and plot is None:
        problems.append("--ratios: has no effect without a plot; add --plot FILE.svg")
    if ratios is not None and not 0 <= ratios[0] < ratios[1] <= 1e4:
        problems.append(
            f"--ratios: got {ratios[0]:g} {ratios[1]:g}, accepts two numbers from 0 to 10000, the lower first"
        )
    if problems:
        raise ConfigError(problems)
