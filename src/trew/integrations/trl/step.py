"""Converts TRL's padded batches to ours and back. Functions take (B, C) tensors and do not depend on the trainer.

Results of ``plan`` and ``renormalised_for`` are stored in TRL's dictionary under the names below, one row per
completion, so that TRL's shuffling and splitting keep them aligned with their completions.
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
"""Per-completion entries (B,), and the field of our batch that each fills."""
READ = ("advantages", MASK, TOKEN_WEIGHTS, TOKENS, *OF_ROWS, "old_per_token_logps", "sampling_per_token_logps",
        "ref_per_token_logps")  # fmt: skip
"""Entries that the loss of a planned batch reads besides log-probs and entropies."""


def loss_mask(inputs: Mapping[str, Tensor]) -> Tensor:
    """(B, C), True if the model sampled the token, so that it may carry loss."""
    # tool_mask is 0 on the output of tools: the model did not choose those tokens.
    mask = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask


def plan(objective: Objective, *, logprobs: Tensor, **fields: Any) -> TokenBatch:
    """Prepares the whole generation batch: advantages, mask and token weights."""
    if (sampler := fields.get("rollout_logprobs")) is not None:
        # vLLM returns NaN if it has no value; the policy's own log-prob there means a ratio of 1. Without old log-probs
        # nothing here reads the sampler's: any number will do.
        old = fields.get("old_logprobs")
        fields["rollout_logprobs"] = torch.where(sampler.isnan(), logprobs if old is None else old, sampler)
    batch = TokenBatch.from_padded(logprobs=logprobs, **fields)
    # Without the bonus ``prepare`` needs no entropies here; the bonus acts in the loss alone, on the current ones.
    return objective.replace(entropy_bonus=EntropyBonus()).prepare(batch)


def carried(batch: TokenBatch) -> dict[str, Tensor]:
    """Extracts what the loss needs from a prepared batch: tensors of shape (B, C), (B,) and ()."""
    assert batch.advantages is not None
    assert batch.token_weights is not None
    assert batch.denominators is not None
    out = {
        "advantages": batch.unpack(batch.advantages),
        # The mask after ``prepare``, not TRL's: filters may have dropped sequences from it.
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
    """:func:`carried` for the rows of a generation batch that form one optimizer step."""
    # Log-probs only set shape and type here: new denominators and token weights do not depend on the policy.
    batch = TokenBatch.from_padded(
        logprobs=torch.zeros_like(rows["advantages"]), mask=rows[MASK], advantages=rows["advantages"],
        max_length=max_length, **_of_rows(rows),
    )  # fmt: skip
    return carried(objective.renormalised_for(batch))


def part(
    objective: Objective, inputs: Mapping[str, Tensor], *, logprobs: Tensor, entropies: Tensor, max_length: int
) -> TokenBatch:
    """Builds the input of ``Objective.loss`` from rows of a planned batch. Unplanned rows count as a whole step, with
    the advantages they already have."""
    planned = MASK in inputs
    # A 16-bit model must not round the coefficients: they take the log-probs' dtype.
    logprobs = logprobs.float() if logprobs.dtype in (torch.bfloat16, torch.float16) else logprobs
    mask = inputs[MASK] if planned else loss_mask(inputs)
    old, sampler = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
    if sampler is not None:
        # vLLM returns NaN if it has no value. Substituting our own log-prob makes the ratio 1: no correction there.
        sampler = torch.where(sampler.isnan(), logprobs.detach() if old is None else old, sampler)
    of_rows = _of_rows(inputs)
    # The constructor requires group ids; unplanned rows come without any and count as one group.
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
        # The token weights already contain the averaging. Of the denominators only ``tokens`` is read from here on, by
        # the check that a rule over a whole step has seen all of its tokens.
        denominators=Denominators(0, int(inputs[TOKENS]), max_length),
        # Any number will do: a fixed bonus acts at every entropy, and adaptive ones are refused.
        mean_entropy=0.0,
    )


def carrier(objective: Objective, inputs: Mapping[str, Tensor], *, batch: TokenBatch) -> Tensor:
    """Computes the loss of rows whose coefficients were computed on the whole step; its value is spread evenly."""
    assert batch.token_weights is not None
    assert batch.entropies is not None
    # Gradient by log-probs: -C of each token, as computed over the whole step.
    pushed = -(inputs[COEFFICIENTS][batch.padded_mask].to(batch.logprobs.dtype) * batch.logprobs).sum()
    # The parenthesis is 0 and carries the gradient; the logged value is this micro-batch's share of the step's loss.
    loss = inputs[VALUE].to(pushed.dtype) + (pushed - pushed.detach())
    if objective.entropy_bonus.active:
        loss = loss + objective.entropy_bonus.loss(batch.entropies, token_weights=batch.token_weights)
    return loss


def refuse_unplanned(inputs: Mapping[str, Tensor], *, micro_batches: int) -> None:
    """Raises DataError if an unplanned micro-batch would be mistaken for a whole optimizer step."""
    if MASK not in inputs and micro_batches > 1:
        raise DataError(
            f"inputs: got a micro-batch of {micro_batches} that did not come from _generate_and_score_completions, so "
            "that the optimizer step's denominators are unknown; accepts such a batch with gradient_accumulation_steps "
            "= 1 alone"
        )


def cut_off(completion_ids: Sequence[Sequence[int]], *, ends: Sequence[int]) -> list[bool]:
    """Returns which completions lack a final end (or pad) token, by TRL's definition of truncation.

    >>> cut_off([[5, 2], [5, 6], []], ends=[2])
    [False, True, True]
    """
    return [not len(ids) or int(ids[-1]) not in ends for ids in completion_ids]
