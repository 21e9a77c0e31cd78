"""Whether servers could load what a policy publishes: the model's tensors, by the names that its checkpoint has."""

from __future__ import annotations

from ..models import loading
from ..rollout.vllm.plugin.trew_vllm.published import Refused, Tensor, check_model, checkpoint


def problems(model: str) -> list[str]:
    """Why no vLLM server would accept weights of ``model``; empty if all fit, or its files are not here yet.

    transformers holds the weights of some models under other names than their files: it fuses the experts of Mixtral
    and Qwen3-MoE and renames the head of GPT-NeoX. vLLM reads the names of the files.
    """
    folder = loading.folder(model)
    if folder is None:
        return []
    config = loading.load_config(model)
    held = loading.skeleton(config).state_dict()
    # A checkpoint's names and shapes alone are compared, so that the type may be any that is published.
    tensors = {name: Tensor("float32", tuple(tensor.shape)) for name, tensor in held.items()}
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    try:
        check_model(tensors, started_from=checkpoint(folder), tied=tied)
    except Refused as refused:
        return [
            "cluster.rollout: got 'vllm', accepts 'embedded' for this model, whose weights transformers holds under "
            f"other names than its files, which are those that vLLM reads: {refused}"
        ]
    return []
