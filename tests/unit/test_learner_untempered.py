"""What a learner says for engines that do not: log-probs and entropies at temperature 1, and the metric ``entropy``."""

from __future__ import annotations

import copy

import pytest
import torch

import learner_help as help
from trew.config import LoraConfig
from trew.models import lora
from trew.objective import preset


def exact(net, items, *, temperature: float = 1.0):
    with torch.no_grad():
        logprobs = torch.cat([help.plain_logprobs(net, s, temperature=temperature) for s in items])
        p = torch.cat([help.plain_logits(net, s) / temperature for s in items]).log_softmax(-1)
    return logprobs, -(p.exp() * p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("fused", [True, False])
def test_log_probs_and_entropies_are_those_of_temperature_1(temperature, fused):
    net, items = help.model(), help.samples()
    own = help.learner(net, temperature=temperature, fused=fused)
    logprobs, entropies = own.untempered(items)
    for got, want in zip((logprobs, entropies), exact(net, items), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own.logprobs(items), exact(net, items, temperature=temperature)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("fused", [True, False])
def test_score_norms_are_the_squared_length_of_each_score(temperature, fused):
    """By autograd through the plain forward: the gradient of log pi by the logits at the training temperature."""
    net, items = help.model(), help.samples()
    own = help.learner(net, temperature=temperature, fused=fused)
    logprobs, norms = own.score_norms(items)
    want = []
    for sample in items:
        z = (help.plain_logits(net, sample).detach() / temperature).requires_grad_()
        chosen = z.log_softmax(-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])[:, 0]
        want.append(torch.autograd.grad(chosen.sum(), z)[0].square().sum(-1))
    torch.testing.assert_close(norms, torch.cat(want), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs, own.logprobs(items), rtol=1e-5, atol=1e-5)


def test_what_is_published_of_adapters_is_the_model_that_they_make():
    own = lora.attach(help.model("qwen2"), LoraConfig(rank=4), name="base", seed=0)
    with torch.no_grad():
        for layer in lora.lora_layers(own.model).values():
            layer.lora_B["default"].weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    learner, items = help.learner(own.model, adapters=own), help.samples()
    other = help.model("qwen2", seed=9)
    other.load_state_dict(dict(learner.weights()))
    torch.testing.assert_close(exact(other, items)[0], learner.untempered(items)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "fused"), [("dr-grpo", True), ("dr-grpo", False), ("clip-cov", True), ("m2po", True)])
def test_the_update_measures_the_entropy_and_learns_the_same(name, fused):
    """Of the tokens that are learned from: clip-cov and m2po also run groups without a signal, for their log-probs."""
    net, items, objective = help.model(), help.samples(), preset(name)
    given = help.batch(items)
    silent = given.group_ids == items[0].group
    data = objective.prepare(
        given.replace(rewards=given.rewards.masked_fill(silent, 1.0), old_logprobs=help.near(net, items))
    )
    assert data.entropies is None
    outputs, weights = [], []
    for measured in (False, True):
        model = copy.deepcopy(net)
        own = help.learner(model, objective, fused=fused)
        own.measure_entropy = measured
        outputs.append(own.step(items, data))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert "entropy" not in outputs[0].metrics
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert silent.sum() > 1
    active = [i for i, sample in enumerate(items) if objective.has_gradient(data)[data.sequence_ids == i].any()]
    total, count = outputs[1].metrics["entropy"]
    want = exact(net, [items[i] for i in active])[1]
    assert count == len(want)
    assert total / count == pytest.approx(float(want.mean()), rel=1e-4)
