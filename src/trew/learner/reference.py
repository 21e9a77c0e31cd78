"""Of which type the weights of a reference are kept."""

from __future__ import annotations

from collections.abc import Set

from ..backends.cpu.runner import reason_against
from ..config import Config
from ..models import loading


def in_bfloat16(config: Config, *, stored: Set[str], device: str) -> bool:
    """Whether those of linear layers are: where they are stored so, or where computation is in bfloat16, which rounds
    them in every product. Not in a reference that is updated, nor where something else is to run its layers in
    float32; and what is stored in float32 needs less, where the kernels read it from its file layer by layer
    (:mod:`trew.backends.cpu.file_backed`). ``stored``: types of the model's weights, as safetensors names them."""
    if config.learner.reference_every:
        return False
    if config.learner.dtype == "float32":
        return stored == {"BF16"} and not (config.learner.compile or config.learner.liger)
    by_layer = stored == {"F32"} and device == "cpu" and config.kernels == config.linear == "auto"
    return not (by_layer and reason_against(loading.skeleton(loading.load_config(config.model))) is None)
