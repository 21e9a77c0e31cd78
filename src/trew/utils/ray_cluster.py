"""Connects to a Ray cluster, and computes what it lacks. Ray is imported on first use."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .installing import install_extra
from .secrets import can_be_secret

ADDRESS = "RAY_ADDRESS"
"""Environment variable: the address of the cluster; ``ray job submit`` sets it for what it runs."""
INSIDE = "TREW_RAY"
"""Environment variable of ranks that run on Ray: the address of their cluster."""
CONNECT_S = 10.0
"""Seconds in which the cluster must accept a connection; Ray itself would try for minutes."""
TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "2")
"""Environment variable of Ray and its value here: how often Ray asks an address that accepts connections and says
nothing, 40 s each time. Ray's own default is 20, a quarter of an hour."""
PASSED = ("TREW_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH_", "NCCL_", "GLOO_", "CUBLAS_", "WANDB_", "MLFLOW_",
          "TRACKIO_", "PYTHONPATH", "PYTHONHASHSEED", "CC", "CXX")  # fmt: skip
"""Environment variables, or their first letters, that ranks on other nodes get from this process. All others are those
of Ray's workers (``ray start``, or the ``env_vars`` of a job's runtime environment)."""
START = "start one with ray start --head, and ray start --address HOST:6379 on the other nodes"

Bundle = Mapping[str, float]
"""Resources of one process, by Ray's names: CPU, GPU."""


def ray() -> Any:
    """The module ``ray``. Raises ConfigError if it is not installed."""
    os.environ.setdefault(*TRIES)  # Ray reads it when it is imported
    try:
        with keeping_signals():
            return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"cluster.launcher: Ray cannot be imported by {sys.executable} ({error}); {install_extra('ray')} on "
            "every node of the cluster, or set cluster.launcher = 'torchrun'"
        ) from None


def train() -> tuple[Any, Any]:
    """The modules ``ray.train`` and ``ray.train.torch``. Raises ConfigError if one cannot be imported."""
    ray()
    try:
        with keeping_signals():
            return importlib.import_module("ray.train"), importlib.import_module("ray.train.torch")
    except ImportError as error:
        raise ConfigError(
            f"cluster.launcher: Ray Train cannot be imported by {sys.executable} ({error}); "
            f"{install_extra('ray')} on every node of the cluster"
        ) from None


def connect() -> Any:
    """Connects this process to the cluster of RAY_ADDRESS, or to one that runs on this machine; returns the module
    ``ray``. Does nothing where it is connected. Raises ConfigError if there is no cluster."""
    module = ray()
    if module.is_initialized():
        return module
    address = checked_address(os.environ.get(ADDRESS, ""))
    try:
        with keeping_signals():
            module.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        if address != "auto":
            raise ConfigError(
                f"{ADDRESS}: got {address!r}, which accepts connections but does not answer as a Ray cluster; {START}, "
                f"or unset {ADDRESS}"
            ) from None
        raise ConfigError(
            f"cluster.launcher: no Ray cluster runs on this machine; {START}, or set {ADDRESS} to the address of one"
        ) from None
    except Exception as error:  # of Ray's own kinds: another version, a wrong token
        said = " ".join(str(error).split())[:400]
        raise ConfigError(f"cluster.launcher: the Ray cluster at {address} refused the connection: {said}") from None
    return module


def checked_address(address: str) -> str:
    """The address for Ray; "auto" for an empty one, which means a cluster of this machine. Raises ConfigError for one
    that cannot be used, or where nobody answers.

    >>> checked_address("")
    'auto'
    """
    if address in ("", "auto", "local"):
        return "auto"
    if "://" in address:
        job = "that of a job server" if address.startswith("http") else "that of Ray Client"
        raise ConfigError(
            f"{ADDRESS}: got {address!r}, {job}, accepts HOST:PORT; run trew on a node of the cluster: ray job submit "
            "--address http://HOST:8265 -- trew train RECIPE"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{ADDRESS}: got {address!r}, accepts HOST:PORT, like 10.0.0.1:6379")
    try:
        # Tried before Ray, which waits for minutes where nobody listens.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"{ADDRESS}: got {address!r}, where nobody answers ({error.strerror or error}); {START}, or unset {ADDRESS}"
        ) from None
    return address


def passed(variables: Any) -> dict[str, str]:
    """The environment variables that ranks get.

    >>> passed({"TREW_CACHE": "/shared", "HOME": "/root", "HF_HUB_OFFLINE": "1"})
    {'TREW_CACHE': '/shared', 'HF_HUB_OFFLINE': '1'}
    """
    return {name: value for name, value in variables.items() if name.startswith(PASSED)}


def passed_openly(variables: Any) -> dict[str, str]:
    """What actors get of this process's environment, which Ray's dashboard shows: no secrets."""
    return {name: value for name, value in passed(variables).items() if not can_be_secret(name, value)}


def node_address() -> str:
    """The address by which other nodes reach this one, as Ray has it."""
    return str(ray().util.get_node_ip_address())


@contextlib.contextmanager
def keeping_signals() -> Iterator[None]:
    """Restores this process's signal handlers afterwards: Ray replaces that of SIGTERM by an exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that Python did not install, and cannot restore.
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not None:
                signal.signal(signum, handler)


# ----------------------------------------------------------------------------------------------------------- resources


def nodes(module: Any) -> list[Bundle]:
    """What each node that is alive has in all, used or not."""
    return [node["Resources"] for node in module.nodes() if node["Alive"]]


def total(there: Sequence[Bundle], kind: str) -> int:
    """How many of a resource all nodes have.

    >>> total([{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0}], "GPU")
    2
    """
    return int(sum(node.get(kind, 0.0) for node in there))


def unplaced(wanted: Sequence[Bundle], there: Sequence[Bundle]) -> list[Bundle]:
    """Those of ``wanted`` that have no room: each must be on one node. First fit, the largest first.

    >>> unplaced([{"GPU": 1}, {"GPU": 2}, {"GPU": 1}], [{"GPU": 2}, {"GPU": 1}])
    [{'GPU': 1}]
    >>> unplaced([{"GPU": 2}], [{"GPU": 1}, {"GPU": 1}])
    [{'GPU': 2}]
    """
    free, left = [dict(node) for node in there], []
    for bundle in sorted(wanted, key=lambda b: (b.get("GPU", 0), b.get("CPU", 0)), reverse=True):
        for node in free:
            if all(node.get(kind, 0.0) >= amount for kind, amount in bundle.items()):
                for kind, amount in bundle.items():
                    node[kind] -= amount
                break
        # Of the for loop: no node had room.
        else:
            left.append(bundle)
    return left


def lacking(wanted: Sequence[Bundle], there: Sequence[Bundle]) -> str:
    """What a cluster lacks for ``wanted``, in words; empty where all of it has room.

    >>> lacking([{"CPU": 1, "GPU": 1}] * 4, [{"CPU": 8.0, "GPU": 2.0}])
    'no room for 2 processes with 1 CPU and 1 GPU each; 1 node: 8 CPU and 2 GPU'
    >>> lacking([{"CPU": 4}], [{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 2.0}])
    'no room for 1 process with 4 CPU each; 1 node: 1 CPU; 2 nodes: 2 CPU'
    """
    left = unplaced(wanted, there)
    if not left:
        return ""
    kinds = "; ".join(
        f"{count} {'process' if count == 1 else 'processes'} with {said} each" for said, count in _counted(left)
    )
    have = "; ".join(f"{count} {'node' if count == 1 else 'nodes'}: {said}" for said, count in _counted(there))
    return f"no room for {kinds}; {have or 'no node is alive'}"


def _counted(bundles: Sequence[Bundle]) -> list[tuple[str, int]]:
    # In one order, whatever order Ray lists its nodes in.
    said = sorted(_words(bundle) for bundle in bundles)
    return [(words, said.count(words)) for words in dict.fromkeys(said)]


def _words(bundle: Bundle) -> str:
    found = [f"{bundle[kind]:g} {kind}" for kind in ("CPU", "GPU") if bundle.get(kind)]
    return " and ".join(found) or "no CPU"
