"""A plugin of verl (0.9): importing it registers the presets that can run there under ``trew-NAME``.

verl imports it by the entry point ``verl.plugins``. ``loss_mode=trew-dapo`` and ``adv_estimator=trew-dapo`` then name
DAPO's policy loss and advantages; :func:`register` adds objectives of your own, and so does the variable ``TREW_VERL``:

    TREW_VERL='{"dapo-wide": {"preset": "dapo", "eps_high": 0.4}}'

Where verl is not installed nothing is registered, and the rest (rewards, the table of what is offered) works all the
same. What goes wrong is logged as an error before it is raised: verl itself keeps silent about a plugin that fails.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from typing import Any

from ...errors import ConfigError
from ...objective import Objective, preset, presets
from .hooks import AdvantageEstimator, PolicyLoss
from .offered import Offer, offer

__all__ = ["VARIABLE", "register", "offer", "registered"]

VARIABLE = "TREW_VERL"
PREFIX = "trew-"
_registered: dict[str, Objective] = {}


def register(name: str, objective: Objective) -> Offer:
    """Makes ``objective`` available to verl as policy loss and as advantage estimator ``name``, wherever it can be one.

    Call it in a module that every process of verl imports: name it in ``VERL_USE_EXTERNAL_MODULES``. Raises ConfigError
    with the reasons where it can be neither, and where the name is taken by something else.
    """
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]

    found = offer(objective)
    if found.loss and found.advantage:
        raise ConfigError([f"{name}: no policy loss of verl: {found.loss}", f"{name}: no estimator: {found.advantage}"])
    losses, estimators = core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY
    if _registered.get(name) == objective:
        return found
    if name in _registered or name in losses or name in estimators:
        raise ConfigError(f"{name!r}: is the name of another loss or estimator of verl's already; choose a new one")
    if not found.loss:
        core_algos.register_policy_loss(name)(PolicyLoss(name, objective))
    if not found.advantage:
        core_algos.register_adv_est(name)(AdvantageEstimator(name, objective))
    _registered[name] = objective
    return found


def registered() -> dict[str, Objective]:
    """Everything that :func:`register` took in this process, by name."""
    return dict(_registered)


def from_variable(text: str) -> dict[str, Objective]:
    """The objectives of ``TREW_VERL``: a JSON object of name -> {"preset": ..., settings}."""
    try:
        table: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: is not JSON ({error}); for example " + _EXAMPLE) from None
    if not isinstance(table, dict) or not all(isinstance(v, dict) and "preset" in v for v in table.values()):
        raise ConfigError(f"{VARIABLE}: got {text!r}, accepts names with a preset and its settings: {_EXAMPLE}")
    return {name: preset(**{"name": v["preset"]}, **{k: x for k, x in v.items() if k != "preset"})
            for name, v in table.items()}  # fmt: skip


_EXAMPLE = '{"dapo-wide": {"preset": "dapo", "eps_high": 0.4}}'


def _register_all() -> None:
    for name in presets():
        objective = preset(name)
        found = offer(objective)
        if not (found.loss and found.advantage):
            register(PREFIX + name, objective)
    for name, objective in from_variable(os.environ.get(VARIABLE, "") or "{}").items():
        register(name, objective)


if importlib.util.find_spec("verl") is not None:
    try:
        _register_all()
    except Exception as error:
        logging.getLogger(__name__).error("trew could not register with verl: %s: %s", type(error).__name__, error)
        raise
