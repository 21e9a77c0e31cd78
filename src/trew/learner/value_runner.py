"""``ValueRunner``: runs samples through a critic, a model whose head gives one number for each state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import ModelError
from .autograd import AutogradRunner
from .head import Beside, LossCallback
from .packing import Pack


def with_value_head(model: PreTrainedModel, *, std: float = 0.0, seed: int = 0) -> PreTrainedModel:
    """Replaces the output head of a language model, in place, by a linear one with a single output. Its weights are
    normal with deviation ``std`` / sqrt(their number), so that values begin at about ``std``; 0: they are all 0.

    An embedding that the old head shared stays what it is.
    """
    old = model.get_output_embeddings()
    if not isinstance(old, nn.Module) or model.base_model is model:
        raise ModelError(f"{type(model).__name__}: has no output head that a critic could replace")
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    width = model.config.get_text_config().hidden_size
    head = nn.Linear(width, 1, bias=False, device=embedding.device, dtype=torch.float32)
    # On the CPU: a seed gives the same critic on every device.
    noise = torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.weight.copy_(noise * std / math.sqrt(width))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


def with_score_as_value(scorer: PreTrainedModel) -> PreTrainedModel:
    """A model whose values are the scores of a reward model, a sequence classifier with one label: its body and its
    head, not copied. Raises ModelError where the head is not one linear map of the hidden state."""
    head = getattr(scorer, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None or head.out_features != 1:
        raise ModelError(
            f"{type(scorer).__name__}: its score is not one product with the hidden state, which a critic's value is; "
            "give a reward model of trew train-reward, or a language model"
        )
    # A shell without memory: its body and its head are replaced below.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scorer.config)
    setattr(model, model.base_model_prefix, scorer.base_model)
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model.eval()


class ValueRunner(AutogradRunner):
    """An :class:`.AutogradRunner` that gives values of states instead of log-probs of tokens: v = w . h, with h the
    hidden state from which a token was chosen. The product is in float32 whatever the body computes in.

    The first samples decide on packed rows as they do for log-probs; the comparison reads h through a fixed vector
    instead of w, which may be 0 and would hide any difference.
    """

    _probing = False

    @torch.no_grad()
    def _values(self, pack: Pack, *, beside: Beside | None = None) -> tuple[Tensor, Tensor | None]:
        assert beside is None
        with self.running(pack) as hidden:
            return self._read(hidden, pack), None

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        assert not entropies
        with self._recomputing(), self.running(pack) as hidden:
            values = self._read(hidden, pack)
            slopes, _ = rule(slice(0, len(values)), values.detach(), None)
            # Linear in the values with the derivatives as constants: the gradient of the real loss.
            (slopes * values).sum().backward()

    def exact(self) -> ValueRunner:
        made = self._like(share_prompts=False, budget=1)
        assert isinstance(made, ValueRunner)
        return made

    def _like(self, **changes: Any) -> AutogradRunner:
        # Always with a fused head: without one, running() would give the outputs of the head instead of hidden states.
        made = super()._like(**{"fused": True, **changes})
        assert isinstance(made, ValueRunner)
        made._probing = True
        return made

    def _read(self, hidden: Tensor, pack: Pack) -> Tensor:
        """Values (n,) of the pack's tokens from the hidden states (K, H) that are read."""
        assert self._head is not None  # so that running() gives hidden states
        weight = self._head.weight
        if self._probing:
            weight = torch.arange(hidden.shape[1], device=hidden.device).cos()[None] / math.sqrt(hidden.shape[1])
        with torch.autocast(hidden.device.type, enabled=False):
            return (hidden.float() @ weight[0])[self._tensor(pack.read_rows)]
