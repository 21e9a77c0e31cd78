"""Shares and metrics where groups, blocks and sequences are uneven or empty."""

from __future__ import annotations

import math

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import ConfigError, DataError
from trew.objective.aggregate import (
    Constant,
    LocalTokenMean,
    PromptMeanTokenMean,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
)
from trew.objective.batch import Denominators
from trew.objective.metrics import step_metrics, token_metrics
from trew.objective.preferred import PromptMeanTokenSum

F64 = torch.float64
LENGTHS = (2, 0, 1, 3, 1)


def f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def make(lengths=LENGTHS, **fields) -> TokenBatch:
    rows, width = len(lengths), max(*lengths, 1)
    data = {"logprobs": torch.full((rows, width), -1.0, dtype=F64), "group_ids": torch.tensor([7, 7, 7, 4, 4])[:rows],
            "mask": torch.arange(width) < torch.tensor(lengths)[:, None],
            "advantages": torch.ones(rows, dtype=F64)}  # fmt: skip
    return TokenBatch.from_padded(**(data | fields))


@pytest.mark.parametrize(
    ("aggregate", "shares"),
    [(SequenceMeanTokenMean(), [1 / 8, 1 / 8, 1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 4]),
     (SequenceMeanTokenSum(), [1 / 4] * 7), (TokenMean(), [1 / 7] * 7), (Constant(), [1 / 40] * 7),
     (PromptMeanTokenMean(), [1 / 6] * 3 + [1 / 8] * 4),
     (LocalTokenMean(1), [1 / 8, 1 / 8, 1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 4]),
     (LocalTokenMean(2), [1 / 6] * 3 + [1 / 8] * 4), (LocalTokenMean(3), [1 / 12] * 6 + [1 / 2]),
     (LocalTokenMean(4), [1 / 7] * 7)],
)  # fmt: skip
def test_shares_of_uneven_completions(aggregate, shares):
    batch = make(max_length=10)
    assert aggregate(batch, denominators=Denominators.of(batch)).tolist() == pytest.approx(shares)


@pytest.mark.parametrize(
    "aggregate",
    [
        SequenceMeanTokenMean(),
        SequenceMeanTokenSum(),
        TokenMean(),
        Constant(),
        PromptMeanTokenMean(),
        LocalTokenMean(2),
    ],
)
def test_an_empty_step_has_finite_shares(aggregate):
    batch = make(max_length=10)
    batch = batch.replace(mask=torch.zeros_like(batch.mask))
    assert aggregate(batch, denominators=Denominators.of(batch)).isfinite().all()


@pytest.mark.parametrize(
    ("aggregate", "share"),
    [(SequenceMeanTokenMean(), 1), (SequenceMeanTokenSum(), 1), (TokenMean(), 1), (Constant(), 0.1),
     (PromptMeanTokenMean(), 1), (LocalTokenMean(1), 1), (LocalTokenMean(2), 1)],
)  # fmt: skip
def test_one_completion_of_one_token(aggregate, share):
    batch = make((1,), max_length=10)
    assert aggregate(batch, denominators=Denominators.of(batch)).tolist() == [share]


def test_shares_of_a_part_are_the_steps():
    part = make((2, 0), max_length=10)
    whole = Denominators(sequences=5, tokens=10, max_length=20, groups=3)
    for aggregate, share in ((SequenceMeanTokenMean(), 0.1), (SequenceMeanTokenSum(), 0.2), (TokenMean(), 0.1),
                             (Constant(), 0.01), (PromptMeanTokenMean(), 1 / 6)):  # fmt: skip
        assert aggregate(part, denominators=whole).tolist() == pytest.approx([share] * 2)
    with pytest.raises(ConfigError, match="max_length: got None"):
        Constant()(part, denominators=Denominators(1, 1))


@pytest.mark.parametrize("aggregate", [PromptMeanTokenMean(), PromptMeanTokenSum()], ids=str)
def test_given_denominators_without_prompts_are_refused(aggregate):
    """They were taken for one prompt, and gradients were as many times too large as the step has prompts."""
    with pytest.raises(DataError, match="denominators: got groups = 0 and tokens = 10"):
        aggregate(make((2, 0)), denominators=Denominators(sequences=5, tokens=10))
    empty = make((0, 0))
    assert aggregate(empty, denominators=Denominators.of(empty)).tolist() == []


def test_metrics_of_the_tokens_by_hand():
    batch = make(
        (3, 2), advantages=f(1, 0), old_logprobs=torch.full((2, 3), -1.5, dtype=F64), entropies=torch.ones(2, 3)
    )
    batch = batch.replace(mask=torch.tensor([True, True, False, True, True]))
    ratio, weight = f(2, 0.5, 9, 1, 4), f(0, 1, 9, 0, 0.5)
    out = token_metrics(batch, ratio=ratio, weight=weight, correction=f(0, 2, 0, 1, 1))
    assert out["ratio"] == (7.5, 4.0)
    assert out["weight"] == (1.0, 2.0)
    assert out["clip_share"] == out["clip_high_positive"] == (1.0, 4.0)
    assert out["clip_low_positive"] == out["clip_low_negative"] == out["clip_high_negative"] == (0.0, 4.0)
    assert out["ess"] == (0.5, 1.0)  # one of two decides
    assert out["correction"] == (4.0, 4.0)
    assert out["correction_zero_share"] == (1.0, 4.0)
    assert out["entropy"] == (4.0, 4.0)
    assert (out["ratio_q01"], out["ratio_q50"], out["ratio_q99"]) == ((0.5, 1.0), (2.0, 1.0), (4.0, 1.0))
    assert out["kl_old"] == (pytest.approx(4 * (math.exp(0.5) - 1.5)), 4.0)
    assert not {"kl", "kl_rollout"} & out.keys()
    even = token_metrics(batch, ratio=ratio, weight=f(1, 4, 0, 0, 0), correction=None)
    assert even["ess"] == (1.0, 1.0)
    assert not {"correction", "correction_zero_share"} & even.keys()
    assert token_metrics(batch, ratio=ratio, weight=weight * 0, correction=None)["ess"] == (0.0, 1.0)
    still = batch.replace(advantages=torch.zeros(5, dtype=F64))
    out = token_metrics(still, ratio=ratio, weight=weight, correction=None)
    assert (out["weight"], out["clip_share"], out["ess"]) == ((0.0, 0.0), (0.0, 4.0), (0.0, 0.0))


def test_sides_of_a_clipped_token():
    batch = make((4,), advantages=f(1, 1, -1, -1)[None], group_ids=torch.tensor([0]))
    out = token_metrics(batch, ratio=f(2, 0.5, 2, 0.5), weight=f(0, 0, 0, 0), correction=None)
    names = ("clip_high_positive", "clip_low_positive", "clip_high_negative", "clip_low_negative")
    assert [out[name] for name in names] == [(1.0, 4.0)] * 4
    at_one = token_metrics(batch, ratio=f(1, 1, 1, 1), weight=f(0, 0, 0, 0), correction=None)
    assert [at_one[name][0] for name in names] == [0.0] * 4


def test_quantiles_of_many_ratios():
    batch = make((201,), group_ids=torch.tensor([0]))
    ratio = torch.arange(201, dtype=F64).flip(0)
    out = token_metrics(batch, ratio=ratio, weight=torch.ones_like(ratio), correction=None)
    assert [out[q][0] for q in ("ratio_q01", "ratio_q50", "ratio_q99")] == [2, 100, 198]


def test_metrics_of_the_step_by_hand():
    batch = make(rewards=f(1, 1, math.nan, 0, 3), truncated=torch.tensor([1, 0, 1, 0, 0]))
    assert step_metrics(batch) == {"zero_signal_share": (1.0, 2.0), "reward": (5.0, 4.0), "unscored_share": (1.0, 5.0),
                                   "truncated_share": (2.0, 5.0)}  # fmt: skip
    assert step_metrics(make()) == {}
    part = trew.preset("lite-ppo").prepare(make(rewards=f(1, 0, 1, 0, 3), advantages=None))
    assert "reward" not in trew.preset("lite-ppo").loss(part).metrics  # a step's, and this may be a part of one
    assert trew.preset("lite-ppo").loss(make(rewards=f(1, 0, 1, 0, 3))).metrics["reward"] == (5.0, 5.0)


def test_the_mean_entropy_of_a_step_and_its_bonus():
    entropies = torch.tensor([[1.0, 3.0], [8.0, 100.0]], dtype=F64, requires_grad=True)
    data = {"logprobs": torch.full((2, 2), -1.0, dtype=F64, requires_grad=True), "group_ids": torch.tensor([0, 0]),
            "mask": torch.tensor([[1, 1], [1, 0]]), "advantages": f(0, 0)}  # fmt: skip
    objective = trew.preset("lite-ppo", entropy_bonus=0.5)
    prepared = objective.prepare(TokenBatch.from_padded(**data, entropies=entropies))
    assert prepared.mean_entropy == 4.0
    loss = objective.loss(prepared).loss
    assert loss.item() == -0.5 * (1 + 3 + 8) / 3
    loss.backward()
    assert entropies.grad.flatten().tolist() == pytest.approx([-1 / 6, -1 / 6, -1 / 6, 0])
    with pytest.raises(DataError, match=r"^entropies: got values without a gradient"):
        objective.loss(TokenBatch.from_padded(**data, entropies=entropies.detach()))
    still = data | {"logprobs": data["logprobs"].detach()}  # nothing is trained: values alone will do
    assert objective.loss(TokenBatch.from_padded(**still, entropies=entropies.detach())).loss.item() == loss.item()
    with pytest.raises(DataError, match=r"^entropies: got None; lite-ppo needs it for its entropy: - 0.5"):
        objective.loss(TokenBatch.from_padded(**data))
    assert trew.preset("lite-ppo").prepare(TokenBatch.from_padded(**data)).mean_entropy is None


def test_what_is_kept_of_a_loss_does_not_keep_the_graph():
    out = trew.preset("ppo-clip").loss(make((2,), logprobs=torch.full((1, 2), -1.0, dtype=F64, requires_grad=True)))
    assert out.loss.requires_grad
    kept = (out.batch.logprobs, out.coefficients, out.ratios, out.weights, out.advantages)
    assert not any(t.requires_grad for t in kept)


def test_values_that_are_refused_where_they_count():
    objective = trew.preset("ppo-clip")
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(DataError, match=r"^advantages: got nan or inf"):
            objective.loss(make((1, 1), advantages=f(1, bad)))
        objective.loss(make((1, 0), advantages=f(1, bad)))
    for bad in (math.inf, -math.inf):
        with pytest.raises(DataError, match=r"^rewards: got inf"):
            trew.preset("lite-ppo").loss(make((1, 1), advantages=None, rewards=f(1, bad)))
