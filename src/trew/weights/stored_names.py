"""Whether servers could load what a policy publishes: the model's tensors, by the names that its checkpoint has."""

from __future__ import annotations

from ..models import loading
from ..models.stored import as_stored
from ..rollout.vllm.plugin.trew_vllm.published import Refused, Tensor, check_model, checkpoint


def problems(model: str) -> list[str]:
    """Why no vLLM server would accept weights of ``model``; empty if all fit, or its files are not here yet.

    Weights are published under the names of the files, as far as transformers can go back to them tensor by tensor
    (:func:`trew.models.stored.as_stored`).
    """
    folder = loading.folder(model)
    if folder is None:
        return []
    config = loading.load_config(model)
    held = loading.skeleton(config)
    # A checkpoint's names and shapes alone are compared, so that the type may be any that is published.
    published = as_stored(held, held.state_dict().items())
    tensors = {name: Tensor("float32", tuple(tensor.shape)) for name, tensor in published}
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    try:
        check_model(tensors, started_from=checkpoint(folder), tied=tied)
    except Refused as refused:
        return [
            "cluster.rollout: got 'vllm', accepts 'embedded' for this model: its weights could not be published under "
            f"the names of its files, which are those that vLLM reads: {refused}"
        ]
    return []
