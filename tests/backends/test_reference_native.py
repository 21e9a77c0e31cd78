"""Which weights of a reference are kept, and what they give, where the compiled kernels run it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cpu_help as cpu
import learner_help as help
import tiers
import tiny
from trew.backends.cpu import build
from trew.backends.cpu.runner import KernelRunner
from trew.config import parse
from trew.models import backends
from trew.objective import preset
from trew.training import planning

OBJECTIVE = preset("grpo", beta=0.1)
pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="no compiler")


def loaded(folder, **sections):
    """The reference of a recipe with the model in this folder."""
    own = parse({"model": str(folder), "out": "o", **sections})
    return planning.load_reference(SimpleNamespace(config=own, device="cpu"), backends.of(own, "cpu"))


@pytest.mark.parametrize(
    ("kind", "sections", "rounded"),
    [
        ("smollm", {}, False),  # read from its file layer by layer
        ("smollm", {"kernels": "plain"}, True),
        ("smollm", {"linear": "plain"}, True),
        ("gpt2", {}, True),
    ],
)
def test_float32_stays_where_it_is_read_layer_by_layer(kind, sections, rounded, tmp_path):
    help.model(kind, seed=5).save_pretrained(tmp_path)
    found = {p.dtype for p in loaded(tmp_path, learner={"dtype": "bfloat16"}, **sections).parameters()}
    assert (torch.bfloat16 in found) == rounded


@pytest.mark.parametrize(("kind", "dtype"), tiers.thinned(tiny.KINDS, ["float32", "bfloat16"], keep=2))
def test_weights_that_are_stored_in_bfloat16_give_the_same_to_the_bit(kind, dtype, tmp_path):
    help.model(kind, seed=5).to(torch.bfloat16).save_pretrained(tmp_path)
    found = {}
    for every in (0, 1):
        reference = loaded(tmp_path, learner={"reference_every": every, "dtype": dtype})
        own = cpu.learner(help.model(kind), OBJECTIVE, reference=reference, dtype=dtype)
        found[every] = own.logprobs(help.samples(), reference=True), {p.dtype for p in reference.parameters()}
        assert own.notes == cpu.learner(help.model(kind), OBJECTIVE, dtype=dtype).notes
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == {torch.float32, torch.bfloat16}
    assert found[1][1] == {torch.float32}


def test_kernels_that_are_wrong_for_a_rounded_reference_alone_are_found(tmp_path, monkeypatch):
    """What runs the reference is compared, and not the model's own forward with itself."""
    help.model("smollm", seed=5).to(torch.bfloat16).save_pretrained(tmp_path)
    own = cpu.learner(help.model("smollm"), OBJECTIVE, reference=loaded(tmp_path))
    right = KernelRunner.logprobs_of

    def wrong(self, pack):
        low = any(p.dtype == torch.bfloat16 for p in self.model.parameters())
        return right(self, pack) * (1.5 if low else 1.0)

    monkeypatch.setattr(KernelRunner, "logprobs_of", wrong)
    own.logprobs(help.samples())
    with pytest.warns(UserWarning, match="because the kernels' log-probs differ by"):
        own.logprobs(help.samples(), reference=True)
    assert own._runner.path.layers == "cpu"
    assert own._reference.path.layers == ""
