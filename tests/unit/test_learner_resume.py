"""Saving and loading: continuing is the same as never having stopped, to the last bit."""

from __future__ import annotations

import pytest
import torch

import learner_help as help
from trew.errors import CheckpointError
from trew.objective import preset
from trew.runs import checkpoint_files


def steps(own, first: int, last: int) -> None:
    for k in range(first, last):
        items = help.samples(seed=k)
        total = sum(len(s.token_ids) for s in items)
        entropies = torch.full((total,), 1.0 + k % 3)
        own.step(items, own.objective.prepare(help.batch(items, seed=k, entropies=entropies)))


@pytest.mark.parametrize("bonus", [0.0, 2.5], ids=["no bonus", "adaptive"])
@pytest.mark.parametrize("kind", ["llama", "smollm", "gpt2"])
def test_four_steps_equal_two_then_save_load_and_two_more(kind, bonus, tmp_path):
    objective = preset("dr-grpo", entropy_target=bonus, entropy_step=0.3)
    settings = {"objective": objective, "steps": 4, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    straight = help.learner(help.model(kind), **settings)
    steps(straight, 0, 4)

    first = help.learner(help.model(kind), **settings)
    steps(first, 0, 2)
    checkpoint_files.save(tmp_path, 2, *first.state(), keep=2)
    loaded, messages = checkpoint_files.load_latest(tmp_path)
    assert loaded is not None
    step, tensors, meta = loaded
    assert (step, messages) == (2, [])
    second = help.learner(help.model(kind, seed=9), **settings)
    second.load_state(tensors, meta)
    assert second.version == 2
    assert second.objective.entropy_bonus.coefficient == (0.6 if bonus else 0.0)
    steps(second, 2, 4)

    expected, got = straight.state(), second.state()
    assert got[1] == expected[1]
    assert got[0].keys() == expected[0].keys()
    assert all(torch.equal(t, expected[0][name]) for name, t in got[0].items())
    moved = help.model(kind).state_dict()
    assert not all(torch.equal(t, moved[name.removeprefix("model.")]) for name, t in got[0].items() if "model" in name)


def test_a_state_before_the_first_step_can_be_loaded(tmp_path):
    checkpoint_files.save(tmp_path, 0, *help.learner(help.model()).state(), keep=1)
    loaded, _ = checkpoint_files.load_latest(tmp_path)
    assert loaded is not None
    own = help.learner(help.model(seed=1))
    own.load_state(loaded[1], loaded[2])
    assert all(torch.equal(a, b) for a, b in zip(own.model.parameters(), help.model().parameters(), strict=True))
    steps(own, 0, 1)
    assert own.version == 1


def test_a_tied_head_is_stored_once():
    names = help.learner(help.model("smollm")).state()[0]
    assert "model.model.embed_tokens.weight" in names
    assert "model.lm_head.weight" not in names


def test_the_checkpoint_of_another_model_is_refused_with_the_differences():
    other = help.learner(help.model(hidden_size=64))
    own = help.learner(help.model())
    before = {name: t.clone() for name, t in own.state()[0].items()}
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: \(260, 64\) .* in the checkpoint, \(260, 32\)"):
        own.load_state(*other.state())
    with pytest.raises(CheckpointError, match="missing in the checkpoint"):
        own.load_state(*help.learner(help.model("gpt2")).state())
    tensors, meta = own.state()
    with pytest.raises(CheckpointError, match="optimizer: 'lion' in the checkpoint, 'adamw' here"):
        own.load_state(tensors, {**meta, "optimizer": "lion"})
    with pytest.raises(CheckpointError, match="optimizer state for unknown parameters"):
        own.load_state({**tensors, "optimizer.step.nobody": torch.zeros(())}, meta)
    with pytest.raises(CheckpointError, match="does not fit a parameter"):
        own.load_state({**tensors, "optimizer.step.lm_head.weight": torch.zeros(())}, meta)
    assert all(torch.equal(t, before[name]) for name, t in own.state()[0].items())
