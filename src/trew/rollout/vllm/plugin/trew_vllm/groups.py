"""Process groups for one update: the trainer is rank 0, the server's workers are the others. Needs torch alone.

Trainer and server both use this module.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed as dist

PIECE_BYTES = 256 << 20
"""Bytes of one broadcast, at most."""


def join(
    store: Any, *, rank: int, size: int, backend: str, address: str, timeout: datetime.timedelta
) -> Any:  # fmt: skip
    """This process's place in a group that meets at ``store``. ``address``: of this host, for gloo. Raises
    RuntimeError, as c10d does, if the group does not come together within ``timeout``."""
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, gloo)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, nccl)


def own_address(host: str, port: int) -> str:
    """The address of this host on the way to another."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def first_line(error: Exception) -> str:
    """What c10d says, without its stack."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
