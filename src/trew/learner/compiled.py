"""torch.compile for the layers of a model that runs through its own ``forward``, in the learner's passes alone.

What is compiled is ``forward`` of the layers' class; the layers get it for the time of a pass, and lose it again.
Outside of :meth:`Compiler.layers` the model is as it was: generation, names of weights and hooks know nothing of it.
Sizes are symbols (``dynamic=True``), so that micro-batches of other lengths run the same code; it is compiled anew for
each of: with and without gradient, packed and padded rows, float32 (the proof) and autocast, adapters on and off, and
kinds of layers. Attention over packed rows and our products stand between or inside the graphs as they are.
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
"""Most versions of one function; what comes after them would run as it is, without a word."""


@dataclass
class Compiler:
    """Compiles, and remembers how long that took; a :class:`.LayerAccelerator`. ``tell`` is told of it."""

    key: ClassVar[str] = "compile"
    what: ClassVar[str] = "compiled layers"
    tell: Callable[[str], None] = lambda text: None
    seconds: float = 0.0
    trial: bool = False  # errors come through as they are
    _told: float = 0.0

    @contextmanager
    def layers(self, model: PreTrainedModel, *, again: bool = False) -> Iterator[None]:
        """Lets the layers run compiled inside the block, which must enclose the backward pass; ``again``: they compute
        their activations again there. A layer that somebody else has wrapped stays as it is, but for ``again``.

        Raises ModelError where torch.compile fails, with what to do; in a ``trial`` its own error.
        """
        layers = recompute.layers(model)
        wrapped = {layer: layer.__dict__["forward"] for layer in layers if "forward" in layer.__dict__}
        before, start = _graphs(), time.perf_counter()
        try:
            with dynamo.patch(recompile_limit=VERSIONS), warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\.")  # of how it works inside
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
            for layer in layers:
                layer.__dict__.pop("forward", None)
            for layer, own in wrapped.items():
                layer.forward = own
            if _graphs() > before:
                self.seconds += time.perf_counter() - start

    def report(self) -> None:
        """Tells what compiling has taken since it was last told."""
        if self.seconds > self._told:
            self._told = self.seconds
            self.tell(f"note: learner.compile: passes with something to compile took {self.seconds:.1f} s so far")


def check(model: PreTrainedModel) -> None:
    """Raises ModelError where it cannot be told what the model's layers are."""
    if not recompute.layers(model):
        raise ModelError(
            f"learner.compile: got true, but it cannot be told what the layers of {type(model).__name__} are; set it "
            "to false"
        )


def _again(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
