"""``trew plan``: estimates what a run needs, without loading any weights."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..estimate.cluster import Fleet


def plan(
    recipe: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    set: tuple[str, ...] = (),
    cluster: bool = False,
    nodes: int = 1,
    gpus: int | None = None,
    gpu_gib: float | None = None,
    json: bool = False,
) -> int:
    """Estimate the memory and time that a recipe needs, by part, and what to change if it does not fit.

    Checks the recipe as `trew train --dry-run` does and loads no weights. Assumes prompts and completions of the
    maximum length. docs/memory.md gives the accuracy of memory estimates; times are rough. Exit code 1 if the run does
    not fit this machine. For several ranks, and with --cluster, shows which rank and which server is on which device
    instead, with the bytes of each.

    Args:
        recipe: The recipe, a TOML file; docs/configuration.md lists its keys.
        set: key=value, overrides the recipe: --set lora.rank=16 learner.microbatch_tokens=2048
        cluster: Show which ranks and servers of [cluster] are on which device.
        nodes: With --cluster, the number of machines.
        gpus: With --cluster, the GPUs of each machine; without it, those of this one.
        gpu_gib: With --gpus, the memory of each GPU in GiB, for example 80.
        json: Print one JSON object: bytes and seconds.
    """
    from ..estimate import Machine, estimate, knobs, table
    from ..estimate.text import as_json
    from ..training import planning
    from ..utils.console import Display

    fleet = _fleet(cluster=cluster, nodes=nodes, gpus=gpus, gpu_gib=gpu_gib)
    display = Display()
    made = planning.plan(planning.read(recipe, set), bar=None if json else display.bar)
    if fleet is not None or made.config.cluster.learner != 1:
        from ..estimate import cluster as clusters

        fleet = fleet or clusters.Fleet.here()
        found = clusters.cluster_map(made.config, objective=made.objective, prompt=made.longest, fleet=fleet)
        print(json_.dumps(clusters.as_json(found), indent=1) if json else "\n".join(clusters.table(found)))
        return int(not found.fits)
    machine = Machine.of(made.device, adapters=made.config.lora.rank > 0)
    needs = estimate(made.config, machine=machine, objective=made.objective, prompt=made.longest)
    turns = knobs(needs)
    if json:
        print(json_.dumps(as_json(needs, turns), indent=1))
    else:
        print("\n".join(table(needs, turns)))
        if made.config.cluster.rollout == "vllm":
            print("\nservers are not counted: trew plan --cluster shows them")
    return int(needs.fits is False)


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
    if gpu_gib is not None and not gpu_gib > 0:
        raise ConfigError(f"--gpu-gib: got {gpu_gib}, accepts GiB above 0, for example 80")
    # Another machine: how much memory it has besides that of its GPUs is not known.
    memory = here.cpu_bytes if gpus == 0 and nodes == 1 else None
    return Fleet(nodes, gpus, None if gpu_gib is None else int(gpu_gib * GIB), memory)
