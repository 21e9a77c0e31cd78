"""Formats an estimate as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .advice import Knob
from .run import Estimate

MIB = 2**20


def table(e: Estimate, turns: Sequence[Knob]) -> list[str]:
    """Formats the whole estimate for people."""
    lines = [*_about(e), "", *_memory(e), "", *summary(e)]
    if turns:
        lines += ["", f"{'to need less':<72}{'peak, MiB':>12}{'s/step':>9}"]
        for knob in turns:
            mark = "  fits" if knob.fits and not e.fits else ""
            lines.append(f"  {knob!s:<70}{_mib(knob.peak):>12}{knob.seconds:>9.3g}{mark}")
    return lines


def _about(e: Estimate) -> list[str]:
    """Formats what was estimated: the model, the size of a step, and the code that would run it."""
    c, s = e.config, e.sizes
    trained = "" if s.trained == s.weights else f", {_count(s.trained)} of them trained"
    if c.lora.rank:
        trained = f", and adapters of {_count(s.trained)}, which alone are trained"
    ours = {True: "trew's kernels", False: "the model's own forward"}
    if c.demonstrates:
        rows = "pairs" if c.prefers else "rows"
        return [
            f"model    {c.model}: {_count(s.weights)} weights{trained}; on {e.machine.device}",
            f"step     {c.sft.batch} {rows} of up to {e.prompt} tokens; micro-batches of {e.load.tokens} tokens",
            f"by       {ours[e.load.body is None]}",
        ]
    own = e.load.evaluation if "evaluating" in e.memory.parts else None
    evaluation = [] if own is None else [
        f"eval     {e.held_out} prompts x {c.eval.samples} completion{'s' * (c.eval.samples > 1)} of up to "
        f"{own.completion}; {own.rows} rows decoded at once"
    ]  # fmt: skip
    return [
        f"model    {c.model}: {_count(s.weights)} weights{trained}; on {e.machine.device}",
        f"step     {c.rollout.prompts} prompts of up to {e.prompt} tokens x {c.rollout.completions} completions of up "
        f"to {e.load.completion}; micro-batches of {e.load.tokens} tokens, {e.load.rows} rows decoded at once",
        *evaluation,
        f"by       generating: {ours[e.load.native_decode]}; training: {ours[e.load.body is None]}",
    ]


def _memory(e: Estimate) -> list[str]:
    """Formats the memory of every part in every phase, and the phases' sums."""
    lines = [f"{'memory, MiB':<14}" + "".join(f"{phase:>12}" for phase in e.memory.parts)]
    names = list(dict.fromkeys(part for parts in e.memory.parts.values() for part in parts))
    for name in names:
        values = [parts.get(name, 0) for parts in e.memory.parts.values()]
        if any(values):
            lines.append(f"  {name:<12}" + "".join(f"{_mib(v):>12}" for v in values))
    lines.append(f"  {'sum':<12}" + "".join(f"{_mib(e.memory.total(p)):>12}" for p in e.memory.parts))
    if e.memory.aside:
        lines.append(f"  and {_mib(e.memory.aside)} of moments in CPU memory")
    return lines


def summary(e: Estimate) -> list[str]:
    """Formats peak and time, one line each."""
    have = "how much is free is not known" if e.machine.free is None else f"{_mib(e.machine.free)} MiB can be had: "
    have += {True: "fits", False: "DOES NOT FIT", None: ""}[e.fits]
    step = sum(e.seconds.values())
    parts = ", ".join(f"{phase} {_two_digits(value)}" for phase, value in e.seconds.items())
    about, bound = "very roughly", ""
    if e.config.plays:
        # Nothing is known of what the environment will say, and built-in ones say a fifth of what they may, or less.
        about = "at most"
        bound = f", and with {e.config.environment.observation_tokens} tokens in every observation"
    return [
        f"memory   peak about {_mib(e.memory.peak)} MiB while {e.memory.peak_phase}; {have}",
        f"time     {about} {_two_digits(step)} s a step ({parts}), {_duration(step * e.config.steps)} for "
        f"{e.config.steps}; without rewards and evaluations, from products of {e.rates.many / 1e9:.0f} GFLOP/s"
        + ("" if e.config.demonstrates else f", {e.rates.few / 1e9:.0f} at {e.load.rows} rows{bound}"),
    ]


def as_json(e: Estimate, turns: Sequence[Knob]) -> dict[str, Any]:
    """Formats the whole estimate for programs, in bytes and seconds."""
    return {
        "model": e.config.model, "device": e.machine.device, "weights": e.sizes.weights, "trained": e.sizes.trained,
        "prompt_tokens": e.prompt, "microbatch_tokens": e.load.tokens, "rows": e.load.rows,
        "native": {"generating": e.load.native_decode, "training": e.load.body is None},
        "memory": e.memory.parts, "peak_bytes": e.memory.peak, "peak_phase": e.memory.peak_phase,
        "cpu_bytes": e.memory.aside, "free_bytes": e.machine.free, "fits": e.fits,
        "seconds": e.seconds, "seconds_per_step": sum(e.seconds.values()),
        "products_per_second": {"many": e.rates.many, "few": e.rates.few},
        "knobs": [
            {"set": k.settings, "peak_bytes": k.peak, "seconds_per_step": k.seconds, "fits": k.fits} for k in turns
        ],
    }  # fmt: skip


def _mib(count: int) -> str:
    return f"{count / MIB:,.0f}"


def _count(count: int) -> str:
    return next((f"{count / u:.3g} {n}" for u, n in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= u), str(count))


def _two_digits(value: float) -> str:
    """
    >>> _two_digits(107.3), _two_digits(4.56), _two_digits(0.0312)
    ('107', '4.6', '0.031')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(50), _duration(600), _duration(9000)
    ('50 s', '10 min', '2.5 h')
    """
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{_two_digits(seconds / unit)} {name}"
    return f"{seconds:.0f} s"
