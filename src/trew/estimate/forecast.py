"""Forecasts a run on servers before it starts: seconds per step, idle shares, ages of groups, by bound.

Rates are given, measured in an earlier run, measured on this machine, or assumed; each says which. The simulation
(:mod:`.simulation`) does the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, load
from ..config.cluster import server_option
from ..errors import ConfigError, ResumeError
from ..objective import Objective
from ..runs import changes
from . import times
from .cluster import Fleet
from .simulation import Forecast, LengthDraw, Work, log_normal, simulate
from .sizes import Sizes, in_passes, sizes_of, sizes_of_critic, sizes_of_teacher
from .virtual_servers import ServerSpecs

RATES = {
    "token_s": "seconds of a server's iteration with a single sequence",
    "sequence_s": "seconds more for each further sequence",
    "slots": "sequences that a server decodes at a time",
    "update_s": "seconds that the learner computes per step",
    "sync_s": "seconds for which new weights stop learner and servers",
    "tokens": "mean length of a completion",
    "sigma": "standard deviation of the logarithm of lengths",
}
"""What ``--rates`` sets."""
GPU_BYTES_S, GPU_FLOPS, GPU_SHARE = 3.35e12, 989e12, 0.4
"""Of an H100 SXM by its data sheet, memory and dense bfloat16; and the share of both that a run is assumed to reach."""
SYNC_BYTES_S = 2e9
"""Of weights that servers load while they stand still, as measured on CPUs (benchmarks/results/cluster.json)."""
MEAN_SHARE, SIGMA = 1 / 3, 0.8
"""Lengths where nothing is known: log-normal, with a mean of this share of ``rollout.max_tokens``."""
BOUNDS = (0, 1, 2, 4)
"""Shown beside the recipe's own staleness, while a step has at most ``MANY`` completions."""
MANY = 50_000


@dataclass(frozen=True, slots=True)
class Rate:
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecasts by staleness, and what they rest on. ``lengths``: where those of completions come from."""

    rates: dict[str, Rate]
    lengths: str
    forecasts: dict[int, Forecast]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an earlier run shows: the lengths of each group's completions, and the learner's seconds per completion;
    None if the run was synchronous, whose metrics do not tell them from the servers' seconds."""

    name: str
    groups: tuple[np.ndarray, ...]
    update_s: float | None

    @classmethod
    def of(cls, run: Path) -> Measured:
        """Reads a run folder. Raises ConfigError if it is none or has no completions."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        try:
            config = load(run / "config.toml")
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
            table = pq.read_table(run / "rollouts", columns=["step", "group", "sampled"])
            # Steps before were made under other settings than config.toml's.
            begun = max((change.step for change in changes.in_folder(run)), default=-1)
        except (OSError, ValueError, ConfigError, ResumeError) as error:
            raise ConfigError(
                f"--like: {run} cannot be read ({error}); give the folder of a run that has completions in rollouts/"
            ) from None
        found: dict[tuple[int, int], list[int]] = {}
        # Only sampled tokens cost decoding steps; tokens of tools and environments are prefilled.
        for row in table.filter(pc.field("step") > begun).to_pylist():
            found.setdefault((row["step"], row["group"]), []).append(max(1, sum(row["sampled"])))
        if not found:
            raise ConfigError(f"--like: {run} has no completions; give a run that has finished a step")
        # The first step compiles and allocates.
        own = [row["update/seconds"] for row in rows if "update/seconds" in row and row["step"] > begun][1:]
        completions = config.rollout.prompts * config.rollout.completions
        update_s = float(np.median(own)) / completions if own else None
        return cls(str(run), tuple(np.array(lengths, float) for lengths in found.values()), update_s)

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Draws from one group: completions of one prompt have similar lengths."""
        group = self.groups[int(rng.integers(len(self.groups)))]
        return rng.choice(group, n, replace=n > len(group))


def read_rates(given: Sequence[str]) -> dict[str, float]:
    """Reads ``key=value`` of ``--rates``. Raises ConfigError with all problems."""
    found, problems = {}, []
    for each in given:
        key, _, text = each.partition("=")
        if key not in RATES:
            problems.append(f"--rates: got {key!r}, accepts {', '.join(f'{k} ({what})' for k, what in RATES.items())}")
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        least = 1 if key in ("slots", "tokens") else 0
        if not (least <= value < math.inf) or (key == "token_s" and value == 0):
            problems.append(f"--rates: got {key}={text}, accepts a number of at least {least}, and token_s above 0")
        found[key] = value
    if problems:
        raise ConfigError(problems)
    return found


def outlook(
    config: Config,
    *,
    objective: Objective,
    prompt: int,
    fleet: Fleet,
    sequences: int | None,
    given: Mapping[str, float],
    like: Measured | None,
) -> Outlook:
    """Simulates the recipe's run, and for comparison others of :data:`BOUNDS`. ``sequences``: of full length that a
    server's cache holds."""
    # First come, first served: setdefault keeps what is given over what was measured, and both over what is assumed.
    rates = {name: Rate(value, "given") for name, value in given.items()}
    lengths, tokens, draw = _lengths(config, rates, like)
    completions = config.rollout.prompts * config.rollout.completions
    if like is not None and like.update_s is not None:
        rates.setdefault("update_s", Rate(like.update_s * completions, f"measured in {like.name}, by completions"))
    # As servers are started (rollout.vllm.launch.options), by a run and by trew serve.
    slots = int(server_option(config.cluster, "max-num-seqs", config.rollout.batch))
    if sequences is not None and 0 < sequences < slots:
        rates.setdefault("slots", Rate(sequences, "of full length that a server's cache holds, by the map above"))
    rates.setdefault("slots", Rate(slots, "max-num-seqs of a server: rollout.batch, or what cluster.server_args has"))
    # Behind the slots, which rates of CPUs depend on.
    sizes = sizes_of(config)
    needed = _Need.of(sizes, config, objective, prompt=prompt, tokens=tokens)
    for name, rate in (_on_gpus if fleet.gpus else _on_cpus)(sizes, config, needed, fleet, given=rates).items():
        rates.setdefault(name, rate)
    # ---- the recipe's own bound, and others to compare with
    bounds = {config.cluster.staleness}
    if completions <= MANY and not config.cluster.colocate:
        bounds |= set(BOUNDS)
    ordered = {name: rates[name] for name in RATES if name in rates}
    return Outlook(ordered, lengths, {b: _simulated(config, ordered, draw, b) for b in sorted(bounds)})


def _lengths(config: Config, rates: dict[str, Rate], like: Measured | None) -> tuple[str, float, LengthDraw]:
    """Where completions' lengths come from, their mean, and how they are drawn: as those of ``like`` unless ``rates``
    give some, else log-normal, where ``rates`` get what is assumed."""
    if like is not None and not rates.keys() & {"tokens", "sigma"}:
        mean = float(np.mean(np.concatenate(like.groups)))
        return f"those of {len(like.groups)} groups of {like.name}, {mean:,.0f} tokens in the mean", mean, like.draw
    most = config.sampled_tokens  # of an episode, in all of its turns
    third = "assumed: a third of rollout.max_tokens" + (" in each of environment.turns" if config.plays else "")
    rates.setdefault("tokens", Rate(max(1.0, MEAN_SHARE * most), third))
    rates.setdefault("sigma", Rate(SIGMA, "assumed"))
    mean = rates["tokens"].value
    return "log-normal, cut at rollout.max_tokens", mean, log_normal(mean, rates["sigma"].value, most)


def _simulated(config: Config, rates: Mapping[str, Rate], draw: LengthDraw, staleness: int) -> Forecast:
    count = config.cluster.servers or len(config.cluster.endpoints)
    servers = ServerSpecs(count, int(rates["slots"].value), rates["token_s"].value, rates["sequence_s"].value)
    warm_up = 5 + staleness  # until the ages of groups are what they stay
    work = Work(
        config.rollout.prompts, config.rollout.completions, staleness, rates["update_s"].value, rates["sync_s"].value,
        draw, steps=warm_up + 20, warm_up=warm_up,
    )  # fmt: skip
    return simulate(servers, work)


# ---- rates of hardware


@dataclass(frozen=True, slots=True)
class _Need:
    """Floating-point operations: of a decoded token, 2 (N_l + V H); and of a step's learning without attention, with
    3 passes over all tokens in each inner update, and one for each time that log-probs alone are computed; a critic and
    a teacher that is loaded here by their sizes."""

    token: float
    update: float

    @classmethod
    def of(cls, s: Sizes, config: Config, objective: Objective, *, prompt: int, tokens: float) -> _Need:
        rollout, learner = config.rollout, config.learner
        token = 2.0 * (s.linear + s.head)
        # A group's prompt is fed once, and each of its completions.
        fed = rollout.prompts * (prompt + rollout.completions * tokens)
        # Forward, and backward for inputs; backward for weights only where they are trained.
        backward = (2 if config.lora.rank else 3) + learner.gradient_checkpointing
        critic = in_passes(sizes_of_critic(config) if "values" in objective.needs else None, s)
        backward += critic * (3 + learner.gradient_checkpointing)
        apart = int("ref_logprobs" in objective.needs) + times.policy_passes(config, objective)
        apart += critic + in_passes(sizes_of_teacher(config), s)
        return cls(token, token * fed * (backward * learner.inner_updates + apart))


def _on_gpus(s: Sizes, config: Config, need: _Need, fleet: Fleet, *, given: Mapping[str, Rate]) -> dict[str, Rate]:
    cluster = config.cluster
    width = 2 if config.learner.dtype == "bfloat16" else 4
    taken = 0 if cluster.colocate else cluster.servers * cluster.server_gpus
    ranks = cluster.learner or max(1, fleet.nodes * fleet.gpus - taken)
    gpu = f"assumed: {GPU_SHARE:.0%} of an H100's"
    # Decoding few sequences is bound by memory: an iteration reads all weights, b N / GPUs of a server.
    read = width * s.weights / cluster.server_gpus / (GPU_SHARE * GPU_BYTES_S)
    return {
        "token_s": Rate(read, f"{gpu} memory bandwidth, which reads the weights"),
        "sequence_s": Rate(need.token / cluster.server_gpus / (GPU_SHARE * GPU_FLOPS), f"{gpu} bfloat16 rate"),
        "update_s": Rate(need.update / ranks / (GPU_SHARE * GPU_FLOPS), f"{gpu} bfloat16 rate on {ranks} GPUs"),
        "sync_s": _sync(width * s.weights),
    }


def _on_cpus(s: Sizes, config: Config, need: _Need, fleet: Fleet, *, given: Mapping[str, Rate]) -> dict[str, Rate]:
    wanted = {"token_s", "sequence_s", "update_s"} - set(given)
    found = {"sync_s": _sync((2 if config.learner.dtype == "bfloat16" else 4) * s.weights)}
    if not wanted:
        return found
    slots = int(given["slots"].value)
    rate = times.rates(s, config, rows=1, tokens=max(2, slots), device="cpu")
    share, here = times.SHARE["plain"], "measured: matrix products on this machine"
    # A straight line through an iteration with one sequence and one with all slots.
    one, all_of = need.token / (share * rate.few), slots * need.token / (share * rate.many)
    return found | {
        "token_s": Rate(one, here),
        "sequence_s": Rate(max(0.0, all_of - one) / max(1, slots - 1), here),
        "update_s": Rate(need.update / (share * rate.many), f"{here}, all of which the learner has"),
    }


def _sync(size: float) -> Rate:
    return Rate(size / SYNC_BYTES_S, f"assumed: {SYNC_BYTES_S / 1e9:g} GB/s")


# ---- as text


def table(found: Outlook, config: Config) -> list[str]:
    """Formats an outlook for people."""
    lines = ["", "forecast, by a simulation that drives the ledger of real runs:"]
    lines.append(f"{'staleness':<11}{'s per step':>11}{'learner waits':>15}{'servers idle':>14}   ages of groups")
    for bound, made in found.forecasts.items():
        ages = ", ".join(f"{age}: {share:.0%}" for age, share in made.ages.items() if share >= 0.005)
        mark = " <- this recipe" if bound == config.cluster.staleness and len(found.forecasts) > 1 else ""
        lines.append(
            f"{bound:<11}{made.seconds:>11.3g}{made.learner_idle:>15.0%}{made.servers_idle:>14.0%}   {ages}{mark}"
        )
    lines += ["", "it rests on (--rates sets them, --like RUN measures):", f"{'lengths':<11}{'':>11}   {found.lengths}"]
    lines += [f"{name:<11}{rate.value:>11.3g}   {rate.source}; {RATES[name]}" for name, rate in found.rates.items()]
    if any(rate.source.startswith("assumed") for rate in found.rates.values()):
        lines.append("what is assumed may be wrong by a factor: measure it before you decide by it")
    return lines


def as_json(found: Outlook) -> dict[str, Any]:
    """Formats an outlook for programs."""
    forecasts = {str(bound): asdict(made) for bound, made in found.forecasts.items()}
    return {"forecasts": forecasts, "lengths": found.lengths, "rates": {n: asdict(r) for n, r in found.rates.items()}}
