"""The compiled learner on episodes: log-probs and gradients as the model's own forward gives them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import cpu_help as cpu
import learner_help as help
from trew.backends.cpu import build
from trew.objective import preset
from trew.types import TrainingSample

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))

TURNS = ((3, 40, 2), (1, 7, 1, 30, 4), (5,), (2, 64, 2, 64, 2))
"""Tokens of each episode: a reply, an observation, a reply, ..."""


def episodes() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, 9), rng.integers(0, 256, 70)]
    out = []
    for i, lengths in enumerate(TURNS):
        sampled = np.concatenate([np.full(n, at % 2 == 0) for at, n in enumerate(lengths)])
        out.append(TrainingSample(prompts[i // 2], rng.integers(0, 256, len(sampled)), i // 2, sampled))
    return out


@pytest.mark.parametrize("budget", [4096, 90])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_gradients_and_log_probs_equal_those_of_the_models_own_forward(name, budget):
    net, items = help.model("llama", hidden_size=64, head_dim=16), episodes()
    every = [dataclasses.replace(item, sampled=None) for item in items]
    sampled = torch.from_numpy(np.concatenate([item.sampled for item in items]))
    objective = preset(name)
    old = help.near(net, items)
    data = objective.prepare(help.batch(items, mask=sampled, old_logprobs=old, ref_logprobs=old))
    own = cpu.learner(net, objective, microbatch_tokens=budget)
    assert own._runner.path.layers == "cpu"
    got, want = own.logprobs(items), cpu.learner(net, kernels=False, share_prompts=False).logprobs(every)
    torch.testing.assert_close(got[sampled], want[sampled], rtol=0, atol=1e-4)
    assert (got[~sampled] == 0).all()
    slope = cpu.gradients(net, objective, items, data, microbatch_tokens=budget)
    exact = cpu.gradients(net, objective, every, data, kernels=False, share_prompts=False)
    assert help.relative(slope, exact) < 1e-5
    assert not own.notes
