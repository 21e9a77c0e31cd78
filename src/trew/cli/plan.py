"""``trew plan``: estimates what a run needs, without loading any weights."""

from __future__ import annotations

import json as json_
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..estimate.cluster import Fleet
    from ..estimate.forecast import Outlook
    from ..training.planning import Plan


def plan(
    recipe: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    set: tuple[str, ...] = (),
    cluster: bool = False,
    nodes: int = 1,
    gpus: int | None = None,
    gpu_gib: float | None = None,
    rates: tuple[str, ...] = (),
    like: Path | None = None,
    json: bool = False,
) -> int:
    """Estimate the memory and time that a recipe needs, by part, and what to change if it does not fit.

    Checks the recipe as `trew train --dry-run` does and loads no weights. Assumes prompts and completions of the
    maximum length. docs/memory.md gives the accuracy of memory estimates; times are rough. Exit code 1 if the run does
    not fit this machine. For several ranks, and with --cluster, shows which rank and which server is on which device
    instead, with the bytes of each; and for runs on servers a forecast: seconds per step, the shares of the time in
    which learner and servers wait, and how old groups are when they are trained on, for several values of
    cluster.staleness. The forecast says what it assumed. docs/scale.md says how far it was right.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, overrides the recipe: --set lora.rank=16 learner.microbatch_tokens=2048
        cluster: Show which ranks and servers of [cluster] are on which device.
        nodes: With --cluster, the number of machines.
        gpus: With --cluster, the GPUs of each machine; without it, those of this one.
        gpu_gib: With --gpus, the memory of each GPU in GiB, for example 80.
        rates: With --cluster, key=value of what the forecast rests on: token_s and sequence_s (seconds of a server's
            iteration with one sequence, and more for each further one), slots (sequences of a server at a time),
            update_s and sync_s (seconds of the learner, and of new weights, per step), tokens and sigma (mean length
            of completions, and the standard deviation of its logarithm). What is not given is measured or assumed.
        like: With --cluster, a run whose completions' lengths, and learner's seconds, the forecast takes.
        json: Print one JSON object: bytes and seconds.
    """
    from ..estimate import Machine, estimate, knobs, table
    from ..estimate.text import as_json
    from ..training import planning
    from ..utils.console import Display

    fleet = _fleet(cluster=cluster, nodes=nodes, gpus=gpus, gpu_gib=gpu_gib)
    if fleet is None and (rates or like):
        raise ConfigError(f"--{'rates' if rates else 'like'}: has no effect without --cluster; add --cluster")
    display = Display()
    made = planning.plan(planning.read(recipe, set), bar=None if json else display.bar)
    # Several ranks are on several devices, even without --cluster.
    if fleet is not None or made.config.cluster.learner != 1:
        from ..estimate import cluster as clusters
        from ..estimate import forecast

        here = fleet or clusters.Fleet.here()
        found = clusters.cluster_map(
            made.config, objective=made.objective, prompt=made.longest, held_out=len(made.eval), fleet=here
        )
        made_of = _outlook(made, found.sequences, here, rates=rates, like=like) if cluster else None
        if json:
            more = {} if made_of is None else {"forecast": forecast.as_json(made_of)}
            print(json_.dumps(clusters.as_json(found) | more, indent=1))
        else:
            lines = [] if made_of is None else forecast.table(made_of, made.config)
            print("\n".join([*clusters.table(found), *lines]))
        return int(not found.fits)
    # ---- one process on this machine
    machine = Machine.of(made.device, adapters=made.config.lora.rank > 0)
    needs = estimate(
        made.config, machine=machine, objective=made.objective, prompt=made.longest, held_out=len(made.eval)
    )
    turns = knobs(needs)
    if json:
        print(json_.dumps(as_json(needs, turns), indent=1))
    else:
        print("\n".join(table(needs, turns)))
        if made.config.cluster.rollout == "vllm":
            print("\nservers are not counted: trew plan --cluster shows them")
    # False only: None means that the machine's memory is not known.
    return int(needs.fits is False)


def _outlook(
    plan: Plan, sequences: int | None, fleet: Fleet, *, rates: Sequence[str], like: Path | None
) -> Outlook | None:
    """The forecast of a run on servers; None for others."""
    from ..estimate import forecast

    given = forecast.read_rates(rates)
    if plan.config.cluster.rollout != "vllm":
        if given or like:
            raise ConfigError("--rates, --like: forecasts are for runs on servers; set cluster.rollout = 'vllm'")
        return None
    measured = None if like is None else forecast.Measured.of(like)
    return forecast.outlook(
        plan.config, objective=plan.objective, prompt=plan.longest, fleet=fleet, sequences=sequences, given=given,
        like=measured,
    )  # fmt: skip


def _fleet(*, cluster: bool, nodes: int, gpus: int | None, gpu_gib: float | None) -> Fleet | None:
    """The machines that --cluster plans for; None without it."""
    if not cluster:
        given = {"--nodes": nodes != 1, "--gpus": gpus is not None, "--gpu-gib": gpu_gib is not None}
        if unused := [flag for flag, there in given.items() if there]:
            raise ConfigError(f"{unused[0]}: has no effect without --cluster; add --cluster, or remove it")
        return None
    if nodes < 1 or (gpus or 0) < 0:
        raise ConfigError(f"--nodes, --gpus: got {nodes} and {gpus}, accepts 1 or more machines, 0 or more GPUs")
    from ..estimate.cluster import GIB, Fleet

    here = Fleet.here()
    if gpus is None:
        if gpu_gib is not None:
            raise ConfigError("--gpu-gib: says how large the GPUs of --gpus are; give --gpus too")
        return Fleet(nodes, here.gpus, here.gpu_bytes, here.cpu_bytes)
    if gpu_gib is not None and not 0 < gpu_gib < math.inf:
        raise ConfigError(f"--gpu-gib: got {gpu_gib}, accepts GiB above 0, for example 80")
    # Another machine: how much memory it has besides that of its GPUs is not known.
    memory = here.cpu_bytes if gpus == 0 and nodes == 1 else None
    return Fleet(nodes, gpus, None if gpu_gib is None else int(gpu_gib * GIB), memory)
