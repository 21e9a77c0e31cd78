"""Settings that do not change what a training learns: where it writes, how fast it is, what it reports."""

from __future__ import annotations

FREE = (
    "out",
    "device",
    "threads",
    "rollout.batch",
    "rollout.overlap",
    "stop.",
    "learner.microbatch_tokens",
    "learner.bad_steps",
    "eval.every",
    "checkpoint.",
    "track.",
    "health.",
    "cluster.launcher",
    "cluster.learner",
    "cluster.shard",
    "cluster.offload",
    "cluster.restarts",
    "cluster.resources_timeout_s",
    "cluster.hang_s",
    "cluster.sync",
    "cluster.servers",
    "cluster.server_",
    "cluster.colocate",
    "cluster.endpoints",
    "cluster.python",
    "cluster.reward_hosts",
    "teacher.endpoint",
    "teacher.wait_s",
    "cluster.request_timeout_s",
    "cluster.sync_timeout_s",
)
"""Keys, or prefixes of keys, that may differ when a training of any kind is continued: they do not change what is
learned, or only from that step on."""


def is_free(key: str) -> bool:
    """
    >>> is_free("track.to"), is_free("learner.lr")
    (True, False)
    """
    return key.startswith(FREE)
