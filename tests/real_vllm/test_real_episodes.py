"""Episodes on the real vLLM: what it reads at each turn is what is trained on, with its prefix cache and without."""

from __future__ import annotations

import contextlib
import string
from collections.abc import Iterator

import numpy as np
import pytest
from test_real_updates import GAP

import env_help
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.rollout.bridge import Bridges
from trew.rollout.episodes import Episodes, Limits
from trew.rollout.generate import generate
from trew.types import Group, Prompt, Sampling, TrainingSample
from vllm_help import House

TURNS = 4
HOW = Sampling(max_tokens=8, seed=3, stop=tuple(string.ascii_letters))
PROMPTS = [Prompt(f"p{i}", text=f"Say {i}.", seed=i) for i in range(4)]


@pytest.fixture(scope="module", params=["", "no-enable-prefix-caching"], ids=["cached", "uncached"])
def server(request, start, tied):
    """A server that keeps what it has computed for a prefix, and one that does not."""
    return start(tied, more={request.param: True} if request.param else {})


@pytest.fixture
def house(server, tied, tmp_path) -> Iterator[House]:
    made = House(tied, tmp_path, list(server.endpoints), [])
    with contextlib.closing(made.weights):
        yield made


def played(house: House) -> tuple[list[Group], dict[tuple[str, int], list[np.ndarray]]]:
    """Groups of episodes, and the tokens that the engine was given at each turn, by uid and sample."""
    engine = house.engine()
    fed: dict[tuple[str, int], list[np.ndarray]] = {}
    submit = engine.submit

    def seen(requests):
        for request in requests:
            fed.setdefault((request.prompt.uid, request.sample), []).append(request.earlier.ids)
        submit(requests)

    engine.submit = seen
    hosts = Hosts(Spec(f"{env_help.__file__}:quiet", {"turns": TURNS}), size=1, timeout_s=60)
    with contextlib.closing(hosts):
        bridges = Bridges(house.renderer, ends=house.facts.ends)
        ends = house.renderer.stop_ids | house.facts.ends
        episodes = Episodes(engine, hosts, bridges, limits=Limits(TURNS, 500, 64), ends=ends)
        return generate(episodes, PROMPTS, n=3, sampling=HOW), fed


def test_tokens_that_are_read_are_tokens_that_are_trained_on(house, record, request):
    groups, fed = played(house)
    rollouts = [(g.prompt.uid, s, r) for g in groups for s, r in enumerate(g.rollouts)]
    assert len(rollouts) == 12
    assert max(len(rollout.turns) for _, _, rollout in rollouts) > 2, "hardly any episode went on"
    for uid, sample, rollout in rollouts:
        whole = np.concatenate([rollout.prompt_ids, rollout.token_ids])
        ends = [len(rollout.prompt_ids) + end for end in rollout.turn_ends]
        begins = [end - len(turn.token_ids) for end, turn in zip(ends, rollout.turns, strict=True)]
        assert [ids.tolist() for ids in fed[uid, sample]] == [whole[:begin].tolist() for begin in begins]
    samples = [TrainingSample(r.prompt_ids, r.token_ids, i // 3, r.sampled) for i, (_, _, r) in enumerate(rollouts)]
    own = house.policy.logprobs(samples).numpy()
    sampled = np.concatenate([rollout.sampled for _, _, rollout in rollouts])
    # The same numbers as the policy computes from the whole episode: nothing else was read.
    gaps = np.abs(own - np.concatenate([rollout.logprobs for _, _, rollout in rollouts]))[sampled]
    assert gaps.max() < 10 * GAP
    assert 0.2 < 1 - sampled.mean() < 0.9
    record(f"episodes_gap_max_nats_{request.node.callspec.id}", float(f"{gaps.max():.2g}"))
