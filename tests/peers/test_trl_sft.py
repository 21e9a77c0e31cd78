"""Loss and gradients of ``trew sft`` against TRL's ``SFTTrainer``: completion-only, padded and packed, from the
same rows of text to the same derivatives."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peer_compare import TOLERANCE, WRONG, apart
from torch import Tensor
from trl import SFTConfig, SFTTrainer

import learner_help
import tiny
import trew
from trew.data.rows import Row
from trew.data.tasks.demonstrations import Demonstrations
from trew.rollout import Renderer
from trew.rollout.demonstrations import Encoder
from trew.types import TrainingSample

TEXTS = [
    {"prompt": "2 + 2 = ", "completion": "4"},
    {"prompt": "say: ", "completion": "an answer that is longer than the others"},
    {"prompt": "é", "completion": "ö!"},
]
CHATS = [
    {"prompt": [{"role": "user", "content": text["prompt"]}],
     "completion": [{"role": "assistant", "content": text["completion"]}]}
    for text in TEXTS
]  # fmt: skip


def theirs(rows: list[dict[str, Any]], *, chat: bool, **settings: Any) -> tuple[float, Any, dict[str, Tensor]]:
    """TRL's loss of one batch of all rows, the model with its gradient, and the batch."""
    folder = tempfile.mkdtemp(prefix="trew-sft-")
    arguments = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=len(rows), completion_only_loss=True, save_strategy="no", disable_tqdm=True,
        max_length=256, loss_type="nll", **settings,
    )  # fmt: skip
    made = SFTTrainer(
        model=tiny.model("llama").double(), args=arguments, processing_class=tiny.tokenizer(chat=chat, pad=True),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    inputs = next(iter(made.get_train_dataloader()))
    made.model.train()
    loss = made.compute_loss(made.model, inputs)
    loss.backward()
    return loss.item(), made.model, inputs


def samples(rows: list[dict[str, Any]], *, chat: bool) -> list[TrainingSample]:
    task, encoder = Demonstrations(), Encoder(Renderer(tiny.tokenizer(chat=chat)), loss_on="all")
    found = []
    for number, row in enumerate(rows):
        (rollout,) = encoder.encode(task._prompt(Row(f"row {number}", row), str(number)))
        found.append(TrainingSample(rollout.prompt_ids, rollout.token_ids, number, rollout.sampled))
    return found


def ours(rows: list[TrainingSample], **settings: Any) -> tuple[float, Any]:
    model = tiny.model("llama")
    learner = learner_help.learner(model, trew.preset("sft"), **settings)
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    batch = trew.TokenBatch(
        logprobs=torch.full((int(lengths.sum()),), float("nan")), group_ids=torch.arange(len(rows)),
        mask=torch.from_numpy(np.concatenate([row.sampled for row in rows])),
        sequence_ids=torch.arange(len(rows)).repeat_interleave(lengths),
    )  # fmt: skip
    return learner.accumulate(rows, batch).loss, model


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def learned(inputs: dict[str, Tensor]) -> list[list[int]]:
    """The tokens that TRL learns, row by row of the batch."""
    return [row[row >= 0].tolist() for row in inputs["labels"]]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("budget", [60, 4096])
def test_loss_and_gradient_are_trls(packing, budget):
    loss, their_model, inputs = theirs(TEXTS, chat=False, packing=packing)
    rows = samples(TEXTS, chat=False)
    found = [token for row in learned(inputs) for token in row]
    assert sorted(found) == sorted(int(t) for row in rows for t in row.token_ids[row.predicted])
    own, model = ours(rows, microbatch_tokens=budget)
    assert own == pytest.approx(loss, rel=1e-6)
    assert apart(gradient(model), gradient(their_model)) < 10 * TOLERANCE  # training is in float32 here
    # And the comparison notices an answer without its end token.
    cut = [TrainingSample(r.prompt_ids, r.token_ids[:-1], r.group, r.sampled[:-1]) for r in rows]
    assert apart(gradient(ours(cut)[1]), gradient(their_model)) > WRONG


def test_of_conversations_trl_learns_what_the_template_writes_behind_the_end_too():
    """The same tokens in front and to the end token; the line break behind it, which no policy samples, is theirs."""
    _, _, inputs = theirs(CHATS, chat=True)
    answers = sorted(learned(inputs))
    own = samples(CHATS, chat=True)
    newline = tiny.tokenizer().encode("\n")
    assert answers == sorted([*row.token_ids[row.predicted].tolist(), *newline] for row in own)
    whole = sorted([*row.prompt_ids.tolist(), *row.token_ids.tolist(), *newline] for row in own)
    mask = inputs["attention_mask"].bool()
    assert whole == sorted(ids[keep].tolist() for ids, keep in zip(inputs["input_ids"], mask, strict=True))
