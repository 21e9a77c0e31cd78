"""A model's folder that cannot be written."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from trew.errors import CheckpointError
from trew.models.writing import written_whole

FULL = "No space left on device"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, FULL),
        SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"),
        shutil.Error([("a/model.safetensors", "b/model.safetensors", f"[Errno 28] {FULL}"), ("a/x", "b/x", "other")]),
    ],
)
def test_a_full_disk_is_one_message_and_leaves_the_model_that_was_there(tmp_path: Path, error: Exception):
    """safetensors and shutil have errors of their own for it."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "kept").touch()

    def write() -> None:
        with written_whole(folder) as work:
            (work / "half").touch()
            raise error

    with pytest.raises(CheckpointError) as caught:
        write()
    told = str(caught.value)
    assert FULL in told
    assert "free some space" in told
    assert "(" not in told.replace("(os error 28)", ""), "no list of files"
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "kept"]
