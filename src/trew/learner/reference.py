"""Of which type the weights of a reference are kept."""

from __future__ import annotations

from collections.abc import Set

from ..config import Config
from ..models import loading
from ..models.backend import Backend


def in_bfloat16(config: Config, *, stored: Set[str], backend: Backend | None) -> bool:
    """Whether those of linear layers are: where they are stored so, or where computation is in bfloat16, which rounds
    them in every product. Not in a reference that is updated, nor where something else is to run its layers in
    float32; and what is stored in float32 needs less, where the ``backend`` reads it from its file layer by layer.
    ``stored``: types of the model's weights, as safetensors names them."""
    if config.learner.reference_every:
        return False
    if config.learner.dtype == "float32":
        return stored == {"BF16"} and not (config.learner.compile or config.learner.liger)
    if backend is None or stored != {"F32"}:
        return True
    return not backend.reads_by_layer(loading.skeleton(loading.load_config(config.model)))
