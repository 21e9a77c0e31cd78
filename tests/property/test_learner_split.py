"""The same step gives the same gradient however it is split: any budget, either layout, any raggedness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import learner_help as help
import tiers
from trew.objective import preset, presets
from trew.objective.ratio import TokenRatio

SHAPES = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=4
)
NET = help.model()


SPLIT_ALWAYS = ("grpo", "dr-grpo", "gspo", "kl-cov", "gtpo", "trw-entropy", "deepseek-v3.2")
"""One of each scope and aggregate; every preset's loss in parts is in the objectives' contract."""
WITH_BONUS = {"grpo": 0.05, "kl-cov": 0.05, "gspo": 0.05}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(shape=SHAPES, budget=st.integers(1, 80), seed=st.integers(0, 99), share=st.booleans())
@example(shape=[(1, [1, 1]), (12, [9, 0, 1])], budget=1, seed=0, share=True)
@pytest.mark.parametrize("name", tiers.some(presets(), SPLIT_ALWAYS))
def test_the_gradient_does_not_depend_on_the_split(name, shape, budget, seed, share):
    objective = preset(name, entropy_bonus=WITH_BONUS.get(name, 0.0), **help.OVERRIDES.get(name, {}))
    items = help.samples(shape, seed=seed)
    if not any(len(s.token_ids) for s in items):
        return
    data = help.prepared(NET, objective, items, seed=seed)
    whole = help.gradients(NET, objective, items, data, share_prompts=False)
    split = help.gradients(NET, objective, items, data, microbatch_tokens=budget, share_prompts=share)
    assert torch.isfinite(split).all()
    torch.testing.assert_close(split, whole, rtol=0, atol=2e-6 * max(float(whole.norm()), 1.0))


@dataclass(frozen=True)
class RatioToTheMean(TokenRatio):
    """A rule that looks across sequences: every ratio over the mean ratio of the step."""

    scope = "batch"

    def __call__(self, batch) -> Tensor:
        ratio = super().__call__(batch)
        return ratio / ratio[batch.mask].mean()


@pytest.mark.parametrize("budget", [1, 25])
@pytest.mark.parametrize("share", [True, False])
def test_a_rule_that_looks_across_sequences_is_not_approximated(budget, share):
    objective = preset("dr-grpo").replace(ratio=RatioToTheMean())
    assert objective.scope == "batch"
    items = help.samples([(5, (4, 3, 6)), (7, (2, 5))])
    data = help.prepared(NET, objective, items, seed=3)
    whole = help.gradients(NET, objective, items, data)
    assert help.relative(help.gradients(NET, preset("dr-grpo"), items, data), whole) > 1e-2  # it does matter
    split = help.gradients(NET, objective, items, data, microbatch_tokens=budget, share_prompts=share)
    assert help.relative(split, whole) < 1e-5


@pytest.mark.parametrize("name", ["grpo", "deepseek-v3.2", "kl-cov", "token-mean-local"])
def test_loss_and_metrics_are_of_the_whole_step_however_it_is_split(name):
    objective, items = preset(name, entropy_bonus=0.05), help.samples()
    data = help.prepared(NET, objective, items, seed=0)
    outs = [help.learner(help.model(), objective, microbatch_tokens=b).step(items, data) for b in (4096, 20, 1)]
    assert {"ess", "ratio_q01", "ratio_q99", "clip_high_positive", "clip_low_negative"} <= outs[0].metrics.keys()
    for out in outs[1:]:
        assert out.loss == pytest.approx(outs[0].loss, abs=1e-5)
        assert out.metrics.keys() == outs[0].metrics.keys()
        for name in out.metrics.keys() - {"learner_tokens"}:
            assert out.metrics[name] == pytest.approx(outs[0].metrics[name], rel=1e-4, abs=1e-5), name
