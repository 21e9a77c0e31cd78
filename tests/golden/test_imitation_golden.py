"""Coefficients of SFT and rejection sampling, worked by hand: DeepSeekMath arXiv 2402.03300 App. A.1."""

from __future__ import annotations

import pytest
import torch

import trew

F64 = torch.float64
# Two prompts with two completions each, of 1, 3, 2 and 2 tokens; the second and the fourth are correct.
MASK = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]], dtype=torch.bool)
LOGPROBS = -torch.tensor([[0.5, 0, 0], [1, 2, 3], [0.25, 0.75, 0], [4, 0, 0]], dtype=F64)


def of(name: str, **settings) -> trew.LossOutput:
    return trew.preset(name, **settings).loss(
        trew.TokenBatch.from_padded(
            logprobs=LOGPROBS.clone().requires_grad_(),
            mask=MASK,
            group_ids=torch.tensor([0, 0, 1, 1]),
            rewards=torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64),
        )
    )


def test_sft_is_cross_entropy_over_all_tokens():
    out = of("sft")
    assert out.coefficients.flatten().tolist() == pytest.approx((MASK.to(F64) / 8).flatten().tolist())
    assert out.loss.item() == pytest.approx((0.5 + 6 + 1 + 4) / 8)


@pytest.mark.parametrize("name", ["rft", "online-rft"])
def test_only_correct_completions_have_a_gradient_and_all_are_counted(name):
    out = of(name)
    want = [0, 0, 0, *[1 / 12] * 3, 0, 0, 0, 1 / 8, 1 / 8, 0]
    assert out.coefficients.flatten().tolist() == pytest.approx(want)
    assert out.loss.item() == pytest.approx((2 + 2) / 4)


def test_an_option_gives_the_mean_over_tokens():
    assert of("online-rft", aggregate="token-mean").coefficients[1].tolist() == pytest.approx([1 / 8] * 3)
