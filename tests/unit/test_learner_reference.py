"""A reference that follows the policy: the mix by hand, what continues with it, where it is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import learner_help as help
import tiny
from trew.config import parse
from trew.errors import CheckpointError, ConfigError
from trew.objective import preset
from trew.runs import checkpoint_files
from trew.training import compatibility, planning

OBJECTIVE = preset("grpo", beta=0.1)


def own(mix: float, *, seed: int = 0):
    return help.learner(
        help.model(seed=seed), OBJECTIVE, reference=help.model(seed=5), reference_every=1, reference_mix=mix
    )


def fill(net, value: float) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)


def test_the_mix_by_hand():
    learner = own(0.25)
    fill(learner.model, 2.0)
    fill(learner._reference.model, -1.0)
    learner.reference_version = 0
    for expected in (-0.25, 0.3125, 0.734375):  # 3/4 of the one before + 1/4 of 2
        learner.update_reference()
        assert all(torch.equal(p, torch.full_like(p, expected)) for p in learner._reference.model.parameters())
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in learner.model.parameters())
    assert learner.reference_version is None


def test_a_mix_of_one_is_the_policy_to_the_bit_and_a_copy():
    learner = own(1.0)
    items = help.samples()
    before = learner.logprobs(items, reference=True)
    learner.version = 7
    learner.update_reference()
    assert learner.reference_version == 7
    assert torch.equal(learner.logprobs(items, reference=True), learner.logprobs(items))
    assert not torch.equal(learner.logprobs(items, reference=True), before)
    fill(learner.model, 0.0)
    assert any(p.any() for p in learner._reference.model.parameters())


def loaded(folder, **sections):
    """The reference of a recipe with the model in this folder."""
    own = parse({"model": str(folder), "out": "o", **sections})
    return planning.load_reference(SimpleNamespace(config=own, device="cpu"))


LOW, HIGH = {torch.float32, torch.bfloat16}, {torch.float32}


@pytest.mark.parametrize(
    ("kind", "stored", "sections", "kept"),
    [
        ("smollm", "float32", {}, HIGH),
        ("smollm", "bfloat16", {}, LOW),
        ("smollm", "float16", {}, HIGH),
        ("smollm", "bfloat16", {"learner": {"reference_every": 2}}, HIGH),
        ("smollm", "bfloat16", {"learner": {"compile": True}, "kernels": "plain"}, HIGH),
        ("smollm", "bfloat16", {"learner": {"dtype": "bfloat16"}}, LOW),
        ("smollm", "float16", {"learner": {"dtype": "bfloat16"}}, LOW),
        ("smollm", "float32", {"learner": {"dtype": "bfloat16"}}, LOW),
        ("gpt2", "float32", {"learner": {"dtype": "bfloat16"}}, LOW),
    ],
)
def test_what_of_a_reference_is_kept_in_bfloat16(kind, stored, sections, kept, tmp_path):
    help.model(kind, seed=5).to(getattr(torch, stored)).save_pretrained(tmp_path)
    assert {p.dtype for p in loaded(tmp_path, **sections).parameters()} == kept


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_weights_that_are_kept_rounded_give_the_same_to_the_bit(kind, fused, tmp_path):
    help.model(kind, seed=5).save_pretrained(tmp_path)
    found = {}
    for every in (0, 1):
        learning = {"dtype": "bfloat16", "reference_every": every}
        reference = loaded(tmp_path, learner=learning)
        own = help.learner(help.model(kind), OBJECTIVE, reference=reference, dtype="bfloat16", fused=fused)
        found[every] = own.logprobs(help.samples(), reference=True), {p.dtype for p in reference.parameters()}
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == {torch.float32, torch.bfloat16}
    assert found[1][1] == {torch.float32}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_weights_that_are_stored_in_bfloat16_stay_so_and_give_the_same_to_the_bit(kind, fused, tmp_path):
    help.model(kind, seed=5).to(torch.bfloat16).save_pretrained(tmp_path)
    found = {}
    for every in (0, 1):
        reference = loaded(tmp_path, learner={"reference_every": every})
        own = help.learner(help.model(kind), OBJECTIVE, reference=reference, fused=fused)
        first = own.logprobs(help.samples(), reference=True)  # proves its way as well
        found[every] = first, {p.dtype for p in reference.parameters()}
        assert torch.equal(own.logprobs(help.samples(), reference=True), first)
        assert own.notes == help.learner(help.model(kind), OBJECTIVE, fused=fused).notes
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == {torch.float32, torch.bfloat16}
    assert found[1][1] == {torch.float32}


def test_what_reads_as_bfloat16_in_the_configuration_is_not_rounded_where_the_file_has_more(tmp_path):
    """transformers loads the type that config.json names; the policy is loaded in float32, whatever it names."""
    help.model(seed=5).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = dict(loaded(tmp_path, learner={"dtype": "bfloat16"}).named_parameters())
    exact = dict(help.model(seed=5).named_parameters())
    assert {p.dtype for p in found.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(p, exact[name].to(p.dtype)) for name, p in found.items())


def test_what_is_saved_may_not_change_before_it_was_read():
    learner, calls = own(0.5), []
    learner.before_update = lambda: calls.append(next(iter(learner._reference.model.parameters())).clone())
    learner.update_reference()
    first = next(iter(learner._reference.model.parameters()))
    assert len(calls) == 1
    assert not torch.equal(calls[0], first)


@pytest.mark.parametrize(("mix", "version"), [(0.5, None), (1.0, 3)])
def test_the_reference_continues_with_the_run(mix, version, tmp_path):
    learner = own(mix)
    learner.version = 3
    learner.update_reference()
    learner.version = 4
    checkpoint_files.save(tmp_path, 1, *learner.state(), keep=1)
    loaded, _ = checkpoint_files.load_latest(tmp_path)
    assert loaded is not None
    other = own(mix, seed=9)
    other.reference_version = 0
    other.load_state(*loaded[1:])
    assert (other.version, other.reference_version) == (4, version)
    before_this_version = {name: value for name, value in loaded[2].items() if name != "reference_version"}
    other.load_state(loaded[1], before_this_version)
    assert other.reference_version is None
    items = help.samples()
    assert torch.equal(other.logprobs(items, reference=True), learner.logprobs(items, reference=True))
    fixed = help.learner(help.model(), OBJECTIVE, reference=help.model(seed=5))
    with pytest.raises(CheckpointError, match=r"reference\.\S+: unknown to this model"):
        fixed.load_state(*loaded[1:])


def config(**sections):
    return parse({"model": "m", "out": "o", **sections})


def test_without_a_reference_it_is_refused():
    given = config(learner={"reference_every": 2})
    (problem,) = compatibility.problems(preset("grpo", beta=0.0), given)
    assert problem.startswith("learner.reference_every: got 2, but grpo has no reference (beta = 0)")
    assert compatibility.problems(OBJECTIVE, given) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"reference_every": 1}, "lora": {"rank": 4}}, "the reference is the model without adapters"),
        ({"learner": {"reference_mix": 0.5}}, "the reference is never updated"),
        ({"learner": {"reference_every": 1, "reference_mix": 0.0}}, "accepts a number above 0 and at most 1"),
        ({"learner": {"reference_every": -1}}, "learner.reference_every: got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        config(**sections)
