"""Which runs ``trew view`` finds, and under which names and addresses."""

from pathlib import Path

from trew.view.library import Library


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
