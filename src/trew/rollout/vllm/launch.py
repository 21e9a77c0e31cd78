"""From a recipe to the servers that a run starts: their options, and the GPUs of each."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...config import Config
from ...config.cluster import option_name
from ...errors import ConfigError
from ...models.positions import positions_of
from ...utils.memory import free_bytes
from . import environment
from .handshake import ENGINES
from .server import ServerOptions, Servers

GIB = 2**30
SHORTEST = 64
"""Positions that a server has at least: the sequences that are compared after each update have 48."""
MOST_SHARE = 0.92
"""vLLM's own default, of a GPU's memory."""
RESERVE = 0.05
"""The share of a GPU's memory that is left for what comes and goes beside a server that takes turns."""
_CACHE_SHARE = 8  # of free memory, its inverse, for the keys and values of all servers on a CPU


def servers(config: Config, *, model: Path, device: str, folder: Path) -> Servers:
    """The servers of a run, not yet started, with logs in ``folder``. ``model`` are the model's files; ``device`` is
    the learner's.

    Raises ConfigError where the environment cannot serve, or has too few GPUs."""
    found = environment.probe(environment.find(config.cluster.python))
    if problems := found.problems():
        raise ConfigError([f"cluster.python: {problem}" for problem in problems])
    # vLLM's build for CPUs uses none, whatever the machine has.
    gpus = [] if found.cpu else shares(config, visible(), device=device)
    made = options(config, python=found.python, model=model, gpus=config.cluster.server_gpus if gpus else 0)
    shared = bool({*_of_ranks(visible(), device)[:1]} & {gpu for each in gpus for gpu in each.split(",")})
    made = dataclasses.replace(made, backend=backend(config, gpus=made.gpus, device=device, shared=shared))
    if gpus and config.cluster.colocate:
        made = dataclasses.replace(made, share=share_of(*torch.cuda.mem_get_info(device)))
    return Servers(made, count=config.cluster.servers, folder=folder, devices=gpus)


def backend(config: Config, *, gpus: int, device: str, shared: bool = False) -> str:
    """The engine of trew-vllm that servers are started with: that of cluster.sync; with ``auto``, the one for streams
    if learner and servers have GPUs of their own. All of them take files as well. ``shared``: a server has the GPU that
    rank 0 would send from, and no two processes of a group of NCCL may have the same. Raises ConfigError where the
    recipe names that route."""
    cluster = config.cluster
    if shared and cluster.sync == "nccl":
        raise ConfigError(
            "cluster.sync: got 'nccl', but a server shares a GPU with the learner, and NCCL connects different GPUs: "
            "set cluster.sync = 'ipc' or 'files'"
        )
    apart = gpus > 0 and device.startswith("cuda") and not (cluster.colocate or shared)
    return ENGINES["nccl"] if cluster.sync == "auto" and apart else ENGINES[cluster.sync]


def options(config: Config, *, python: Path, model: Path, gpus: int) -> ServerOptions:
    """What all servers are started with. ``gpus`` are those of each, 0 on CPUs."""
    files = json.loads((model / "config.json").read_text(encoding="utf-8"))
    table: dict[str, Any] = files.get("text_config") or files
    length, count = length_of(config, table), config.cluster.servers
    return ServerOptions(
        python=python, model=model.absolute(), tokenizer=_tokenizer(config.tokenizer), dtype=config.learner.dtype,
        seed=config.seed % 2**32,  # vLLM's own limit; requests bring their own seeds
        max_length=length, sequences=config.rollout.batch, gpus=gpus,
        # Servers and learner take turns in a synchronous run, so that each side may use all processors.
        threads=max(1, len(os.sched_getaffinity(0)) // count),
        cache_gib=cache_gib(config, table, free=free_bytes()),
        sleeps=config.cluster.colocate, more=config.cluster.server_args,
    )  # fmt: skip


def _tokenizer(name: str) -> str:
    """A hub id as it is, a folder by a path that means the same in a server's working directory."""
    folder = Path(os.path.expanduser(name))
    return str(folder.absolute()) if name and folder.is_dir() else name


def length_of(config: Config, table: Mapping[str, Any]) -> int:
    """The tokens of the longest sequence that servers accept; ``table``: the model's configuration."""
    prompt = max(one.max_prompt_tokens for one in config.sets)
    reply = max(config.rollout.max_tokens, config.eval.max_tokens)
    longest = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, max_tokens=reply))
    length = max(SHORTEST, prompt + longest.completion_tokens)  # of an episode, all of its turns
    # No more than the model has positions, where it says so.
    return min(length, positions_of(table) or length)


def cache_gib(config: Config, table: Mapping[str, Any], *, free: int | None) -> int:
    """Whole GiB of keys and values of each server on CPUs: of all sequences that are decoded at once, in full length,
    but at most a share of the ``free`` bytes."""
    tokens = length_of(config, table) * config.rollout.batch
    heads = table.get("num_key_value_heads") or table.get("num_attention_heads", 1)
    width = table.get("head_dim") or table.get("hidden_size", 1) // table.get("num_attention_heads", 1)
    # Keys and values: 2 L K b bytes a token.
    number = 4 if config.learner.dtype == "float32" else 2
    size = 2 * table.get("num_hidden_layers", 1) * heads * width * number * tokens
    most = (free or 8 * GIB) // _CACHE_SHARE // config.cluster.servers
    return max(1, -(-min(size, most) // GIB))


def share_of(free: int, total: int) -> float:
    """The share of a GPU's memory for a server that takes turns with the learner, which has left: what is free, less
    a reserve. What stays of the learner (its context, reward models) is not free.

    >>> share_of(78 << 30, 80 << 30), share_of(40 << 30, 80 << 30), share_of(80 << 30, 80 << 30)
    (0.92, 0.45, 0.92)
    """
    return min(MOST_SHARE, math.floor(100 * (free / total - RESERVE)) / 100)


def visible() -> list[str]:
    """The GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(i) for i in range(count)]


def _of_ranks(gpus: list[str], device: str) -> list[str]:
    """The GPUs of the ranks on this node, that of rank 0, whose ``device`` is given, first."""
    kind, _, index = device.partition(":")
    first, ranks = int(index or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return gpus[first : first + ranks] if kind == "cuda" else []


def shares(config: Config, gpus: list[str], *, device: str) -> list[str]:
    """The GPUs of each server, as values of CUDA_VISIBLE_DEVICES: the last ones, since the learner has the first; with
    cluster.colocate the first as well.

    Raises ConfigError where there are too few, or where a server would share the learner's and take all of its memory.
    """
    count, each = config.cluster.servers, config.cluster.server_gpus
    if count * each > len(gpus):
        raise ConfigError(
            f"cluster.servers: got {count} with cluster.server_gpus = {each}, which needs {count * each} GPUs; this "
            f"process sees {len(gpus)}. Use fewer, or vLLM's build for CPUs (trew cluster install-vllm --build cpu)"
        )
    # The learner has the first GPUs.
    taken = gpus[: count * each] if config.cluster.colocate else gpus[len(gpus) - count * each :]
    shared = next((gpu for gpu in _of_ranks(gpus, device) if gpu in taken), None)
    given = {option_name(name) for name in config.cluster.server_args}
    if shared is not None and not config.cluster.colocate and "gpu-memory-utilization" not in given:
        raise ConfigError(
            f"cluster.servers: got {count} with cluster.server_gpus = {each}, so that a server shares GPU {shared} "
            "with the learner, and vLLM takes most of a GPU's memory unless it is told not to; set cluster.colocate = "
            "true, so that they take turns, or cluster.server_args.gpu-memory-utilization, to 0.4 for example"
        )
    return [",".join(taken[i * each : (i + 1) * each]) for i in range(count)]
