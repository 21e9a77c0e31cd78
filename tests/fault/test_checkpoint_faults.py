"""Kills, damage, full disks and strangers in the checkpoint folder: what remains is used, or the reason is given."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import disk
from trew.errors import CheckpointError, LostRankError
from trew.models.sharded import whole
from trew.runs import checkpoint_files, tensor_files
from trew.runs.writer import Writer

KEEP = 2


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((40, 50), value),
        "model.b": torch.tensor(value),
        "optimizer.step.a": torch.tensor([value, value + 1]),
    }


def save(root: Path, step: int, keep: int = KEEP) -> Path:
    return checkpoint_files.save(root, step, tensors(float(step)), {"step": step, "note": "é"}, keep=keep)


def latest(root: Path):
    loaded, messages = checkpoint_files.load_latest(root)
    assert loaded is not None
    step, values, meta = loaded
    assert meta == {"step": step, "note": "é"}
    assert values.keys() == tensors(0.0).keys()
    assert all(torch.equal(whole(values[name]), t) for name, t in tensors(float(step)).items())
    return step, messages


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_checkpoint_is_safetensors_and_json_and_old_ones_go(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint_files.load_latest(root) == (None, [])
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

        for module, name in ((os, "fsync"), (os, "rename"), (tensor_files, "save_file"),
                             (checkpoint_files, "_write_json"),
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
        checkpoint_files.load_latest(tmp_path)
    message = str(caught.value)
    assert "000001: manifest.json is missing" in message
    assert "000002: manifest.json is missing" in message
    assert "does not silently start over" in message
    assert caught.value.exit_code == 2


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


def test_a_broken_one_of_the_same_step_stands_in_for_no_older_one(tmp_path):
    """Of the two that were kept one was known to be broken: had the other broken, too, the run would have been lost."""
    for step in (10, 20, 20):
        save(tmp_path, step, keep=2)
        (tmp_path / "000020" / "state.json").unlink(missing_ok=True)
    assert names(tmp_path) == ["000010", "000020", "000020.1"]
    (tmp_path / "000020.1" / "state.json").unlink()
    assert latest(tmp_path)[0] == 10
    save(tmp_path, 30, keep=2)
    assert names(tmp_path) == ["000020", "000020.1", "000030"]


@pytest.mark.parametrize("room", [0, 4_096, 8_192, 16_384])
def test_a_full_disk_leaves_the_old_ones_and_no_remains(tmp_path, room):
    """However far the writing comes before the disk is full: not at all, into the tensors, to the manifest."""
    with disk.tmpfs(kilobytes=256) as root:
        save(root / "c", 1)
        save(root / "c", 2)
        ballast = disk.fill(root, leave=room)
        with pytest.raises(CheckpointError, match=r"step 3 could not be written: .*No space left on device"):
            save(root / "c", 3)
        assert names(root / "c") == ["000001", "000002"]
        assert latest(root / "c") == (2, [])
        ballast.unlink()
        save(root / "c", 3)
        assert latest(root / "c") == (3, [])


def test_a_file_system_that_became_read_only_is_said_once(tmp_path):
    with disk.tmpfs(kilobytes=256) as root:
        save(root / "c", 1)
        disk.read_only(root)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written: .*Read-only file system"):
            save(root / "c", 2)
        assert latest(root / "c") == (1, [])


def test_a_place_that_is_a_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="could not be written: "):
        save(tmp_path / "checkpoints", 1)


@pytest.mark.parametrize(("offset", "age"), [(1, "a newer"), (-1, "an older")])
def test_another_format_is_refused_and_not_passed_over(tmp_path, offset, age):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    other = checkpoint_files.FORMAT + offset
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": other}))
    said = f"has format {other}, written by {age} trew; this version reads format {checkpoint_files.FORMAT}"
    with pytest.raises(CheckpointError, match=said):
        checkpoint_files.load_latest(tmp_path)


def test_a_rename_that_is_not_atomic_and_is_cut_off_leaves_no_false_checkpoint(tmp_path):
    """As some network file systems do it: file by file, in any order. The manifest says what belongs together."""
    save(tmp_path, 1)
    done = save(tmp_path, 2)
    files = sorted(done.iterdir())
    for order in (files, files[::-1]):
        for count in range(len(files)):
            shutil.rmtree(tmp_path / "000003", ignore_errors=True)
            (tmp_path / "000003").mkdir()
            for file in order[:count]:
                shutil.copy(file, tmp_path / "000003")
            step, messages = latest(tmp_path)
            assert step == 2
            assert "000003: " in messages[0]


def test_the_best_one_outlives_rotation_until_there_is_a_better_one(tmp_path):
    def with_best(step: int, best: int) -> None:
        checkpoint_files.save(tmp_path, step, tensors(float(step)), {"step": step, "note": "é"}, keep=2, best=best)

    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1)):
        with_best(step, best)
    assert names(tmp_path) == ["000001", "000003", "000004"]
    with_best(5, 5)
    assert names(tmp_path) == ["000004", "000005"]
    with_best(6, 4)
    with_best(7, 4)
    assert names(tmp_path) == ["000004", "000006", "000007"]
    assert latest(tmp_path) == (7, [])


@pytest.mark.parametrize("content", ["tmp", "foreign", "empty root"])
def test_without_any_checkpoint_what_is_there_is_named(tmp_path, content):
    if content == "tmp":
        (tmp_path / ".tmp-000003-77").mkdir()
    elif content == "foreign":
        (tmp_path / "checkpoint-99").mkdir()
    loaded, messages = checkpoint_files.load_latest(tmp_path)
    assert loaded is None
    assert len(messages) == (content != "empty root")
    assert all("ignored" in m for m in messages)


# ---- in the background


def test_the_thread_reads_before_the_tensors_may_change(tmp_path, monkeypatch):
    """``release`` comes back only when the tensors have been read: what is stored are the values of the save."""
    real, about_to_read = tensor_files.write, threading.Event()

    def slowly(folder, given, **how):
        about_to_read.set()
        time.sleep(0.2)
        real(folder, given, **how)

    monkeypatch.setattr(tensor_files, "write", slowly)
    values, writer = tensors(3.0), Writer()
    writer.save(tmp_path, 3, values, {"step": 3, "note": "é"}, keep=2)
    assert about_to_read.wait(10)
    writer.release()
    for tensor in values.values():
        tensor.zero_()
    writer.finish()
    assert latest(tmp_path) == (3, [])


def test_an_error_of_the_thread_ends_the_run_once(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    told: list[str] = []
    writer = Writer(told.append)
    writer.save(tmp_path / "checkpoints", 1, tensors(1.0), {}, keep=1)
    with pytest.raises(CheckpointError, match="step 1 could not be written: "):
        writer.finish()
    writer.finish()  # it was told
    assert told == []


def test_a_checkpoint_that_was_begun_is_completed_whatever_ends_the_run(tmp_path):
    def run() -> None:
        with Writer() as writer:
            writer.save(tmp_path, 5, tensors(5.0), {"step": 5, "note": "é"}, keep=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert latest(tmp_path) == (5, [])


def test_time_and_size_are_told_and_the_next_waits_for_the_one_before(tmp_path):
    told: list[str] = []
    with Writer(told.append) as writer:
        for step in (1, 2, 3):
            writer.save(tmp_path, step, tensors(float(step)), {"step": step, "note": "é"}, keep=1)
    assert [line.split(":")[0] for line in told] == [f"checkpoint of step {step}" for step in (1, 2, 3)]
    assert all(re.search(r": 0\.0 MB in \d+\.\d\d s; the run waited \d+\.\d\d s for it$", line) for line in told)
    assert names(tmp_path) == ["000003"]


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


# ---- parts of other ranks


def test_a_part_that_never_comes_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PART_S", 0.2)
    with pytest.raises(CheckpointError, match=r"part-2-of-2.safetensors was not written, and nothing else for 0.2 s"):
        checkpoint_files.save(tmp_path, 1, tensors(1.0), {}, keep=1, parts=2)
    assert names(tmp_path) == []


def test_nobody_waits_for_the_parts_of_a_rank_that_died(tmp_path):
    """Rank 0 has lost another rank, and rank 1 has lost rank 0: neither waits five minutes for the other's files."""
    told: list[str] = []
    writer = Writer(told.append)
    writer.save(tmp_path, 1, tensors(1.0), {}, keep=1, parts=2)
    writer.__exit__(LostRankError)
    assert "part-2-of-2.safetensors was not written: another rank died meanwhile" in told[0]
    writer = Writer(told.append)
    writer.run(lambda read, abandoned: checkpoint_files.save_part(
        tmp_path / "never", tensors(1.0), part=2, parts=2, read=read, abandoned=abandoned
    ))  # fmt: skip
    writer.__exit__(LostRankError)
    assert names(tmp_path) == []


def test_an_error_of_another_rank_is_passed_on(tmp_path):
    aside = checkpoint_files.aside(tmp_path, 1)

    def extra_files(folder: Path) -> None:
        assert folder == aside
        (folder / "part-2.error").write_text("No space left on device")

    with pytest.raises(CheckpointError, match="rank 1: No space left on device"):
        checkpoint_files.save(tmp_path, 1, tensors(1.0), {}, keep=1, parts=2, extra_files=extra_files)
    assert names(tmp_path) == []


def test_a_part_waits_for_its_folder_and_gives_up_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PART_S", 0.1)
    checkpoint_files.save_part(tmp_path / "never", tensors(1.0), part=2, parts=2)
    assert names(tmp_path) == []


def test_a_part_for_which_there_is_no_room_leaves_its_error(tmp_path, monkeypatch):
    """The disk was too full for that as well, and rank 0 waited five minutes for the part."""

    def write(folder: Path, tensors: object, *, part: int, parts: int) -> None:
        disk.fill(folder, leave=0).rename(folder / f"model.part-{part}-of-{parts}.writing")
        (folder / "last").write_bytes(b"x" * 4096)

    monkeypatch.setattr(checkpoint_files.tensor_files, "write", write)
    with disk.tmpfs(kilobytes=256) as root:
        checkpoint_files.save_part(root, {}, part=2, parts=2)
        assert "No space left on device" in (root / "part-2.error").read_text()
