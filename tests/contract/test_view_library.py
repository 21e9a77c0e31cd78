"""Which runs ``trew view`` finds, and under which names and addresses."""

from pathlib import Path

import pytest

from trew.errors import DataError
from trew.view import library
from trew.view.library import Library
from view_help import client, get


def _run(folder: Path) -> Path:
    """The least that makes a run folder."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('model = "none"\n')
    (folder / "run.lock").write_text("")
    return folder


def _found(*folders: Path) -> list[str]:
    return [run.name for run in Library(folders).runs()]


def test_runs_are_found_in_folders_that_are_called_like_members_of_a_run(tmp_path: Path) -> None:
    # The study of docs/study.md is in runs/weights.
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "study.lock").write_text("")
    _run(tmp_path / "weights" / "sums" / "on" / "clip" / "lr" / "0")
    _run(tmp_path / "final")
    _run(tmp_path / "pending" / "first")
    assert _found(tmp_path) == ["final", "pending/first", "weights/sums/on/clip/lr/0"]


def test_members_of_a_run_in_rounds_are_no_runs(tmp_path: Path) -> None:
    (_run(tmp_path / "x") / "rounds.jsonl").write_text("")
    _run(tmp_path / "x" / "round-1" / "policy")
    _run(tmp_path / "x" / "final")
    assert _found(tmp_path) == ["x", "x/round-1/policy"]


def test_links_right_below_a_folder_lead_to_runs(tmp_path: Path) -> None:
    """A folder of links to the runs that are worth keeping: it was said to have no run."""
    _run(tmp_path / "runs" / "a")
    (_run(tmp_path / "runs" / "in rounds") / "rounds.jsonl").write_text("")
    (tmp_path / "runs" / "in rounds" / "circle").symlink_to(tmp_path / "links")
    _run(tmp_path / "runs" / "in rounds" / "round-1" / "policy")
    (tmp_path / "links").mkdir()
    for name, leads_to in (("good", "a"), ("good too", "a"), ("rounds", "in rounds"), ("all", "."), ("none", "gone")):
        (tmp_path / "links" / name).symlink_to(tmp_path / "runs" / leads_to)
    (tmp_path / "links" / "circle").symlink_to(tmp_path / "links")
    assert _found(tmp_path / "links") == ["good", "rounds", "rounds/round-1/policy"]
    page = client(tmp_path / "links")
    assert get(page, "runs/good/config")["text"] == 'model = "none"\n'
    # Each run once, by its own name, whichever is found first.
    own = ["a", "in rounds", "in rounds/round-1/policy"]
    assert _found(tmp_path / "links", tmp_path / "runs") == own
    assert _found(tmp_path / "runs", tmp_path / "links") == own
    (tmp_path / "runs" / "0").symlink_to(tmp_path / "runs" / "a")
    (tmp_path / "way").symlink_to(tmp_path)
    assert _found(tmp_path / "runs") == _found(tmp_path / "way" / "runs") == own


def test_links_that_lead_to_no_run_are_counted(tmp_path: Path) -> None:
    _run(tmp_path / "runs" / "a")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "all").symlink_to(tmp_path / "runs")
    told = "1 link there leads to no run folder, and only links to run folders are followed; give the folders that hold"
    with pytest.raises(DataError, match=told):
        Library([tmp_path / "links"])
    (tmp_path / "links" / "none").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=told.replace("1 link there leads", "2 links there lead")):
        Library([tmp_path / "links"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a folder that contains runs$"):
        Library([tmp_path / "empty"])


def test_a_folder_of_more_runs_than_are_shown_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_MOST", 3)
    for folder, count in (("few", 3), ("many", 4)):
        for i in range(count):
            _run(tmp_path / folder / f"run-{i}")
    page = client(tmp_path / "few", tmp_path / "many")
    found = get(page, "runs")
    assert [run["name"] for run in found["runs"]] == [
        *(f"few/run-{i}" for i in range(3)), *(f"many/run-{i}" for i in range(3))
    ]  # fmt: skip
    assert found["left_out"] == [
        f"{tmp_path / 'many'}: has more than 3 runs, and only the first 3 are shown; start trew view with the folders "
        "below it that you want to see"
    ]


def test_an_address_leads_to_the_same_run_after_a_restart(tmp_path: Path) -> None:
    for name in ("b/0", "c/0", "c/alone"):
        _run(tmp_path / name)
    before = {run.id: run.folder for run in Library([tmp_path]).runs()}
    assert "alone" in before
    _run(tmp_path / "a" / "0")  # is found before the others
    _run(tmp_path / "a" / "alone")
    after = {run.id: run.folder for run in Library([tmp_path]).runs()}
    assert len(after) == 5
    assert {id: folder for id, folder in after.items() if before.get(id, folder) != folder} == {}
    assert set(before) - set(after) == {"alone"}  # refused, and not another run's


def test_an_id_stays_while_the_server_runs(tmp_path: Path) -> None:
    _run(tmp_path / "b" / "seed 0")
    found = Library([tmp_path])
    assert [run.id for run in found.runs()] == ["seed-0"]
    _run(tmp_path / "a" / "seed-0")
    first, second = found.runs()
    assert (second.id, second.folder.parent.name) == ("seed-0", "b")
    assert first.id.startswith("seed-0-")
    assert found.run(first.id) is first
