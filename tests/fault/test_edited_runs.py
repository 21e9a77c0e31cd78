"""What lies in a run's folder is not believed: edited JSON, lost rows and files, parts that do not fit each other."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import crashing
import tiers
from forks import Server
from trew.errors import TrewError
from trew.runs import checkpoint_files
from trew.training import policy_state, remembered

STEPS = 3
CHANGED: list[Any] = ["text", None, [], {}, [[1]], {"a": {"b": 1}}, math.nan, -7, 10**400, True, 1.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(folder) -> Path:
    return crashing.recipe(
        folder, "grpo", steps=STEPS, checkpoint={"every": 2}, eval={"every": 2, "size": 2}, learner={"inner_updates": 1}
    )


@pytest.fixture(scope="module")
def whole(server, folder, recipe) -> Path:
    server.run("train", recipe, "--out", "whole", cwd=folder)
    return folder / "whole"


@pytest.fixture
def cut(whole, tmp_path) -> Path:
    """A run that was killed after step 3: one checkpoint, of step 2."""
    run = tmp_path / "cut"
    shutil.copytree(whole, run)
    for name in ("summary.json", "report.html"):
        (run / name).unlink()
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "000003")
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def refused(server: Server, recipe: Path, run: Path, *more: str) -> str:
    """What a command says that must not continue a run, and must leave its folder as it is."""
    before = contents(run)
    output = server.run("train", recipe, "--out", run, "--resume", *more, cwd=recipe.parent, code=2)
    assert contents(run) == before
    return output


def rewrite(folder: Path, name: str, value: Any) -> None:
    """Writes a file of a checkpoint, and what the manifest says of it: whoever can edit one can edit both."""
    (folder / name).write_text(json.dumps(value))
    if name != "manifest.json":
        content = (folder / name).read_bytes()
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))


# ---- JSON


def edits(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every place of a JSON value with what it becomes; ``...`` stands for its removal."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key), ...
            yield from edits(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from edits(value[0], (*path, 0))
    for n in range(3 if path else 0):  # not all of them everywhere: neighbours get others
        yield path, CHANGED[(len(str(path)) + 4 * n) % len(CHANGED)]


def edited(value: Any, path: tuple, other: Any) -> Any:
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if other is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = other
    return value


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_every_edit_is_one_message_or_a_value_that_fits(cut, name):
    """Not one of them gets as far as the parts of a run: reading is all that is done before."""
    root = cut / "checkpoints"
    checkpoint = root / "000002"
    pristine = contents(checkpoint)
    original = json.loads((checkpoint / name).read_text())
    count, fits = 0, []
    for path, other in edits(original):
        count += 1
        rewrite(checkpoint, name, edited(original, path, other))
        problem = None
        try:
            loaded, _ = checkpoint_files.load_latest(root)
            assert loaded is not None
            remembered.read(policy_state.SHAPES, loaded[2], loaded[0], root)
        except TrewError as error:
            problem = error
        (checkpoint / "manifest.json").write_bytes(pristine["manifest.json"])
        if problem is None:
            fits.append((path, other))
        elif problem.exit_code != 2 or len(str(problem)) > 1000:
            raise AssertionError((path, other)) from problem
    assert count > 50
    # What fits has the type that was asked for: another text, another number in its range, an entry less.
    assert not [path for path, other in fits if path[-1] in ("step", "position", "tokens", "format", "size", "saved")]
    assert not [path for path, other in fits if isinstance(other, int) and abs(other) > 2**63]


EDITS: dict[str, tuple[tuple[str, ...], Any]] = {
    "gone": (("meta", "remembered", "rollouts", "position"), ...), "step": (("meta", "state", "step"), 1),
    "text": (("meta", "learner", "steps"), "x"), "number": (("meta", "remembered", "health", "last"), 5),
    "nested": (("meta", "state", "before", "accuracy"), ...), "list": (("meta",), []),
}  # fmt: skip


@pytest.mark.parametrize("edit", tiers.some(EDITS, ("gone", "step")))
def test_an_edited_state_is_refused_by_the_command_and_the_folder_stays(server, recipe, cut, edit):
    path, other = EDITS[edit]
    checkpoint = cut / "checkpoints" / "000002"
    rewrite(checkpoint, "state.json", edited(json.loads((checkpoint / "state.json").read_text()), path, other))
    assert "state.json" in refused(server, recipe, cut)


def test_a_manifest_without_the_optimizer_is_refused(server, recipe, cut):
    checkpoint = cut / "checkpoints" / "000002"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["files"]["optimizer.safetensors"]
    rewrite(checkpoint, "manifest.json", manifest)
    assert "manifest.json does not name optimizer.safetensors" in refused(server, recipe, cut)


def test_the_format_before_is_refused_by_name(server, recipe, cut):
    checkpoint = cut / "checkpoints" / "000002"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    rewrite(checkpoint, "manifest.json", {**manifest, "format": 2})
    assert "has format 2, written by an older trew" in refused(server, recipe, cut)


def test_other_versions_of_libraries_are_told(server, recipe, cut):
    """An update of PyTorch may round otherwise: the run is no longer the one that was never stopped."""
    checkpoint = cut / "checkpoints" / "000002"
    state = json.loads((checkpoint / "state.json").read_text())
    here = state["meta"]["made_with"]["torch"]
    rewrite(checkpoint, "state.json", edited(state, ("meta", "made_with", "torch"), "2.9.9"))
    output = server.run("train", recipe, "--out", cut, "--resume", cwd=recipe.parent)
    told = f"torch was 2.9.9, is {here}"
    assert f"note: {told}: steps from here on may round otherwise than they would have" in output
    assert f"After step 2 the run went on with changes: {told}." in (cut / "report.html").read_text()


def test_other_kernels_and_threads_are_told(server, recipe, cut):
    """As where the compiler is gone, or OMP_NUM_THREADS has changed: sums are rounded otherwise."""
    checkpoint = cut / "checkpoints" / "000002"
    state = json.loads((checkpoint / "state.json").read_text())
    made = state["meta"]["made_with"]
    assert made["kernels"] in ("trew's", "PyTorch's")
    other = {"threads": str(1 + int(made["threads"])), "kernels": "nobody's"}
    rewrite(checkpoint, "state.json", edited(state, ("meta", "made_with"), made | other))
    output = server.run("train", recipe, "--out", cut, "--resume", cwd=recipe.parent)
    for name, then in other.items():
        assert f"note: {name} was {then}, is {made[name]}: steps from here on may round otherwise" in output
    known = json.loads((cut / "summary.json").read_text())["arithmetic"]
    assert known == {name: made[name] for name in ("device", "threads", "kernels")}


# ---- rows and files before the checkpoint


def lose(run: Path, how: str) -> str:
    """Damages what lies before the checkpoint of step 2; what must be said."""
    metrics, rollouts = run / "metrics.jsonl", run / "rollouts" / "000001.parquet"
    lines = metrics.read_text().splitlines(keepends=True)
    if how == "no metrics":
        metrics.unlink()
        return "no row of step 1, 2"
    if how == "a row gone":
        metrics.write_text("".join([lines[0], *lines[2:]]))
        return "no row of step 1"
    if how == "a row twice":
        metrics.write_text("".join([*lines[:2], *lines[1:]]))
        return "more than one of step 1"
    if how == "a row changed":
        metrics.write_text("".join(lines).replace('"step": 1', '"step":  1'))
        return "lines were changed"
    if how == "no rollouts":
        rollouts.unlink()
        return "missing: rollouts/000001.parquet"
    if how == "rollouts cut off":
        rollouts.write_bytes(rollouts.read_bytes()[:-9])
        return "changed or truncated since then: rollouts/000001.parquet"
    if how == "evaluation gone":
        (run / "evals" / "000000.parquet").unlink()
        return "missing: evals/000000.parquet"
    shutil.copy(rollouts, run / "rollouts" / "000000.parquet")
    return "not written by this run before that step: rollouts/000000.parquet"


HOW = ["no metrics", "a row gone", "a row twice", "a row changed", "no rollouts", "rollouts cut off", "evaluation gone",
       "a file more"]  # fmt: skip


@pytest.mark.parametrize("how", tiers.some(HOW, ("no metrics", "no rollouts", "a row gone", "a row changed")))
def test_what_is_lost_before_the_checkpoint_is_named(server, recipe, cut, how):
    said = lose(cut, how)
    assert said in refused(server, recipe, cut)


def test_what_is_lost_is_named_where_it_goes_on_all_the_same(server, recipe, cut):
    said = lose(cut, "no rollouts")
    output = server.run("train", recipe, "--out", cut, "--resume", "--allow-changes", cwd=recipe.parent)
    assert said in output
    assert "continuing after step 2" in output
    assert said in (cut / "report.html").read_text()


def test_rows_behind_the_checkpoint_go_whatever_their_step(server, recipe, whole, cut):
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join([*lines, lines[1], lines[-1]]))
    server.run("train", recipe, "--out", cut, "--resume", cwd=recipe.parent)
    assert crashing.differences(whole, cut) == []


# ---- settings


def test_a_run_goes_on_with_its_own_settings(server, recipe, folder):
    settings = ("--set", "learner.lr=1e-3", "steps=1", "eval.every=0", "checkpoint.every=1")
    server.run("train", recipe, "--out", "own", *settings, cwd=folder)
    output = server.run("train", recipe, "--out", "own", "--resume", "--set", "steps=2", "health.window=3", cwd=folder)
    assert "continuing after step 1" in output
    assert "health.window: the run was started with 10, now it is 3" in output
    assert "learner.lr: the recipe says 0.01 now, and the run goes on with 0.001" in output
    assert "lr = 0.001\n" in (folder / "own" / "config.toml").read_text()
    said = refused(server, recipe, folder / "own", "--set", "learner.lr=0.01")
    assert "learner.lr: the run was started with 0.001, now it is 0.01" in said


# ---- links


def test_a_link_to_a_folder_is_followed_and_one_to_nothing_named(server, recipe, folder, tmp_path):
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big-disk")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    settings = ("--set", "steps=1", "eval.every=0")
    server.run("train", recipe, "--out", tmp_path / "run", *settings, cwd=folder)
    assert (tmp_path / "big-disk" / "summary.json").exists()
    assert (tmp_path / "run").is_symlink()
    output = server.run("train", recipe, "--out", tmp_path / "nowhere", *settings, cwd=folder, code=2)
    assert "is a link to" in output
    assert "does not exist" in output
