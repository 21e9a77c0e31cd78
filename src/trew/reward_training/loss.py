"""The loss of a reward model on preference pairs."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen: Float[Tensor, "P"], *, rejected: Float[Tensor, "P"], centre: float = 0.0
) -> Float[Tensor, "P"]:
    """-log sigma(r_c - r_r) + centre (r_c + r_r)²  for each pair: Bradley and Terry 1952; Ouyang et al. 2022,
    arXiv 2203.02155, eq. 1; the second term as in Eisenstein et al. 2023, arXiv 2312.09244, §3.

    The first term depends only on differences within a pair: adding a constant to all scores of a prompt changes
    nothing. A small ``centre`` (0.01) keeps scores around 0. Two equal scores cost log 2.

    >>> loss = bradley_terry(torch.tensor([1., 0.]), rejected=torch.tensor([-1., 0.]))
    >>> [round(x, 4) for x in loss.tolist()]
    [0.1269, 0.6931]
    """
    loss = -torch.nn.functional.logsigmoid(chosen - rejected)  # finite for any scores; softplus is linear beyond 20
    return loss + centre * (chosen + rejected) ** 2 if centre else loss
