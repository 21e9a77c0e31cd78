"""liger-kernel's norms, rotary embedding and gates (Triton) for a model on a CUDA GPU, in the learner's passes alone.

liger-kernel's own way in exchanges functions and classes of transformers for the whole process and for good, and gives
the modules of the model other names: generation, a reference and exports would see it too. So only its functions are
used here, and what they stand in for is put back after the pass. Its head and losses are not used: the head's work is
:mod:`.fused_head`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ModelError
from ..models.anatomy import ACTIVATIONS, FAMILIES
from . import recompute

ROPE = "apply_rotary_pos_emb"
"""The function that is exchanged in the file of the model's architecture."""


@dataclass
class Liger:
    """Exchanges norms, gates and rotary embedding; a :class:`.LayerAccelerator`."""

    key: ClassVar[str] = "liger"
    what: ClassVar[str] = "liger-kernel"
    trial: bool = False

    @contextmanager
    def layers(self, model: PreTrainedModel, *, again: bool = False) -> Iterator[None]:
        """Lets the model run with liger's kernels inside the block, which must enclose the backward pass; ``again``:
        layers compute their activations again there. A module that somebody else has wrapped stays as it is."""
        from liger_kernel.transformers import functional  # type: ignore[import-not-found]
        from triton.errors import TritonError  # type: ignore[import-not-found]

        free = [(m, new) for m in model.modules() if "forward" not in m.__dict__ and (new := _forward(m, functional))]
        file = vars(sys.modules[type(model).__module__])
        rope = file[ROPE]
        try:
            for module, forward in free:
                module.forward = forward
            file[ROPE] = lambda *tensors, unsqueeze_dim=1: functional.liger_rope(*tensors, unsqueeze_dim=unsqueeze_dim)
            with recompute.recomputing(model) if again else nullcontext():
                yield
        except TritonError as error:
            if self.trial:
                raise RuntimeError(str(error)) from error
            raise ModelError(
                f"learner.liger: got true, but its kernels fail on {type(model).__name__}: {error}; set it to false"
            ) from error
        finally:
            file[ROPE] = rope
            for module, _ in free:
                module.__dict__.pop("forward", None)

    def report(self) -> None:
        """There is nothing to tell."""


def check(model: PreTrainedModel) -> None:
    """Raises ModelError where the architecture is not one whose norms, gates and rotary embedding liger has."""
    name, config = type(model).__name__, model.config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.") or activation not in ACTIVATIONS:
        raise ModelError(
            f"learner.liger: got true, accepts it for {', '.join(sorted(FAMILIES))} with an activation of "
            f"{', '.join(ACTIVATIONS)}; this is {name} with {activation!r}; set it to false"
        )


def _forward(m: Any, functional: Any) -> Callable[[Tensor], Tensor] | None:
    """What stands in for ``forward`` of a norm or a gated product; None for other modules."""
    name = type(m).__name__
    if name.endswith("RMSNorm"):
        gemma = name.startswith("Gemma")
        # Not in place: the gradient that a norm gets may be the residual's too.
        given = (float(m.eps), 1.0, "gemma", False) if gemma else (float(m.variance_epsilon), 0.0, "llama", False)
        return lambda x: functional.liger_rms_norm(x, m.weight, *given)
    if name.endswith("MLP"):
        kind = getattr(m.config, "hidden_activation", None) or m.config.hidden_act
        product = {"silu": functional.liger_swiglu, "gelu_tanh": functional.liger_geglu}[ACTIVATIONS[kind]]
        return lambda x: m.down_proj(product(m.gate_proj(x), m.up_proj(x)))
    return None
