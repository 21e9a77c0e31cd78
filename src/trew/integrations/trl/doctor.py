"""Checks behind ``trew doctor trl``: yields (mark, what, says, todo) per line; marks are ok, note and bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ...utils.installing import install_extra, install_packages
from . import hooks, refusals

Told = tuple[Literal["ok", "note", "bad"], str, str, str]


def found() -> Iterator[Told]:
    """Checks that TRL is installed and in which version, that our hooks fit, and which presets run there."""
    version = hooks.installed()
    known = " and ".join(f"{release}.x" for release in hooks.TESTED)
    if version is None:
        yield "note", "trl", "is not installed, and trew does without it", f"to train with TRL: {install_extra('trl')}"
        return
    if hooks.tested(version):
        yield "ok", "trl", f"{version}, a release that trew is tested with", ""
    else:
        yield "note", "trl", f"{version}; trew is tested with {known}", "look at the hooks below"
    try:
        import trl  # type: ignore[import-not-found]

        trainer = trl.GRPOTrainer
    # TRL imports lazily, so that reading the attribute runs the import; a broken dependency may raise anything.
    except Exception as error:
        yield (
            "bad",
            "import",
            f"trl.GRPOTrainer cannot be imported: {type(error).__name__}: {error}",
            "repair TRL first",
        )
        return
    problems = hooks.misfits(trainer)
    for problem in problems:
        yield "bad", "hooks", problem, install_packages(hooks.WORKS)
    if problems:
        return
    yield "ok", "hooks", f"all {len(hooks.HOOKS)} fit", ""
    # Only now: the module subclasses TRL's trainer, and its import fails where the checks above have failed.
    from .trainer import GRPOTrainer

    own = f"{GRPOTrainer.__module__}.{GRPOTrainer.__name__}"
    yield "ok", "trainer", f"{own} is active where it is used in place of trl.GRPOTrainer", ""
    runs, refused = refusals.offered()
    yield "ok", "presets", f"{len(runs)} run there; not {', '.join(refused)}", ""
