"""One process of several that train together: writes the gradients that all of them have, averaged as DDP does.

python trl_processes.py FILE, with RANK and WORLD_SIZE in the environment where it is one of several; the completions
and their rewards are the same, divided among them.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import trl_help
from peer_compare import GROUPS
from test_trl_rewards import CUT, answers
from test_trl_trainer import REWARDS, GRPOTrainer, objective
from torch import Tensor
from trl.trainer import grpo_trainer

CASES = (
    ("dapo", {}),
    ("gtpo", {}),
    ("grpo", {"beta": 0.1, "kl_place": "reward"}),
    ("kl-cov", {}),
    ("lite-ppo", {}),
    ("scalerl", {}),
    ("trw-logistic", {"entropy_bonus": 0.1, "overlong_filtering": True}),
)
ACCUMULATED, PARTS = 2, 4
FIRST = (0, 1, 4, 5)  # the rows of the first of two optimizer steps: the first two of each process
SHOWN = ("entropy", "reward", "clip_ratio/region_mean", "trew/ratio", "trew/weight", "trew/zero_signal_share")


def in_order(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """In place of TRL's shuffle: each optimizer step has the same rows, however many processes there are."""
    rows = len(batch["completion_ids"])
    order = torch.tensor([*FIRST, *(i for i in range(rows) if i not in FIRST)] if rows == len(GROUPS) else range(rows))
    return {name: value[order] if value.dim() else value for name, value in batch.items()}


def own(rank: int, world: int) -> slice:
    """A process's rows."""
    return slice(rank * len(GROUPS) // world, (rank + 1) * len(GROUPS) // world)


def trainer(chosen: Any, *, rank: int, world: int, **settings: Any) -> Any:
    """One process's trainer, around its part of the completions."""
    mine = own(rank, world)

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [list(p.encode()) for p in prompts], "completion_ids": answers(CUT)[mine],
                "logprobs": None}  # fmt: skip

    return trl_help.trainer(
        {"gradient_accumulation_steps": ACCUMULATED, "steps_per_generation": PARTS, **settings},
        rows=len(GROUPS) // PARTS // world, rollout_func=rollout,
        kind=functools.partial(GRPOTrainer, objective=chosen),
        reward_funcs=[lambda completions, **_: list(REWARDS[mine])],
    )  # fmt: skip


def learned(name: str, settings: dict[str, Any], *, rank: int, world: int) -> dict[str, Any]:
    """Gradients of the two optimizer steps of a generation batch, averaged over processes, and what was logged."""
    made = trainer(objective(name, **settings), rank=rank, world=world)
    mine = own(rank, world)
    gradients = []
    for step in range(PARTS):
        inputs = made._prepare_inputs([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS[mine]])
        made._compute_loss(made.model, inputs).backward()
        made._step += 1
        if step % ACCUMULATED == ACCUMULATED - 1:
            found = trl_help.gradient(made.model).clone()
            if world > 1:
                torch.distributed.all_reduce(found)
            gradients.append(found / world)
            made.model.zero_grad()
    logged = {name: sum(values) / len(values) for name, values in made._metrics["train"].items() if name in SHOWN}
    return {"gradients": gradients, "logged": logged}


def trained(*, rank: int, world: int) -> Tensor:
    """How far the weights have moved after a whole ``train()`` of four optimizer steps."""
    chosen = objective("trw-logistic", beta=0.05)
    made = trainer(chosen, rank=rank, world=world, max_steps=4, optim="sgd", lr_scheduler_type="constant")
    start = [p.detach().clone() for p in made.model.parameters()]
    made.train()
    return torch.cat([(p.detach() - s).flatten() for p, s in zip(made.model.parameters(), start, strict=True)])


if __name__ == "__main__":
    grpo_trainer.shuffle_sequence_dict = in_order
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found = [learned(name, settings, rank=rank, world=world) for name, settings in CASES]
    weights = trained(rank=rank, world=world)
    if rank == 0:
        torch.save({"cases": found, "weights": weights}, sys.argv[1])
    if world > 1:
        torch.distributed.destroy_process_group()
