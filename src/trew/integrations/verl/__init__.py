"""A plugin for verl 0.9: importing it registers every preset that can run there as ``trew-NAME``.

verl imports it through the entry point ``verl.plugins``. ``loss_mode=trew-dapo`` and ``adv_estimator=trew-dapo`` then
select DAPO's policy loss and advantages. :func:`register` or the variable ``TREW_VERL`` adds custom objectives:

    TREW_VERL='{"dapo-wide": {"preset": "dapo", "eps_high": 0.4}}'

Without verl nothing is registered; the rest (rewards, the table of what is offered) still works. Errors are logged
before they are raised, because verl swallows the exceptions of plugins.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
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
    """Registers ``objective`` with verl as the policy loss and the advantage estimator ``name``, where it can be one.

    Call it in a module that every verl process imports; list that module in ``VERL_USE_EXTERNAL_MODULES``. Warns where
    the objective can be one of the two only, with the reason. Raises ConfigError with the reasons where it can be
    neither, where the name is taken, and for what is no objective.
    """
    if not isinstance(objective, Objective):
        raise ConfigError(f"objective: got {objective!r}, accepts an Objective, such as trew.preset('trw-logistic')")
    found = _register(name, objective)
    for half, key, why in (("policy loss", "loss_mode", found.loss), ("estimator", "adv_estimator", found.advantage)):
        if why:  # verl would only say that it knows no such name
            warnings.warn(f"{name}: is no {half} of verl's, so that {key}={name} does not exist: {why}", stacklevel=2)
    return found


def _register(name: str, objective: Objective) -> Offer:
    # Imported here: the registries exist only where verl is installed, and this package must import without it.
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]

    found = offer(objective)
    if found.loss and found.advantage:
        raise ConfigError([f"{name}: no policy loss of verl: {found.loss}", f"{name}: no estimator: {found.advantage}"])
    losses, estimators = core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY
    # Idempotent for the same objective, so that a module may run twice in one process.
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
    """Returns the objectives registered in this process, by name."""
    return dict(_registered)


def from_variable(text: str) -> dict[str, Objective]:
    """Parses ``TREW_VERL``: a JSON object of name -> {"preset": ..., settings}."""
    try:
        table: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: is not JSON ({error}); for example " + _EXAMPLE) from None
    if not isinstance(table, dict) or not all(isinstance(v, dict) and "preset" in v for v in table.values()):
        raise ConfigError(f"{VARIABLE}: got {text!r}, accepts names with a preset and its settings: {_EXAMPLE}")
    return {name: preset(v["preset"], **{k: x for k, x in v.items() if k != "preset"}) for name, v in table.items()}


_EXAMPLE = '{"dapo-wide": {"preset": "dapo", "eps_high": 0.4}}'


def _register_all() -> None:
    for name in presets():
        objective = preset(name)
        found = offer(objective)
        if not (found.loss and found.advantage):
            _register(PREFIX + name, objective)  # without a warning: the documentation lists what each is
    for name, objective in from_variable(os.environ.get(VARIABLE, "") or "{}").items():
        register(name, objective)


# On import, since an import is all that verl does with an entry point.
if importlib.util.find_spec("verl") is not None:
    try:
        _register_all()
    except Exception as error:
        logging.getLogger(__name__).error("trew could not register with verl: %s: %s", type(error).__name__, error)
        raise
