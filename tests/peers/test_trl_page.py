"""docs/trl.md: its examples run as they stand, its table is true; and what the doctor says."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import runpy
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import peft
import pytest
import trl.rewards
import trl_help
from peer_compare import TOLERANCE, WRONG, apart, noise
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

import tiny
import trew
from trew.config import Config, DataConfig, load
from trew.integrations.trl import doctor, hooks, refusals
from trew.objective.options import Options
from trew.objective.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "trl.md"
EXAMPLE, WEIGHT = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


REWARD, SCRIPT = re.findall(r"^```python\n(.*?)^```", (DOCS / "from-trl-verl.md").read_text(), re.M | re.S)
RECIPE = re.findall(r"^```toml\n(.*?)^```", (DOCS / "from-trl-verl.md").read_text(), re.M | re.S)[0]


def executed(code: str, folder: Path) -> dict[str, Any]:
    """What a block of the page leaves behind, run as a file."""
    (folder / "block.py").write_text(code)
    return runpy.run_path(str(folder / "block.py"))


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model", pad=True)
    monkeypatch.chdir(tmp_path)
    trainer = executed(EXAMPLE, tmp_path)["trainer"]
    assert trainer.state.global_step == 10
    assert len(trainer.state.log_history) == 11  # each step, and the end
    assert {"rewards/arithmetic/mean", "trew/ratio"} <= set(trainer.state.log_history[0])


def test_the_script_runs_and_its_recipe_has_the_same_settings(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model", pad=True)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    trainers = []

    def two_steps(*given, max_steps, **keywords):  # without a GPU, TRL refuses its default of bf16
        made = GRPOConfig(*given, max_steps=2, bf16=False, **keywords)
        trainers.append((made, max_steps))
        return made

    monkeypatch.setattr("trl.GRPOConfig", two_steps)
    executed(SCRIPT, tmp_path)
    [(theirs, steps)] = trainers
    ours = load(tmp_path / "recipe.toml")
    assert theirs.generation_batch_size == ours.rollout.prompts * ours.rollout.completions
    assert steps * theirs.gradient_accumulation_steps == ours.steps * theirs.steps_per_generation
    updated = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert updated == ours.learner.minibatch_prompts * ours.rollout.completions
    assert (theirs.num_generations, theirs.max_completion_length) == (ours.rollout.completions, ours.rollout.max_tokens)
    assert (theirs.temperature, theirs.top_p, theirs.num_iterations) == (
        ours.rollout.temperature, ours.rollout.top_p, ours.learner.inner_updates
    )  # fmt: skip
    for name, key in (
        ("learning_rate", "lr"), ("lr_scheduler_type", "schedule"), ("weight_decay", "weight_decay"),
        ("max_grad_norm", "max_grad_norm"), ("adam_beta1", "adam_beta1"), ("adam_beta2", "adam_beta2"),
        ("adam_epsilon", "adam_eps"), ("warmup_steps", "warmup_steps"),
    ):  # fmt: skip
        assert getattr(theirs, name) == getattr(ours.learner, key), name
    objective = trew.preset(ours.objective.preset, **ours.objective.args)
    assert (theirs.loss_type, theirs.beta, theirs.epsilon) == ("grpo", ours.objective.args["beta"], 0.2)
    assert objective == trew.preset("grpo", beta=0.0, std_eps=1e-4, eps_low=0.2, eps_high=0.2)


def test_the_weight_alone_has_the_gradient_of_our_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trl_help.trainer({"loss_type": "vespo"}, kind=executed(WEIGHT, tmp_path)["Weighted"])
    inputs = trl_help.batch()
    now = trl_help.forward(made.model, inputs)[0].detach()
    inputs["old_per_token_logps"] = now + noise(3, *now.shape, size=0.3)
    gradient = trl_help.theirs(made, inputs)[1]
    for name, near in (("trw-logistic", True), ("trw-triangular", False)):
        ours = trl_help.ours(trew.preset(name, aggregate="token-mean"), made.model, inputs)[1]
        assert apart(ours, gradient) <= TOLERANCE if near else apart(ours, gradient) >= WRONG


def test_the_page_names_what_is_refused_and_tested():
    text = PAGE.read_text()
    for name in refusals.DECIDED:
        family = re.sub(r"^(sapo|vespo)_.*", r"\1_*", name)
        assert f"`{family}`" in text or name.startswith(("entropy_", "use_adaptive", "vllm_"))
    assert all(f"{version}.0" in text for version in hooks.TESTED)


def test_the_doctor_here():
    found = {what: (mark, says) for mark, what, says, _ in doctor.found()}
    assert {mark for mark, _ in found.values()} == {"ok"}
    assert found["hooks"] == ("ok", "all 5 fit")
    assert "not remax, ppo, vapo, ppo-clip" in found["presets"][1]


def test_the_doctor_as_a_command():
    done = subprocess.run([sys.executable, "-m", "trew", "doctor", "trl"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a release that trew is tested with" in done.stdout


@pytest.mark.parametrize(
    ("version", "mark"),
    [("1.16.3", "ok"), ("1.15.3", "ok"), ("1.14.2", "note"), ("1.17.0", "note"), (None, "note")],
)
def test_the_doctor_elsewhere(monkeypatch, version, mark):
    monkeypatch.setattr(hooks, "installed", lambda: version)
    lines = list(doctor.found())
    assert lines[0][0] == mark
    assert all(todo for m, _, _, todo in lines if m != "ok")


def test_the_doctor_finds_changed_hooks(monkeypatch):
    monkeypatch.setitem(hooks.HOOKS, "_compute_loss", ("self", "model", "inputs", "more"))
    assert [line[0] for line in doctor.found()] == ["ok", "bad"]


def table(first: str) -> list[list[list[str]]]:
    """The cells of a table of docs/from-trl-verl.md, each as the names that stand in it as code."""
    lines = (DOCS / "from-trl-verl.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|")] for row in rows]


KEYS, OTHERS = table("trew"), table("TRL (GRPOConfig)")
BESIDE = {"reward_funcs", "train_dataset", "eval_dataset", "peft_config", "model", "get_soft_overlong_punishment"}
"""Names in TRL's column that are no settings of GRPOConfig: arguments of the trainer, and a reward function."""


def test_every_key_of_trl_exists():
    fields = {f.name for f in dataclasses.fields(trl_help.GRPOConfig)}
    named = {name for row in KEYS for name in row[1]} | {name for row in OTHERS for name in row[0]}
    assert named - BESIDE <= fields
    arguments = inspect.signature(GRPOTrainer.__init__).parameters
    assert all(name in arguments or hasattr(trl.rewards, name) for name in BESIDE)


def test_every_default_of_trl_s_is_what_the_page_says():
    fields = {f.name: f.default for f in dataclasses.fields(trl_help.GRPOConfig)}
    said = [
        text.partition("=") for row in table("here, by default") for text in row[1] if "=" in text and " = " not in text
    ]
    wrong = {name: fields.get(name) for name, _, value in said if name in fields and str(fields[name]) != value}
    assert wrong == {}
    assert {name for name, _, _ in said if name not in fields} == {"lora_alpha"}  # peft's
    assert peft.LoraConfig().lora_alpha == 8
    assert len(said) > 9


def test_every_default_of_ours_is_what_the_page_says():
    hints, seen = typing.get_type_hints(Config), 0
    for text in [text for row in table("here, by default") for text in row[0] if " = " in text]:
        key, _, value = text.partition(" = ")
        section, _, name = key.rpartition(".")
        if key == "objective.beta":
            known: Any = trew.preset("grpo").beta
        else:
            holder = Options if key == "objective.correction" else hints[section] if section else Config
            known = next(f.default for f in dataclasses.fields(holder) if f.name == name)
        assert json.loads(value) == known, text
        seen += 1
    assert seen > 10


def test_every_key_of_trl_s_grpo_is_there():
    fields = {f.name for f in dataclasses.fields(trl_help.GRPOConfig)}
    general = {f.name for f in dataclasses.fields(TrainingArguments)}
    named = [name for row in KEYS for name in row[1]] + [name for row in OTHERS for name in row[0]]
    assert fields - general - set(named) == set()
    assert len({name for row in OTHERS for name in row[0]}) == sum(len(row[0]) for row in OTHERS)


def test_every_key_of_ours_exists():
    settings = {name for make in PRESETS.values() for name in inspect.signature(make).parameters}
    hints = typing.get_type_hints(Config)
    sections = {name: {f.name for f in dataclasses.fields(kind)} for name, kind in hints.items()
                if dataclasses.is_dataclass(kind)}  # fmt: skip
    sections["data"] = {f.name for f in dataclasses.fields(DataConfig)}
    sections["objective"] |= settings | {f.name for f in dataclasses.fields(Options)}
    seen = 0
    for cell in [row[0] for row in KEYS] + [row[1] for row in OTHERS]:
        section = ""
        for text in cell:
            key = text.partition(" = ")[0].strip("[]")
            head, dot, name = key.partition(".")
            section = head if dot else section
            known = sections[section] if section and (dot or key not in hints) else set(hints)
            assert (name if dot else key) in known, text
            seen += 1
    assert seen > 60
