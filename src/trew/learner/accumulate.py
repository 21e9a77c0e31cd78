"""The derivatives of the loss by the log-probs of one pack, and the sums over all packs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import NumericsError
from ..objective import LossOutput, Objective, TokenBatch, token_metrics
from ..objective.entropy_bonus import EntropyBonus
from ..types import Metrics, TrainingSample
from .packing import Pack
from .parallel import Parallel


@dataclass(slots=True)
class Accumulated:
    """The results of all packs of an optimizer step; the gradient itself is in the parameters.

    Values are kept per token, not averaged per pack: quantiles and other metrics that are not sums need all tokens of
    the step, and must not depend on how it was split into packs.
    """

    samples: Sequence[TrainingSample]
    batch: TokenBatch  # of the samples, prepared by the objective
    active: list[int]  # positions of the samples that can have a gradient
    loss: float = 0.0
    tokens: int = 0  # fed to the model for a gradient, prompts and padding included
    values: dict[str, Tensor] = field(default_factory=dict)  # each (N,), zero where no pack has written yet
    ran: list[int] = field(default_factory=list)  # positions of the samples that metrics() covers

    def add(self, out: LossOutput, at: Int[Tensor, "n"]) -> None:
        """Adds the loss of ``out`` and writes its per-token values to positions ``at`` of the step's tokens."""
        self.loss += float(out.loss.detach())
        for name, value in {**out.packed, "logprobs": out.batch.policy}.items():
            if name not in self.values:
                self.values[name] = torch.zeros(len(self.batch.mask), dtype=value.dtype, device=value.device)
            self.values[name][at] = value

    def measure(self, entropies: Float[Tensor, "n"], at: Int[Tensor, "n"]) -> None:
        """Writes the policy's entropies of the tokens at positions ``at``, for the metrics alone."""
        if "entropies" not in self.values:
            self.values["entropies"] = torch.zeros(len(self.batch.mask), dtype=entropies.dtype)
        self.values["entropies"][at] = entropies.cpu()

    def reduce(self, parallel: Parallel) -> None:
        """Sums the results over ranks. Each token's values come from one rank and are zero on the others."""
        if parallel.size == 1:
            return
        # Every rank must take part in the same sums with the same dtypes, or the collectives hang. A rank without a
        # pack has no values at all, so the ranks first agree on names and dtypes.
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in self.values.items()}
        found = parallel.gather({"dtypes": dtypes, "loss": self.loss, "tokens": self.tokens, "ran": self.ran})
        self.loss = sum(one["loss"] for one in found)
        self.tokens = sum(one["tokens"] for one in found)
        self.ran = [i for one in found for i in one["ran"]]
        for name, dtype in sorted({item for one in found for item in one["dtypes"].items()}):
            if name not in self.values:  # this rank had no pack: it contributes zeros
                self.values[name] = torch.zeros(len(self.batch.mask), dtype=getattr(torch, dtype))
        parallel.sum_([self.values[name] for name in sorted(self.values)])

    def per_token(self) -> dict[str, Float[Tensor, "N"]]:
        """``ratio``, ``weight`` and ``coefficients`` of the loss tokens; NaN at all others. Samples that were not run
        have coefficients of 0, and neither ratio nor weight."""
        mask = self.batch.mask
        run = torch.zeros_like(mask)
        if self.ran:
            run[TokenPositions.of(self.samples).of_samples(self.ran)] = True
        out = {}
        for name in ("ratio", "weight", "coefficients"):
            # Where no pack has written the value is 0: true of a coefficient, an invention for the other two.
            values = self.values.get(name, torch.zeros(len(mask)))
            out[name] = torch.where(mask if name == "coefficients" else mask & run, values.float(), torch.nan)
        return out

    def metrics(self, objective: Objective) -> Metrics:
        """The metrics of ``objective`` over the samples that were run; those that need the policy's log-probs of before
        the first update only where this is the first."""
        ran = sorted(self.ran)  # one order however packs were formed: float sums depend on it
        at = TokenPositions.of(self.samples).of_samples(ran)
        values = {name: value[at] for name, value in self.values.items()}
        batch = self.batch.select(torch.tensor(ran)).replace(logprobs=values["logprobs"])
        measured = {"entropy": self._entropy(self.values["entropies"])} if "entropies" in values else {}
        found = token_metrics(
            batch, ratio=values["ratio"], weight=values["weight"],
            **{name: values.get(name) for name in ("correction", "importance", "likelihood", "margins")},
        )  # fmt: skip
        # With old log-probs the share is known before the update, of all samples.
        beyond = objective.beyond_correction(batch) if batch.old_logprobs is None else None
        return {**found, **measured, **({} if beyond is None else {"corrected_share": beyond})}

    def _entropy(self, entropies: Float[Tensor, "N"]) -> tuple[float, float]:
        """Sum and count over the loss tokens of the samples with a gradient: only their passes measure entropies, also
        where a rule that looks across sequences has run the others."""
        where = torch.zeros_like(self.batch.mask)
        where[TokenPositions.of(self.samples).of_samples(self.active)] = True
        where &= self.batch.mask
        return float(entropies.where(where, 0.0).sum(dtype=torch.float64)), float(where.sum())


@dataclass(slots=True)
class PackLoss:
    """The loss of one pack as a :data:`.head.LossCallback`: maps log-probs and entropies to the derivatives of the loss
    by them. Raises NumericsError where a value is not finite."""

    part: TokenBatch  # the pack's tokens, in its order
    pack: Pack
    samples: Sequence[TrainingSample]
    objective: Objective
    bonus: EntropyBonus | None
    done: Accumulated
    at: Int[Tensor, "n"]  # positions of the pack's tokens among the step's
    coefficients: Float[Tensor, "n"] | None = None  # set where they are known before the head runs

    def fix_coefficients(self, logprobs: Float[Tensor, "n"]) -> None:
        """Computes all coefficients from the log-probs of the whole pack."""
        self.coefficients = self._of_objective(slice(0, len(self.at)), logprobs)

    def __call__(
        self, where: slice, logprobs: Float[Tensor, "m"], entropies: Float[Tensor, "m"] | None
    ) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"] | None]:
        device = logprobs.device
        if self.coefficients is None:
            coefficients = self._of_objective(where, logprobs)
        else:
            # The loss was added when the coefficients were computed; only these log-probs are new.
            self._check(logprobs, where)
            coefficients = self.coefficients[where]
        if entropies is not None and self.part.entropies is None:
            self.done.measure(entropies, self.at[where])
        # An objective's coefficients are weights of grad log p in the ascent direction; the loss is their negative.
        if entropies is None or self.bonus is None:
            return -coefficients.to(device), None
        assert self.part.token_weights is not None
        with torch.enable_grad():  # the fused head calls this under no_grad
            own = entropies.to(self.part.mask.device).requires_grad_()
            term = self.bonus.loss(own, token_weights=self.part.token_weights[where])  # 0 outside the mask
            (slope,) = torch.autograd.grad(term, own)
        self._add(float(term.detach()))
        return -coefficients.to(device), slope.to(device)

    def _of_objective(self, where: slice, logprobs: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        self._check(logprobs, where)
        out = self.objective.loss(self.part.select_tokens(where).replace(logprobs=logprobs.to(self.part.mask.device)))
        self.done.add(out, self.at[where])
        self._add(0.0)  # checks the sum, to which done.add() has added
        return out.packed["coefficients"]

    def _check(self, logprobs: Float[Tensor, "m"], where: slice) -> None:
        check_finite(logprobs, self.part.sequence_ids[where], self.pack, self.samples)

    def _add(self, value: float) -> None:
        self.done.loss += value
        if not np.isfinite(self.done.loss):
            raise NumericsError(
                f"the loss is {self.done.loss}",
                names=sample_names(self.pack.samples, self.samples), quantity="loss", samples=self.pack.samples,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where the tokens of each sample are in the stream of all completion tokens."""

    samples: Sequence[TrainingSample]
    starts: np.ndarray  # (S,)

    @staticmethod
    def of(samples: Sequence[TrainingSample]) -> TokenPositions:
        lengths = [len(s.token_ids) for s in samples]
        return TokenPositions(samples, np.cumsum([0, *lengths])[:-1])

    def of_samples(self, members: Sequence[int]) -> Tensor:
        """All tokens of these samples."""
        parts = [self.starts[i] + np.arange(len(self.samples[i].token_ids)) for i in members]
        return torch.from_numpy(np.concatenate(parts))

    def predicted(self, members: Sequence[int]) -> Tensor:
        """The tokens of these samples whose log-probs are computed."""
        return torch.from_numpy(np.concatenate([self.starts[i] + self.samples[i].predicted for i in members]))


def predicted_part(batch: TokenBatch, own: Sequence[TrainingSample], pack: Pack, count: int) -> TokenBatch:
    """The part of ``batch`` that belongs to a pack with the samples ``own``, which predicts ``count`` of their tokens;
    the others are what an environment said."""
    part = batch.select(torch.tensor(pack.samples))
    if count == len(part.mask):
        return part
    return part.select_tokens(TokenPositions.of(own).predicted(range(len(own))))


def members(samples: Sequence[TrainingSample], batch: TokenBatch, tokens: Bool[Tensor, "N"]) -> list[int]:
    """Positions of the samples with at least one token where ``tokens`` is True."""
    found = set(batch.sequence_ids[tokens].tolist())
    return [i for i in range(len(samples)) if i in found]


def check_finite(
    logprobs: Float[Tensor, "n"],
    sequences: Int[Tensor, "n"],
    pack: Pack,
    samples: Sequence[TrainingSample],
    *,
    quantity: str = "logprobs",
) -> None:
    """Raises NumericsError that names the samples of ``pack`` whose log-probs are not finite; ``logprobs[i]`` belongs
    to the pack's sample ``sequences[i]``."""
    # All finite is the rule: a single reduction on the device, and the names are only worked out on failure.
    finite = torch.isfinite(logprobs)
    if finite.all():
        return
    found = logprobs.to(sequences.device)
    broken = sequences[~finite.to(sequences.device)].unique().tolist()
    names = {"ref_logprobs": "the reference's log-probs", "teacher_logprobs": "the teacher's log-probs"}
    whose = (names | {"values": "the critic's values"}).get(quantity, "log-probs")
    raise NumericsError(
        f"{whose} are not finite (broken weights, or a token that has probability 0)",
        names=sample_names([pack.samples[i] for i in broken], samples), quantity=quantity,
        samples=[pack.samples[i] for i in broken],
        values={pack.samples[i]: found[sequences == i].tolist() for i in broken},
    )  # fmt: skip


def sample_names(members: Sequence[int], samples: Sequence[TrainingSample]) -> str:
    shown = [f"{i} (group {samples[i].group})" for i in sorted(members)[:8]]
    return ", ".join(shown) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
