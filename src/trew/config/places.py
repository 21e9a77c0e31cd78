"""What the processes of a run ask of a Ray cluster: CPUs and GPUs, each on one node."""

from __future__ import annotations

from collections.abc import Sequence

from ..utils.ray_cluster import Bundle, total
from .schema import Config


def uses_gpus(config: Config, there: Sequence[Bundle]) -> bool:
    """Whether ranks and servers get GPUs, on a cluster whose nodes have ``there``."""
    return config.device != "cpu" and total(there, "GPU") > 0


def rank_bundle(config: Config, *, gpus: bool) -> Bundle:
    """What a rank asks for."""
    return {"CPU": float(config.threads or 1)} | ({"GPU": 1.0} if gpus else {})


def server_bundle(config: Config, *, gpus: bool) -> Bundle:
    """What a server asks for."""
    return {"CPU": float(config.threads or 1)} | ({"GPU": float(config.cluster.server_gpus)} if gpus else {})


def bundles(config: Config, *, gpus: bool) -> list[Bundle]:
    """What each process of a run asks for: ranks first, then servers."""
    cluster = config.cluster
    ranks = [rank_bundle(config, gpus=gpus)] * cluster.learner
    return [*ranks, *[server_bundle(config, gpus=gpus)] * cluster.servers]
