"""Checks behind ``trew doctor verl``: yields (mark, what, says, todo) per line; marks are ok, note and bad.

verl does not report a plugin that it could not import. The registries are therefore read in a new process that imports
verl alone, as a training process does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from ...utils.installing import install_extra, install_trew
from .hooks import PolicyLoss
from .offered import table

Told = tuple[Literal["ok", "note", "bad"], str, str, str]
TESTED = ("0.9.1",)
VARIABLES = ("VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES", "TREW_VERL")
SECONDS = 300.0  # importing verl takes ten, more on a busy machine
# The registries are copied before our package is imported: it would register itself and hide that verl did not load it.
LOOK = """
import inspect, json, verl
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as estimators, POLICY_LOSS_REGISTRY as losses
found = [list(losses), list(estimators), list(inspect.signature(losses["vanilla"]).parameters)]
try:
    import trew.integrations.verl
    why = ""
except Exception as error:
    why = f"{type(error).__name__}: {error}"
print(json.dumps([*found, why]))
"""


def found() -> Iterator[Told]:
    """Checks version, entry point, environment variables, verl's registries, and which presets run there."""
    if importlib.util.find_spec("verl") is None:
        todo = f"to train with verl: run this in verl's environment, or {install_extra('verl')}"
        yield "note", "verl", "is not installed here, and trew does without it", todo
        return
    version = importlib.metadata.version("verl")
    if version in TESTED:
        yield "ok", "verl", f"{version}, a release that trew is tested with", ""
    else:
        yield (
            "note",
            "verl",
            f"{version}; trew is tested with {' and '.join(TESTED)}",
            f"use verl {TESTED[-1]} where what follows is not enough",
        )
    points = importlib.metadata.entry_points(group="verl.plugins")
    declared = any(point.value == __package__ for point in points)
    if declared:
        yield "ok", "entry point", "declared in verl.plugins", ""
    else:
        yield "note", "entry point", "not declared in this environment", install_trew()
    for name in VARIABLES:
        if value := os.environ.get(name):
            yield "note", "variable", f"{name} = {value}", ""
    yield from _registered(declared)
    for name, offer in table().items():
        if reason := offer.loss or offer.advantage:
            yield "note", name, f"not offered as {'a loss' if offer.loss else 'an estimator'}: {reason}", ""


def _registered(declared: bool) -> Iterator[Told]:
    done = None
    try:
        done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=SECONDS)
        # The last line: verl and its dependencies may print while they are imported.
        losses, estimators, arguments, why = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        last = [] if done is None else done.stderr.strip().splitlines()[-1:]
        yield "bad", "import", f"verl cannot be imported: {(last or [str(error)])[0]}", "repair verl first"
        return
    if why:
        yield "bad", "plugin", f"fails, which verl says nothing about: {why}", "repair this first"
    if unknown := {*arguments} - {*inspect.signature(PolicyLoss.__call__).parameters}:
        yield "bad", "hooks", f"verl calls a loss with {', '.join(sorted(unknown))}, unknown to trew", _OTHER
    offers = table()
    for what, there, wanted in (
        ("losses", losses, [name for name, offer in offers.items() if not offer.loss]),
        ("estimators", estimators, [name for name, offer in offers.items() if not offer.advantage]),
    ):
        missing = [name for name in wanted if f"trew-{name}" not in there]
        says = f"{len(wanted) - len(missing)} of trew's {len(wanted)} are registered with verl"
        yield ("bad", what, says, _todo(declared, why)) if missing else ("ok", what, says, "")


_OTHER = f"use verl {TESTED[-1]}, or a newer trew"


def _todo(declared: bool, why: str) -> str:
    if why:
        return "see plugin"
    chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if chosen.strip().lower() != "auto":
        return f"VERL_USE_EXTERNAL_PLUGINS={chosen} leaves trew out: unset it, or name trew in it"
    if not declared:
        return f"verl has not heard of trew: {install_trew()}, or VERL_USE_EXTERNAL_MODULES=trew.integrations.verl"
    return _OTHER
