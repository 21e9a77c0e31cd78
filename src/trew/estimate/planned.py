"""What a run is expected to need, for the run's own folder: the estimate of ``trew plan``, without times."""

from __future__ import annotations

from typing import Any

import torch

from ..config import Config
from ..objective import Objective
from .cluster import Fleet, cluster_map
from .memory import memory
from .run import Machine, load_of
from .sizes import sizes_of


def planned(config: Config, *, objective: Objective, prompt: int, held_out: int, device: str) -> dict[str, Any]:
    """Bytes by process, phase and part; ``why`` instead, if they cannot be estimated. Never raises: a run that can be
    trained does not fail because of its estimate.

    Only rank 0 of several calls this, before it has loaded anything.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # copies of the model draw weights, and the run's numbers stay
            processes = _processes(config, objective, prompt, held_out, device)
    except Exception as error:
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"prompt_tokens": prompt, "processes": processes}


def _processes(config: Config, objective: Objective, prompt: int, held_out: int, device: str) -> list[dict[str, Any]]:
    cluster = config.cluster
    if cluster.learner != 1 or cluster.servers:
        found = cluster_map(config, objective=objective, prompt=prompt, held_out=held_out, fleet=Fleet.here())
        return [_process(tenant.who, one.name, tenant.parts) for one in found.devices for tenant in one.tenants]
    sizes, machine = sizes_of(config), Machine.of(device, adapters=config.lora.rank > 0)
    needs = memory(sizes, config, load_of(config, sizes, objective, machine, prompt=prompt, held_out=held_out))
    return [_process("rank 0", device, needs.parts)]


def _process(who: str, device: str, parts: Any) -> dict[str, Any]:
    memory = {phase: {part: size for part, size in by_part.items() if size} for phase, by_part in parts.items()}
    return {"who": who, "device": device, "memory": memory, "peak_bytes": max(sum(p.values()) for p in memory.values())}
