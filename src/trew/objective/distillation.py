"""On-policy distillation: a teacher's log-probs of the policy's own tokens, as part of their advantages."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from .adjust import Adjust
from .batch import TokenBatch
from .component import positive


def teacher_gap(old_logprobs: Float[Tensor, "N"], *, teacher_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """log pi_teacher - log pi_old at each sampled token, without gradient: the advantage of on-policy distillation,
    arXiv 2601.02780 eq. 8; thinkingmachines.ai/blog/on-policy-distillation.

    Over samples of pi_old its mean is - KL(pi_old || pi_teacher) per token. It is exactly 0 where both give a token the
    same probability, and is not bounded: a token that the teacher almost never writes is pushed down by as many nats.

    >>> import torch
    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> round(teacher_gap(half, teacher_logprobs=quarter).item(), 6)
    -0.693147
    """
    return (teacher_logprobs - old_logprobs).detach()


@dataclass(frozen=True)
class Distillation(Adjust):
    """A_t <- A_t + coefficient :func:`teacher_gap`, the last of all that changes advantages.

    pi_old is the policy in the ratio's denominator: the gap is the same in all updates on a step's rollouts, and the
    trust region and the corrections act on it as on any advantage. On-policy this is the gradient of
    coefficient KL(pi || pi_teacher), the same as that of a ``k2`` term with the teacher as the reference.
    """

    coefficient: float = 1.0

    def __post_init__(self) -> None:
        positive(distill=self.coefficient)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("teacher_logprobs",)

    def __call__(self, advantages: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.teacher_logprobs is not None
        gap = teacher_gap(batch.old.to(advantages.dtype), teacher_logprobs=batch.teacher_logprobs.to(advantages.dtype))
        return advantages + self.coefficient * gap

    def equation(self) -> str:
        return f"A_t <- A_t + {self.coefficient:g} log(pi_teacher / pi_old)"
