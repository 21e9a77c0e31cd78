"""Chooses the route of the weights to servers, by cluster.sync and what the servers can receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError
from ..rollout.endings import ModelFacts
from ..rollout.vllm import handshake, memory, stream
from ..rollout.vllm.endpoint import Endpoint
from . import places
from .files import PublishedFiles, version_size
from .memory import PublishedOnGpu, PublishedSegments
from .publisher import Publisher
from .stream import PublishedStream

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def folder_of(backend: str, run: Path) -> Path:
    """The folder that a server with this weight transfer engine must see: that of shared memory, or of the run."""
    if backend != handshake.ENGINES["ipc"]:
        return run.resolve()
    if not places.SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"cluster.sync: got 'ipc', but this system has no shared memory in {places.SHARED_MEMORY}; set "
            "cluster.sync = 'files'"
        )
    return places.SHARED_MEMORY


def publisher(
    config: Config, *, device: str, model: PreTrainedConfig, facts: ModelFacts, run: Path,
    endpoints: Sequence[Endpoint], backend: str, tell: Callable[[str], None],
) -> Publisher:  # fmt: skip
    """The publisher for servers that were started with ``backend``. ``device``: the learner's; ``run``: the folder of
    the run.

    With cluster.sync = 'auto' files replace streams that a server cannot receive, and ``tell`` gets the reason. Raises
    ConfigError if a route that the recipe names is closed.
    """
    dtype, cluster = config.learner.dtype, config.cluster
    known: dict[str, Any] = {"dtype": dtype, "vocabulary": facts.vocabulary, "positions": facts.positions}
    size = version_size(model, dtype)
    # ---- streams, where every server accepts how the learner introduces itself
    if backend == handshake.ENGINES["nccl"]:
        if not (why := _refusal(endpoints, stream.introduction(stream.backend_of(device)))):
            return PublishedStream(device=device, **known)
        if cluster.sync == "nccl":
            raise ConfigError(f"cluster.sync: got 'nccl', but {why}")
        tell(f"weights are published as files: {why}")
    # ---- memory of this host: on the GPU where possible, otherwise the host's
    if backend == handshake.ENGINES["ipc"]:
        if elsewhere := [endpoint for endpoint in endpoints if not endpoint.local]:
            raise ConfigError(
                f"cluster.sync: got 'ipc', but server {elsewhere[0]} is on another host; only servers on the host of "
                "rank 0 see its memory: set cluster.sync = 'files' or 'nccl'"
            )
        # With colocate the learner has left the GPU when servers wake.
        if device.startswith("cuda") and not cluster.colocate:
            if not (why := _refusal(endpoints, memory.introduction(memory.gpu_of(device)))):
                return PublishedOnGpu(device=device, **known)
            # Not refused where the recipe names 'ipc': host memory is that route, too.
            tell(f"weights are shared in host memory, not on the GPU: {why}")
        return PublishedSegments(size=size, **known)
    return PublishedFiles(run, size=size, **known)


def _refusal(endpoints: Sequence[Endpoint], introduction: Mapping[str, object]) -> str:
    """The first server's reason not to take weights that are introduced like this; empty if all of them take them."""
    return next(filter(None, (handshake.refusal(endpoint, introduction) for endpoint in endpoints)), "")
