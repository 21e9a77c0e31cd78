"""Optimizer steps: the gradient against a textbook, silent samples, numbers that are not finite, schedules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import learner_help as help
import tiny
from trew.config import LearnerConfig
from trew.errors import EngineError, ModelError, NumericsError
from trew.learner.optimizer import learning_rate, make_optimizer, trainable
from trew.objective import preset
from trew.types import TrainingSample


def snapshot(net) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def textbook_grpo(net, items, data, *, temperature: float, eps: float = 0.2, beta: float = 0.0) -> torch.Tensor:
    """GRPO as in the paper, float64, one unpadded sequence at a time, differentiated by autograd."""
    net = copy.deepcopy(net).double()
    rewards, groups = data.rewards.double(), data.group_ids
    lengths = [len(s.token_ids) for s in items]
    old, ref = data.old_logprobs.double().split(lengths), data.ref_logprobs.double().split(lengths)
    counted = [i for i, n in enumerate(lengths) if n]
    total = torch.zeros((), dtype=torch.float64)
    for i in counted:
        peers = rewards[groups == groups[i]]
        spread = peers.std() if len(peers) > 1 else torch.tensor(0.0)
        advantage = (rewards[i] - peers.mean()) / spread if spread > 0 else torch.tensor(0.0, dtype=torch.float64)
        logprobs = help.plain_logprobs(net, items[i], temperature=temperature)
        ratio = (logprobs - old[i]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
        kl = (ref[i] - logprobs).exp() - (ref[i] - logprobs) - 1
        total = total - (gain - beta * kl).mean() / len(counted)
    total.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("kind", ["llama", "smollm", "qwen3", "gemma2", "gpt_neox", "gpt2"])
def test_the_gradient_of_a_step_equals_the_textbook(kind, share, beta):
    net, items = help.model(kind), help.samples()
    data = help.batch(items, old_logprobs=help.near(net, items), ref_logprobs=help.near(net, items, seed=2))
    expected = textbook_grpo(net, items, data, temperature=0.9, beta=beta)
    objective = preset("grpo", beta=beta)
    got = help.gradients(net, objective, items, objective.prepare(data), temperature=0.9, share_prompts=share,
                         microbatch_tokens=30)  # fmt: skip
    assert help.relative(got, expected) < 1e-5


def test_logprobs_come_in_sample_order_and_the_reference_has_its_own():
    net, other, items = help.model(seed=0), help.model(seed=1), help.samples()
    own = help.learner(net, reference=other, microbatch_tokens=15)
    done: list[int] = []
    with torch.no_grad():
        expected = [torch.cat([help.plain_logprobs(m, s) for s in items]) for m in (net, other)]
    torch.testing.assert_close(own.logprobs(items, progress=done.append), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(own.logprobs(items, reference=True), expected[1], rtol=0, atol=1e-5)
    assert sum(done) == sum(len(s.token_ids) > 0 for s in items)
    assert not any(p.requires_grad for p in other.parameters())
    with pytest.raises(ValueError, match="without a reference model"):
        help.learner(net).logprobs(items, reference=True)


def test_silent_samples_are_skipped_and_change_nothing():
    shape = [(6, (4, 3)), (5, (5, 2)), (4, (3, 3))]
    net, items = help.model(), help.samples(shape)
    data = help.batch(items, rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), old_logprobs=help.near(net, items))
    objective = preset("grpo", beta=0.0)
    prepared = objective.prepare(data)
    own = help.learner(copy.deepcopy(net), objective)
    out = own.step(items, prepared)
    assert out.metrics["silent_share"] == (4.0, 6.0)
    assert out.metrics["learner_tokens"] == (6 + 3 + 2, 1.0)
    # The same step with every sample run: an unmeasurable advantage keeps the silent ones awake.
    awake = prepared.replace(advantages=torch.where(prepared.advantages == 0, 1e-30, prepared.advantages))
    full = help.gradients(net, objective, items, awake)
    assert help.relative(help.gradients(net, objective, items, prepared), full) < 1e-6
    # and they do count in the denominators: without them it would be another gradient
    alone = objective.prepare(data.select(torch.tensor([0, 1])))
    # Sums in another order: by how much they differ depends on the processor.
    assert help.relative(help.gradients(net, objective, items[:2], alone) / 3, full) < 1e-5


def test_a_step_without_any_signal_leaves_weights_optimizer_and_version_untouched():
    net, items = help.model(), help.samples()
    own = help.learner(net, weight_decay=0.1)
    data = help.batch(items, rewards=torch.ones(len(items)))
    own.step(items, own.objective.prepare(help.batch(items)))
    before = {name: t.clone() for name, t in own.state()[0].items()}
    out = own.step(items, own.objective.prepare(data))
    assert (out.loss, out.grad_norm, out.policy_version) == (0.0, 0.0, 1)
    assert out.metrics["skipped_steps"] == (1.0, 1.0)
    assert all(torch.equal(t, before[name]) for name, t in own.state()[0].items())
    assert own.steps == 2  # the schedule goes on


def test_with_a_kl_term_no_sample_is_silent():
    net, items = help.model(), help.samples()
    own = help.learner(net, preset("grpo", beta=0.1), reference=help.model(seed=1))
    data = help.batch(items, rewards=torch.ones(len(items)), ref_logprobs=own.logprobs(items, reference=True))
    out = own.step(items, own.objective.prepare(data))
    assert out.grad_norm > 0
    assert out.metrics["silent_share"][0] == sum(len(s.token_ids) == 0 for s in items)


def autograd(net, objective, items, data, *, temperature: float = 1.0, bonus: float = 0.0) -> torch.Tensor:
    """The gradient of ``Objective.loss`` on a prepared step at once, each sequence run by itself in float64, and of
    - bonus sum_t share_t H_t."""
    net = copy.deepcopy(net).double()
    logits = [help.plain_logits(net, s) / temperature for s in items]
    log_p = [z.log_softmax(-1) for z in logits]
    logprobs = [p.gather(1, torch.from_numpy(s.token_ids)[:, None])[:, 0] for p, s in zip(log_p, items, strict=True)]
    entropies = torch.cat([-(p.exp() * p).sum(-1) for p in log_p])
    loss = objective.loss(data.replace(logprobs=torch.cat(logprobs))).loss
    (loss - bonus * (data.token_weights * data.mask * entropies).sum()).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["grpo", "dapo", "kl-cov"])
def test_an_entropy_bonus_has_the_gradient_of_the_entropy(name, share):
    net, items = help.model(), help.samples()
    extra = {"share": 0.2} if name == "kl-cov" else {}
    plain, objective = (preset(name, beta=0.0, entropy_bonus=b, **extra) for b in (0.0, 0.3))
    mask = torch.rand(27, generator=torch.Generator().manual_seed(0)) > 0.3
    data = help.batch(items, old_logprobs=help.near(net, items), entropies=torch.ones(27), mask=mask)
    prepared = objective.prepare(data)
    settings = {"temperature": 0.8, "share_prompts": share, "microbatch_tokens": 30}
    got = help.gradients(net, objective, items, prepared, **settings)
    want = autograd(net, plain, items, prepared, temperature=0.8, bonus=0.3)
    assert help.relative(got, want) < 1e-5
    assert help.relative(help.gradients(net, plain, items, prepared, **settings), want) > 1e-2  # it does matter


def test_an_entropy_bonus_speaks_for_silent_samples_and_an_adaptive_one_only_below_its_target():
    net, items = help.model(), help.samples()
    data = help.batch(items, rewards=torch.ones(len(items)), entropies=torch.full((27,), 2.0))
    for bonus, target, grows in ((0.1, 0.0, None), (0.1, 2.5, True), (0.1, 1.5, False), (0.0, 2.5, True)):
        own = help.learner(copy.deepcopy(net), preset("grpo", beta=0, entropy_bonus=bonus, entropy_target=target))
        out = own.step(items, own.objective.prepare(data))
        acts = bonus > 0 and (target == 0 or target > 2)
        assert (out.grad_norm > 0) == acts
        assert out.metrics["skipped_steps"] == (float(not acts), 1.0)
        assert out.metrics["entropy_coefficient"] == (bonus, 1.0)  # of this step
        after = {None: bonus, True: bonus + 0.005, False: bonus - 0.005}[grows]
        assert own.objective.entropy_bonus.coefficient == pytest.approx(after)
    plain = help.learner(copy.deepcopy(net), preset("grpo", beta=0))
    assert "entropy_coefficient" not in plain.step(items, plain.objective.prepare(data)).metrics


def test_a_step_that_failed_does_not_move_the_adaptive_coefficient():
    net, items = help.model(), help.samples()
    own = help.learner(net, preset("dr-grpo", entropy_target=9.0), fused=False)
    data = own.objective.prepare(help.batch(items, entropies=torch.ones(27)))
    net.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError):
        own.step(items, data)
    assert own.objective.entropy_bonus.coefficient == 0


@pytest.mark.parametrize("budget", [4096, 20])
def test_silent_samples_take_part_in_a_rule_that_looks_across_sequences(budget):
    """Clip-Cov draws by covariances with the means over all tokens, those of groups without signal among them."""
    shape = [(6, (4, 3)), (5, (5, 2)), (4, (3, 3))]
    net, items = help.model(), help.samples(shape)
    objective = preset("clip-cov", share=0.2, cov_low=-0.2, cov_high=9.0, eps_low=0.2, eps_high=0.2)
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    data = objective.prepare(help.batch(items, rewards=rewards, old_logprobs=help.near(net, items)))
    got = help.gradients(net, objective, items, data, microbatch_tokens=budget)
    assert help.relative(got, autograd(net, objective, items, data)) < 1e-5
    heard = torch.tensor([0, 1])
    alone = objective.prepare(data.select(heard).replace(denominators=None, token_weights=None))
    ignorant = help.gradients(net, objective, items[:2], alone) / 10  # as if nobody else were there
    assert help.relative(ignorant * 7, got) > 1e-2
    out = help.learner(net, objective, microbatch_tokens=budget).step(items, data)
    assert out.metrics["silent_share"] == (4.0, 6.0)
    assert out.metrics["ratio"][1] == 20  # metrics: over all that was looked at


@pytest.mark.parametrize("budget", [4096, 20, 1])
@pytest.mark.parametrize("name", ["grpo", "vespo"])  # vespo: the correction is in the ratio, and counts once in ess
def test_metrics_that_do_not_add_up_are_of_all_samples_that_were_run(name, budget):
    shape = [(6, (4, 3)), (5, (5, 2)), (4, (3, 3))]
    net, items = help.model(), help.samples(shape)
    objective = preset(name, beta=0.0, correction="tis")
    data = objective.prepare(help.batch(
        items, rewards=torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), old_logprobs=help.near(net, items),
        rollout_logprobs=help.near(net, items, seed=3),
    ))  # fmt: skip
    logprobs = help.near(net, items, spread=0.0)
    want = objective.loss(data.replace(logprobs=logprobs).select(torch.tensor([0, 1, 4, 5]))).metrics
    out = help.learner(net, objective, microbatch_tokens=budget).step(items, data)
    assert {"ess", "ratio_q01", "ratio_q50", "ratio_q99", "correction", "correction_zero_share"} <= want.keys()
    for metric, value in want.items():
        assert out.metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize("budget", [4096, 1])
@pytest.mark.parametrize("rule", ["tis", "mis", "geo-mask"])
def test_what_a_correction_cuts_is_known_where_the_first_update_is_the_only_one(rule, budget):
    """Nobody computes old log-probs then, and the share and its warning were missing from such runs."""
    net, items = help.model(), help.samples([(6, (4, 3)), (5, (5, 2)), (4, (3, 3))])
    objective = preset("grpo", beta=0.0, correction=rule, correction_high=1.1)
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    data = objective.prepare(help.batch(items, rewards=rewards, rollout_logprobs=help.near(net, items, seed=3)))
    logprobs = help.near(net, items, spread=0.0)
    ran = data.replace(logprobs=logprobs, old_logprobs=logprobs).select(torch.tensor([0, 1, 4, 5]))
    out = help.learner(net, objective, microbatch_tokens=budget).step(items, data)
    cut, count = out.metrics["corrected_share"]
    assert count == 13
    assert cut / count == pytest.approx(objective.corrected_share(ran))
    assert 0 < cut < count or rule != "tis"
    several = help.learner(net, objective).step(items, data.replace(old_logprobs=logprobs))
    assert "corrected_share" not in several.metrics  # known before the update


def test_masked_samples_and_tokens_carry_no_gradient():
    net, items = help.model(), help.samples([(5, (4, 3))])
    mask = torch.tensor([True, False, True, False, False, False, False])
    objective = preset("dr-grpo")
    data = objective.prepare(help.batch(items, mask=mask))
    got = help.gradients(net, objective, items, data)
    reference = copy.deepcopy(net)
    logprobs = help.plain_logprobs(reference, items[0])
    advantage = data.advantages[0]
    (-(logprobs[[0, 2]] * advantage).sum() / 16).backward()  # dr-grpo: one sequence with loss, 16 tokens at most
    assert help.relative(got, torch.cat([p.grad.flatten() for p in reference.parameters()])) < 1e-5


@pytest.mark.parametrize("share", [True, False])
def test_broken_weights_stop_the_step_and_are_named(share):
    net, items = help.model(), help.samples()
    own = help.learner(net, share_prompts=share)
    with torch.no_grad():
        net.get_input_embeddings().weight[items[0].prompt_ids[0]] = float("nan")  # of the first group alone
    before, data = snapshot(net), own.objective.prepare(help.batch(items))
    with pytest.raises(NumericsError, match=r"not finite .*in samples 0 \(group 0\)"):
        own.step(items, data)
    with pytest.raises(NumericsError, match=r"not finite .*in samples"):
        own.logprobs(items)
    assert all(torch.equal(p, before[name]) or p.isnan().any() for name, p in net.named_parameters())
    assert all(p.grad is None for p in net.parameters())
    assert (own.version, own.steps) == (0, 0)


def test_a_gradient_that_is_not_finite_is_not_applied():
    net, items = help.model(), help.samples()
    own = help.learner(net, fused=False)
    before, data = snapshot(net), own.objective.prepare(help.batch(items))
    net.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NumericsError, match=r"the gradient norm is (nan|inf).* in samples"):
        own.step(items, data)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert all(p.grad is None for p in net.parameters())


def test_a_loss_that_is_not_finite_is_not_applied():
    net, items = help.model(), help.samples()
    own = help.learner(net)
    data = own.objective.prepare(help.batch(items, old_logprobs=torch.full((27,), torch.nan)))
    with pytest.raises(NumericsError, match=r"the loss is (nan|-?inf), in samples"):
        own.step(items, data)
    assert own.version == 0


def test_token_ids_outside_the_vocabulary_are_refused():
    own = help.learner(help.model())
    items = [TrainingSample(np.array([1]), np.array([tiny.VOCAB]), 0), TrainingSample(np.array([1]), np.array([2]), 0)]
    with pytest.raises(EngineError, match=f"sample 0: the completion holds token id {tiny.VOCAB}"):
        own.logprobs(items)


def test_the_gradient_is_clipped_to_its_norm():
    net, items = help.model(), help.samples()
    big, small = (help.learner(copy.deepcopy(net), max_grad_norm=m) for m in (1e9, 1e-3))
    data = big.objective.prepare(help.batch(items))
    out = [own.step(items, data) for own in (big, small)]
    assert out[0].grad_norm == pytest.approx(out[1].grad_norm)  # reported before clipping
    first = [own.state()[0]["optimizer.exp_avg.lm_head.weight"] for own in (big, small)]
    torch.testing.assert_close(first[1] * (out[0].grad_norm / 1e-3), first[0], rtol=1e-4, atol=1e-8)


def test_schedules_by_hand():
    def rates(name, warmup, count):
        config = LearnerConfig(lr=0.8, schedule=name, warmup_steps=warmup)
        return [learning_rate(s, config=config, steps=6) for s in range(count)]

    assert rates("constant", 0, 3) == [0.8, 0.8, 0.8]
    assert rates("constant", 4, 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates("linear", 2, 8) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    assert rates("cosine", 2, 7) == pytest.approx([0.4, 0.8, 0.8, 0.682843, 0.4, 0.117157, 0.0], abs=1e-6)


def test_the_schedule_reaches_the_optimizer():
    net, items = help.model(), help.samples()
    own = help.learner(net, steps=4, schedule="linear", lr=0.1)
    data = own.objective.prepare(help.batch(items))
    rates = [own.step(items, data).metrics["lr"][0] for _ in range(4)]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    before = snapshot(net)
    own.step(items, data)  # past the end: rate 0
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_weight_decay_leaves_norms_and_biases_alone_and_tied_weights_come_once():
    net = help.model("gpt2")  # has biases, norms and a tied head
    parameters = trainable(net)
    assert "lm_head.weight" not in parameters
    groups = make_optimizer(parameters, LearnerConfig(weight_decay=0.5)).param_groups
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    decayed = {id(p) for p in groups[0]["params"]}
    assert {name for name, p in parameters.items() if id(p) not in decayed} == {
        name for name in parameters if name.endswith("bias") or ".ln_" in name
    }
    assert sum(len(g["params"]) for g in groups) == len(parameters)


def test_weights_that_are_not_float32_are_refused():
    with pytest.raises(ModelError, match=r"got torch\.bfloat16, training accepts float32"):
        help.learner(help.model().to(torch.bfloat16))
    with pytest.raises(ModelError, match="no parameter to train"):
        help.learner(help.model().requires_grad_(False))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputed_activations_give_the_same_gradient_without_dropout(kind, share, monkeypatch):
    dropout = {"attention_dropout": 0.5} if kind == "llama" else {"resid_pdrop": 0.5, "attn_pdrop": 0.5}
    net, items = help.model(kind, **dropout), help.samples()
    objective = preset("dr-grpo")
    data = objective.prepare(help.batch(items))
    calls: list[bool] = []
    inner = "self_attn" if kind == "llama" else "attn"
    attention_class = type(getattr(net.model.layers[0] if kind == "llama" else net.transformer.h[0], inner))
    forward = attention_class.forward

    def counting(self, *args, **kwargs):
        calls.append(self.training)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(attention_class, "forward", counting)
    plain = help.gradients(net, objective, items, data, share_prompts=share)
    once = len(calls)
    again = help.gradients(net, objective, items, data, share_prompts=share, gradient_checkpointing=True)
    assert len(calls) == 2 * once + 2  # each of the two layers once more, in the backward pass
    assert not any(calls)
    assert help.relative(again, plain) < 1e-6


def test_a_model_that_cannot_recompute_is_refused(monkeypatch):
    net = help.model()
    monkeypatch.setattr(type(net), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"learner\.gradient_checkpointing: got true, but LlamaForCausalLM"):
        help.learner(net, gradient_checkpointing=True)


def test_bfloat16_steps_stay_close_to_float32_and_keep_float32_weights():
    net, items = help.model("qwen3"), help.samples()
    objective = preset("dr-grpo")
    data = objective.prepare(help.batch(items))
    exact = help.gradients(net, objective, items, data)
    rounded = help.gradients(net, objective, items, data, dtype="bfloat16")
    assert rounded.dtype == torch.float32
    assert 1e-4 < help.relative(rounded, exact) < 0.05
