"""What a training needs of the process that it runs in: to be the only one, and torch's own defaults."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ..errors import ConfigError

_running = threading.Lock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Around a training. Weights, buffers and log-probs are made in float32 on the CPU unless something else is named,
    and with gradients, whatever the caller has set for its own code; at the end its settings are as they were.

    Raises ConfigError while another training runs in this process, since threads, signals, warnings and the number of
    torch's threads are the process's; and inside ``torch.autocast``.
    """
    if _in_autocast():
        raise ConfigError(
            "training: got a call inside torch.autocast, which would round differently in sampler and learner, and "
            "keep copies of weights from before an update; leave the block, and set learner.dtype"
        )
    if not _running.acquire(blocking=False):
        raise ConfigError(
            "training: another one runs in this process, and two would change each other's signals, warnings and "
            "threads; run each in a process of its own, or one after the other"
        )
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with contextlib.ExitStack() as settings:
            settings.enter_context(torch.inference_mode(False))
            settings.enter_context(torch.enable_grad())
            if torch.get_default_device().type != "cpu":
                settings.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        _running.release()


def _in_autocast() -> bool:
    """Also inside a block that switches it off: those nested in it share its copies of weights."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
