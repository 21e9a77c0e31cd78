"""liger-kernel's norms, rotary embedding and gates (Triton) for a model on a CUDA GPU, in the learner's passes only.

liger-kernel's own entry point patches functions and classes of transformers for the whole process, permanently, and
renames the model's modules: generation, a reference and exports would be affected too. So only its functions are used
here, and the originals are restored after the pass. Its head and losses are not used: :mod:`.fused_head` does that.
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
"""The function that is replaced in the module that defines the model's architecture."""


@dataclass
class Liger:
    """Replaces norms, gates and rotary embedding. Implements :class:`.LayerAccelerator`."""

    key: ClassVar[str] = "liger"
    what: ClassVar[str] = "liger-kernel"
    trial: bool = False

    @contextmanager
    def layers(self, model: PreTrainedModel, *, again: bool = False) -> Iterator[None]:
        """Runs the model with liger's kernels inside the block, which must enclose the backward pass; ``again``: layers
        recompute their activations there. A module whose ``forward`` is already replaced keeps it."""
        from liger_kernel.transformers import functional  # type: ignore[import-not-found]
        from triton.errors import TritonError  # type: ignore[import-not-found]

        free = [(m, new) for m in model.modules() if "forward" not in m.__dict__ and (new := _forward(m, functional))]
        # The attention code looks this function up as a global of its module, so it must be replaced there.
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
        """Reports nothing."""


def check(model: PreTrainedModel) -> None:
    """Raises ModelError where liger lacks the architecture's norms, gates or rotary embedding."""
    name, config = type(model).__name__, model.config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    if name not in FAMILIES or not type(model).__module__.startswith("transformers.") or activation not in ACTIVATIONS:
        raise ModelError(
            f"learner.liger: got true, accepts it for {', '.join(sorted(FAMILIES))} with an activation of "
            f"{', '.join(ACTIVATIONS)}; this is {name} with {activation!r}; set it to false"
        )


def _forward(m: Any, functional: Any) -> Callable[[Tensor], Tensor] | None:
    """The replacement for ``forward`` of a norm or a gated MLP; None for other modules."""
    name = type(m).__name__
    if name.endswith("RMSNorm"):
        gemma = name.startswith("Gemma")
        # Arguments: eps, offset of the weight (Gemma stores w - 1), rounding mode, in place. Not in place: the gradient
        # tensor that a norm receives may also be the residual's.
        given = (float(m.eps), 1.0, "gemma", False) if gemma else (float(m.variance_epsilon), 0.0, "llama", False)
        return lambda x: functional.liger_rms_norm(x, m.weight, *given)
    if name.endswith("MLP"):
        kind = getattr(m.config, "hidden_activation", None) or m.config.hidden_act
        product = {"silu": functional.liger_swiglu, "gelu_tanh": functional.liger_geglu}[ACTIVATIONS[kind]]
        return lambda x: m.down_proj(product(m.gate_proj(x), m.up_proj(x)))
    return None
