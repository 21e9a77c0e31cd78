"""Metrics of an objective, counted by hand."""

from __future__ import annotations

import pytest
import torch

import trew
from trew import TokenBatch

F64 = torch.float64
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=F64)
RATIO = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 1.1], [0.9, 0.7, 1.0], [1.0, 1.0, 1.0]], dtype=F64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)


def make(**changes) -> TokenBatch:
    data = {
        "logprobs": OLD + RATIO.log(), "old_logprobs": OLD, "mask": MASK,
        "group_ids": torch.zeros(4, dtype=torch.int64),
        "advantages": torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=F64),
    }  # fmt: skip
    return TokenBatch.from_padded(**(data | changes))


def value(metrics, name: str) -> float:
    total, count = metrics[name]
    return total / count


def test_shares_of_silenced_tokens_by_side_and_sign():
    metrics = trew.preset("dual-clip", cap=1.4).loss(make()).metrics
    n = 11
    assert metrics["clip_share"] == (4.0, n)  # 1.5 at A > 0; 0.5, 0.7 and (dual) 1.5 at A < 0
    assert metrics["clip_high_positive"] == (1.0, n)
    assert metrics["clip_low_negative"] == (2.0, n)
    assert metrics["clip_high_negative"] == (1.0, n)
    assert metrics["clip_low_positive"] == (0.0, n)
    assert metrics["weight"] == (4.0, 8.0)  # tokens with A = 0 are not counted
    assert value(metrics, "ratio") == pytest.approx((3.0 + 3.1 + 1.6 + 3.0) / n)


def test_effective_sample_size_and_quantiles():
    metrics = trew.preset("kl-cov", penalty=0.0).loss(make()).metrics
    g = torch.tensor([1.5, 0.5, 1.0, 1.5, 0.5, 1.1, 0.9, 0.7])
    assert value(metrics, "ess") == pytest.approx(float(g.sum() ** 2 / (8 * (g**2).sum())))
    assert value(metrics, "ratio_q50") == 1.0
    assert value(metrics, "ratio_q01") == pytest.approx(0.5)
    assert value(metrics, "ratio_q99") == pytest.approx(1.5)


def test_one_token_that_decides_everything_shows():
    low = OLD - 18
    metrics = (
        trew.preset("kl-cov", penalty=0.0).loss(make(logprobs=low + torch.eye(4, 3) * 18, old_logprobs=low)).metrics
    )
    assert value(metrics, "ess") < 0.3


def test_divergences_have_the_direction_of_their_samples():
    ref, rollout = OLD + 0.3, OLD - 0.2
    metrics = trew.preset("ppo-clip").loss(make(ref_logprobs=ref, rollout_logprobs=rollout)).metrics
    l = OLD + RATIO.log()

    def k3(p: torch.Tensor, q: torch.Tensor) -> float:
        return float(((q - p).exp() - 1 - (q - p))[MASK].mean())

    assert value(metrics, "kl") == pytest.approx(k3(l, ref))
    assert value(metrics, "kl_old") == pytest.approx(k3(OLD, l))
    assert value(metrics, "kl_rollout") == pytest.approx(k3(rollout, l))


def test_what_belongs_to_whole_groups():
    batch = make(
        advantages=None, rewards=torch.tensor([1.0, 0.0, torch.nan, 1.0]), entropies=torch.full((4, 3), 0.5, dtype=F64),
        group_ids=torch.tensor([0, 0, 1, 1]), truncated=torch.tensor([True, False, False, False]),
    )  # fmt: skip
    metrics = trew.preset("ppo-clip").replace(advantage=trew.preset("dapo").advantage).loss(batch).metrics
    assert metrics["zero_signal_share"] == (1.0, 2.0)
    assert metrics["unscored_share"] == (1.0, 4.0)
    assert metrics["truncated_share"] == (1.0, 4.0)
    assert metrics["reward"] == (2.0, 3.0)
    assert metrics["entropy"] == (4.5, 9.0)  # the unscored completion carries no loss


def test_corrections_are_counted():
    rollout = OLD - torch.tensor([0.0, 1.0, 0.0], dtype=F64)
    metrics = trew.preset("dual-clip", correction="mis-token", correction_high=2.0).loss(
        make(rollout_logprobs=rollout)
    ).metrics  # fmt: skip
    assert metrics["correction_zero_share"] == (4.0, 11.0)
    assert value(metrics, "correction") == pytest.approx(7 / 11)


def test_an_empty_step_has_metrics_and_nothing_else():
    out = trew.preset("grpo", beta=0.0).loss(make(mask=torch.zeros_like(MASK)))
    assert out.loss.item() == 0
    assert out.metrics["clip_share"] == (0.0, 0.0)
    assert out.metrics["ess"] == (0.0, 0.0)


def test_turns_that_have_another_to_be_compared_with():
    """In a group: a state of one's own does not count, one that comes back in the same episode does."""
    turns = [[(1, 0.0), (3, 1.0)], [(2, 0.0), (3, 0.0)], [(3, 0.0)], [(1, 0.0), (2, 0.0), (3, 0.0)]]
    states = [["a", "b"], ["a", "c"], ["a"], ["d", "d", "b"]]
    data = {"turns": turns, "rewards": torch.tensor([1.0, 0, 0, 0]), "group_ids": torch.tensor([0, 0, 1, 1])}
    objective = trew.preset("grpo", beta=0.0)
    assert objective.loss(make(**data, states=states)).metrics["shared_state_share"] == (4.0, 8.0)
    assert "shared_state_share" not in objective.loss(make(**data)).metrics
