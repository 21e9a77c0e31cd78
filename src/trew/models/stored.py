"""Tensors of a model as its files hold them: transformers fuses or renames the weights of some models as it loads them,
and vLLM reads the names of the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def as_stored(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of the model's state under the names, and in the parts, that its files have: of Qwen3-MoE the
    experts one by one, of GPT-NeoX the head as ``embed_out.weight``. Most models' tensors pass as they are.

    Tensors are converted one by one, so that one at a time is in memory twice. A tensor of the files that would need
    several of these comes out with a wrong shape, which :func:`trew.weights.stored_names.problems` finds beforehand.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # transformers gives the same dictionary back where it converts nothing; it finds that out anew in every call.
    none: dict[str, Tensor] = {}
    if revert_weight_conversion(model, none) is none:
        yield from tensors
        return
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()
