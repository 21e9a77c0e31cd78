"""trew-vllm refuses every version that is damaged, half written, elsewhere or of another model, before it loads it."""

import json
import os
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file
from trew_vllm import published
from trew_vllm.ahead import Ahead
from trew_vllm.published import Refused, Tensor

VALUES = {"model.embed_tokens.weight": np.ones((4, 2), np.float32), "model.norm.weight": np.ones(2, np.float32)}


def digest_of(path):
    return published.digest_of(path.read_bytes())


def publish(root, parts=(VALUES,), **changes):
    """Writes version 3 and returns its folder's name and its manifest's digest."""
    folder = root / "000003"
    folder.mkdir()
    names = [f"part-{i}.safetensors" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    manifest = {
        "format": published.FORMAT, "version": 3,
        "files": {n: {"size": (folder / n).stat().st_size, "blake3": digest_of(folder / n)} for n in names},
        "tensors": {n: {"dtype": str(v.dtype), "shape": list(v.shape)} for part in parts for n, v in part.items()},
        **changes,
    }  # fmt: skip
    (folder / published.MANIFEST).write_text(json.dumps(manifest))
    return folder.name, digest_of(folder / published.MANIFEST)


def test_a_whole_version_is_read_with_all_its_tensors(tmp_path):
    parts = [{n: v} for n, v in VALUES.items()]
    version = published.read(tmp_path, *publish(tmp_path, parts))
    assert (version.number, version.files) == (3, ("part-0.safetensors", "part-1.safetensors"))
    assert version.tensors == {n: Tensor("float32", v.shape) for n, v in VALUES.items()}


def test_the_digest_is_blake3():
    """By the algorithm's own test vectors (github.com/BLAKE3-team/BLAKE3)."""
    assert published.digest_of(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert published.digest_of(b"\0") == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shorten, "half written or damaged"),
        (flip, "its BLAKE3 digest is"),
        (link, "cannot be read"),
        (pipe, "not a regular file"),
        (os.unlink, "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, says):
    folder, digest = publish(tmp_path)
    damage(tmp_path / folder / "part-0.safetensors")
    with pytest.raises(Refused, match=f"part-0.safetensors.*{says}"):
        published.read(tmp_path, folder, digest)


@pytest.mark.parametrize("damage", [shorten, flip, link, pipe, os.unlink])
def test_a_damaged_manifest_is_refused(tmp_path, damage):
    folder, digest = publish(tmp_path)
    damage(tmp_path / folder / published.MANIFEST)
    with pytest.raises(Refused, match=r"manifest\.json"):
        published.read(tmp_path, folder, digest)


# ---- announced versions


@pytest.fixture
def readers(monkeypatch):
    """The names of the threads that have verified a version."""
    names, read = [], published.read

    def reading(*given):
        names.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(published, "read", reading)
    return names


def announced(root, *version):
    ahead = Ahead()
    ahead.begin(root, *version)
    ahead._found.exception()  # waits
    return ahead


def test_an_announced_version_is_verified_once_before_it_is_asked_for(tmp_path, readers):
    version = publish(tmp_path)
    ahead = announced(tmp_path, *version)
    ahead.begin(tmp_path, *version)
    found = ahead.take(tmp_path, *version)
    assert readers == ["trew-verify"]
    assert found == published.read(tmp_path, *version)


def test_a_version_is_waited_for_while_it_is_verified(tmp_path, monkeypatch, readers):
    version, may, digest = publish(tmp_path), threading.Event(), published._digest_of_file
    monkeypatch.setattr(published, "_digest_of_file", lambda file: may.wait(30) and digest(file))
    ahead = Ahead()
    ahead.begin(tmp_path, *version)
    threading.Timer(0.1, may.set).start()
    assert ahead.take(tmp_path, *version).number == 3
    assert readers == ["trew-verify"]


def flip_and_set_the_time_back(path):
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path):
    """By another file of the same size and time."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    flip_and_set_the_time_back(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


DAMAGES = [shorten, flip, flip_and_set_the_time_back, replace, link, pipe, os.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_after_it_was_verified_is_refused(tmp_path, damage):
    version = publish(tmp_path)
    ahead = announced(tmp_path, *version)
    damage(tmp_path / version[0] / "part-0.safetensors")
    with pytest.raises(Refused, match=r"part-0\.safetensors"):
        ahead.take(tmp_path, *version)


def test_a_file_that_is_damaged_while_it_is_verified_is_refused(tmp_path, monkeypatch):
    version, digest = publish(tmp_path), published._digest_of_file

    def damaging(file):
        found = digest(file)
        flip(tmp_path / version[0] / "part-0.safetensors")
        return found

    with monkeypatch.context() as within:
        within.setattr(published, "_digest_of_file", damaging)
        ahead = announced(tmp_path, *version)
    with pytest.raises(Refused, match="is damaged"):
        ahead.take(tmp_path, *version)


def test_a_version_that_could_not_be_read_when_it_was_announced_is_read_when_it_is_asked_for(tmp_path):
    """A file system may show a new folder late."""
    folder, digest = publish(tmp_path)
    (tmp_path / folder).rename(tmp_path / "hidden")
    ahead = announced(tmp_path, folder, digest)
    with pytest.raises(Refused, match="is not a folder below"):
        ahead.take(tmp_path, folder, digest)
    ahead.begin(tmp_path, folder, digest)
    ahead._found.exception()
    (tmp_path / "hidden").rename(tmp_path / folder)
    assert ahead.take(tmp_path, folder, digest).number == 3


def test_only_the_announced_version_is_taken_as_verified_and_only_once(tmp_path, readers):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    version = publish(here)
    assert publish(elsewhere) == version, "of another run"
    ahead = announced(here, *version)
    ahead.take(elsewhere, *version)
    ahead = announced(here, *version)
    ahead.take(here, *version)
    ahead.take(here, *version)
    mine = threading.current_thread().name
    assert readers == ["trew-verify", mine, "trew-verify", mine]


def test_another_manifest_than_the_one_asked_for_is_refused(tmp_path):
    folder, _ = publish(tmp_path)
    with pytest.raises(Refused, match="not the one that was published"):
        published.read(tmp_path, folder, "0" * 64)


@pytest.mark.parametrize("folder", ["../000003", "000003/..", "/000003", "3", "", "000003\n", ".", "000004"])
def test_nothing_but_a_version_below_the_root_is_read(tmp_path, folder):
    root = tmp_path / "root"
    root.mkdir()
    _, digest = publish(tmp_path)
    with pytest.raises(Refused):
        published.read(root, folder, digest)


def test_a_linked_version_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    folder, digest = publish(tmp_path)
    (root / folder).symlink_to(tmp_path / folder)
    with pytest.raises(Refused, match="is not a folder"):
        published.read(root, folder, digest)


@pytest.mark.parametrize("name", ["../000003/part-0.safetensors", "a/b.safetensors", "model.bin", ".safetensors"])
def test_only_safetensors_files_of_the_folder_itself_are_read(tmp_path, name):
    folder, digest = publish(tmp_path, files={name: {"size": 1, "blake3": "0" * 64}})
    with pytest.raises(Refused, match="not the name of a safetensors file"):
        published.read(tmp_path, folder, digest)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 1}, f"publishes format 1, this server reads format {published.FORMAT}"),
        ({"version": 4}, "000003 holds version 4"),
        ({"files": {}}, "'files'"),
        ({"files": ["part-0.safetensors"]}, "'files'"),
        ({"tensors": {"model.norm.weight": {}}}, "dtype and shape"),
        ({"tensors": {"model.norm.weight": {"dtype": "float32", "shape": [2]}}}, "model.embed_tokens.weight in the f"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, changes, says):
    with pytest.raises(Refused, match=says):
        published.read(tmp_path, *publish(tmp_path, **changes))


def test_a_type_and_a_shape_that_differ_are_named(tmp_path):
    table = {n: {"dtype": "float32", "shape": list(v.shape)} for n, v in VALUES.items()}
    table["model.norm.weight"] = {"dtype": "bfloat16", "shape": [3]}
    with pytest.raises(Refused, match=r"model.norm.weight is float32 \[2\] in the files and bfloat16 \[3\]"):
        published.read(tmp_path, *publish(tmp_path, tensors=table))


def test_a_tensor_in_two_files_is_refused(tmp_path):
    with pytest.raises(Refused, match="also in another file"):
        published.read(tmp_path, *publish(tmp_path, parts=(VALUES, VALUES)))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\x09" + b"\0" * 7 + b"{"])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    file = {"part-0.safetensors": {"size": len(content), "blake3": published.digest_of(content)}}
    folder, digest = publish(tmp_path, files=file)
    (tmp_path / folder / "part-0.safetensors").write_bytes(content)
    with pytest.raises(Refused, match="not a safetensors file"):
        published.read(tmp_path, folder, digest)


# ------------------------------------------------------------------------------------------- against the server's model

HELD = {n: Tensor("float32", v.shape) for n, v in VALUES.items()}
HEAD = {"lm_head.weight": Tensor("float32", (4, 2))}


def test_all_weights_of_the_checkpoint_are_accepted_in_another_type(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    started_from = published.checkpoint(tmp_path)
    assert started_from == HELD
    halves = {n: Tensor("bfloat16", t.shape) for n, t in HELD.items()}
    published.check_model(halves, started_from=started_from, tied=False)
    published.check_model({**halves, **HEAD}, started_from=started_from, tied=True)


@pytest.mark.parametrize(
    ("tensors", "tied", "says"),
    [
        (HELD, True, "lm_head.weight is missing"),
        ({**HELD, **HEAD}, False, "lm_head.weight in what was published, but not in the model's checkpoint"),
        (
            {"model.norm.weight": HELD["model.norm.weight"]},
            False,
            "model.embed_tokens.weight in the model's checkpoint",
        ),
        ({**HELD, "model.norm.weight": Tensor("float32", (3,))}, False, r"\[3\] in what was published and \[2\]"),
        ({**HELD, "model.norm.weight": Tensor("I8", (2,))}, False, "is I8, accepts"),
    ],
)
def test_weights_of_another_model_are_refused(tensors, tied, says):
    with pytest.raises(Refused, match=says):
        published.check_model(tensors, started_from=HELD, tied=tied)


def test_rotary_tables_that_a_checkpoint_holds_are_not_missed():
    """As those of Llama 2 do, for each layer; a model computes its own."""
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": Tensor("float32", (2,)) for i in range(2)}
    published.check_model(HELD, started_from={**HELD, **tables}, tied=False)


def test_a_checkpoint_with_names_of_its_own_is_not_judged():
    published.check_model(HELD, started_from={"wte.weight": Tensor("float32", (4, 2))}, tied=False)
    published.check_model(HELD, started_from={}, tied=False)
