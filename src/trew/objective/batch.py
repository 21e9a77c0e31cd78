"""``TokenBatch``: what an objective looks at, as packed one-dimensional streams; and the denominators of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DataError
from .segments import segment_count

PER_TOKEN = ("logprobs", "mask", "sequence_ids", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs",
             "entropies")  # fmt: skip
PER_SEQUENCE = ("group_ids", "rewards", "correct", "truncated")


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a whole optimizer step divides by: fixed once, over all its micro-batches and ranks.

    ``sequences`` counts the sequences that have at least one loss token: one without any carries no gradient, and
    would only shrink everybody else's.
    """

    sequences: int
    tokens: int
    max_length: int | None = None

    @staticmethod
    def of(batch: TokenBatch) -> Denominators:
        """The denominators if ``batch`` is the whole step."""
        lengths = batch.lengths
        return Denominators(int((lengths > 0).sum()), int(lengths.sum()), batch.max_length)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N completion tokens of S sequences, in sequence order, and what is known about them.

    Only ``logprobs`` (the policy being trained) carries a gradient; all log-probabilities are of the sampled token, in
    nats. ``mask`` is True where a token carries loss. ``rewards`` may hold NaN (does not apply): such a sequence takes
    no part in its group's statistics and carries no loss. ``old_logprobs`` defaults to ``logprobs.detach()``.
    """

    logprobs: Float[Tensor, "N"]
    mask: Bool[Tensor, "N"]
    sequence_ids: Int[Tensor, "N"]
    group_ids: Int[Tensor, "S"]
    rewards: Float[Tensor, "S"] | Float[Tensor, "S K"] | None = None
    advantages: Float[Tensor, "N"] | None = None
    old_logprobs: Float[Tensor, "N"] | None = None
    rollout_logprobs: Float[Tensor, "N"] | None = None
    ref_logprobs: Float[Tensor, "N"] | None = None
    entropies: Float[Tensor, "N"] | None = None
    correct: Bool[Tensor, "S"] | None = None
    truncated: Bool[Tensor, "S"] | None = None
    max_length: int | None = None
    denominators: Denominators | None = None
    padded_mask: Bool[Tensor, "B T"] | None = None

    @property
    def lengths(self) -> Int[Tensor, "S"]:
        """Loss tokens of each sequence, T_i."""
        return segment_count(self.mask, ids=self.sequence_ids, size=len(self.group_ids))

    def replace(self, **fields: Any) -> TokenBatch:
        """A copy with some fields exchanged."""
        return dataclasses.replace(self, **fields)

    def select(self, sequences: Int[Tensor, "M"]) -> TokenBatch:
        """The batch of these whole sequences only, renumbered in the given order; denominators stay the step's."""
        position = torch.full((len(self.group_ids),), -1, dtype=torch.int64, device=self.mask.device)
        position[sequences] = torch.arange(len(sequences), device=self.mask.device)
        new_ids = position[self.sequence_ids]
        keep = (new_ids >= 0).nonzero().squeeze(1)
        order = keep[torch.argsort(new_ids[keep], stable=True)]
        fields = {k: v[order] for k in PER_TOKEN if (v := getattr(self, k)) is not None}
        fields |= {k: v[sequences] for k in PER_SEQUENCE if (v := getattr(self, k)) is not None}
        return self.replace(**(fields | {"sequence_ids": new_ids[order], "padded_mask": None}))

    def unpack(self, values: Float[Tensor, "N"]) -> Float[Tensor, "..."]:
        """Values per token in the shape the batch was made from: (B, T) with zeros outside the mask, or (N,)."""
        if self.padded_mask is None:
            return values
        out = torch.zeros(self.padded_mask.shape, dtype=values.dtype, device=values.device)
        out[self.padded_mask] = values
        return out

    @classmethod
    def from_padded(
        cls,
        *,
        logprobs: Float[Tensor, "B T"],
        mask: Tensor,
        group_ids: Tensor,
        rewards: Tensor | None = None,
        advantages: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropies: Tensor | None = None,
        correct: Tensor | None = None,
        truncated: Tensor | None = None,
        max_length: int | None = None,
        denominators: Denominators | None = None,
    ) -> TokenBatch:
        """Packs ordinary padded (B, T) tensors: the way in from any other trainer.

        ``rewards`` is (B,) or (B, K), NaN where a reward does not apply; ``advantages`` (B,) or (B, T) may be given
        instead. What stands outside ``mask`` is never read. Raises DataError when shapes do not fit or when neither
        rewards nor advantages are given.

        >>> l = torch.tensor([[-1., -2.], [-3., 0.]]); m = torch.tensor([[True, True], [True, False]])
        >>> batch = TokenBatch.from_padded(logprobs=l, mask=m, rewards=torch.tensor([1., 0.]),
        ...                                group_ids=torch.tensor([0, 0]))
        >>> batch.logprobs.tolist(), batch.sequence_ids.tolist(), batch.lengths.tolist()
        ([-1.0, -2.0, -3.0], [0, 0, 1], [2, 1])
        """
        rows, width = logprobs.shape
        mask = mask.to(torch.bool)
        per_token = {"mask": mask, "old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs,
                     "ref_logprobs": ref_logprobs, "entropies": entropies}  # fmt: skip
        for name, value in per_token.items():
            _expect(name, value, [(rows, width)])
        for name, value in {"group_ids": group_ids, "correct": correct, "truncated": truncated}.items():
            _expect(name, value, [(rows,)])
        _expect("advantages", advantages, [(rows,), (rows, width)])
        if rewards is not None and (rewards.dim() not in (1, 2) or rewards.shape[0] != rows):
            raise DataError(f"rewards: got shape {tuple(rewards.shape)}, accepts ({rows},) or ({rows}, K)")
        if rewards is None and advantages is None:
            raise DataError("rewards: got None; give rewards (B,) or (B, K), or advantages (B,) or (B, T)")
        if advantages is not None:
            wide = advantages if advantages.dim() == 2 else advantages[:, None].expand(rows, width)
            advantages = wide.to(logprobs.dtype)[mask]
        sequence_ids = torch.arange(rows, device=logprobs.device)[:, None].expand(rows, width)[mask]

        def pack(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[mask]

        return cls(
            logprobs=logprobs[mask],
            mask=torch.ones(len(sequence_ids), dtype=torch.bool, device=logprobs.device),
            sequence_ids=sequence_ids,
            group_ids=group_ids.to(torch.int64),
            rewards=rewards if rewards is None or rewards.is_floating_point() else rewards.to(torch.float32),
            advantages=advantages,
            old_logprobs=pack(old_logprobs),
            rollout_logprobs=pack(rollout_logprobs),
            ref_logprobs=pack(ref_logprobs),
            entropies=pack(entropies),
            correct=correct if correct is None else correct.to(torch.bool),
            truncated=truncated if truncated is None else truncated.to(torch.bool),
            max_length=max_length,
            denominators=denominators,
            padded_mask=mask,
        )


def _expect(name: str, value: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if value is not None and tuple(value.shape) not in shapes:
        raise DataError(f"{name}: got shape {tuple(value.shape)}, accepts {' or '.join(map(str, shapes))}")
