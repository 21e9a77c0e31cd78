"""The learner computes nothing for observations but what later tokens read, and no number of the step depends on that.

An episode's stream has tokens that the policy did not sample. Their log-probs are not computed, on any path; the same
episodes with all log-probs computed, and these tokens masked, must give the same gradient, loss and metrics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import learner_help as help
import tiers
from trew.objective import preset, presets
from trew.types import TrainingSample

NET = help.model()
EPISODE = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=0, max_size=3)
"""(sampled tokens, tokens of the observation behind them) for each turn."""
GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(EPISODE, min_size=1, max_size=3)), min_size=1, max_size=3
)  # fmt: skip
PATHS: tuple[dict[str, Any], ...] = (
    {}, {"microbatch_tokens": 20}, {"share_prompts": False}, {"share_prompts": False, "fused": False}, {"fused": False},
)  # fmt: skip
ALWAYS = ("grpo", "dr-grpo", "dapo", "gspo", "kl-cov", "gtpo", "remax", "deepseek-v3.2", "grpo-process", "gigpo")


def episodes(groups: Any, *, seed: int) -> list[TrainingSample]:
    """Samples of several turns; the last observation is never followed by a reply."""
    rng = np.random.default_rng(seed)
    out = []
    for group, (prompt, played) in enumerate(groups):
        ids = rng.integers(0, 256, prompt)
        for turns in played:
            parts = [np.repeat([True, False], turn) for turn in turns]
            sampled = np.concatenate([np.zeros(0, bool), *parts])
            out.append(TrainingSample(ids, rng.integers(0, 256, len(sampled)), group, sampled))
    return out


def all_predicted(items: list[TrainingSample]) -> list[TrainingSample]:
    return [dataclasses.replace(item, sampled=None) for item in items]


def prepared(objective: Any, items: list[TrainingSample], *, seed: int) -> Any:
    data = help.prepared(NET, objective, items, seed=seed, mask_share=0.0)
    mask = torch.from_numpy(np.concatenate([item.sampled for item in items if item.sampled is not None])) & data.mask
    return objective.prepare(data.replace(mask=mask, denominators=None, token_weights=None, mean_entropy=None))


@settings(max_examples=tiers.examples(12), deadline=None, derandomize=True)
@given(groups=GROUPS, path=st.sampled_from(PATHS), seed=st.integers(0, 99))
@example(groups=[(3, [[(2, 3), (1, 0)], [(1, 5), (4, 2), (2, 1)]])], path={"microbatch_tokens": 20}, seed=1)
@pytest.mark.parametrize("name", tiers.some(presets(), ALWAYS))
def test_no_number_depends_on_log_probs_of_observations(name, groups, path, seed):
    objective = preset(name, **help.OVERRIDES.get(name, {}))
    items = episodes(groups, seed=seed)
    if not any(len(item.token_ids) for item in items):
        return
    data = prepared(objective, items, seed=seed)
    want = help.gradients(NET, objective, all_predicted(items), data, **path)
    got = help.gradients(NET, objective, items, data, **path)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * max(float(want.norm()), 1.0))


@settings(max_examples=tiers.examples(20), deadline=None, derandomize=True)
@given(groups=GROUPS, path=st.sampled_from(PATHS), seed=st.integers(0, 99))
def test_log_probs_are_those_of_the_sampled_tokens_and_0_elsewhere(groups, path, seed):
    items = episodes(groups, seed=seed)
    sampled = np.concatenate([item.sampled for item in items if item.sampled is not None])
    own = help.learner(NET, **path)
    got, entropies = own.untempered(items)
    want, all_entropies = own.untempered(all_predicted(items))
    torch.testing.assert_close(own.logprobs(items), got)
    torch.testing.assert_close(got[sampled], want[sampled], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies[sampled], all_entropies[sampled], rtol=0, atol=1e-5)
    assert (got[~sampled] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "gspo", "token-mean-local"])
def test_loss_and_metrics_are_the_same(name):
    objective = preset(name, entropy_bonus=0.05)
    items = episodes([(3, [[(2, 3), (1, 0)], [(1, 5), (4, 2), (2, 1)]]), (5, [[(2, 0)], [(3, 4), (1, 0)]])], seed=4)
    data = prepared(objective, items, seed=4)
    want, got = (help.learner(help.model(), objective).step(each, data) for each in (all_predicted(items), items))
    assert got.loss == pytest.approx(want.loss, abs=1e-6)
    for key, (total, count) in want.metrics.items():
        assert got.metrics[key] == pytest.approx((total, count), rel=1e-4, abs=1e-5), key


def test_the_head_computes_sampled_tokens_alone(monkeypatch):
    from trew.learner.fused_head import FusedHead

    rows, products = [], FusedHead._products
    monkeypatch.setattr(FusedHead, "_products", lambda self, h: (rows.append(len(h)), products(self, h))[1])
    items = episodes([(3, [[(2, 30), (1, 0)], [(2, 40), (2, 0)]])], seed=2)
    for given_items, count in ((items, 6), (all_predicted(items), 76)):
        own = help.learner(NET)
        own.verify(given_items)
        rows.clear()
        own.logprobs(given_items)
        assert sum(rows) == count  # both first tokens are read at the prompt's last position
