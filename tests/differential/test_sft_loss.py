"""The loss and gradient of ``preset("sft")`` through the learner, against transformers' own cross entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import learner_help
import tiny
import trew
from trew.rollout import Renderer
from trew.rollout.demonstrations import Encoder
from trew.training.sft_program import held_out_loss
from trew.types import Prompt, TrainingSample

ROWS = [
    [("user", "2 + 2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "yes, 4")],
    [("user", "hello"), ("assistant", "a longer answer than the others")],
    [("system", "s"), ("user", "1 + 1?"), ("assistant", "2")],
]


def samples(loss_on: str) -> list[TrainingSample]:
    encoder = Encoder(Renderer(tiny.tokenizer()), loss_on=loss_on)
    made = []
    for number, row in enumerate(ROWS):
        messages = [{"role": role, "content": content} for role, content in row]
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        prompt = Prompt(str(number), messages=tuple(messages[:first]), columns={"demonstration": messages[first:]})
        (rollout,) = encoder.encode(prompt)
        made.append(TrainingSample(rollout.prompt_ids, rollout.token_ids, number, rollout.sampled))
    return made


def cross_entropy(model, rows: list[TrainingSample]) -> torch.Tensor:
    """transformers' loss: each row by itself, labels of -100 where nothing is learned, the mean over all tokens."""
    total, count = torch.zeros(()), sum(len(row.predicted) for row in rows)
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.token_ids]))[None]
        labels = torch.full_like(ids, -100)
        at = len(row.prompt_ids) + torch.from_numpy(row.predicted)
        labels[0, at] = ids[0, at]
        total = total + model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(count)).loss
    return total


@pytest.mark.parametrize("budget", [60, 4096])
@pytest.mark.parametrize("loss_on", ["all", "last"])
def test_loss_and_gradient_are_transformers(loss_on, budget):
    rows, other, model = samples(loss_on), tiny.model(), tiny.model()
    want = cross_entropy(other, rows)
    want.backward()
    learner = learner_help.learner(model, trew.preset("sft"), microbatch_tokens=budget)
    count = sum(len(row.token_ids) for row in rows)
    batch = trew.TokenBatch(
        logprobs=torch.full((count,), float("nan")), group_ids=torch.arange(len(rows)),
        mask=torch.from_numpy(np.concatenate([row.sampled for row in rows])),
        sequence_ids=torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row.token_ids) for row in rows])),
    )  # fmt: skip
    done = learner.accumulate(rows, batch)
    assert done.loss == pytest.approx(want.item(), rel=1e-5)
    gradients = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    held = held_out_loss(learner.logprobs(rows).numpy(), rows, seed=0)
    assert held["loss"]["mean"] == pytest.approx(want.item(), rel=1e-5)
