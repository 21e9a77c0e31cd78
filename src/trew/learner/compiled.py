"""torch.compile for the layers of a model that runs through its own ``forward``, in the learner's passes only.

The ``forward`` of the layers' class is compiled and set on each layer for the duration of a pass. Outside
:meth:`Compiler.layers` the model is unchanged: generation, weight names and hooks never see the compiled code. Sizes
are symbolic (``dynamic=True``), so that micro-batches of all lengths run the same code. It is recompiled for each
combination of: with and without gradient, packed and padded rows, float32 (verification) and autocast, adapters on and
off, and kinds of layers. Attention over packed rows and this project's own products stay outside the graphs or appear
in them as they are.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import ModelError
from . import recompute

VERSIONS = 64
"""Limit of compiled versions per function. Beyond it torch runs the function uncompiled, silently."""


@dataclass
class Compiler:
    """Compiles layers and reports through ``tell`` how long that took. Implements :class:`.LayerAccelerator`."""

    key: ClassVar[str] = "compile"
    what: ClassVar[str] = "compiled layers"
    tell: Callable[[str], None] = lambda text: None
    seconds: float = 0.0
    trial: bool = False  # torch's own errors are raised
    _told: float = 0.0

    @contextmanager
    def layers(self, model: PreTrainedModel, *, again: bool = False) -> Iterator[None]:
        """Runs the layers compiled inside the block, which must enclose the backward pass; ``again``: they recompute
        their activations there. A layer whose ``forward`` is already replaced keeps it, apart from ``again``.

        Raises ModelError that says what to do where torch.compile fails; during a ``trial``, torch's own error.
        """
        layers = recompute.layers(model)
        # A ``forward`` in the instance's dictionary was put there by other code (hooks of the accelerate library do
        # so): compiling the class's function instead would drop that code.
        wrapped = {layer: layer.__dict__["forward"] for layer in layers if "forward" in layer.__dict__}
        before, start = _graphs(), time.perf_counter()
        try:
            with dynamo.patch(recompile_limit=VERSIONS), warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\.")  # about torch's internals
                for layer in layers:
                    run = wrapped.get(layer) or MethodType(_compiled(type(layer).forward), layer)
                    layer.forward = functools.partial(_again, run) if again else run  # type: ignore[method-assign]
                yield
        except TorchDynamoException as error:
            if self.trial:
                raise
            raise ModelError(
                f"learner.compile: got true, but torch.compile fails on {type(model).__name__} with "
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}; set it to false"
            ) from error
        finally:
            # Removed rather than reassigned: an attribute left behind would count as someone else's in the next pass.
            for layer in layers:
                layer.__dict__.pop("forward", None)
            for layer, own in wrapped.items():
                layer.forward = own
            # Compilation happens inside the first pass, so that only the whole pass can be timed.
            if _graphs() > before:
                self.seconds += time.perf_counter() - start

    def report(self) -> None:
        """Reports the compile time where it has grown since the last report."""
        if self.seconds > self._told:
            self._told = self.seconds
            self.tell(f"note: learner.compile: passes with something to compile took {self.seconds:.1f} s so far")


def check(model: PreTrainedModel) -> None:
    """Raises ModelError where the model's layers cannot be identified."""
    if not recompute.layers(model):
        raise ModelError(
            f"learner.compile: got true, but it cannot be told what the layers of {type(model).__name__} are; set it "
            "to false"
        )


def _again(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)


@functools.cache  # a new wrapper per pass would compile anew each time
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
