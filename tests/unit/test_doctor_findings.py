"""The doctor: every finding has a mark and, where something is missing, what to do; odd machines do not stop it."""

import importlib.metadata
import stat
import subprocess
import sys
import time
import types

import pytest

from trew.cli import doctor as d
from trew.rewards.sandbox import choose
from trew.utils.installing import install_extra, install_packages


def by_name(findings):
    return {f.what: f for f in findings}


def test_this_machine_is_described_and_nothing_needed_is_broken(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TREW_CACHE", str(tmp_path))
    assert d.doctor() == 0
    text = capsys.readouterr().out
    for what in (
        "python",
        "trew",
        "torch",
        "transformers",
        "cpu",
        "kernels",
        "memory",
        "default model",
        "wandb",
        "sandbox",
        "hub",
    ):
        assert any(line.split()[1] == what.split()[0] for line in text.splitlines() if line[:4] in d.MARKS.values()), (
            what
        )
    assert f"torch         {importlib.metadata.version('torch')}" in text
    assert "not asked: HF_HUB_OFFLINE is set" in text
    assert "Nothing required is broken" in text


def test_whatever_is_not_ok_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    for finding in d.findings():
        assert finding.mark == "ok" or finding.todo, finding


def test_a_missing_and_an_old_package_are_broken(monkeypatch, capsys):
    monkeypatch.setattr(d, "_requirements", lambda: {"": [("torch", "999.1"), ("trew-no-such-thing", "1.0")]})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = by_name(d._packages())
    assert (found["torch"].mark, found["trew-no-such-thing"].mark) == ("bad", "bad")
    assert found["torch"].todo == install_packages("torch>=999.1")
    assert d.doctor() == 1
    assert "see the lines marked BAD" in capsys.readouterr().out


def test_requirements_are_those_of_the_project():
    needs = d._requirements()
    assert dict(needs[""])["torch"] == "2.10"
    assert dict(needs["wandb"]) == {"wandb": "0.18"}
    assert {"trackio", "wandb", "tensorboard", "mlflow", "data"} <= set(needs)


@pytest.mark.parametrize(
    ("a", "b"), [("2.9.1", "2.10"), ("5.3.0.dev0", "5.3.1"), ("1.26", "1.26.1"), ("2.13.0+cpu", "2.13.1")]
)
def test_versions_are_compared_by_number(a, b):
    assert d._parts(a) < d._parts(b)


def test_equal_versions_are_equal_whatever_follows():
    assert d._parts("2.10.0+cpu") == d._parts("2.10")


def test_a_probe_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def _memory():
        raise RuntimeError("no such counter")

    monkeypatch.setattr(d, "_memory", _memory)
    found = by_name(d.findings())
    assert found["memory"].says == "could not be determined: RuntimeError: no such counter"
    assert "disk here" in found


def program(folder, code):
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def _asked_anew():
    choose._found.cache_clear()
    yield
    choose._found.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("", ""),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
        ("exit 0", "a plain program did not run"),
    ],
)
def test_a_sandbox_counts_only_if_it_holds(monkeypatch, tmp_path, code, says):
    monkeypatch.setenv("PATH", str(tmp_path))
    if code:
        program(tmp_path, code)
        tmp_path.chmod(0o755)
    finding = by_name(d._sandbox())["sandbox"]
    assert finding.mark == "note"
    assert "bubblewrap" in finding.todo
    # The test's folder may be closed to an unprivileged user, who then cannot even start this bwrap.
    assert says in finding.says or "Permission denied" in finding.says


@pytest.mark.usefixtures("_asked_anew")
def test_without_any_boundary_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(choose, "designs", list)
    finding = by_name(d._sandbox())["sandbox"]
    assert finding.mark == "note"
    assert "cannot be used" in finding.says
    assert "apt-get install bubblewrap" in finding.todo


def test_a_hub_that_does_not_answer_costs_no_more_than_its_time(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(d, "_HUB_SECONDS", 0.1)
    monkeypatch.setattr(d, "_ask", lambda address: time.sleep(2) or "")
    start = time.monotonic()
    finding = by_name(d._hub())["hub"]
    assert time.monotonic() - start < 1.5
    assert "no answer in 0.1 seconds" in finding.says


@pytest.mark.parametrize(("answer", "mark"), [("", "ok"), ("Name or service not known", "note")])
def test_a_hub_that_answers_or_is_away(monkeypatch, answer, mark):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    asked = []
    monkeypatch.setattr(d, "_ask", lambda address: asked.append(address) or answer)
    assert by_name(d._hub())["hub"].mark == mark
    assert asked == ["https://mirror.example"]


def test_only_http_is_asked():
    assert "not an http address" in d._ask("file:///etc/passwd")


def test_little_disk_and_little_memory_are_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("TREW_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(d.shutil, "disk_usage", lambda p: types.SimpleNamespace(free=10**9))
    assert {f.mark for f in d._disk()} == {"note"}
    monkeypatch.setattr(d, "free_bytes", lambda: 10**9)
    assert "about 3 GiB" in by_name(d._memory())["memory"].todo


def test_a_cache_below_what_is_no_folder_is_broken(monkeypatch, tmp_path):
    monkeypatch.setenv("TREW_CACHE", "/dev/null/x")
    found = by_name(d._disk())["disk of cache"]
    assert (found.mark, found.says) == ("bad", "/dev/null is no folder")
    assert found.todo == "set TREW_CACHE to a writable folder"


def test_a_zip_is_no_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(d, "__file__", str(tmp_path / "t.zip" / "trew" / "cli" / "doctor.py"))
    [found] = [each for each in d._packages() if each.what == "trew"]
    assert (found.mark, found.todo) == ("bad", d.install_trew())
    assert found.says == f"is imported from {tmp_path / 't.zip'}, which is no folder: trew cannot run from a zip"


def test_importing_the_commands_is_light():
    code = (
        "import sys; import trew.cli.doctor, trew.cli.report, trew.cli.eval; "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'jinja2', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("peer", ["trl", "verl"])
def test_a_trainer_that_is_not_there_is_nothing_broken(monkeypatch, capsys, peer):
    import importlib.util

    from trew.integrations.trl import hooks

    monkeypatch.setattr(hooks, "installed", lambda: None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "verl" else find_spec(name, *a))
    assert d.doctor(peer) == 0
    said = capsys.readouterr().out
    assert "is not installed" in said
    assert install_extra(peer) in said
    assert "BAD" not in said
    assert "Nothing required is broken." in said
