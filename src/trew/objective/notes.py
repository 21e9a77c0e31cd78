"""Notes on settings of an objective whose effect their names do not say."""

from __future__ import annotations

from .preferred import PreferenceWeight
from .ratio import GeometricRatio, Ratio
from .weight import Clip, Weight

WIDE = 0.1
"""A clip range of this size or more is meant for the ratio of a token, not of a sequence."""


def notes(*, ratio: Ratio, weight: Weight, beta: float = 0.0) -> tuple[str, ...]:
    """Lists settings that cannot have their intended effect, one sentence each.

    >>> notes(ratio=GeometricRatio(), weight=Clip(3e-4, 4e-4))
    ()
    """
    if isinstance(weight, PreferenceWeight) and beta:
        return (f"beta = {beta:g} is a KL term beside DPO's loss, whose own beta is dpo_beta = {weight.beta:g}",)
    if not (isinstance(ratio, GeometricRatio) and isinstance(weight, Clip)):
        return ()
    wide = [f"{k} = {v:g}" for k in ("eps_low", "eps_high") if (v := getattr(weight, k)) >= WIDE]
    if not wide:
        return ()
    return (
        f"{' and '.join(wide)}: a clip that never acts, since s_i is a mean over the tokens of a sequence and moves by "
        "thousandths; GSPO has 0.0003 and 0.0004",
    )
