"""The loss and gradient of ``preset("dpo")`` through the learner, against autograd of DPO's loss over plain passes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import learner_help as help
import trew
from trew.errors import NumericsError
from trew.objective.preference import dpo_loss
from trew.training.sft_program import held_out_pairs

BETA = 0.5


@pytest.mark.parametrize("budget", [1, 4096])
@pytest.mark.parametrize("share", [True, False])
def test_loss_and_gradient_are_those_of_whole_pairs(budget, share):
    """A budget of one token puts the answers of a pair in different micro-batches."""
    net = help.model()
    items = help.samples([(4, [3, 5]), (2, [1, 7]), (6, [2, 2])])
    ref = help.near(net, items, seed=2)
    rewards = torch.tensor([1.0, 0.0] * 3)
    objective = trew.preset("dpo", dpo_beta=BETA)
    data = objective.prepare(help.batch(items, ref_logprobs=ref, rewards=rewards))
    got = help.gradients(net, objective, items, data, microbatch_tokens=budget, share_prompts=share)

    other = copy.deepcopy(net)
    z = [
        BETA * (help.plain_logprobs(other, s) - part).sum()
        for s, part in zip(items, ref.split([len(s.token_ids) for s in items]), strict=True)
    ]
    want = -sum(logsigmoid(z[i] - z[i + 1]) for i in (0, 2, 4)) / 3
    want.backward()
    flat = torch.cat([p.grad.flatten() for p in other.parameters()])
    assert help.relative(got, flat) < 1e-5
    out = help.learner(net, objective).step(items, data)
    assert out.loss == pytest.approx(want.item(), rel=1e-5)
    value, count = out.metrics["preference_margin"]
    margins = [(z[i] - z[i + 1]).item() for i in (0, 2, 4)]
    assert value / count == pytest.approx(sum(margins) / 3, rel=1e-4)


def test_held_out_pairs_have_the_loss_of_a_step_and_a_share_that_is_ranked_right():
    items = help.samples([(4, [3, 5]), (2, [1, 7]), (6, [2, 2])])
    log_ratios = torch.randn(20, generator=torch.Generator().manual_seed(1))
    plan: Any = SimpleNamespace(objective=trew.preset("dpo", dpo_beta=BETA), config=SimpleNamespace(seed=0))
    found = held_out_pairs(plan, log_ratios, items)
    batch = help.batch(items, ref_logprobs=torch.zeros(20), rewards=torch.tensor([1.0, 0.0] * 3))
    want = dpo_loss(batch.replace(logprobs=log_ratios), beta=BETA)
    assert found["loss"]["mean"] == pytest.approx(want.item(), rel=1e-5)
    assert found["loss"]["low"] <= found["loss"]["mean"] <= found["loss"]["high"]
    z = [BETA * part.sum().item() for part in log_ratios.split([len(s.token_ids) for s in items])]
    margins = [z[i] - z[i + 1] for i in (0, 2, 4)]
    assert found["margin"] == pytest.approx(sum(margins) / 3, rel=1e-5)
    assert found["accuracy"]["mean"] == pytest.approx(sum(m > 0 for m in margins) / 3)
    assert found["tokens"] == 20
    log_ratios[4] = torch.nan
    with pytest.raises(NumericsError, match="the held-out loss is not finite"):
        held_out_pairs(plan, log_ratios, items)
