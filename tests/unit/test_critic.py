"""The critic in the learner: its values, its gradient, its steps, and its place in a checkpoint."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import learner_help as help
import trew
from trew.config import CriticConfig, LearnerConfig
from trew.errors import CheckpointError, NumericsError
from trew.learner.critic import Critic, without_critic
from trew.learner.value_runner import ValueRunner, with_value_head
from trew.objective import TokenBatch
from trew.types import TrainingSample

ITEMS = help.samples()


def made(kind: str = "llama", *, std: float = 1.0, clip: float = 0.5, lr: float = 1e-3, **learner) -> Critic:
    net = with_value_head(help.model(kind), std=std, seed=3)
    config = LearnerConfig(**{"max_grad_norm": 1e9, **learner})
    return Critic(net, config=CriticConfig(lr=lr, clip=clip), learner=config, optimizer_steps=100)


def plain_values(net, sample: TrainingSample) -> torch.Tensor:
    """w . h before each completion token, from one unpadded pass of this sequence alone."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]))[None]
    hidden = net.base_model(input_ids=ids).last_hidden_state[0]
    start = len(sample.prompt_ids) - 1
    return (hidden @ net.get_output_embeddings().weight[0])[start : start + len(sample.token_ids)]


def prepared(critic: Critic, *, items=ITEMS, **fields) -> TokenBatch:
    data = help.batch(items, values=critic.values(items), **fields)
    return trew.preset("ppo").prepare(data.replace(logprobs=torch.full_like(data.logprobs, torch.nan)))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("budget", [16, 4096])
def test_values_are_those_of_each_sequence_alone(kind, budget):
    critic = made(kind, microbatch_tokens=budget)
    with torch.no_grad():
        wanted = torch.cat([plain_values(critic.model, s) for s in ITEMS])
    assert wanted.std() > 0.05
    torch.testing.assert_close(critic.values(ITEMS), wanted, rtol=1e-4, atol=1e-5)


def test_a_head_of_zeros_does_not_hide_a_wrong_pack(monkeypatch):
    """The first samples are compared through a fixed vector: with the head's zeros, any hidden states would agree."""
    from trew.learner import autograd, value_runner

    critic = made(std=0.0)
    real = autograd.pack_shared

    def broken(*args, **more):
        packs = real(*args, **more)
        for pack in packs:
            pack.position_ids[:] = 0
        return packs

    monkeypatch.setattr(autograd, "pack_shared", broken)
    with pytest.warns(UserWarning, match="packed rows"):
        assert (critic.values(ITEMS) == 0).all()
    assert any("packed rows" in note for note in critic.notes)
    assert not value_runner.ValueRunner._probing


def gradient(critic: Critic, batch: TokenBatch) -> torch.Tensor:
    """The gradient of one step before the weights move; the critic itself stays as it is."""
    caught = {}

    def stop() -> None:
        caught.update({n: p.grad.clone() for n, p in critic.model.named_parameters() if p.grad is not None})
        raise StopIteration

    critic.before_update = stop
    with pytest.raises(StopIteration):
        critic.step(ITEMS, batch)
    critic._optimizer.zero_grad(set_to_none=True)
    return torch.cat([caught.get(n, torch.zeros_like(p)).flatten() for n, p in critic.model.named_parameters()])


@pytest.mark.parametrize("clip", [0.1, 1e6])
@pytest.mark.parametrize("settings", [{}, {"microbatch_tokens": 16}, {"share_prompts": False},
                                      {"gradient_checkpointing": True}], ids=str)  # fmt: skip
def test_the_gradient_is_that_of_the_textbook_s_loss(clip, settings):
    critic = made(clip=clip, **settings)
    batch = prepared(critic)
    # Values of before: far from the predictions for some tokens, so that the clip acts.
    old = batch.values + 0.3 * torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(1))
    batch = batch.replace(values=old)
    v = torch.cat([plain_values(critic.model, s) for s in ITEMS])
    bounded = torch.clamp(v, old - clip, old + clip)
    loss = 0.5 * torch.max((v - batch.returns) ** 2, (bounded - batch.returns) ** 2)[batch.mask].mean()
    wanted = torch.autograd.grad(loss, list(critic.model.parameters()), allow_unused=True)
    flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                      for g, p in zip(wanted, critic.model.parameters(), strict=True)])  # fmt: skip
    got = gradient(critic, batch)
    assert flat.norm() > 1e-3
    assert help.relative(got, flat) < 1e-4


@pytest.mark.parametrize("budget", [16, 4096])
def test_predictions_that_moved_beyond_the_clip_are_counted_from_those_of_every_pack(budget):
    critic = made(clip=0.1, microbatch_tokens=budget)
    batch = prepared(critic)
    values = batch.values
    assert float(values.abs()[batch.mask].min()) > 0
    moved = torch.arange(len(values)) % 3 == 0
    shifted = batch.replace(values=values + torch.where(moved, 0.2, 0.05))
    expected = float((moved & batch.mask).sum()), float(batch.mask.sum())
    assert critic.step(ITEMS, shifted).metrics["value_clipped"] == expected


def test_bfloat16_is_near():
    exact, low = made(), made(dtype="bfloat16")
    batch = prepared(exact)
    assert help.relative(gradient(low, batch), gradient(exact, batch)) < 0.1


def test_a_value_is_a_product_in_float32_whatever_the_body_computes_in(monkeypatch):
    seen, critic = [], made(dtype="bfloat16")
    read = ValueRunner._read

    def watched(self, hidden, pack):
        values = read(self, hidden, pack)
        if not self._probing:
            seen.append((hidden.detach(), values.detach(), self._tensor(pack.read_rows)))
        return values

    monkeypatch.setattr(ValueRunner, "_read", watched)
    critic.step(ITEMS, prepared(critic))
    weight = made().model.get_output_embeddings().weight[0].detach()
    assert len(seen) >= 2
    for hidden, values, rows in seen:
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, (hidden.float() @ weight)[rows], rtol=1e-6, atol=1e-6)


def test_steps_bring_values_to_the_returns_of_samples_and_count():
    critic = made(std=0.0, clip=1e6, lr=5e-3)
    batch = prepared(critic)
    assert (critic.values(ITEMS) == 0).all()
    losses = [critic.step(ITEMS, batch).loss for _ in range(80)]
    assert losses[-1] < 0.2 * losses[0]
    assert critic.steps == 80


def test_samples_without_an_advantage_count_too():
    """A critic learns from all that was sampled: a group of equal rewards has no advantage under grpo, and a return."""
    critic = made(std=0.0)
    batch = prepared(critic).replace(advantages=torch.zeros(sum(len(s.token_ids) for s in ITEMS)))
    out = critic.step(ITEMS, batch)
    assert out.metrics["value_loss"][0] > 0
    assert out.metrics["value"][1] == float(batch.mask.sum())


def test_masked_tokens_and_other_sequences_do_not_move_it():
    critic = made()
    batch = prepared(critic)
    mask = batch.mask & (batch.sequence_ids == 2)
    alone = batch.replace(mask=mask, denominators=None)
    alone = trew.preset("ppo").renormalised_for(alone)
    wild = alone.replace(returns=torch.where(mask, alone.returns, torch.nan))
    assert torch.equal(gradient(critic, alone), gradient(critic, wild))


def test_a_step_that_is_not_finite_changes_nothing():
    critic = made()
    batch = prepared(critic)
    before = copy.deepcopy(critic.model.state_dict())
    with pytest.raises(NumericsError):
        critic.step(ITEMS, batch.replace(returns=torch.full_like(batch.returns, torch.inf)))
    assert all(torch.equal(t, before[name]) for name, t in critic.model.state_dict().items())
    assert critic.steps == 0
    with torch.no_grad():
        critic.model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(NumericsError, match="the critic's values are not finite"):
        critic.values(ITEMS)


def test_restored_from_a_checkpoint_it_goes_on_to_the_bit():
    """With a schedule, which counts the steps before the checkpoint too."""
    critic, other = made(schedule="linear"), made(std=0.2, schedule="linear")
    batch = prepared(critic)
    rates = [critic.step(ITEMS, batch).metrics["critic_lr"][0] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 0.99e-3, 0.98e-3])
    tensors, counters = critic.state()
    saved = {name: t.clone() for name, t in tensors.items()}
    assert {name.partition(".")[0] for name in saved} == {"critic", "critic_optimizer"}
    assert without_critic({**saved, "model.x": torch.zeros(1)}).keys() == {"model.x"}
    other.load_state(saved, counters)
    for one in (critic, other):
        one.step(ITEMS, batch)
    assert all(torch.equal(t, other.state()[0][name]) for name, t in critic.state()[0].items())


def test_a_checkpoint_of_another_critic_is_refused():
    critic = made()
    saved = {name: t.clone() for name, t in critic.state()[0].items()}
    saved.pop("critic.lm_head.weight")
    with pytest.raises(CheckpointError, match=r"critic\.lm_head\.weight: missing"):
        critic.load_state(saved, {"critic_steps": 0})


def test_tied_embeddings_stay_what_they_are():
    net = help.model("gemma2")
    assert net.get_output_embeddings().weight is net.get_input_embeddings().weight
    before = net.get_input_embeddings().weight.clone()
    with_value_head(net, std=0.5)
    assert torch.equal(net.get_input_embeddings().weight, before)
    assert net.get_output_embeddings().weight.shape == (1, before.shape[1])
