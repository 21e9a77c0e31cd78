"""Where the default model begins in the built-in environments: where there is something to learn from."""

from __future__ import annotations

import contextlib

import pytest

from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.models import loading
from trew.models.default import DEFAULT_MODEL, cached
from trew.rollout import Renderer
from trew.rollout.bridge import Bridges
from trew.rollout.endings import facts_of
from trew.rollout.episodes import Episodes, Limits
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.types import Prompt, Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cached() is None, reason="the default model is not here: make fetch"),
]
GROUPS, SIZE = 16, 8


@pytest.mark.parametrize(("name", "turns", "max_tokens"), [("guess", 4, 6), ("grid", 5, 5), ("calculator", 3, 18)])
def test_built_in_environments_start_where_a_policy_can_learn(name, turns, max_tokens):
    net, renderer = loading.load_model(DEFAULT_MODEL), Renderer(loading.load_tokenizer(DEFAULT_MODEL))
    facts, hosts = facts_of(net), Hosts(Spec(name))
    prompts = [Prompt(f"p{i}", text="", seed=i) for i in range(GROUPS)]
    with contextlib.closing(hosts):
        ends = renderer.stop_ids | facts.ends
        episodes = Episodes(
            TorchEngine(net, renderer), hosts, Bridges(renderer, ends=facts.ends),
            limits=Limits(turns, facts.positions or 8192, 64), ends=ends,
        )  # fmt: skip
        groups = generate(episodes, prompts, n=SIZE, sampling=Sampling(max_tokens=max_tokens, seed=1))
    rewards = [[[turn.reward or 0.0 for turn in r.turns] for r in group.rollouts] for group in groups]
    started = sum(own[-1] >= 1.0 for group in rewards for own in group) / (GROUPS * SIZE)
    differ = sum(len({round(sum(own), 6) for own in group}) > 1 for group in rewards) / GROUPS
    print(f"{name}: success {started:.3f}, groups that differ {differ:.2f}")
    # Wider than 0.05 to 0.5 by two standard errors of so few episodes: the seeds of prompts and draws are fixed, but
    # rounding is not everywhere the same.
    assert 0.03 < started < 0.55
    assert differ >= 0.5
