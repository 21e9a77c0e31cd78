"""Whether ``trew view`` says of a folder that its run trains: of the folder itself, moved or not, and of no copy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from trew.runs import RunFolder
from trew.view.viewed import ViewedRun


def _state(folder: Path) -> str:
    return ViewedRun(folder, id="x", name="x").state


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="says what a process has open: Linux")


@needs_proc
def test_a_copy_of_a_run_that_trains_does_not_train(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 3\n")
        shutil.copytree(tmp_path / "x", tmp_path / "copy")
        assert (tmp_path / "copy" / "run.lock").read_bytes() == (tmp_path / "x" / "run.lock").read_bytes() != b""
        assert [_state(tmp_path / name) for name in ("x", "copy")] == ["running", "stopped"]
        # Of rounds, the process has two locks open.
        with RunFolder.open(tmp_path / "x" / "round-1"):
            shutil.copytree(tmp_path / "x", tmp_path / "both")
            folders = ("x", "x/round-1", "both", "both/round-1")
            assert [_state(tmp_path / name) for name in folders] == ["running", "running", "stopped", "stopped"]
    assert _state(tmp_path / "x") == "stopped"


@needs_proc
def test_a_copy_in_the_place_of_a_run_that_trains_does_not_train(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "x"):
        shutil.copytree(tmp_path / "x", tmp_path / "copy")
        shutil.rmtree(tmp_path / "x")
        (tmp_path / "copy").rename(tmp_path / "x")
        assert _state(tmp_path / "x") == "stopped"


def test_a_run_whose_folder_is_moved_or_linked_trains(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "x"):
        (tmp_path / "link").symlink_to(tmp_path / "x")
        assert _state(tmp_path / "link") == "running"
        (tmp_path / "x").rename(tmp_path / "moved")
        assert _state(tmp_path / "moved") == "running"


def test_a_run_that_has_another_path_for_its_process_trains(tmp_path: Path) -> None:
    """As on a second mount of a disk, for which a second name of the file stands here."""
    with RunFolder.open(tmp_path / "x"):
        (tmp_path / "mount").mkdir()
        (tmp_path / "mount" / "run.lock").hardlink_to(tmp_path / "x" / "run.lock")
        assert _state(tmp_path / "mount") == "running"


def test_a_run_whose_files_have_other_inodes_each_time_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of some network file systems."""
    with RunFolder.open(tmp_path / "x"):
        real = os.fstat
        monkeypatch.setattr(os, "fstat", lambda at: os.stat_result((*real(at)[:1], -1, *real(at)[2:])))
        assert _state(tmp_path / "x") == "running"


def test_a_process_of_which_nothing_is_known_holds_the_lock_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder.open(tmp_path / "x"):
        shutil.copytree(tmp_path / "x", tmp_path / "copy")

        def refuse(_: object) -> None:
            raise PermissionError("another user's process")

        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", refuse)
            assert _state(tmp_path / "copy") == "running"
    # Where the file system has no locks, the process keeps none open.
    lock = json.dumps({"pid": os.getppid(), "host": os.uname().nodename, "started": None})
    (tmp_path / "x" / "run.lock").write_text(lock)
    assert _state(tmp_path / "x") == "running"
