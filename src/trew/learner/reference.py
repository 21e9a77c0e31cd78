"""The dtype in which a reference's weights are kept."""

from __future__ import annotations

from collections.abc import Set

from ..config import Config
from ..models import loading
from ..models.backend import Backend


def in_bfloat16(config: Config, *, stored: Set[str], backend: Backend | None) -> bool:
    """Whether the reference keeps its linear weights in bfloat16.

    It does where they are stored in bfloat16, or where computation is in bfloat16, which rounds them in every product
    anyway. It does not where the reference is updated, or where an accelerator runs its layers in float32. Weights that
    are stored in float32 stay so if the ``backend`` reads them from their file layer by layer, which takes less memory
    than a bfloat16 copy. ``stored``: dtypes of the model's weights, as safetensors names them."""
    # bfloat16 would lose the small moves of an updated reference.
    if config.learner.reference_every:
        return False
    if config.learner.dtype == "float32":
        return stored == {"BF16"} and not (config.learner.compile or config.learner.liger)
    # ---- computation in bfloat16
    if backend is None or stored != {"F32"}:
        return True
    return not backend.reads_by_layer(loading.skeleton(loading.load_config(config.model)))
