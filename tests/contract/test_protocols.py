"""The protocols between the rooms: short, documented, and kept by every implementation."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import learner_help as help
from engine_help import ScriptedEngine
from trew.config import parse
from trew.eval import correct_by
from trew.learner import Learner, Policy
from trew.objective import preset
from trew.rewards import RewardSet
from trew.rollout import Engine, RolloutSource
from trew.rollout.sync import SyncRollouts
from trew.types import Prompt
from trew.weights import InPlace, WeightSync

SOURCE = Path(__file__).parents[2] / "src" / "trew"
FILES = (
    "learner/parallel.py", "learner/policy.py", "learner/runner.py", "models/backend.py", "rollout/engine.py",
    "rollout/source.py", "rollout/torch_engine/decoder.py", "rollout/torch_engine/resuming.py", "weights/sync.py",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_protocol_is_read_at_a_glance(name):
    text = (SOURCE / name).read_text()
    assert text.count("\n") <= 90
    protocols = [
        node for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]  # fmt: skip
    assert protocols
    for protocol in protocols:
        assert ast.get_docstring(protocol), protocol.name
        methods = [node for node in protocol.body if isinstance(node, ast.FunctionDef)]
        assert [m.name for m in methods if not ast.get_docstring(m)] == [], protocol.name


# ---- Policy


def policies() -> dict[str, Policy]:
    """Every implementation, on the same model."""
    return {"learner": help.learner(help.model(), preset("dr-grpo"))}


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("name", policies())
def test_weights_and_version_change_together_and_only_when_applied(name):
    policy, items = policies()[name], help.samples()
    data = preset("dr-grpo").prepare(help.batch(items))
    before, version = weights_of(policy), policy.version
    done = policy.accumulate(items, data)
    assert same(weights_of(policy), before)
    assert policy.version == version
    out = policy.apply(done)
    assert not same(weights_of(policy), before)
    assert policy.version == out.policy_version == version + 1

    moved = weights_of(policy)
    silent = preset("dr-grpo").prepare(help.batch(items, rewards=torch.ones(len(items))))
    out = policy.apply(policy.accumulate(items, silent))
    assert same(weights_of(policy), moved)
    assert policy.version == out.policy_version == version + 1


def test_both_halves_of_a_step_are_the_step():
    net, items = help.model(), help.samples()
    data = preset("dr-grpo").prepare(help.batch(items))
    one, two = (help.learner(copy.deepcopy(net), preset("dr-grpo")) for _ in range(2))
    whole, halves = one.step(items, data), two.apply(two.accumulate(items, data))
    assert same(weights_of(one), weights_of(two))
    assert whole == halves


@pytest.mark.parametrize("name", policies())
def test_log_probs_are_those_of_the_weights_that_are_published(name):
    policy, items = policies()[name], help.samples()
    other = help.model(seed=5)
    other.load_state_dict(dict(policy.weights()))
    torch.testing.assert_close(policy.logprobs(items), help.learner(other).logprobs(items), rtol=0, atol=0)


# ---- RolloutSource and WeightSync


def sources(engine: Engine) -> dict[str, RolloutSource]:
    """Every implementation, over seven prompts."""
    config = parse({"model": "m", "rollout": {"prompts": 3, "completions": 4}})
    prompts = [Prompt(f"p{i}", text="?", columns={"answer": "#### 1"}) for i in range(7)]
    return {
        "sync": SyncRollouts(
            engine, config=config, objective=preset("grpo", beta=0.0), prompts=prompts,
            rewards=RewardSet.from_config(parse({"model": "m", "rewards": [{"name": "gsm8k"}]}).rewards),
            correct=correct_by("gsm8k"),
        )
    }  # fmt: skip


def seen(source: RolloutSource, step: int) -> list[Any]:
    found = source.next(step)
    assert set(map(id, found.trained_on)) <= set(map(id, found.sampled))
    assert found.baselines is None
    return [
        (g.group.prompt.uid, [r.token_ids.tolist() for r in g.group.rollouts], [s.value for s in g.scores])
        for g in found.sampled
    ]


@pytest.mark.parametrize("name", sources(ScriptedEngine()))
def test_a_resumed_source_goes_on_as_one_that_was_never_stopped(name):
    source = sources(ScriptedEngine())[name]
    whole, states = [], []
    for step in (1, 2, 3):
        states.append(source.state())
        whole.append(seen(source, step))
        source.trained(step, step)
    assert len({uid for step in whole[:2] for uid, _, _ in step}) == 6  # no prompt twice within an epoch
    again = sources(ScriptedEngine())[name]
    again.load_state(states[1])
    assert [seen(again, step) for step in (2, 3)] == whole[1:]


@pytest.mark.parametrize("sync", [InPlace()], ids=["in place"])
def test_what_is_sampled_after_publishing_says_the_new_version(sync: WeightSync):
    policy, engine, items = policies()["learner"], ScriptedEngine(), help.samples()
    source = sources(engine)["sync"]
    policy.apply(policy.accumulate(items, preset("dr-grpo").prepare(help.batch(items))))
    for _ in range(2):  # publishing a version twice changes nothing
        sync.publish(policy, engine)
        assert engine.version == policy.version == 1
    versions = {span.version for g in source.next(1).sampled for r in g.group.rollouts for span in r.versions}
    assert versions == {1}


def test_the_types_say_so():
    """Checked by the type checker; at run time the names suffice."""
    learner: Policy = help.learner(help.model())
    assert isinstance(learner, Learner)
    for name in ("logprobs", "verify", "accumulate", "apply", "update_reference", "weights"):
        assert callable(getattr(learner, name))
