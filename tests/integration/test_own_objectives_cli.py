"""An objective in a file of the user's, through every command that meets it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import study_help
import trew
from forks import Server
from ranks_help import free_port, variables
from recipe_help import assert_equal_weights, final_weights, metrics, recipe, run_folder
from trew.utils.console import Silent

CLIP = '''
"""GRPO's clip once more, and a trust region without an edge."""
from dataclasses import dataclass

import torch
import trew
from trew.objective import Objective
from trew.objective.advantage import BaselineAdvantage, GroupMean, GroupStd
from trew.objective.aggregate import SequenceMeanTokenMean
from trew.objective.weight import Weight


@dataclass(frozen=True)
class Again(Weight):
    low: float
    high: float

    def __call__(self, ratio, *, advantages, batch):
        outside = ((advantages > 0) & (ratio > 1 + self.high)) | ((advantages < 0) & (ratio < 1 - self.low))
        return torch.where(outside, 0.0, 1.0)

    def surrogate(self, ratio, *, advantages, batch):
        return torch.minimum(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)

    def equation(self):
        return f"w = 0 above 1 + {self.high:g} for A > 0 and below 1 - {self.low:g} for A < 0, else 1"


@dataclass(frozen=True)
class Gaussian(Weight):
    s: float = 0.2

    def __call__(self, ratio, *, advantages, batch):
        return torch.exp(-((ratio - 1) ** 2) / (2 * self.s**2))

    def equation(self):
        return f"w = exp(-(r - 1)^2 / (2 * {self.s:g}^2))"


def clip(low: float = 0.2, high: float = 0.2):
    """GRPO's clip, written once more."""
    advantage = BaselineAdvantage(GroupMean(), GroupStd())
    return Objective("clip again", advantage, Again(low, high), SequenceMeanTokenMean())


def own(s: float = 0.2):
    """A trust region without an edge."""
    return trew.preset("grpo", beta=0.0).replace(name="gaussian", weight=Gaussian(s))
'''
SETTINGS = {
    "chat_template": "plain", "eval": {"size": 4, "every": 2}, "checkpoint": {"every": 1},
    "learner": {"inner_updates": 3, "lr": 1e-2}, "objective": {"preset": "my.py:own", "s": 0.05},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = run_folder(tmp_path_factory.mktemp("own"), recipe("lm", **SETTINGS))
    (place / "my.py").write_text(CLIP)
    return place


def train(server: Server, folder: Path, out: str, *settings: str, code: int = 0, resume: bool = False) -> str:
    more = ("--resume",) if resume else ()
    return server.run("train", "r.toml", "--out", out, *more, *(["--set", *settings] if settings else []),
                      cwd=folder, code=code)  # fmt: skip


@pytest.fixture(scope="module")
def whole(server, folder) -> Path:
    """A run of four steps."""
    said = train(server, folder, "whole")
    assert "my.py:own: lm (" in said
    return folder / "whole"


def test_the_clip_of_grpo_written_once_more_trains_the_same_weights(server, folder):
    options = ("objective.beta=0.05", "objective.correction=tis")
    train(server, folder, "grpo", "objective={preset='grpo'}", "objective.eps_low=0.1", *options)
    train(server, folder, "again", "objective={preset='my.py:clip'}", "objective.low=0.1", *options)
    assert_equal_weights(folder / "grpo", folder / "again")
    ours, theirs = metrics(folder / "again"), metrics(folder / "grpo")
    assert [row.get("loss") for row in ours] == [row.get("loss") for row in theirs]
    assert any(row.get("clip_share", 0) for row in ours)  # the trust region has acted


@pytest.mark.parametrize("setting", ["objective.s=0.5", "objective.beta=0.5", "objective.aggregate=token-mean"])
def test_its_settings_and_the_options_of_all_act(server, folder, whole, setting):
    out = setting.replace("=", "-")
    train(server, folder, out, setting)
    before, after = final_weights(whole), final_weights(folder / out)
    assert not all(before[name].equal(after[name]) for name in before)


def test_the_run_records_where_it_lies_and_pages_name_it_briefly(server, folder, whole):
    table = tomllib.loads((whole / "config.toml").read_text())["objective"]
    assert table == {"preset": f"{folder.resolve()}/my.py:own", "s": 0.05}
    assert json.loads((whole / "summary.json").read_text())["objective"] == "my.py:own"
    page = (whole / "report.html").read_text()
    assert ">my.py:own<" in page


def test_python_trains_the_same(folder, whole, monkeypatch):
    monkeypatch.chdir(folder)
    table = tomllib.loads((folder / "r.toml").read_text())
    table["objective"]["preset"] = f"{folder}/my.py:own"
    trew.train(table | {"out": "python", "steps": 4}, display=Silent())
    assert_equal_weights(whole, folder / "python")


def test_a_resumed_run_is_the_run_and_a_changed_file_another(server, folder, whole):
    train(server, folder, "cut", "steps=2")
    said = train(server, folder, "cut", "steps=4", resume=True)
    assert "continuing after step 2" in said
    assert "the recipe says" not in said  # the same file, which config.toml has with its folder
    assert_equal_weights(whole, folder / "cut")
    # ---- the file changes, its settings do not
    other = folder / "other.py"
    other.write_text(CLIP)
    other_preset = "objective.preset=other.py:own"
    train(server, folder, "changed", other_preset, "steps=2")
    other.write_text(CLIP.replace("2 * self.s**2", "3 * self.s**2"))
    said = train(server, folder, "changed", other_preset, "steps=4", resume=True, code=2)
    assert "what this run reads besides its data changed since its checkpoint (objective: other.py)" in said
    said = server.run(
        "train", "r.toml", "--out", "changed", "--resume", "--allow-changes", "--set", other_preset, "steps=4",
        cwd=folder,
    )  # fmt: skip
    assert "steps before and after cannot be compared" in said
    assert "continuing after step 2" in said


def test_two_ranks_train_what_one_process_does(server, folder):
    port = free_port()
    usual = ("kernels=plain", "linear=plain", "learner.lr=1e-3")
    args = ("train", "r.toml", "--out", "pair", "--set", "cluster.learner=2", *usual)
    ranks = [server.start(*args, cwd=folder, **variables(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
    train(server, folder, "single", *usual)
    train(server, folder, "wide", *usual, "objective.s=0.5")
    one, two = final_weights(folder / "single"), final_weights(folder / "pair")
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    wide = final_weights(folder / "wide")
    assert max(float((wide[name] - one[name]).abs().max()) for name in one) > 1e-4  # far more than the tolerance


def test_what_is_wrong_with_a_file_is_said_before_anything_is_loaded(server, folder):
    said = {
        "my.py:onw": "my.py: has no function 'onw' (did you mean 'own'?); it defines ",
        "none.py:own": "none.py: no such file",
        "broken.py:own": "broken.py:3: cannot be imported: ZeroDivisionError: division by zero",
        "shapes.py:own": "shapes.py: own: tried on a step of 8 completions: Gaussian: returned float32 of shape (3,)",
    }
    (folder / "broken.py").write_text("import trew\n\n1 / 0\n")
    (folder / "shapes.py").write_text(CLIP.replace("(2 * self.s**2))", "(2 * self.s**2))[:3]"))
    for name, problem in said.items():
        for more in ((), ("--dry-run",)):
            text = server.run("train", "r.toml", "--out", "no", *more, "--set", f"objective.preset={name}",
                              cwd=folder, code=2)  # fmt: skip
            assert f"objective.preset: {folder.resolve()}/{problem}" in text
    text = train(server, folder, "no", "objective.width=1", "rollout.prompts=0", code=2)
    assert "objective.width: my.py:own has no such setting; accepts s; and as every objective beta" in text
    assert "rollout.prompts: got 0" in text  # all problems at once
    assert not (folder / "no").exists()


def test_it_is_shown_before_and_planned(server, folder):
    said = server.run("train", "r.toml", "--out", "no", "--dry-run", cwd=folder)
    assert "w = exp(-(r - 1)^2 / (2 * 0.05^2))" in said
    assert f'preset = "{folder.resolve()}/my.py:own"' in said
    assert not (folder / "no").exists()
    said = server.run("explain", "my.py:own", "--set", "s=0.1", "beta=0.04", "--plot", "w.svg", cwd=folder)
    assert said.startswith("my.py:own\n\nA trust region without an edge.")
    assert "Settings    s = 0.1 (default 0.2)" in said
    assert "<svg" in (folder / "w.svg").read_text()
    assert "reference" not in server.run("plan", "r.toml", cwd=folder)
    assert "reference" in server.run("plan", "r.toml", "--set", "objective.beta=0.1", cwd=folder)


def test_runs_are_compared_by_its_name_and_settings(server, folder, whole):
    for seed in (4, 5):
        train(server, folder, f"own-{seed}", f"seed={seed}")
        train(server, folder, f"grpo-{seed}", f"seed={seed}", "objective={preset='grpo'}", "objective.beta=0.01")
    runs = [f"{name}-{seed}" for name in ("own", "grpo") for seed in (4, 5)]
    said = server.run("compare", *runs, cwd=folder)
    assert "my.py:own s=0.05  2 " in said  # the name of a group


def test_a_model_is_exported_with_a_card_that_names_it(server, folder, whole):
    server.run("export", "model", "whole", "--out", "model", cwd=folder)
    card = (folder / "model" / "README.md").read_text()
    assert "Objective `my.py:own`: the author's own." in card
    assert 'preset = "my.py:own"\ns = 0.05' in card
    assert "functions in files of the author's" in card
    assert str(folder.resolve()) not in card


def test_a_study_compares_it(server, folder, tmp_path):
    for name in ("my.py", "reward.py"):
        (tmp_path / name).write_text((folder / name).read_text())
    sections = {
        "steps": 2, "chat_template": "plain", "eval": {"size": 8, "correct_at": 0.6, "every": 1},
        "checkpoint": {"every": 0}, "track": {"samples_every": 0, "regrade_every": 0},
    }  # fmt: skip
    algorithms = {
        "clip": {"objective.preset": "grpo"},
        "other": {"objective.preset": "my.py:own", "objective.s": 0.3},
        "same": {"objective.preset": "my.py:clip"},
    }
    study_help.write(tmp_path, recipe(folder / "lm", **sections), seeds=2, tune=None,
                     algorithms=algorithms)  # fmt: skip
    said = server.run("study", "study.toml", "--out", "study", cwd=tmp_path)
    assert "3 cells" in said
    found = {}
    for path in (tmp_path / "study").glob("runs/**/summary.json"):
        table = tomllib.loads((path.parent / "config.toml").read_text())
        found[table["objective"]["preset"], table["seed"]] = path.parent
    assert {name for name, _ in found} == {"grpo", *(f"{tmp_path.resolve()}/my.py:{name}" for name in ("own", "clip"))}
    learned = {key: [row.get("loss") for row in metrics(run)] for key, run in found.items()}
    for (name, seed), losses in learned.items():
        assert (losses == learned["grpo", seed]) == (not name.endswith(":own")), (name, seed)
