"""``TokenBatch``: what an objective reads, as packed one-dimensional streams; and the denominators of a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DataError
from . import padded
from .renamed import message
from .segments import segment_count, segment_starts
from .turns import Turns

# What _cut() takes the chosen entries of: a field that is missing here would keep those of the whole step.
_PER_TOKEN = ("logprobs", "mask", "sequence_ids", "advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs",
             "teacher_logprobs", "entropies", "score_norms", "values", "returns", "token_weights")  # fmt: skip
RENAMED = {"shares": "token_weights"}
_PER_SEQUENCE = ("group_ids", "rewards", "correct", "truncated", "baselines")


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts that a whole optimizer step divides by: fixed once, over all its micro-batches and ranks.

    Sequences and groups count if they have at least one loss token: one without any has no gradient, and counting it
    would only shrink the gradient of the others. ``correct_tokens`` are the loss tokens of correct completions, None
    where nothing says which are correct.
    """

    sequences: int
    tokens: int
    max_length: int | None = None
    groups: int = 0
    correct_tokens: int | None = None

    @staticmethod
    def of(batch: TokenBatch) -> Denominators:
        """The denominators if ``batch`` is the whole step."""
        lengths = batch.lengths
        groups = torch.unique(batch.group_ids[lengths > 0])
        judged = batch.correct is not None or batch.rewards is not None
        correct = int(lengths[batch.is_correct].sum()) if judged else None
        return Denominators(int((lengths > 0).sum()), int(lengths.sum()), batch.max_length, len(groups), correct)


@dataclass(frozen=True, eq=False)
class ReasoningSteps:
    """Rewards of M steps of reasoning: step m belongs to a sequence and ends with the ``ends[m]``-th of its tokens in
    the stream (0: before the first)."""

    values: Float[Tensor, "M"]
    sequence_ids: Int[Tensor, "M"]
    ends: Int[Tensor, "M"]

    @staticmethod
    def of(steps: Sequence[Sequence[tuple[int, float]]], *, mask: Bool[Tensor, "B T"]) -> ReasoningSteps:
        """Packs (end, value) lists, ``end`` in columns. Raises DataError for ends and values out of range."""
        rows, width = mask.shape
        if len(steps) != rows:
            raise DataError(f"step_rewards: got {len(steps)} lists, accepts {rows}, one per sequence")
        flat = [(row, end, value) for row, ends in enumerate(steps) for end, value in ends]
        for row, end, value in flat:
            if not 1 <= end <= width:
                raise DataError(f"step_rewards: sequence {row} has a step that ends at {end}, accepts 1 to {width}")
            if not math.isfinite(value):
                raise DataError(f"step_rewards: sequence {row} has the value {value}, accepts finite numbers")
        device = mask.device
        sequences = torch.tensor([row for row, _, _ in flat], dtype=torch.int64, device=device)
        columns = torch.tensor([end for _, end, _ in flat], dtype=torch.int64, device=device)
        values = torch.tensor([value for _, _, value in flat], dtype=torch.float64, device=device)
        # Columns outside the mask are not in the stream, so an end is the number of tokens inside up to its column.
        return ReasoningSteps(values, sequences, mask.cumsum(dim=1)[sequences, columns - 1])

    def select(self, position: Int[Tensor, "S"]) -> ReasoningSteps:
        """Steps of the sequences that stay; ``position`` (S,) has each one's new number, -1 where it is left out."""
        new = position[self.sequence_ids]
        return ReasoningSteps(self.values[new >= 0], new[new >= 0], self.ends[new >= 0])


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N completion tokens of S sequences, in sequence order, with everything that an objective may read.

    Only ``logprobs`` (of the policy being trained) has a gradient. ``entropies`` are those of the rollout's policy,
    without gradient; for an entropy bonus they are the policy's, with one. All log-probs are of the sampled token, in
    nats. ``mask`` is True where a token carries loss. ``rewards`` may hold NaN (does not apply): such a sequence takes
    no part in its group's statistics and carries no loss. ``old_logprobs`` defaults to ``logprobs.detach()``,
    ``correct`` to a total reward above 0 (dynamic sampling reads it only where it is given, and otherwise whether the
    rewards of a group differ). ``score_norms`` are 1 - 2 pi + sum_v pi_v^2 at each token, the squared length of its
    log-prob's gradient by the logits, of the policy before the step's updates. ``baselines`` is the reward of the
    greedy answer to each sequence's prompt. ``turns`` are those of multi-turn episodes; ``states`` is theirs.
    ``values`` are a critic's, of the state in which each token was chosen.

    ``Objective.prepare`` adds ``advantages``, ``denominators``, ``token_weights`` (each token's weight in the loss's
    average, share_t in equations), ``mean_entropy`` (of the step, in nats), itself as ``prepared_by``, and with values
    the ``returns`` that the critic learns.
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
    teacher_logprobs: Float[Tensor, "N"] | None = None
    entropies: Float[Tensor, "N"] | None = None
    score_norms: Float[Tensor, "N"] | None = None
    step_rewards: ReasoningSteps | None = None
    turns: Turns | None = None
    values: Float[Tensor, "N"] | None = None
    returns: Float[Tensor, "N"] | None = None
    correct: Bool[Tensor, "S"] | None = None
    truncated: Bool[Tensor, "S"] | None = None
    baselines: Float[Tensor, "S"] | None = None
    reward_weights: Float[Tensor, "K"] | None = None
    max_length: int | None = None
    denominators: Denominators | None = None
    token_weights: Float[Tensor, "N"] | None = None
    mean_entropy: float | None = None
    prepared_by: Any = None  # an Objective
    padded_mask: Bool[Tensor, "B T"] | None = None

    @property
    def size(self) -> int:
        """Number of sequences, S."""
        return len(self.group_ids)

    @property
    def lengths(self) -> Int[Tensor, "S"]:
        """Loss tokens of each sequence, T_i."""
        return segment_count(self.mask, ids=self.sequence_ids, size=self.size)

    @property
    def policy(self) -> Float[Tensor, "N"]:
        """log pi without gradient."""
        return self.logprobs.detach()

    @property
    def old(self) -> Float[Tensor, "N"]:
        """log pi_old; the policy's own log-probs where it has not moved since the rollout."""
        return self.policy if self.old_logprobs is None else self.old_logprobs

    @property
    def total_rewards(self) -> Float[Tensor, "S"]:
        """The weighted sum of the rewards that apply, in float64; NaN where none of those with a weight does."""
        assert self.rewards is not None
        rewards = self.rewards.to(torch.float64)
        if rewards.dim() == 1:
            return rewards
        weights = torch.ones_like(rewards[:1]) if self.reward_weights is None else self.reward_weights.to(rewards)
        # A reward of weight 0 is only logged: where it alone has a number, nothing has judged. But for a batch whose
        # rewards all have weight 0, which learns from something else.
        counts = (weights != 0) | (weights == 0).all()
        # nansum of no numbers is 0, which would be a reward.
        return torch.where((rewards.isnan() | ~counts).all(dim=1), torch.nan, (rewards * weights).nansum(dim=1))

    @property
    def is_correct(self) -> Bool[Tensor, "S"]:
        """``correct`` where given, otherwise whether the total reward is above 0."""
        return self.total_rewards > 0 if self.correct is None else self.correct

    @property
    def states(self) -> Int[Tensor, "M"] | None:
        """The numbers of the states in which the turns began; None if no turns or no states are known."""
        return None if self.turns is None else self.turns.states

    if not TYPE_CHECKING:  # a type checker would take every misspelled name for a known one

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(message("TokenBatch", name, RENAMED))

    def replace(self, **fields: Any) -> TokenBatch:
        """A copy with some fields exchanged. Raises TypeError for a field that does not exist."""
        for name in RENAMED.keys() & fields.keys():
            raise TypeError(message("TokenBatch", name, RENAMED))
        return dataclasses.replace(self, **fields)

    def select(self, sequences: Int[Tensor, "M"]) -> TokenBatch:
        """The batch of these whole sequences, renumbered in the given order; denominators stay the step's.

        Consecutive sequences become views of this batch, others copies: packs of a step are mostly consecutive. Raises
        DataError for numbers that are not 0 to S - 1, and for one that is given twice.
        """
        self._refuse_unknown(sequences)
        # Step rewards and turns refer to sequences by number, so they need the map from old to new numbers in both
        # cases below.
        position = torch.full((self.size,), -1, dtype=torch.int64, device=self.mask.device)
        position[sequences] = torch.arange(len(sequences), device=self.mask.device)
        parts = {
            "step_rewards": None if self.step_rewards is None else self.step_rewards.select(position),
            "turns": None if self.turns is None else self.turns.select(position),
        }
        first, count = (int(sequences[0]), len(sequences)) if len(sequences) else (0, 0)
        if count and torch.equal(sequences, torch.arange(first, first + count, device=sequences.device)):
            # One id more than there are: its start is the end of the last sequence.
            start, end = segment_starts(self.sequence_ids, size=self.size + 1)[[first, first + count]].tolist()
            ids = self.sequence_ids[start:end] - first
            return self._cut(slice(start, end), slice(first, first + count), ids).replace(**parts)
        # ---- otherwise copy: tokens in the order of their sequences' new numbers, stable to keep each one's own order
        new_ids = position[self.sequence_ids]
        chosen = (new_ids >= 0).nonzero().squeeze(1)
        order = chosen[torch.argsort(new_ids[chosen], stable=True)]
        return self._cut(order, sequences, new_ids[order]).replace(**parts)

    def _refuse_unknown(self, sequences: Any) -> None:
        """Raises DataError for what :meth:`select` would take for other sequences, or leave without tokens."""
        accepts = f"accepts whole numbers (M,) from 0 to {self.size - 1}, each once"
        if not isinstance(sequences, Tensor):
            raise DataError(f"sequences: got {padded.kind(sequences)}, {accepts}, as a tensor")
        if sequences.dim() != 1 or sequences.dtype == torch.bool or sequences.is_floating_point():
            hint = "; of a mask: mask.nonzero().squeeze(1)" if sequences.dtype == torch.bool else ""
            raise DataError(f"sequences: got {sequences.dtype} of shape {tuple(sequences.shape)}, {accepts}{hint}")
        if not len(sequences):
            return
        low, high = (int(n) for n in sequences.aminmax())
        if low < 0 or high >= self.size:
            raise DataError(f"sequences: got {low if low < 0 else high}, {accepts}")
        times = torch.bincount(sequences)
        if int(times.max()) > 1:
            raise DataError(f"sequences: got {int(times.argmax())} more than once, {accepts}")

    def select_tokens(self, tokens: slice | Int[Tensor, "M"]) -> TokenBatch:
        """The batch of these tokens, at least one, in order; views, if consecutive. Denominators stay the step's.

        It may cut sequences, so that ``lengths`` counts what is left of them: what a component computes from it is that
        of the whole batch only where its scope is "token" or no sequence was cut. Step rewards and turns are left out,
        since their ends count the tokens of whole sequences.
        """
        ids = self.sequence_ids[tokens]
        # Also sequences between of which no token was chosen: ids stay consecutive.
        first, last = int(ids[0]), int(ids[-1])
        return self._cut(tokens, slice(first, last + 1), ids - first).replace(step_rewards=None, turns=None)

    def _cut(self, tokens: slice | Tensor, sequences: slice | Tensor, sequence_ids: Int[Tensor, "M"]) -> TokenBatch:
        fields = {k: v[tokens] for k in _PER_TOKEN if (v := getattr(self, k)) is not None}
        fields |= {k: v[sequences] for k in _PER_SEQUENCE if (v := getattr(self, k)) is not None}
        # The layout (B, T) is that of the batch that was packed, and no part's.
        return self.replace(**(fields | {"sequence_ids": sequence_ids, "padded_mask": None}))

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
        teacher_logprobs: Tensor | None = None,
        entropies: Tensor | None = None,
        values: Tensor | None = None,
        score_norms: Tensor | None = None,
        step_rewards: Sequence[Sequence[tuple[int, float]]] | None = None,
        turns: Sequence[Sequence[tuple[int, float]]] | None = None,
        states: Sequence[Sequence[Hashable]] | None = None,
        correct: Tensor | None = None,
        truncated: Tensor | None = None,
        baselines: Tensor | None = None,
        reward_weights: Tensor | None = None,
        max_length: int | None = None,
        denominators: Denominators | None = None,
    ) -> TokenBatch:
        """Packs padded (B, T) tensors, the layout of most trainers.

        ``rewards`` is (B,) or (B, K), NaN where a reward does not apply; ``advantages``, (B,) or (B, T) and final, may
        be given instead; ``step_rewards`` lists (end, value) for each sequence, ``end`` the number of columns up to and
        including the step's last token; ``turns`` lists (end, reward) of each turn likewise, ``states`` the state in
        which each began (whatever compares equal if it is the same). Values outside ``mask`` are never read. 16-bit
        tensors are widened to float32; all but ``logprobs`` and ``entropies`` are detached.

        Raises DataError for shapes and types that do not fit, a mask with values other than 0 and 1, log-probs or
        entropies that are not finite, log-probs above 0 (most likely negative log-likelihoods), ``score_norms`` below
        0, and a batch without rewards, step rewards, advantages or a teacher's log-probs.

        >>> l = torch.tensor([[-1., -2.], [-3., 0.]]); m = torch.tensor([[True, True], [True, False]])
        >>> batch = TokenBatch.from_padded(logprobs=l, mask=m, rewards=torch.tensor([1., 0.]),
        ...                                group_ids=torch.tensor([0, 0]))
        >>> batch.logprobs.tolist(), batch.sequence_ids.tolist(), batch.lengths.tolist()
        ([-1.0, -2.0, -3.0], [0, 0, 1], [2, 1])
        """
        given, logprobs = logprobs, padded.policy(logprobs)
        rows, width = logprobs.shape
        device = logprobs.device
        mask = padded.flags("mask", mask, (rows, width), like=logprobs)
        # ---- per token: entries at the mask, (B, T) -> (N,)
        anchors = {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs, "ref_logprobs": ref_logprobs,
                   "teacher_logprobs": teacher_logprobs}  # fmt: skip
        fields: dict[str, Any] = {k: padded.log_probabilities(k, v, mask) for k, v in anchors.items() if v is not None}
        if entropies is not None:
            fields["entropies"] = padded.stream("entropies", entropies, mask, keep_gradient=True)
        if values is not None:
            fields["values"] = padded.stream("values", values, mask)
        if score_norms is not None:
            fields["score_norms"] = padded.squares("score_norms", score_norms, mask)
        # ---- what advantages are computed from
        if teacher_logprobs is None:  # with a teacher, there may be nothing else to learn from
            _refuse_without_signal(rewards, reward_weights, advantages, step_rewards)
        fields |= _signal(rewards, reward_weights, advantages, step_rewards, mask=mask, like=logprobs)
        if turns is not None:
            fields["turns"] = Turns.of(turns, states=states, mask=mask)
        elif states is not None:
            raise DataError("states: got some, but turns is None; give the turns that began in them")
        # ---- per sequence
        fields |= _per_sequence(correct, truncated, baselines, like=logprobs)
        if not isinstance(denominators, Denominators | None):
            raise DataError(f"denominators: got {padded.kind(denominators)}, accepts trew.objective.Denominators")
        # (B, T) of row numbers -> (N,), row by row as all streams are packed.
        sequence_ids = torch.arange(rows, device=device)[:, None].expand(rows, width)[mask]
        return cls(
            logprobs=padded.log_probabilities("logprobs", given, mask, keep_gradient=True),
            # Tokens outside the mask are not packed: all that are here carry loss.
            mask=torch.ones(len(sequence_ids), dtype=torch.bool, device=device),
            sequence_ids=sequence_ids,
            group_ids=padded.whole("group_ids", group_ids, (rows,), like=logprobs),
            max_length=padded.limit("max_length", max_length),
            denominators=denominators,
            padded_mask=mask,
            **fields,
        )


def _refuse_without_signal(*given: Any) -> None:
    if all(value is None for value in given):
        raise DataError(
            "rewards: got None; give rewards (B,) or (B, K), or advantages (B,) or (B, T), or step_rewards, or "
            "teacher_logprobs (B, T)"
        )


def _signal(
    rewards: Any, reward_weights: Any, advantages: Any, step_rewards: Any, *, mask: Bool[Tensor, "B T"], like: Tensor
) -> dict[str, Any]:
    """The fields that advantages are computed from, or the advantages themselves."""
    fields: dict[str, Any] = {}
    if rewards is not None or reward_weights is not None:
        fields |= _rewards(rewards, reward_weights, like=like)
    if advantages is not None:
        rows, width = mask.shape
        final = padded.numbers("advantages", advantages, (rows,), (rows, width), like=like)
        # (B,) -> (B, T): a sequence's advantage is that of each of its tokens.
        final = final if final.dim() == 2 else final[:, None].expand(rows, width)
        fields["advantages"] = final.to(like.dtype)[mask]
    if step_rewards is not None:
        fields["step_rewards"] = ReasoningSteps.of(step_rewards, mask=mask)
    return fields


def _per_sequence(correct: Any, truncated: Any, baselines: Any, *, like: Tensor) -> dict[str, Tensor]:
    fields = {
        name: padded.flags(name, value, (len(like),), like=like)
        for name, value in (("correct", correct), ("truncated", truncated))
        if value is not None
    }
    if baselines is not None:
        fields["baselines"] = padded.numbers("baselines", baselines, (len(like),), like=like)
    return fields


def _rewards(rewards: Any, weights: Any, *, like: Tensor) -> dict[str, Tensor]:
    """Rewards (B,) or (B, K), and the weights of the K."""
    rewards = padded.numbers("rewards", rewards, (len(like),), (len(like), "K"), like=like)
    if weights is None:
        return {"rewards": rewards}
    if rewards.dim() == 1:
        raise DataError("reward_weights: got weights, but rewards (B,) are one reward; accepts None here")
    weights = padded.numbers("reward_weights", weights, (rewards.shape[1],), like=like)
    return {"rewards": rewards, "reward_weights": padded.finite("reward_weights", weights)}
