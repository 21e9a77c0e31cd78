"""From rewards and scripted answers to loss and gradient, through TRL's own ``_generate_and_score_completions``.

Advantages, denominators, the mask of cut-off answers and the mismatch correction are TRL's here, not given by the test.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import trl_help
from peer_compare import (
    GROUPS,
    LENGTHS,
    REWARDS,
    TOLERANCE,
    WRONG,
    Case,
    apart,
    noise,
    parametrize,
    ragged_mask,
    same_value,
)
from torch import Tensor
from trl import RLOOConfig, RLOOTrainer

import trew
from trew.objective.ratio import ProductRatio

NAN = math.nan
SECOND = (0.3, 0.1, 0.9, 0.0, 0.0, 1.0, 0.5, 0.5)
TWO = tuple(zip(REWARDS, SECOND, strict=True))
GAPS = ((1.0, NAN), (0.0, 0.1), (NAN, NAN), (0.2, 0.0), (0.1, NAN), (NAN, 1.0), (1.0, 0.5), (0.3, 0.5))
SAME = (0.7, 0.7, 0.7, 0.7, 0.1, 0.9, 1.0, 0.3)  # the first group has nothing to learn from
LOSS = {"loss_type": "grpo", "beta": 0.0}
EPS = {"std_eps": 1e-4}  # what TRL adds to a standard deviation
CUT = (1, 4, 6)  # answers that end without an end token, where a case asks for it


def answers(cut: tuple[int, ...]) -> list[list[int]]:
    """Completions of the usual lengths; all but the ``cut`` ones end with the end token."""
    draw = torch.Generator().manual_seed(7)
    out = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in LENGTHS]
    end = 258  # <|im_end|>
    return [ids if i in cut else [*ids[:-1], end] for i, ids in enumerate(out)]


def scripted(rewards: tuple, *, cut: tuple[int, ...] = (), mu: Tensor | None = None) -> tuple[list, Any]:
    """Reward functions that return these rewards, and a rollout function that returns these answers."""
    table = torch.tensor(rewards, dtype=torch.float64).reshape(len(rewards), -1)

    def function(column: int) -> Any:
        def score(completions: list, **_: Any) -> list:
            assert len(completions) == len(table)
            return [None if math.isnan(value) else value for value in table[:, column].tolist()]

        return score

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        logprobs = None if mu is None else [row[:n].tolist() for row, n in zip(mu, LENGTHS, strict=True)]
        return {"prompt_ids": [list(p.encode()) for p in prompts], "completion_ids": answers(cut), "logprobs": logprobs}

    return [function(i) for i in range(table.shape[1])], rollout


def generate(made: Any) -> dict[str, Tensor]:
    """TRL's batch for the loss."""
    return made._generate_and_score_completions([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])


def run(case: Case) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A trainer, the batch it made, and the rewards."""
    data = dict(case.data)
    rewards, cut = data.get("rewards", REWARDS), data.get("cut", ())
    settings = dict(case.peer)
    mu = None
    if data.get("mu"):
        plain = trl_help.trainer(LOSS, rollout_func=scripted(rewards, cut=cut)[1])
        mu = trl_help.forward(plain.model, generate(plain))[0].detach() + noise(5, len(LENGTHS), max(LENGTHS), size=0.5)
    functions, rollout = scripted(rewards, cut=cut, mu=mu)
    made = trl_help.trainer(settings, reward_funcs=functions, rollout_func=rollout)
    if mu is not None:
        # The engine itself is not needed for what TRL does with its log-probabilities.
        made.use_vllm, made._last_loaded_step = True, 0
    inputs = generate(made)
    made.use_vllm = made.use_vllm and made.vllm_importance_sampling_correction
    return made, inputs, torch.tensor(rewards, dtype=torch.float64)


def fields(case: Case, rewards: Tensor) -> dict[str, Tensor]:
    """What our batch holds besides log-probabilities."""
    out = {"rewards": rewards, "correct": (rewards if rewards.dim() == 1 else rewards.nansum(1)) > 0.5}
    if "cut" in case.data:
        cut = torch.tensor([i in case.data["cut"] for i in range(len(LENGTHS))])
        # TRL takes them out of the mask itself, and ours is to do it by its own rule.
        out |= {"truncated": cut, "mask": ragged_mask()}
    if "reward_weights" in case.data:
        out["reward_weights"] = torch.tensor(case.data["reward_weights"], dtype=torch.float64)
    return out


def is_mode(mode: str, high: float = 3.0, **more: Any) -> dict[str, Any]:
    return {**LOSS, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": high, **more}


GRPO = {"beta": 0.0, **EPS}
BOUNDS = {"correction_low": 0.5, "correction_high": 1.5}
CASES = [
    # advantages
    Case("group std", {**LOSS, "scale_rewards": "group"}, "grpo", GRPO, {"ddof": 0}),
    Case("group std, eps counts", {**LOSS, "scale_rewards": "group"}, "grpo", GRPO, {"std_eps": 0.01}),
    Case("batch std", {"loss_type": "dapo", "scale_rewards": "batch"}, "lite-ppo", EPS, {"ddof": 0}),
    Case("no std", {"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr-grpo", {}, {"aggregate": "token-mean"}),
    Case("no std, token mean", {"loss_type": "dapo", "scale_rewards": "none"}, "dr-grpo", {"aggregate": "token-mean"},
         {"aggregate": "constant"}),
    Case("no std, mean of means", {"loss_type": "grpo", "scale_rewards": "none"}, "dr-grpo",
         {"aggregate": "seq-mean-token-mean"}, {"aggregate": "token-mean"}),
    Case("a group without signal", {**LOSS}, "grpo", GRPO, {"std_eps": 0.01}, data={"rewards": SAME}),
    Case("two rewards, weighted sum", {**LOSS, "reward_weights": [0.3, 1.7]}, "grpo", GRPO, {"ddof": 0},
         data={"rewards": TWO, "reward_weights": (0.3, 1.7)}),
    Case("two rewards, each normalized", {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
         "gdpo", EPS, {"std_eps": 0.05}, data={"rewards": TWO}),
    Case("two rewards, each normalized, weighted", {"loss_type": "dapo", "reward_weights": [0.3, 1.7],
         "multi_objective_aggregation": "normalize_then_sum"}, "gdpo", EPS, {"ddof": 0},
         data={"rewards": TWO, "reward_weights": (0.3, 1.7)}),
    # cut-off answers
    Case("cut-off answers left out, token mean", {"loss_type": "dapo", "mask_truncated_completions": True}, "dapo",
         {**EPS, "dynamic_sampling": False, "overlong_filtering": True}, {"overlong_filtering": False},
         data={"cut": CUT}),
    # TRL divides by all sequences, also those it has masked; we divide by those that carry loss.
    Case("cut-off answers left out, sequence mean", {**LOSS, "mask_truncated_completions": True}, "grpo",
         {**GRPO, "overlong_filtering": True}, {"overlong_filtering": False}, data={"cut": CUT}, scale=5 / 8),
    # the sampler's log-probabilities differ from the trainer's
    Case("tis", is_mode("token_truncate", 1.5), "grpo", {**GRPO, "correction": "tis", "correction_high": 1.5},
         {"correction_high": 1.2}, data={"mu": True}),
    Case("tis, bounded below", is_mode("token_truncate", 1.5, vllm_importance_sampling_clip_min=0.5), "grpo",
         {**GRPO, "correction": "tis", **BOUNDS}, {"correction_low": 0.8}, data={"mu": True}),
    Case("mis-token", is_mode("token_mask", 1.5), "grpo", {**GRPO, "correction": "mis-token", "correction_high": 1.5},
         {"correction": "tis"}, data={"mu": True}),
    Case("icepop", is_mode("token_mask", 1.5, vllm_importance_sampling_clip_min=0.5), "grpo",
         {**GRPO, "correction": "icepop", **BOUNDS}, {"correction_low": 0.8}, data={"mu": True}),
    Case("tis-sequence", is_mode("sequence_truncate", 1.5), "grpo",
         {**GRPO, "correction": "tis-sequence", "correction_high": 1.5}, {"correction_high": 1.2}, data={"mu": True}),
    Case("mis", is_mode("sequence_mask"), "grpo", {**GRPO, "correction": "mis"}, {"correction": "tis-sequence"},
         data={"mu": True}),
    Case("mis, both bounds", is_mode("sequence_mask", 1.5, vllm_importance_sampling_clip_min=0.5), "grpo",
         {**GRPO, "correction": "mis", **BOUNDS}, {"correction_low": 0.0}, data={"mu": True}),
    Case("mis does not touch the KL", is_mode("sequence_mask", 1.5, beta=0.3, use_bias_correction_kl=False), "grpo",
         {**GRPO, "beta": 0.3, "correction": "mis", "correction_high": 1.5}, {"correction_high": 3.0},
         data={"mu": True, "ref": True}),
    Case("mis and opsm", is_mode("sequence_mask", 1.5, off_policy_mask_threshold=0.1), "grpo",
         {**GRPO, "correction": "mis+opsm", "correction_high": 1.5, "opsm_delta": 0.1}, {"opsm_delta": 5.0},
         data={"mu": True}),
    Case("cispo with mis-token", is_mode("token_mask", 1.5) | {"loss_type": "cispo", "epsilon_high": 5.0}, "cispo",
         {**EPS, "correction": "mis-token", "correction_high": 1.5}, {"correction": "tis"},
         data={"mu": True}),
]  # fmt: skip


@parametrize(CASES)
def test_from_rewards_to_gradient(case):
    made, inputs, rewards = run(case)
    loss, gradient = trl_help.theirs(made, inputs)
    more = fields(case, rewards)
    our_loss, our_gradient, output = trl_help.ours(trew.preset(case.preset, **case.ours), made.model, inputs, **more)
    mask = trl_help.loss_mask(inputs)
    assert apart(output.advantages[mask], inputs["advantages"][:, None].expand_as(mask)[mask]) <= TOLERANCE
    assert apart(our_gradient * case.scale, gradient) <= TOLERANCE
    assert same_value(our_loss * case.scale, loss)
    wrong = trl_help.ours(trew.preset(case.preset, **(case.ours | case.wrong)), made.model, inputs, **more)[1]
    assert apart(wrong * case.scale, gradient) >= WRONG


def test_vespo_takes_the_mismatch_into_its_ratio():
    # W is then the whole answer's ratio to the sampler, pi / mu; no factor stands beside phi(W).
    case = Case("vespo", is_mode("token_truncate", 1e6) | {"loss_type": "vespo"}, "vespo", EPS, {}, data={"mu": True})
    made, inputs, rewards = run(case)
    _, gradient = trl_help.theirs(made, inputs)
    anchored, plain = trew.preset("vespo", **EPS).replace(ratio=ProductRatio("rollout")), trew.preset("vespo", **EPS)
    assert apart(trl_help.ours(anchored, made.model, inputs, rewards=rewards)[1], gradient) <= TOLERANCE
    assert apart(trl_help.ours(plain, made.model, inputs, rewards=rewards)[1], gradient) >= WRONG


@pytest.mark.parametrize(
    ("mode", "cap", "correction"), [("token_truncate", 1.05, "tis"), ("token_mask", 1.05, "mis-token")]
)
def test_vespo_takes_a_bounded_correction_into_its_ratio(mode, cap, correction):
    case = Case("vespo", is_mode(mode, cap) | {"loss_type": "vespo"}, "vespo", EPS, {}, data={"mu": True})
    made, inputs, rewards = run(case)
    _, gradient = trl_help.theirs(made, inputs)
    for setting, holds in ((correction, True), ("none", False)):
        bound = {"correction_high": cap} if holds else {}
        ours = trew.preset("vespo", **EPS, correction=setting, **bound)
        distance = apart(trl_help.ours(ours, made.model, inputs, rewards=rewards)[1], gradient)
        assert distance <= TOLERANCE if holds else distance >= WRONG


def advantages(settings: dict, rewards: tuple, preset: str, **ours: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages per sequence, TRL's and ours, and which sequences we let carry loss."""
    functions, rollout = scripted(rewards)
    made = trl_help.trainer(settings, reward_funcs=functions, rollout_func=rollout)
    inputs = generate(made)
    mask = trl_help.loss_mask(inputs)
    batch = trew.TokenBatch.from_padded(
        logprobs=torch.zeros(mask.shape, dtype=torch.float64), mask=mask, group_ids=torch.tensor(GROUPS),
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )  # fmt: skip
    output = trew.preset(preset, **ours).loss(batch)
    return inputs["advantages"], output.advantages[:, 0], (output.coefficients != 0).any(1)


def test_rewards_that_do_not_apply():
    # One of two missing: the other alone. Both missing: out of the statistics, and advantage 0.
    theirs, ours, moved = advantages(LOSS, GAPS, "grpo", **GRPO)
    assert apart(ours, theirs) <= TOLERANCE
    assert theirs[2] == 0
    assert not moved[2]
    zeros = tuple((0.0 if math.isnan(a) else a, 0.0 if math.isnan(b) else b) for a, b in GAPS)
    assert apart(advantages(LOSS, zeros, "grpo", **GRPO)[1], theirs) >= WRONG


def test_rewards_that_do_not_apply_each_normalized():
    settings = {**LOSS, "multi_objective_aggregation": "normalize_then_sum"}
    theirs, ours, _ = advantages(settings, GAPS, "gdpo", **EPS)
    assert apart(ours, theirs) <= TOLERANCE


def test_equal_rewards_are_exactly_zero_here():
    # TRL leaves what rounding leaves: at most 1e-3 of a normal advantage.
    rewards = (0.1 + 0.2,) * 4 + (0.1, 0.9, 1.0, 0.3)
    theirs, ours, _ = advantages(LOSS, rewards, "grpo", **GRPO)
    assert bool((ours[:4] == 0).all())
    assert float(theirs[:4].abs().max()) < 1e-3


class TestRLOO:
    """TRL's leave-one-out trainer: KL in the reward, ratio and clip of the whole answer."""

    def setting(self, **peer: Any) -> tuple[Any, dict[str, Tensor], Tensor]:
        functions, _ = scripted(REWARDS)
        made = trl_help.trainer(
            {"epsilon": 0.2, "epsilon_high": 0.28, **peer}, kind=RLOOTrainer, config=RLOOConfig, reward_funcs=functions,
        )  # fmt: skip
        prompts = [list(trl_help.PROMPTS[g].encode()) for g in GROUPS]
        made._generate = lambda _: (prompts, answers(()), [""] * len(GROUPS))
        if made.beta:
            # A reference that is not the policy.
            with torch.no_grad():
                for parameter in made.ref_model.parameters():
                    parameter.mul_(0.9)
        inputs = generate(made)
        reference = trl_help.forward(made.ref_model.double(), inputs)[0].detach() if made.beta else None
        return made, inputs, reference

    def compare(self, made: Any, inputs: dict[str, Tensor], reference: Tensor | None, **wrong: Any) -> tuple:
        """Ours after an inner step: the old log-probabilities are the batch's, the model has moved."""
        old = trl_help.forward(made.model, inputs)[0].detach()
        with torch.no_grad():
            for i, parameter in enumerate(made.model.parameters()):
                parameter.add_(noise(i, *parameter.shape, size=0.01))
        gradients = []
        more = {"ref_logprobs": reference} if reference is not None else {}
        plain = {"eps_low": 0.2, "eps_high": 0.28, "beta": made.beta}
        for settings in (plain, plain | wrong):
            objective = trew.preset("rloo", **settings)
            rewards = torch.tensor(REWARDS, dtype=torch.float64)
            gradients.append(trl_help.ours(objective, made.model, inputs, rewards=rewards, old_logprobs=old, **more))
        return trl_help.theirs(made, inputs), *gradients

    def test_loss_and_gradient(self):
        made, inputs, reference = self.setting(beta=0.05)
        (loss, gradient), (our_loss, ours, output), (_, wrong, _) = self.compare(made, inputs, reference, beta=0.0)
        assert apart(output.advantages[:, 0], inputs["advantages"]) <= TOLERANCE
        assert same_value(our_loss, loss)
        assert apart(ours, gradient) <= TOLERANCE
        assert apart(wrong, gradient) >= WRONG

    @pytest.mark.parametrize("wrong", [{"eps_high": 2.0, "eps_low": 0.9}, {"aggregate": "token-mean"}])
    def test_without_reference(self, wrong):
        made, inputs, reference = self.setting(beta=0.0)
        (loss, gradient), (our_loss, ours, _), (_, off, _) = self.compare(made, inputs, reference, **wrong)
        assert same_value(our_loss, loss)
        assert apart(ours, gradient) <= TOLERANCE
        assert apart(off, gradient) >= WRONG
