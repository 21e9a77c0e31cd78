"""Checks what components return and leave behind, with a DataError.

A value of another shape would be broadcast against the tokens, or read at the wrong places, and the sum over all of
them would still be one number. Numbers come without gradient: one that went through a weight or a KL's value would add
to that of the coefficients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import DataError
from .advantage import Advantage
from .batch import TokenBatch
from .component import Component
from .padded import kind


def of_tokens(value: Any, component: Component, *, batch: TokenBatch) -> Float[Tensor, "N"]:
    """``value``, if it is one number for each token of the batch; a single number counts for all of them."""
    return _numbers(value, component, batch, len(batch.mask), "token of the batch")


def of_sequences(value: Any, component: Component, *, batch: TokenBatch) -> Float[Tensor, "S"]:
    """``value``, if it is one number for each sequence of the batch; a single number counts for all of them."""
    return _numbers(value, component, batch, batch.size, "sequence of the batch")


def of_advantage(value: Any, advantage: Advantage, *, batch: TokenBatch) -> Float[Tensor, "N"]:
    """What an advantage returned, one number for each token, or for each sequence, as it declares; for each token."""
    if advantage.per_token:
        return of_tokens(value, advantage, batch=batch)
    each = "sequence of the batch; one that returns them for each token declares per_token = True"
    return _numbers(value, advantage, batch, batch.size, each)[batch.sequence_ids]


def flags(value: Any, component: Component, shape: Sequence[int], each: str) -> Bool[Tensor, "..."]:
    """``value``, if it is True or False for each token or sequence, of which there are as many as ``shape`` says."""
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != torch.bool:
        raise _refusal(value, component, f"bool of shape ({shape[0]},): True or False for each {each} of the batch")
    return value


def _numbers(value: Any, component: Component, batch: TokenBatch, count: int, each: str) -> Tensor:
    dtype = batch.logprobs.dtype
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
        return torch.full((count,), float(value), dtype=dtype, device=batch.mask.device)
    if not isinstance(value, Tensor) or value.shape != (count,):
        raise _refusal(value, component, f"({count},): one number for each {each}")
    return value.detach() if value.is_floating_point() else value.to(dtype)


def _refusal(value: Any, component: Component, accepts: str) -> DataError:
    got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind(value)
    return DataError(f"{type(component).__name__}: returned {got.replace('torch.', '')}, accepts {accepts}")


class Watched:
    """The tensors that components are given: one that changes them in place changes what the others read, and the
    caller's own tensors."""

    def __init__(self, batch: TokenBatch) -> None:
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self.add(**{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)})

    def add(self, **given: Any) -> None:
        """Watches more tensors, by their names; other values are ignored."""
        # PyTorch counts the changes of a tensor, but not of those that were made in inference mode.
        tensors = {name: t for name, t in given.items() if isinstance(t, Tensor) and not t.is_inference()}
        self._seen |= {name: (t, t._version) for name, t in tensors.items()}

    def check(self) -> None:
        """Raises DataError for the first tensor that has changed."""
        for name, (tensor, version) in self._seen.items():
            if tensor._version != version:
                raise DataError(
                    f"{name}: was changed in place by a component of the objective, so that the others read something "
                    "else; a component returns a new tensor: write x = x * y, not x *= y, and x.clamp(), not x.clamp_()"
                )
