"""The rules of the table [cluster]: values that can be judged without starting a server."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..utils.addresses import ACCEPTS, is_local, split_address
from .schema import ClusterConfig, Config

_MODEL = "a server has the run's model"
_ADDRESS = "the run chooses the socket that a server listens on"
_ONE = "one endpoint is one engine: set cluster.servers for more"
_VERSIONS = "versions of the weights are published by the run"
_EXACT = "log-probs must be those of the sampling distribution, with the run's own sampling settings"
_CODE = "code from models and other files is never run"
RESERVED = {
    "model": _MODEL, "model-tag": _MODEL, "served-model-name": _MODEL, "tokenizer": _MODEL, "tokenizer-mode": _MODEL,
    "hf-config-path": _MODEL, "hf-overrides": _MODEL, "revision": _MODEL, "code-revision": _MODEL,
    "tokenizer-revision": _MODEL, "skip-tokenizer-init": _MODEL, "runner": _MODEL, "convert": _MODEL,
    "dtype": "learner.dtype sets it", "seed": "the recipe's seed sets it",
    "max-model-len": "data.max_prompt_tokens and rollout.max_tokens set it",
    "tensor-parallel-size": "cluster.server_gpus sets it", "pipeline-parallel-size": _ONE, "data-parallel-size": _ONE,
    "data-parallel-rank": _ONE, "data-parallel-start-rank": _ONE, "data-parallel-backend": _ONE,
    "data-parallel-address": _ONE, "data-parallel-hybrid-lb": _ONE, "data-parallel-external-lb": _ONE,
    "data-parallel-supervisor-port": _ONE, "data-parallel-size-local": _ONE, "data-parallel-rpc-port": _ONE,
    "api-server-count": _ONE, "headless": _ONE, "nnodes": _ONE,
    "host": _ADDRESS, "port": _ADDRESS, "uds": _ADDRESS, "api-key": _ADDRESS, "ssl-keyfile": _ADDRESS,
    "ssl-certfile": _ADDRESS, "root-path": _ADDRESS, "grpc": _ADDRESS, "grpc-port": _ADDRESS, "config": _ADDRESS,
    "enable-sleep-mode": "cluster.colocate sets it", "enable-scale-out": _VERSIONS, "weight-transfer-config": _VERSIONS,
    "logprobs-mode": _EXACT, "generation-config": _EXACT, "override-generation-config": _EXACT,
    "logits-processors": _EXACT, "speculative-config": _EXACT,
    "scheduling-policy": "the comparison of new weights goes before completions that wait",
    "disable-log-stats": "its counters say whether a server makes progress",
    "trust-remote-code": _CODE, "worker-extension-cls": _CODE, "worker-cls": _CODE, "scheduler-cls": _CODE,
    "middleware": _CODE, "tool-parser-plugin": _CODE, "reasoning-parser-plugin": _CODE, "io-processor-plugin": _CODE,
}  # fmt: skip
"""Options of vLLM that cluster.server_args cannot set, and why."""


OF_SERVERS = (
    "servers", "server_gpus", "colocate", "endpoints", "sync", "python", "server_args", "staleness", "sync_timeout_s",
)  # fmt: skip
"""Keys that do nothing without servers."""


COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples at: it takes a lower one for 0.01 without saying so, and refuses a higher one."""


def problems(c: Config) -> Iterator[str]:
    """Yields every problem with the settings of servers, one line each."""
    cluster = c.cluster
    for key, least in (("servers", 0), ("server_gpus", 1), ("staleness", 0)):
        if (got := getattr(cluster, key)) < least:
            yield f"cluster.{key}: got {got}, accepts a whole number of at least {least}"
    for key in ("request_timeout_s", "sync_timeout_s"):
        if not 0 < (got := getattr(cluster, key)) < math.inf:
            yield f"cluster.{key}: got {got!r}, accepts a number of seconds above 0"
    # A run without servers of its own may ask a teacher's; a replay has the settings of a run that had servers.
    yield from _engine(cluster, asks_others=bool(c.teacher.endpoint or c.rollout.replay))
    if cluster.rollout == "vllm":
        yield from _temperatures(c)
    yield from _asynchronous(cluster)
    yield from _route(cluster)
    yield from _endpoints(cluster)
    if cluster.reward_hosts != ("ray",):
        yield from _addresses("reward_hosts", cluster.reward_hosts, sockets=False)
    for name, value in cluster.server_args.items():
        yield from _server_arg(str(name), value)


def _engine(cluster: ClusterConfig, *, asks_others: bool) -> Iterator[str]:
    there = cluster.servers != 0 or bool(cluster.endpoints)
    if cluster.rollout == "vllm" and not there:
        yield (
            "cluster.rollout: got 'vllm' without servers; set cluster.servers to how many the run starts, or "
            "cluster.endpoints to the addresses of those that run already"
        )
    if cluster.rollout == "embedded":
        defaults = ClusterConfig()
        for key in (*OF_SERVERS, *(() if asks_others else ("request_timeout_s",))):
            if (got := getattr(cluster, key)) != getattr(defaults, key):
                yield f"cluster.{key}: got {got!r} with cluster.rollout = 'embedded'; set cluster.rollout = 'vllm'"


def _temperatures(c: Config) -> Iterator[str]:
    for key, got, zero in (
        ("rollout.temperature", c.rollout.temperature, ""),
        ("eval.temperature", c.eval.temperature, "0, or "),
    ):
        if 0 < got < COLDEST or HOTTEST < got < math.inf:
            yield (
                f"{key}: got {got!r} with cluster.rollout = 'vllm', accepts {zero}{COLDEST:g} to {HOTTEST:g}: vLLM "
                f"samples at {COLDEST:g} where it is asked for less, and refuses more; set cluster.rollout = "
                "'embedded' for others"
            )


def _asynchronous(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.staleness > 0 and cluster.colocate:
        yield (
            f"cluster.staleness: got {cluster.staleness} with cluster.colocate = true, where servers sleep while the "
            "learner computes; set cluster.staleness = 0, or give servers GPUs of their own"
        )
    if cluster.staleness == 0 and cluster.in_flight != "keep":
        yield (
            f"cluster.in_flight: got {cluster.in_flight!r}, accepts only its default while cluster.staleness = 0, "
            "where no completion is unfinished when weights change"
        )


def _route(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.sync == "nccl" and cluster.colocate:
        yield (
            "cluster.sync: got 'nccl' with cluster.colocate = true; NCCL connects different GPUs, and the learner has "
            "left its own when servers wake: set cluster.sync = 'files'"
        )
    if cluster.sync == "ipc":
        found = [(text, split_address(text)) for text in cluster.endpoints]
        if elsewhere := [text for text, address in found if address is not None and not is_local(*address)]:
            yield (
                f"cluster.sync: got 'ipc' with {elsewhere[0]!r} in cluster.endpoints; only servers on the host of "
                "rank 0 see its memory: set cluster.sync = 'files' or 'nccl', or name a server on this host by "
                "127.0.0.1 or its socket"
            )


def _endpoints(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.endpoints and cluster.colocate:
        yield (
            "cluster.colocate: got true with cluster.endpoints; only servers that the run starts take turns with it: "
            "set cluster.servers instead, or remove cluster.colocate"
        )
    yield from _addresses("endpoints", cluster.endpoints, sockets=True)
    if cluster.endpoints and cluster.servers > 0:
        yield (
            f"cluster.endpoints: got {len(cluster.endpoints)} with cluster.servers = {cluster.servers}; a run either "
            "starts its servers or is given them: remove one of the two"
        )


def _addresses(key: str, texts: Sequence[str], *, sockets: bool) -> Iterator[str]:
    """What is wrong with a list of addresses; with ``sockets``, they may be of Unix sockets."""
    found = []
    accepts = ACCEPTS if sockets else "addresses like 'http://10.0.0.1:8100' or 'https://host:8443', or 'ray' alone"
    for i, text in enumerate(texts):
        address = split_address(text)
        if address is None or (address[1] and not sockets):
            yield f"cluster.{key}[{i}]: got {text!r}, accepts {accepts}"
        elif address in found:
            yield f"cluster.{key}[{i}]: got {text!r} twice; name each once"
        found.append(address)


def option_name(name: str) -> str:
    """The name of an option as vLLM's command line has it.

    >>> option_name("max_num_seqs"), option_name("--max-num-seqs")
    ('max-num-seqs', 'max-num-seqs')
    """
    return name.lstrip("-").replace("_", "-")


def server_option(config: ClusterConfig, option: str, default: Any) -> Any:
    """An option of vLLM's command line as ``cluster.server_args`` has it, however its name is written there."""
    return {option_name(name): value for name, value in config.server_args.items()}.get(option, default)


def _server_arg(name: str, value: Any) -> Iterator[str]:
    where, option = f"cluster.server_args.{name}", option_name(name)
    if not re.fullmatch(r"[a-z][a-z0-9-]+(\.[A-Za-z0-9_.-]+)?", option):
        yield f"{where}: is not the name of an option; write it as vllm serve --help does, without dashes in front"
        return
    # The parser takes an option's first letters for it, and "a.b" for the entry b of the table a.
    top = option.partition(".")[0]
    # "no-headless" is "headless", negated.
    taken = [reserved for reserved in RESERVED if reserved.startswith(top) or top.removeprefix("no-") == reserved]
    if taken:
        yield f"{where}: got {value!r}, but trew sets {taken[0]} itself: {RESERVED[taken[0]]}"
    elif not _plain(value):
        yield (
            f"{where}: got {value!r} ({type(value).__name__}), accepts a string, a number, true, false, a list of "
            "these, or a table"
        )


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(isinstance(v, str | int | float) for v in value)
    # bool is an int here, so true and false pass.
    return isinstance(value, str | int | float) and not (isinstance(value, float) and not math.isfinite(value))
