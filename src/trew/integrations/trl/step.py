"""From TRL's padded batch to ours and back. All functions see whole tensors of (B, C) and know nothing of a trainer.

What ``plan`` and ``renormalised_for`` compute travels in TRL's own dictionary under the names below, one row per
completion, so that TRL's shuffling and splitting carry it along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ...objective import Denominators, Objective, TokenBatch
from ...objective.entropy_bonus import EntropyBonus

MASK, GROUPS, TOKEN_WEIGHTS, TOKENS = "trew_mask", "trew_group_ids", "trew_token_weights", "trew_tokens"
REWARDS, CORRECT, TRUNCATED = "trew_rewards", "trew_correct", "trew_truncated"
COEFFICIENTS, VALUE = "trew_coefficients", "trew_value"
OF_ROWS = {GROUPS: "group_ids", REWARDS: "rewards", CORRECT: "correct", TRUNCATED: "truncated"}
"""What is carried of each completion, (B,), and its field in our batch."""
READ = ("advantages", MASK, TOKEN_WEIGHTS, TOKENS, *OF_ROWS, "old_per_token_logps", "sampling_per_token_logps",
        "ref_per_token_logps")  # fmt: skip
"""What the loss of a planned batch reads beside log-probs and entropies."""


def loss_mask(inputs: Mapping[str, Tensor]) -> Tensor:
    """(B, C) True where a token was chosen by the model and may carry loss."""
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def plan(objective: Objective, *, logprobs: Tensor, **fields: Any) -> TokenBatch:
    """The whole generation batch with advantages, mask and token weights. An entropy bonus acts in the loss alone."""
    batch = TokenBatch.from_padded(logprobs=logprobs, **fields)
    return objective.replace(entropy_bonus=EntropyBonus()).prepare(batch)


def carried(batch: TokenBatch) -> dict[str, Tensor]:
    """What the loss needs of a prepared batch, (B, C), (B,) and ()."""
    assert batch.advantages is not None
    assert batch.token_weights is not None
    assert batch.denominators is not None
    out = {
        "advantages": batch.unpack(batch.advantages),
        MASK: batch.unpack(batch.mask.to(batch.token_weights.dtype)).bool(),
        TOKEN_WEIGHTS: batch.unpack(batch.token_weights),
        TOKENS: torch.tensor(batch.denominators.tokens, device=batch.mask.device),
    }
    if batch.rewards is not None:
        out |= {REWARDS: batch.total_rewards.to(batch.token_weights.dtype), CORRECT: batch.is_correct}
    return out | {
        name: value for name, f in OF_ROWS.items() if name not in out and (value := getattr(batch, f)) is not None
    }


def _of_rows(rows: Mapping[str, Tensor]) -> dict[str, Any]:
    return {field: rows[name] for name, field in OF_ROWS.items() if name in rows}


def renormalised_for(objective: Objective, rows: Mapping[str, Tensor], *, max_length: int) -> dict[str, Tensor]:
    """:func:`carried` of some rows of a generation batch that are an optimizer step of their own."""
    batch = TokenBatch.from_padded(
        logprobs=torch.zeros_like(rows["advantages"]), mask=rows[MASK], advantages=rows["advantages"],
        max_length=max_length, **_of_rows(rows),
    )  # fmt: skip
    return carried(objective.renormalised_for(batch))


def part(
    objective: Objective, inputs: Mapping[str, Tensor], *, logprobs: Tensor, entropies: Tensor, max_length: int
) -> TokenBatch:
    """Rows of a planned batch, ready for ``Objective.loss``; where nothing was planned, the rows as a whole step with
    the advantages that they have."""
    planned = MASK in inputs
    # Where a model computes in 16 bits, its log-probs are not to round the coefficients.
    logprobs = logprobs.float() if logprobs.dtype in (torch.bfloat16, torch.float16) else logprobs
    mask = inputs[MASK] if planned else loss_mask(inputs)
    old, sampler = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
    if sampler is not None:
        # vLLM gives NaN where it cannot say: no difference is known there, and none is corrected.
        sampler = torch.where(sampler.isnan(), logprobs.detach() if old is None else old, sampler)
    of_rows = _of_rows(inputs)
    of_rows.setdefault("group_ids", torch.zeros(len(mask), dtype=torch.int64, device=mask.device))
    batch = TokenBatch.from_padded(
        logprobs=logprobs, mask=mask, advantages=inputs["advantages"], **of_rows, old_logprobs=old,
        rollout_logprobs=sampler, ref_logprobs=inputs.get("ref_per_token_logps"),
        entropies=entropies if objective.entropy_bonus.active else entropies.detach(), max_length=max_length,
    )  # fmt: skip
    if not planned:
        return batch
    return batch.replace(
        token_weights=inputs[TOKEN_WEIGHTS][batch.padded_mask].to(logprobs.dtype),
        denominators=Denominators(0, int(inputs[TOKENS]), max_length),
        mean_entropy=0.0,  # a bonus that is not adaptive acts whatever the entropy is
    )


def carrier(objective: Objective, inputs: Mapping[str, Tensor], *, batch: TokenBatch) -> Tensor:
    """The loss of rows whose coefficients have been computed on the whole step: the step's value is spread evenly."""
    assert batch.token_weights is not None
    assert batch.entropies is not None
    pushed = -(inputs[COEFFICIENTS][batch.padded_mask].to(batch.logprobs.dtype) * batch.logprobs).sum()
    loss = inputs[VALUE].to(pushed.dtype) + (pushed - pushed.detach())
    if objective.entropy_bonus.active:
        loss = loss + objective.entropy_bonus.loss(batch.entropies, token_weights=batch.token_weights)
    return loss


def refuse_unplanned(inputs: Mapping[str, Tensor], *, micro_batches: int) -> None:
    """Raises DataError where a micro-batch that nobody planned would be taken for a whole step."""
    if MASK not in inputs and micro_batches > 1:
        raise DataError(
            f"inputs: got a micro-batch of {micro_batches} that did not come from _generate_and_score_completions, so "
            "that the optimizer step's denominators are unknown; accepts such a batch with gradient_accumulation_steps "
            "= 1 alone"
        )


def cut_off(completion_ids: Sequence[Sequence[int]], *, ends: Sequence[int]) -> list[bool]:
    """Which completions end without an end token (or pad), as TRL judges it.

    >>> cut_off([[5, 2], [5, 6], []], ends=[2])
    [False, True, True]
    """
    return [not len(ids) or int(ids[-1]) not in ends for ids in completion_ids]
