"""Whole runs of ``GRPOTrainer.train()`` against the same updates made with trew: two inner iterations per rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trl_help
from peer_compare import TOLERANCE, WRONG, apart
from test_trl_rewards import REWARDS, scripted
from torch import Tensor

import trew

STEPS, ITERATIONS, RATE = 6, 3, 0.3


def weights(policy: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def their_run(settings: dict[str, Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The weights after training, and the batches that the loss was given."""
    functions, rollout = scripted(REWARDS)
    made = trl_help.trainer(
        {"max_steps": STEPS, "num_iterations": ITERATIONS, "learning_rate": RATE, "lr_scheduler_type": "constant",
         "optim": "sgd", "max_grad_norm": 0.0, "loss_type": "dapo", **settings},
        reward_funcs=functions, rollout_func=rollout,
    )  # fmt: skip
    seen, compute = [], made._compute_loss

    def recorded(policy: Any, inputs: dict[str, Tensor]) -> Tensor:
        seen.append({k: v.clone() for k, v in inputs.items()})
        return compute(policy, inputs)

    made._compute_loss = recorded
    made.train()
    return weights(made.model), seen


def our_run(preset: str, seen: list[dict[str, Tensor]], *, iterations: int, **settings: Any) -> Tensor:
    """The same steps by hand: log-probabilities are kept from the first of each ``iterations`` updates."""
    policy, objective, old = trl_help.model().train(), trew.preset(preset, **settings), None
    for step, inputs in enumerate(seen):
        batch = {k: v for k, v in inputs.items() if k != "old_per_token_logps"}
        if step % iterations == 0:
            old = trl_help.forward(policy, batch)[0].detach()
        # TRL shuffles a rollout's rows: the advantages that came with them are taken, not the rewards.
        trl_help.ours(objective, policy, batch, advantages=inputs["advantages"], old_logprobs=old)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= RATE * parameter.grad
    return weights(policy)


@pytest.mark.parametrize(
    ("peer", "preset", "settings"),
    [
        ({"loss_type": "dapo", "epsilon": 0.05, "epsilon_high": 0.08}, "dapo",
         {"eps_low": 0.05, "eps_high": 0.08, "dynamic_sampling": False}),
        ({"loss_type": "grpo", "epsilon": 0.05}, "grpo", {"eps_low": 0.05, "eps_high": 0.05, "beta": 0.0}),
        ({"loss_type": "grpo", "epsilon": 0.01, "importance_sampling_level": "sequence"}, "gspo",
         {"eps_low": 0.01, "eps_high": 0.01}),
    ],
    ids=["dapo", "grpo", "gspo"],
)  # fmt: skip
def test_weights_after_training(peer, preset, settings):
    theirs, seen = their_run(peer)
    assert len(seen) == STEPS
    moved = theirs - weights(trl_help.model())
    start = weights(trl_help.model())
    ours = our_run(preset, seen, iterations=ITERATIONS, **settings) - start
    assert apart(ours, moved) <= 10 * TOLERANCE  # six updates, each from the rounding of the one before, in float32
    # Taking every step for the first of its rollout loses the ratio.
    assert apart(our_run(preset, seen, iterations=1, **settings) - start, moved) >= WRONG
