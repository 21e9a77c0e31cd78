"""What ``trew doctor verl`` finds: (mark, what, says, todo) of each line; marks are ok, note and bad.

verl says nothing about a plugin that it could not import, so the registries are looked at in a new process that imports
verl alone, as a training process does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from .offered import table

Told = tuple[Literal["ok", "note", "bad"], str, str, str]
TESTED = ("0.9.1",)
SECONDS = 300.0  # an import of verl takes ten, on a busy machine more
LOOK = """
import json, verl
from verl.trainer.ppo import core_algos
print(json.dumps([list(core_algos.POLICY_LOSS_REGISTRY), list(core_algos.ADV_ESTIMATOR_REGISTRY)]))
"""


def found() -> Iterator[Told]:
    """Versions, the entry point, the variables that decide, what verl has registered, and what runs there."""
    if importlib.util.find_spec("verl") is None:
        yield "bad", "verl", "is not installed", "run this in verl's environment, or pip install 'trew[verl]'"
        return
    version = importlib.metadata.version("verl")
    if version in TESTED:
        yield "ok", "verl", f"{version}, a release that trew is tested with", ""
    else:
        yield "note", "verl", f"{version}; trew is tested with {' and '.join(TESTED)}", "look at the registries below"
    if any(point.value == __package__ for point in importlib.metadata.entry_points(group="verl.plugins")):
        yield "ok", "entry point", "declared in verl.plugins", ""
    else:
        yield "note", "entry point", "not declared in this environment", "pip install trew here"
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES", "TREW_VERL"):
        if value := os.environ.get(name):
            yield "note", "variable", f"{name} = {value}", ""
    yield from _registered()
    for name, offer in table().items():
        if reason := offer.loss or offer.advantage:
            yield "note", name, f"not offered as {'a loss' if offer.loss else 'an estimator'}: {reason}", ""


def _registered() -> Iterator[Told]:
    try:
        done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=SECONDS)
        losses, estimators = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] if not isinstance(error, subprocess.TimeoutExpired) else []
        yield "bad", "import", f"verl cannot be imported: {(last or [str(error)])[0]}", "repair verl first"
        return
    offers = table()
    for what, there, wanted in (
        ("losses", losses, [name for name, offer in offers.items() if not offer.loss]),
        ("estimators", estimators, [name for name, offer in offers.items() if not offer.advantage]),
    ):
        missing = [name for name in wanted if f"trew-{name}" not in there]
        says = f"{len(wanted) - len(missing)} of trew's {len(wanted)} are registered with verl"
        if missing:
            todo = "python -c 'import trew.integrations.verl' shows why, and see VERL_USE_EXTERNAL_PLUGINS"
            yield "bad", what, says, todo
        else:
            yield "ok", what, says, ""
