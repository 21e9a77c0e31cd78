"""Memory planned and measured, as a run writes it into its folder."""

from __future__ import annotations

import json
import mmap

import pytest
import torch

import run_help
from trew.runs import RunFolder
from trew.training import planning
from trew.training.build import _planned
from trew.training.memory_record import MemoryRecord
from trew.training.team import Team
from trew.utils import memory as measuring
from trew.utils.memory import Peaks

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("estimated")


def hold(size: int) -> None:
    """Touches that many bytes and gives them back."""
    with mmap.mmap(-1, size) as room:
        room.write(b"x" * size)


def test_each_phase_has_the_peak_of_its_own():
    peaks = Peaks()
    peaks.enter("large")
    if not peaks.phases:
        pytest.skip("this system does not let a peak begin again")
    hold(192 * MIB)
    peaks.enter("small")
    hold(MIB)
    peaks.enter("over")
    assert peaks.phases["large"] > peaks.phases["small"] + 150 * MIB
    assert peaks.most >= peaks.phases["large"]  # although the peak began again since


def test_without_phases_the_most_is_still_known(monkeypatch):
    monkeypatch.setattr(measuring, "_status", lambda name: None)
    peaks = Peaks()
    peaks.enter("training")
    peaks.enter("over")
    assert peaks.phases == {}
    assert peaks.most > MIB


def test_the_file_has_both_and_is_written_when_a_peak_grows(tmp_path):
    with RunFolder.open(tmp_path / "x") as folder:
        peaks = Peaks()
        peaks.phases = {"training": 100}
        record = MemoryRecord(folder, {"processes": []}, peaks)
        record.begin()
        assert read(folder) == {"planned": {"processes": []}, "measured": []}
        record.update(Team())
        assert read(folder)["measured"][0]["memory"] == {"training": 100}
        peaks.phases = {"training": 100, "generating": 0}
        (folder.folder / "memory.json").unlink()
        record.update(Team())
        assert not (folder.folder / "memory.json").exists()  # nothing grew
        peaks.phases = {"training": 120}
        record.update(Team())
        assert read(folder)["measured"][0]["memory"] == {"training": 120}


def read(folder: RunFolder) -> dict:
    return json.loads((folder.folder / "memory.json").read_text())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return run_help.configured(folder, run_help.save_models(folder)["native"])


def test_the_plan_of_a_run_is_what_trew_plan_says(config):
    from trew.estimate import Machine, estimate

    plan = planning.plan(config)
    [process] = _planned(plan)["processes"]
    needs = estimate(
        plan.config, machine=Machine.of(plan.device), objective=plan.objective, prompt=plan.longest,
        held_out=len(plan.eval),
    )  # fmt: skip
    for phase, parts in needs.memory.parts.items():
        for part in parts.keys() - {"process"}:  # what this process holds by now differs
            assert process["memory"][phase].get(part, 0) == parts[part], (phase, part)
    assert process["peak_bytes"] == max(sum(parts.values()) for parts in process["memory"].values())


def test_several_processes_are_planned_one_by_one(config):
    import dataclasses

    cluster = dataclasses.replace(config.cluster, learner=2, rollout="vllm", servers=2)
    plan = dataclasses.replace(planning.plan(config), config=dataclasses.replace(config, cluster=cluster))
    who = [process["who"] for process in _planned(plan)["processes"]]
    assert who == ["rank 0", "rank 1", "server 0", "server 1", "weights for servers"]


def test_a_plan_leaves_the_numbers_that_a_run_draws_as_they_were(config):
    plan = planning.plan(config)
    torch.manual_seed(5)
    want = torch.get_rng_state()
    assert "processes" in _planned(plan)
    assert torch.equal(torch.get_rng_state(), want)


def test_a_run_does_not_fail_because_of_its_plan(config, monkeypatch):
    from trew.estimate import planned

    def broken(*_, **__):
        raise ZeroDivisionError("no such model\nmore")

    monkeypatch.setattr(planned, "load_of", broken)
    assert _planned(planning.plan(config)) == {"why": "ZeroDivisionError: no such model"}


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_has_left_counts_pages_of_files_as_free(version, tmp_path, monkeypatch):
    """They count as used: after a model was downloaded, a run that fits was said not to fit."""
    folder, names = tmp_path, ("memory.max", "memory.current")
    if version == 1:
        folder, names = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder.mkdir()
    total = "inactive_file 1\ntotal_" if version == 1 else ""
    (folder / names[0]).write_text("1000\n")
    (folder / names[1]).write_text("900\n")
    (folder / "memory.stat").write_text(f"anon 7\n{total}inactive_file 500\n{total[-6:]}active_file 100\n")
    monkeypatch.setattr(measuring, "GROUPS", tmp_path)
    assert measuring.free_bytes() == 700
    (folder / names[0]).write_text("max\n")
    assert (measuring.free_bytes() or 0) > 1000
    (folder / names[0]).unlink()
    assert (measuring.free_bytes() or 0) > 1000
