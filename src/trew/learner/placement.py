"""Where a learner's tensors are: on its device while it learns, in CPU memory while others use the device."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from .optimizer import OffloadedAdamW
from .step import Learner

Move = Callable[[Tensor, torch.device], Tensor]
"""Returns a tensor's values on a device."""
CPU = torch.device("cpu")


class Placement:
    """Moves weights, buffers, gradients, the reference and the optimizer's moments between the device and CPU memory.

    Parameters stay the same objects, with the same values to the bit. What is in CPU memory for good (offloaded shards
    or moments) stays there, and on a CPU nothing moves. ``move``: does it in another way, on any device.
    """

    def __init__(self, learner: Learner, *, move: Move | None = None) -> None:
        self.device = next(learner.model.parameters()).device
        self.away = False
        self._learner = learner
        self._move = move or (None if self.device.type == "cpu" else _moved)

    def leave(self) -> None:
        """Frees the device's memory for others. Whatever reads weights afterwards reads them on the CPU."""
        if not self.away:
            self.away = True
            self._to(CPU)

    def enter(self) -> None:
        """Takes the device's memory; the others must have given it up."""
        if self.away:
            self.away = False
            self._to(self.device)

    @torch.no_grad()
    def _to(self, device: torch.device) -> None:
        move, learner = self._move, self._learner
        if move is None:
            return
        learner.release()  # what was computed from the weights, and would keep memory
        for model in learner.models:
            # torch's own way of moving a module, which FSDP2's modules extend to the rows that they hold.
            model._apply(lambda tensor: move(tensor, device))
        if not isinstance(learner.optimizer, OffloadedAdamW):
            for state in learner.optimizer.state.values():
                state.update({name: move(t, device) for name, t in state.items() if isinstance(t, Tensor)})
        if device == CPU and self.device.type == "cuda":
            gc.collect()  # cycles hold tensors too
            torch.cuda.empty_cache()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)
