"""The map of a run of several processes: who is on which device, with how many bytes.

Letters as in :mod:`.memory`, and: S ranks that share the weights (all with ``fsdp``, those of a node with ``hsdp``, 1
with ``none``), N_o = N - N_l the weights outside of layers (embedding, final norm, head).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config
from ..config.cluster import server_option
from ..models import loading
from ..objective import Objective
from ..utils.memory import free_bytes, used_bytes
from . import passes
from .memory import (
    Load,
    coefficients,
    critic,
    critic_gradients,
    critic_pass,
    head,
    low_copies,
    memory,
    optimizer,
    reference,
    samplings,
    weights,
)
from .run import LIBRARIES, Machine, load_of, of_rows
from .sizes import Sizes, sizes_of

GIB = 2**30
SERVER_WORK = 2 * GIB
"""Bytes of a server besides weights and cache: CUDA context, activations, graphs. vLLM measures it; this is a guess."""
VERSIONS = 3
"""Published versions that lie in memory at once, at most."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines of a run: ``nodes`` with ``gpus`` each (0: everything runs on the CPUs), and the bytes that can be
    had of each GPU and of each node's memory; None where that is not known."""

    nodes: int = 1
    gpus: int = 0
    gpu_bytes: int | None = None
    cpu_bytes: int | None = None

    @classmethod
    def here(cls) -> Fleet:
        """This machine as it is now."""
        import torch

        if not torch.cuda.is_available():
            return cls(cpu_bytes=free_bytes())
        count = torch.cuda.device_count()
        return cls(1, count, min(free_bytes(f"cuda:{i}") or 0 for i in range(count)), free_bytes())


@dataclass(frozen=True, slots=True)
class Tenant:
    """A process on a device: its bytes by phase and part. A server has one phase."""

    who: str
    parts: Mapping[str, Mapping[str, int]]

    @property
    def peak(self) -> int:
        return max(sum(phase.values()) for phase in self.parts.values())


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a node's CPUs and memory, with everybody on it. ``turns``: they use it one after the other."""

    name: str
    tenants: tuple[Tenant, ...]
    free: int | None
    turns: bool = False

    @property
    def need(self) -> int:
        """The bytes that its tenants need at once."""
        peaks = [tenant.peak for tenant in self.tenants]
        return max(peaks, default=0) if self.turns else sum(peaks)

    @property
    def fits(self) -> bool | None:
        return None if self.free is None else self.need <= self.free


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """All devices of a run, and what is wrong with it: more processes than devices, for example."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...]
    sequences: int | None = None  # of full length that a server's cache holds; None where vLLM's share is not known

    @property
    def fits(self) -> bool:
        return not self.problems and all(device.fits is not False for device in self.devices)


def cluster_map(config: Config, *, objective: Objective, prompt: int, held_out: int, fleet: Fleet) -> ClusterMap:
    """Places ranks and servers as a run does, and adds up what each needs for prompts of ``prompt`` tokens, of which
    ``held_out`` are evaluated on."""
    demonstrates = config.demonstrates
    if demonstrates:
        (config, prompt), held_out = of_rows(config, prompt), 0
    cluster, s = config.cluster, sizes_of(config)
    # 0: as many ranks as GPUs are left beside the servers.
    if cluster.learner == 0:
        taken = 0 if cluster.colocate else _started(config) * cluster.server_gpus
        ranks = fleet.nodes * fleet.gpus - taken
        if ranks < 1:
            return ClusterMap((), ("cluster.learner: got 0 (every GPU that servers leave), and none is left",))
        config = replace(config, cluster=replace(cluster, learner=ranks))
    if config.device == "cpu" and not _started(config):
        fleet = replace(fleet, gpus=0)  # nobody would use them
    if not fleet.gpus:  # what a rank keeps aside is in the memory where it would be anyway
        config = replace(config, cluster=replace(config.cluster, offload="none"))
    # ---- a rank's needs, then everybody's place
    load = _load(config, s, objective, fleet, prompt=prompt, held_out=held_out)
    # A single process with a backend is what trew plan without ranks estimates.
    parts = (
        memory(s, config, load).parts
        if load.body is None
        else rank_parts(s, config, load, shards=_shared(config, fleet))
    )
    if demonstrates:  # nothing is sampled
        parts = {"training": parts["training"]}
    rank = Tenant("rank", parts)
    length = prompt + max(passes.completion_tokens(config, prompt), config.eval.max_tokens)
    if fleet.gpus:
        return _gpu_map(config, s, load, rank, fleet, length=length)
    return _cpu_map(config, s, rank, fleet)


def _gpu_map(config: Config, s: Sizes, load: Load, rank: Tenant, fleet: Fleet, *, length: int) -> ClusterMap:
    each, server = config.cluster.server_gpus, None
    if _started(config):
        server = Tenant("server", {"serving": _on_gpu(s, config, fleet.gpu_bytes, gpus=each)})
    devices, problems = _on_gpus(config, rank, server, fleet)
    nodes = [_node(s, config, load, node, fleet) for node in range(fleet.nodes)]
    room = None if server is None else server.parts["serving"].get("cache")
    if room is None:
        return ClusterMap((*devices, *nodes), tuple(problems))
    problems += [] if room > 0 else [_no_cache(config)]
    # room is that of one GPU, and a server's cache is spread over all of its GPUs.
    count = max(0, room * each) // max(1, _cache_bytes(s, config, length))
    return ClusterMap((*devices, *nodes), tuple(problems), count)


def _cpu_map(config: Config, s: Sizes, rank: Tenant, fleet: Fleet) -> ClusterMap:
    devices = []
    for node in range(fleet.nodes):
        tenants = list(_numbered(rank, _ranks_of(node, config, fleet)))
        if node == 0 and (started := _started(config)):
            server = Tenant("server", {"serving": _on_cpu(s, config, fleet.cpu_bytes)})
            tenants += _numbered(server, range(started))
        if node == 0 and config.cluster.rollout == "vllm":
            tenants.append(_published(s, config))
        name = "CPU" if fleet.nodes == 1 else f"node {node}, CPU"
        devices.append(Device(name, tuple(tenants), fleet.cpu_bytes))
    return ClusterMap(tuple(devices), tuple(_uneven(config, fleet)))


def _ranks_of(node: int, config: Config, fleet: Fleet) -> range:
    """The ranks of a node: as many on each, fewer on the last ones where they do not divide evenly."""
    ranks = range(config.cluster.learner)
    on_node = _part(len(ranks), fleet.nodes)
    return ranks[node * on_node : (node + 1) * on_node]


def _uneven(config: Config, fleet: Fleet) -> list[str]:
    ranks, shard = config.cluster.learner, config.cluster.shard
    if ranks % fleet.nodes == 0 or shard not in ("auto", "hsdp"):
        return []
    return [
        f"cluster.learner: got {ranks} with cluster.shard = {shard!r}, which shards inside each node, accepts a "
        f"multiple of the {fleet.nodes} nodes; or set cluster.shard = 'fsdp'"
    ]


def _started(config: Config) -> int:
    """The number of servers that the run starts."""
    return config.cluster.servers if config.cluster.rollout == "vllm" else 0


def _published(s: Sizes, config: Config) -> Tenant:
    # A tied head is published under its own name, too.
    size = VERSIONS * _width(config) * (s.weights + (s.head if s.tied else 0))
    return Tenant("weights for servers", {"always": {"published": size}})


# ---- what one process needs


def _load(config: Config, s: Sizes, objective: Objective, fleet: Fleet, *, prompt: int, held_out: int) -> Load:
    import torch

    on_gpus = fleet.gpus > 0
    there = on_gpus and torch.cuda.is_available()
    if on_gpus and not there and config.cluster.learner == 1:
        # Planned on a machine without GPUs, whose own backend says nothing about theirs; with 0, "as many as there
        # are", there is none, and the packs are those of one process.
        config = replace(config, cluster=replace(config.cluster, learner=0))
    # What a process holds before it loads a model is in RAM; the memory of a GPU has nothing of it yet.
    process = 0 if on_gpus else used_bytes() + LIBRARIES
    machine = Machine("cuda" if there else "cpu", process, fleet.gpu_bytes if on_gpus else fleet.cpu_bytes)
    return load_of(config, s, objective, machine, prompt=prompt, held_out=held_out)


def rank_parts(s: Sizes, config: Config, load: Load, *, shards: int) -> dict[str, dict[str, int]]:
    """Bytes of one rank by phase:

    always      4 N / S weights, 8 N_t / S moments (fewer in 8 bits), 4 N / S reference, 1 / S of a teacher; none of
                the first two with ``offload = "all"``; a whole critic with its moments
    training    4 N_t / S gradients; gathered 4 N_o and two layers of b N_l / L, and the gradients of one, in float32
                too where they are summed; of the whole head 4 V H; activations of one micro-batch, and the head's work
    generating  embedded engine only: gathered 4 N_o + b N_l; cache and work of the model's own forward
    evaluating  the same, if it is more
    """
    offload, b = config.cluster.offload, _width(config)
    outside = 4 * (s.weights - s.linear)
    kept, read = reference(s, config, load)
    whole = weights(s, config)
    aside = offload == "all"
    always = {
        "process": load.process,
        "weights": 0 if aside else _part(whole, shards),
        "optimizer": 0 if aside or offload == "optimizer" else _part(optimizer(s, config), shards),
        "reference": 0 if aside else _part(max(kept, read), shards),
        "teacher": 0 if aside else _part(load.teacher, shards),
        "critic": critic(config, load),
    }
    # b N_l / L: a layer's matrices in the type of products.
    layer = b * s.linear // s.layers
    summed = (4 if b == 4 else 4 + b) * s.linear // s.layers  # gradients, and a copy of another type
    # Weights in pieces, or in CPU memory, are gathered layer by layer where they are used.
    apart = shards > 1 or aside
    assert load.body is not None
    trained = {
        "gradients": 0 if aside else max(_part(4 * s.trained, shards), critic_gradients(load)),
        "gathered": (outside + 2 * layer if apart else 0),
        "whole gradients": (4 * s.head + summed if apart and not config.lora.rank else 0),
        "copies": low_copies(s, config, load),
        "activations": load.body.before.layer * s.layers + load.body.before.rest,
        "head": head(s, config, load),
    }
    # One after the other in the same memory.
    trained["critic pass"] = max(0, critic_pass(load) - trained["activations"] - trained["head"])
    training = always | trained | {"coefficients": coefficients(load, trained)}
    # Weights in pieces are gathered whole to sample.
    sampled = {"gathered": outside + b * s.linear if apart else 0} if config.cluster.rollout == "embedded" else {}
    made = {phase: always | sampled | parts for phase, parts in samplings(s, config, load).items()}
    return {**made, "training": training}


def _part(size: int, shards: int) -> int:
    return -(-size // shards)


def _width(config: Config) -> int:
    return 2 if config.learner.dtype == "bfloat16" else 4


def _cache_bytes(s: Sizes, config: Config, tokens: int) -> int:
    """2 L K b bytes a token."""
    return 2 * s.layers * s.kv_heads * s.head_dim * _width(config) * tokens


def _on_gpu(s: Sizes, config: Config, free: int | None, *, gpus: int) -> dict[str, int]:
    """A server's bytes on one of its GPUs: b N weights, vLLM's work, and a cache that takes what is left of its share
    (below 0 where nothing is)."""
    model = _part(_width(config) * s.weights, gpus)
    if free is None:
        return {"weights": model, "work": SERVER_WORK}
    from ..rollout.vllm.launch import MOST_SHARE

    share = float(server_option(config.cluster, "gpu-memory-utilization", MOST_SHARE))
    # vLLM fills its share to the end: the cache is what is left, and no need of its own.
    return {"weights": model, "work": SERVER_WORK, "cache": int(share * free) - model - SERVER_WORK}


def _on_cpu(s: Sizes, config: Config, free: int | None) -> dict[str, int]:
    """vLLM's build for CPUs: b N weights, as much again while they are packed, and the whole GiB of cache that a run
    starts it with."""
    from ..rollout.vllm import launch

    table = loading.load_config(config.model).get_text_config().to_dict()
    model = _width(config) * (s.weights + s.head)
    cache = launch.cache_gib(config, table, free=free) * GIB
    return {"process": GIB, "weights": model, "packing": model, "cache": cache}


# ---- who is where


def _shared(config: Config, fleet: Fleet) -> int:
    """S: the number of ranks that hold one copy of the weights together."""
    ranks, how = config.cluster.learner, config.cluster.shard
    if how == "auto":
        how = "hsdp" if fleet.nodes > 1 else "fsdp"
    return {"none": 1, "fsdp": ranks, "hsdp": max(1, ranks // fleet.nodes)}[how]


def _numbered(one: Tenant, numbers: Sequence[int] | range) -> Iterator[Tenant]:
    return (replace(one, who=f"{one.who} {number}") for number in numbers)


def _on_gpus(config: Config, rank: Tenant, server: Tenant | None, fleet: Fleet) -> tuple[list[Device], list[str]]:
    """Every GPU with its tenants: ranks take the first ones of every node, servers the last ones of the first node.
    They may have the same ones in turns, or at once where the recipe says which share of a GPU a server takes."""
    each, colocated = config.cluster.server_gpus, config.cluster.colocate
    shared = colocated or server_option(config.cluster, "gpu-memory-utilization", None) is not None
    on_node = len(_ranks_of(0, config, fleet))  # no node has more
    servers = config.cluster.servers if server is not None else 0
    problems = _uneven(config, fleet)
    needed = max(on_node, servers * each) if shared else on_node + servers * each
    if needed > fleet.gpus:
        problems.append(
            f"the first node needs {needed} GPUs ({on_node} ranks, {servers} servers of {each}), and has {fleet.gpus}; "
            "lower cluster.learner or cluster.servers"
            + ("" if shared else ", or set cluster.colocate = true, or cluster.server_args.gpu-memory-utilization")
        )
    devices = []
    for node in range(fleet.nodes):
        for gpu in range(fleet.gpus):
            tenants = list(_numbered(rank, _ranks_of(node, config, fleet)[gpu : gpu + 1]))
            # Beside ranks servers take the last GPUs of the node; in turns with ranks they begin at the first GPU.
            from_end = gpu if colocated else gpu - (fleet.gpus - servers * each)
            if server is not None and node == 0 and 0 <= from_end < servers * each:
                tenants.append(replace(server, who=f"server {from_end // each}"))
            name = f"GPU {gpu}" if fleet.nodes == 1 else f"node {node}, GPU {gpu}"
            devices.append(Device(name, tuple(tenants), fleet.gpu_bytes, turns=colocated))
    return devices, problems


def _node(s: Sizes, config: Config, load: Load, node: int, fleet: Fleet) -> Device:
    """A node's own memory: what ranks keep there, the copy that rank 0 loads, and published weights."""
    on_node, shards = len(_ranks_of(node, config, fleet)), _shared(config, fleet)
    offload = config.cluster.offload
    whole, away = weights(s, config), config.cluster.colocate  # while servers use the GPUs, ranks leave them
    kept = {"process": on_node * LIBRARIES}
    if offload != "none" or away or config.learner.optimizer == "adamw-offload":
        kept["optimizer"] = (_part(8 * s.trained, shards) + 2 * critic_gradients(load)) * on_node
    if offload == "all" or away:
        kept["weights"] = _part(whole, shards) * on_node
        kept["reference"] = _part(max(reference(s, config, load)), shards) * on_node
        kept["teacher"] = _part(load.teacher, shards) * on_node
    if offload == "all":
        kept["gradients"] = _part(4 * s.trained, shards) * on_node
    tenants = [Tenant("ranks", {"always": kept})]
    # In shards, rank 0 alone holds the whole model while it loads; without, every rank of the node does.
    if node == 0 or shards == 1:
        tenants.append(Tenant("loading", {"loading": {"weights": whole * (on_node if shards == 1 else 1)}}))
    if config.cluster.rollout == "vllm" and node == 0:
        tenants.append(_published(s, config))
    return Device(f"memory of node {node}" if fleet.nodes > 1 else "memory", tuple(tenants), fleet.cpu_bytes)


def _no_cache(config: Config) -> str:
    return (
        f"cluster.servers: the model leaves no memory for keys and values on {config.cluster.server_gpus} GPUs; raise "
        "cluster.server_gpus, or gpu-memory-utilization in cluster.server_args"
    )


# ---- as text


def table(found: ClusterMap) -> list[str]:
    """Formats the map for people: devices with the same tenants are one line."""
    from .text import MIB

    lines = [f"{'device':<26}{'who':<30}{'MiB':>10}   parts"]
    for names, device in _alike(found.devices):
        for number, tenant in enumerate(device.tenants):
            phase, parts = max(tenant.parts.items(), key=lambda item: sum(item[1].values()))
            said = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items() if size)
            who = tenant.who if len(tenant.parts) == 1 else f"{tenant.who}, while {phase}"
            lines.append(f"{names if not number else '':<26}{who:<30}{tenant.peak / MIB:>10,.0f}   {said}")
        have = "how much is free is not known"
        if device.free is not None:
            have = f"{device.free / MIB:,.0f} MiB can be had: {'fits' if device.fits else 'DOES NOT FIT'}"
        how = "the larger of these, in turns" if device.turns and len(device.tenants) > 1 else "together"
        lines.append(f"{'':<26}{how:<30}{device.need / MIB:>10,.0f}   {have}" if device.tenants else f"{names:<26}idle")
    if found.sequences is not None:
        lines += ["", f"the cache of a server holds about {found.sequences} sequences of full length"]
    return lines + [f"problem: {problem}" for problem in found.problems]


def _alike(devices: Sequence[Device]) -> Iterator[tuple[str, Device]]:
    """Devices with their names; consecutive ones that differ in numbers only are joined."""
    # Joins neighbours by kind, so that eight equal GPUs are one line: see _kind.
    groups: list[list[Device]] = []
    for device in devices:
        if groups and _kind(groups[-1][0]) == _kind(device):
            groups[-1].append(device)
        else:
            groups.append([device])
    for group in groups:
        first, last = group[0], group[-1]
        if len(group) == 1:
            yield first.name, first
            continue
        span = [
            replace(a, who=f"{a.who} to {b.who.rpartition(' ')[2]}" if a.who != b.who else a.who)
            for a, b in zip(first.tenants, last.tenants, strict=True)
        ]
        yield f"{first.name} to {last.name}", replace(first, tenants=tuple(span))


def _kind(device: Device) -> tuple[Any, ...]:
    who = tuple((t.who.partition(" ")[0], t.peak) for t in device.tenants)
    return device.name.partition(",")[0].rstrip("0123456789 "), who, device.free, device.turns


def as_json(found: ClusterMap) -> dict[str, Any]:
    """Formats the map for programs, in bytes."""
    devices = [
        {
            "device": d.name, "bytes": d.need, "free_bytes": d.free, "fits": d.fits, "turns": d.turns,
            "tenants": [{"who": t.who, "peak_bytes": t.peak, "parts": t.parts} for t in d.tenants],
        }
        for d in found.devices
    ]  # fmt: skip
    return {
        "devices": devices, "problems": list(found.problems), "fits": found.fits, "server_sequences": found.sequences
    }  # fmt: skip
