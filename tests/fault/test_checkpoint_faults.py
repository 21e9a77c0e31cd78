"""Kills, damage, full disks and strangers in the checkpoint folder: what remains is used, or the reason is given."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from trew.errors import CheckpointError
from trew.learner import checkpoint

KEEP = 2


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((40, 50), value),
        "model.b": torch.tensor(value),
        "optimizer.step.a": torch.tensor([value, value + 1]),
    }


def save(root: Path, step: int, keep: int = KEEP) -> Path:
    return checkpoint.save(root, step, tensors(float(step)), {"step": step, "note": "é"}, keep=keep)


def latest(root: Path):
    loaded = checkpoint.load_latest(root)
    assert loaded is not None
    step, values, meta, messages = loaded
    assert meta == {"step": step, "note": "é"}
    assert values.keys() == tensors(0.0).keys()
    assert all(torch.equal(values[name], t) for name, t in tensors(float(step)).items())
    return step, messages


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_checkpoint_is_safetensors_and_json_and_old_ones_go(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint.load_latest(root) is None
    for step in (5, 10, 15):
        assert save(root, step) == root / f"{step:06d}"
    assert names(root) == ["000010", "000015"]
    assert names(root / "000015") == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert latest(root) == (15, [])


def kill_at(call: int, root: Path, step: int) -> int | None:
    """Saves in a child that is killed (SIGKILL) at its ``call``-th contact with the disk; the signal, if any."""
    child = os.fork()
    if child == 0:  # no pytest from here on: the process ends below, one way or the other
        count = 0

        def counted(function):
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        for module, name in ((os, "fsync"), (os, "rename"), (checkpoint, "save_file"), (checkpoint, "_write_json"),
                             (shutil, "rmtree"), (os, "unlink"), (os, "rmdir")):  # fmt: skip
            setattr(module, name, counted(getattr(module, name)))
        try:
            save(root, step)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def test_a_kill_at_any_contact_with_the_disk_leaves_a_usable_checkpoint(tmp_path):
    """Before the rename the previous checkpoint is used, after it the new one; saving goes on from either."""
    seen = set()
    for call in range(1, 100):
        root = tmp_path / str(call)
        save(root, 1)
        save(root, 2)
        killed = kill_at(call, root, 3)
        step, messages = latest(root)
        seen.add(step)
        assert step in (2, 3)
        assert all("left behind by an interrupted write or removal; ignored" in m for m in messages)
        save(root, 4)
        assert latest(root) == (4, [])
        assert len(names(root)) == 2
        if killed is None:
            break
    assert killed is None
    assert call > 10
    assert seen == {2, 3}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(tmp_path, file, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    elif damage == "cut":
        path.write_bytes(content[:-1] if file != "manifest.json" else content[:-20])
    else:
        path.unlink()
    step, messages = latest(tmp_path)
    assert step == 1
    assert len(messages) == 1
    assert messages[0].startswith(f"{tmp_path / '000002'}: ")
    # A manifest with another hash in it accuses the file; it cannot do so wrongly in the other direction.
    assert file in messages[0] or (file == "manifest.json" and "SHA-256 differs" in messages[0])
    assert save(tmp_path, 2) == tmp_path / "000002.1"  # nothing is overwritten
    assert latest(tmp_path) == (2, [])


def test_every_single_bit_of_a_small_tensor_file_is_covered(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "optimizer.safetensors"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 128]) + content[position + 1 :])
        assert latest(tmp_path)[0] == 1


def test_when_all_are_broken_the_run_does_not_start_over(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_latest(tmp_path)
    message = str(caught.value)
    assert "000001: manifest.json is missing" in message
    assert "000002: manifest.json is missing" in message
    assert "not silently started over" in message
    assert caught.value.exit_code == 1


def test_strangers_are_ignored_by_name_and_left_alone(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint-99").mkdir()
    (tmp_path / "000100").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    step, messages = latest(tmp_path)
    assert step == 1
    assert [m.split("/")[-1] for m in messages] == [
        f"{name}: is not a checkpoint of trew; ignored" for name in ("000100", "checkpoint-99", "notes.txt")
    ]
    save(tmp_path, 2)
    save(tmp_path, 3)
    assert names(tmp_path) == ["000002", "000003", "000100", "checkpoint-99", "notes.txt"]


def test_an_empty_folder_with_a_checkpoints_name_is_skipped(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "000007").mkdir()
    step, messages = latest(tmp_path)
    assert step == 1
    assert "000007: manifest.json is missing" in messages[0]


def test_after_going_back_to_an_older_one_the_new_one_survives_rotation(tmp_path):
    save(tmp_path, 10)
    (save(tmp_path, 20) / "state.json").unlink()
    assert latest(tmp_path)[0] == 10
    save(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["000015"]
    assert latest(tmp_path) == (15, [])


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device"),
)


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_leaves_the_old_ones_and_no_remains(tmp_path, monkeypatch, error, call):
    save(tmp_path, 1)
    save(tmp_path, 2)
    real, calls = checkpoint.save_file, []

    def full(members, path):
        real(members, path)
        calls.append(path)
        if len(calls) == call:
            path.write_bytes(path.read_bytes()[:30])
            raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written: .*No space left on device"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["000001", "000002"]
    assert latest(tmp_path) == (2, [])
    monkeypatch.undo()
    save(tmp_path, 3)
    assert latest(tmp_path) == (3, [])


def test_a_place_that_is_a_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="could not be written: "):
        save(tmp_path / "checkpoints", 1)


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": checkpoint.FORMAT + 1}))
    with pytest.raises(CheckpointError, match="written in format 2 by a newer trew; this one reads up to 1"):
        checkpoint.load_latest(tmp_path)


def test_a_manifest_cannot_point_outside_its_folder(tmp_path):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../000001/state.json"] = manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    step, messages = latest(tmp_path)
    assert step == 1
    assert "../000001/state.json is missing" in messages[0]


def test_loading_runs_no_code(tmp_path):
    """A pickle in the place of a tensor file is not opened: its hash is wrong, and safetensors would refuse it."""
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    canary = tmp_path / "canary"
    evil = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (folder / "model.safetensors").write_bytes(evil)
    assert latest(tmp_path)[0] == 1
    assert not canary.exists()
