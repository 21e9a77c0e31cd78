"""``trew explain``: an objective, in words, numbers and a picture."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import ConfigError, output_file


def explain(
    name: Annotated[str, tyro.conf.Positional] = "",
    /,
    *,
    plot: Path | None = None,
) -> int:
    """Show an objective: equation, every choice, defaults, source and deviations. Without a name: the list of all.

    Args:
        name: Preset, for example dapo.
        plot: Draw the weight w(r, A) for A > 0 and A < 0 into this SVG file.
    """
    from ..objective import preset
    from ..objective.presets import PRESETS

    if plot is not None and not name:
        raise ConfigError("--plot: which objective? trew explain NAME --plot FILE; trew explain lists the names")
    if not name:
        width = max(map(len, PRESETS))
        for known, build in PRESETS.items():
            print(f"  {known:<{width}}  {(build.__doc__ or '').splitlines()[0]}")
        return 0
    objective = preset(name)
    if plot is not None:
        with output_file(plot):
            plot.write_text(weight_plot(name), encoding="utf-8")
    defaults = ", ".join(f"{p.name} = {p.default!r}" for p in inspect.signature(PRESETS[name]).parameters.values())
    print(inspect.cleandoc(PRESETS[name].__doc__ or ""))
    print(f"\n{objective.equation()}\n\nSettings: {defaults}")
    if plot is not None:
        print(f"\nWeight drawn into {plot}")
    return 0


def weight_plot(name: str) -> str:
    """w(r, A) over r in [0, 2] for both signs of A, as SVG."""
    import torch

    from ..objective import preset
    from ..report.svg import Series, line_chart

    objective = preset(name)
    ratio = torch.linspace(0.0, 2.0, 401)
    series = []
    for sign, label in ((1.0, "A > 0"), (-1.0, "A < 0")):
        weight = objective.weight(ratio, advantages=torch.full_like(ratio, sign))
        series.append(Series(label, ratio.tolist(), weight.tolist()))
    return line_chart(series, title=f"{name}: weight of a token", x_label="ratio r", y_label="w(r, A)")
