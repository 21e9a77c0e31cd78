"""The dtype in which the weights of frozen models are kept: a reference's, a teacher's."""

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
    return not config.learner.reference_every and _rounding_changes_nothing(
        config, config.model, stored=stored, backend=backend
    )


def teacher_in_bfloat16(config: Config, *, stored: Set[str], backend: Backend | None) -> bool:
    """Whether the teacher keeps its linear weights in bfloat16: as ``teacher.dtype`` says and, with "auto", where a
    reference with these ``stored`` dtypes would."""
    if config.teacher.dtype != "auto":
        return config.teacher.dtype == "bfloat16"
    return _rounding_changes_nothing(config, config.teacher.model, stored=stored, backend=backend)


def _rounding_changes_nothing(config: Config, model: str, *, stored: Set[str], backend: Backend | None) -> bool:
    if config.learner.dtype == "float32":
        return stored == {"BF16"} and not (config.learner.compile or config.learner.liger)
    # ---- computation in bfloat16
    if backend is None or stored != {"F32"}:
        return True
    return not backend.reads_by_layer(loading.skeleton(loading.load_config(model)))
