"""The plain runner for weights that FSDP2 shards over ranks: each layer's weights are gathered while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from ..errors import NumericsError
from .autograd import AutogradRunner
from .fused_head import FusedHead
from .head import Beside, LossCallback
from .packing import Pack
from .runner import RunnerSettings

_METHOD = "trew_forward"


class ShardedRunner(AutogradRunner):
    """Runs samples through a model whose weights are sharded. Gathering is a collective operation, so all ranks must
    run the same number of passes, with and without a gradient, in the same order: see :meth:`idle`."""

    def __init__(self, model: Any, settings: RunnerSettings | None = None, **parts: Any) -> None:
        super().__init__(model, settings, **parts)
        if not hasattr(model, _METHOD):
            # Embedding, final norm and head belong to the root, whose weights are gathered for registered methods only.
            setattr(model, _METHOD, MethodType(_call, model))
            register_fsdp_forward_method(model, _METHOD)

    @torch.no_grad()
    def _values(self, pack: Pack, *, beside: Beside | None = None) -> tuple[Tensor, Tensor | None]:
        if self._head is None:
            return super()._values(pack, beside=beside)
        given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}

        def values(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
            with self._gathered_head().working() as head:
                return head.values(hidden, **given, beside=beside)

        # The head runs inside the registered method, too: its weight is whole only there.
        with self._prepared(pack):
            return getattr(self.model, _METHOD)(lambda: values(self._run(pack)))

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        finishing = _Finishing(rule)
        if self._head is None:
            super().accumulate(pack, finishing, entropies=entropies, lengths=lengths)
        else:
            given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}

            def loss(hidden: Tensor) -> Tensor:
                head = self._gathered_head()
                how = {**given, "entropies": entropies, "lengths": lengths}
                return _HeadLoss.apply(hidden, head.weight, head.bias, head, finishing, how)

            with self._recomputing(), self._prepared(pack):
                getattr(self.model, _METHOD)(lambda: loss(self._run(pack))).backward()
        if finishing.error is not None:
            raise finishing.error

    def idle(self, *, gradient: bool) -> None:
        # The same collective operations as for a real pack; with slopes of 0, nothing is added to the gradient.
        pack = _one_token()
        if gradient:
            self.accumulate(pack, lambda part, logprobs, entropies: (torch.zeros_like(logprobs), None))
        else:
            self.logprobs_of(pack)

    def release(self) -> None:
        """Frees gathered weights; the next pass gathers them anew, with all updates since."""
        super().release()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _gathered_head(self) -> FusedHead:
        """The head with its whole weight; valid while the root's weights are gathered."""
        now: Any = self.model.get_output_embeddings()
        assert self._head is not None
        return self._head.with_weights(now.weight, now.bias)


def _call(model: Any, work: Any) -> Any:
    """Calls ``work``, with the root's weights gathered before."""
    del model
    return work()


class _Finishing:
    """A rule whose NumericsError is kept until the backward pass is through, which the other ranks take part in."""

    def __init__(self, rule: LossCallback) -> None:
        self.rule = rule
        self.error: NumericsError | None = None

    def __call__(self, part: slice, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.error is None:
            try:
                return self.rule(part, logprobs, entropies)
            except NumericsError as error:
                self.error = error
        # The step is lost: zeros let the rest of the pass run, whose collective operations the others wait for.
        return torch.zeros_like(logprobs), None if entropies is None else torch.zeros_like(logprobs)


class _HeadLoss(torch.autograd.Function):
    """A zero whose gradients are those that the fused head computes beside its forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, rule, how):
        # The head adds to ``grad`` itself; on stand-ins, so that autograd hands the sums to FSDP's reduction.
        own = head.with_weights(_stand_in(weight), None if bias is None else _stand_in(bias))
        with own.working() as working:
            by_hidden = working.accumulate(hidden.detach(), rule, **how)
        ctx.save_for_backward(by_hidden.to(hidden.dtype), own.weight.grad, None if own.bias is None else own.bias.grad)
        return torch.zeros((), device=hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # ``grad`` is 1, since nothing stands between this loss and its backward().
        return (*ctx.saved_tensors, None, None, None)


def _stand_in(weight: Tensor) -> Tensor:
    return weight.detach().requires_grad_(weight.requires_grad)


def _one_token() -> Pack:
    """A pack of one prompt token and one completion token."""
    zero = np.zeros(1, dtype=np.int64)
    ids = np.zeros((1, 1), dtype=np.int64)
    return Pack((0,), ids, ids, zero, zero, zero, mask=np.ones((1, 1), dtype=bool))
