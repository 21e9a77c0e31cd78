"""What the values of a token mean, for the page."""

from __future__ import annotations

from typing import Any


def _about(title: str, help: str, *, diverging: bool, middle: float = 0.0) -> dict[str, Any]:
    return {"title": title, "help": help, "diverging": diverging, "middle": middle}


ABOUT: dict[str, dict[str, Any]] = {
    "advantage": _about(
        "Advantage A",
        "positive: the objective wants this token to become likelier; negative: less likely",
        diverging=True,
    ),
    "coefficient": _about(
        "Coefficient C",
        "the gradient of the loss is the sum of -C times the gradient of the token's log-prob: how "
        "far, and in which direction, this token was pushed; where it is 0, nothing moved",
        diverging=True,
    ),
    "weight": _about(
        "Weight w(r, A)", "the trust region's weight: 0 means that it passed no gradient", diverging=False
    ),
    "ratio": _about(
        "Ratio r",
        "importance ratio of the policy to the old policy at the step's last update",
        diverging=True,
        middle=1.0,
    ),
    "logprob": _about("Log-prob", "of the policy at temperature 1, in nats", diverging=False),
    "sampling_logprob": _about(
        "Sampler's log-prob", "under the distribution it was drawn from, in nats", diverging=False
    ),
    "entropy": _about("Entropy", "of the next-token distribution, in nats: how open the choice was", diverging=False),
    "ref_logprob": _about(
        "Reference's log-prob", "of the reference model at the run's temperature, in nats", diverging=False
    ),
    "teacher_logprob": _about(
        "Teacher's log-prob", "of the teacher that a run distils, at the run's temperature, in nats", diverging=False
    ),
    "teacher_gap": _about(
        "Teacher minus policy",
        "difference of log-probs at the run's temperature, in nats: positive where the teacher finds the token "
        "likelier than the policy",
        diverging=True,
    ),
    "sampler_gap": _about(
        "Policy minus sampler",
        "difference of log-probs in nats: rounding, staleness, or sampling settings",
        diverging=True,
    ),
    "ref_gap": _about(
        "Policy minus reference",
        "difference of log-probs at the run's temperature, in nats: how far training moved this token",
        diverging=True,
    ),
}
