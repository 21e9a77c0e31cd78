"""docs/trl.md: its examples run as they stand, its table is true; and what the doctor says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import trl_help
from peer_compare import TOLERANCE, WRONG, apart, noise

import tiny
import trew
from trew.integrations.trl import doctor, hooks, refusals

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
EXAMPLE, WEIGHT = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def executed(code: str, folder: Path) -> dict[str, Any]:
    """What a block of the page leaves behind, run as a file."""
    (folder / "block.py").write_text(code)
    return runpy.run_path(str(folder / "block.py"))


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model", pad=True)
    monkeypatch.chdir(tmp_path)
    trainer = executed(EXAMPLE, tmp_path)["trainer"]
    assert trainer.state.global_step == 10
    assert {"rewards/arithmetic/mean", "trew/ratio"} <= set(trainer.state.log_history[0])


def test_the_weight_alone_has_the_gradient_of_our_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trl_help.trainer({"loss_type": "vespo"}, kind=executed(WEIGHT, tmp_path)["Weighted"])
    inputs = trl_help.batch()
    now = trl_help.forward(made.model, inputs)[0].detach()
    inputs["old_per_token_logps"] = now + noise(3, *now.shape, size=0.3)
    gradient = trl_help.theirs(made, inputs)[1]
    for name, near in (("trw-logistic", True), ("trw-triangular", False)):
        ours = trl_help.ours(trew.preset(name, aggregate="token-mean"), made.model, inputs)[1]
        assert apart(ours, gradient) <= TOLERANCE if near else apart(ours, gradient) >= WRONG


def test_the_page_names_what_is_refused_and_tested():
    text = PAGE.read_text()
    for name in refusals.DECIDED:
        family = re.sub(r"^(sapo|vespo)_.*", r"\1_*", name)
        assert f"`{family}`" in text or name.startswith(("entropy_", "use_adaptive", "vllm_"))
    assert all(f"{version}.0" in text for version in hooks.TESTED)


def test_the_doctor_here():
    found = {what: (mark, says) for mark, what, says, _ in doctor.found()}
    assert {mark for mark, _ in found.values()} == {"ok"}
    assert found["hooks"] == ("ok", "all 5 fit")
    assert "not remax, ppo-clip" in found["presets"][1]


@pytest.mark.parametrize(
    ("version", "mark"),
    [("1.16.3", "ok"), ("1.15.3", "ok"), ("1.14.2", "note"), ("1.17.0", "note"), (None, "bad")],
)
def test_the_doctor_elsewhere(monkeypatch, version, mark):
    monkeypatch.setattr(hooks, "installed", lambda: version)
    lines = list(doctor.found())
    assert lines[0][0] == mark
    assert all(todo for m, _, _, todo in lines if m != "ok")


def test_the_doctor_finds_changed_hooks(monkeypatch):
    monkeypatch.setitem(hooks.HOOKS, "_compute_loss", ("self", "model", "inputs", "more"))
    assert [line[0] for line in doctor.found()] == ["ok", "bad"]
