"""What a continued run refuses, what it lets through, and what a disk, a clock or a stranger in its folder does to it.

Every command is a real process; full and read-only disks are real file systems.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import crashing
import disk
import scorer_help
import tiny
from crashing import differences
from forks import Server

KIND = "grpo"
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def recipe(folder) -> Path:
    """Checkpoints of every step, all of them kept."""
    return crashing.recipe(
        folder, KIND, steps=STEPS, checkpoint={"every": 1, "keep": 9}, eval={"every": 0, "size": 2},
        learner={"inner_updates": 1}, rewards=["odd", "short"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(server, folder, recipe) -> Path:
    server.run("train", recipe, "--out", "whole", cwd=folder)
    return folder / "whole"


@pytest.fixture
def cut(whole, folder, request) -> Path:
    """A run that was killed in step 3: checkpoints of steps 1 and 2."""
    run = folder / "".join(c if c.isalnum() else "-" for c in request.node.name)
    shutil.copytree(whole, run)
    for name in ("summary.json", "report.html"):
        (run / name).unlink()
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "000003")
    return run


def resume(server: Server, recipe: Path, run: Path, *more: str, code: int = 0) -> str:
    return server.run("train", recipe, "--out", run, "--resume", *more, cwd=recipe.parent, code=code)


# ---- what is in the folder of checkpoints


def test_a_damaged_checkpoint_is_named_and_the_one_before_continues_to_the_same_bits(server, recipe, whole, cut):
    """One flipped bit; beside it strangers, an empty folder, and what an interrupted write left."""
    root = cut / "checkpoints"
    file = root / "000002" / "optimizer.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    (root / "checkpoint-99").mkdir()
    (root / ".tmp-000003-1").mkdir()
    (root / ".tmp-000003-1" / "model.safetensors").write_bytes(b"x" * 100)
    (root / "000009").mkdir()
    output = resume(server, recipe, cut)
    for said in ("000002: optimizer.safetensors is damaged (SHA-256 differs); not used",
                 "checkpoint-99: is not a checkpoint of trew; ignored", "000009: manifest.json is missing; not used",
                 ".tmp-000003-1: left behind by an interrupted write or removal; ignored"):  # fmt: skip
        assert f"warning: {root}/{said}" in output
    assert "continuing after step 1" in output
    assert differences(whole, cut) == []
    assert (root / "checkpoint-99").exists()
    assert not (root / ".tmp-000003-1").exists()


@pytest.mark.parametrize("how", ["all broken", "all gone"])
def test_a_run_is_never_silently_started_over(server, recipe, cut, how):
    before = (cut / "metrics.jsonl").read_bytes()
    for name in ("000001", "000002"):
        if how == "all broken":
            (cut / "checkpoints" / name / "model.safetensors").unlink()
        else:
            shutil.rmtree(cut / "checkpoints" / name)
    output = resume(server, recipe, cut, code=2)
    assert "silently start" in output
    if how == "all broken":
        assert output.count("model.safetensors is missing") == 2
    assert (cut / "metrics.jsonl").read_bytes() == before


# ---- disks


def test_a_disk_that_is_full_while_saving_ends_the_run_with_one_message(server, folder, recipe, whole, tmp_path):
    with disk.tmpfs(kilobytes=8192) as root:
        hold = "trew.runs.checkpoint_files:save:2"
        command = server.start("train", recipe, "--out", root / "run", cwd=folder, hold=hold).held()
        ballast = disk.fill(root, leave=300_000)  # enough for rows and completions, not for weights
        command.go()
        assert command.wait() == 1
        text = command.text()
        assert text.count("No space left on device") == 1
        assert "the checkpoint of step 2 could not be written: " in text
        assert "continue with --resume" in text
        assert "Traceback" not in text
        assert [p.name for p in (root / "run" / "checkpoints").iterdir()] == ["000001"]
        ballast.unlink()
        output = resume(server, recipe, root / "run")
        assert "continuing after step 1" in output
        assert differences(whole, root / "run") == []


def test_a_disk_that_is_full_while_logging_ends_the_run_with_one_message(server, folder, recipe, whole, tmp_path):
    with disk.tmpfs(kilobytes=8192) as root:
        command = server.start(
            "train", recipe, "--out", root / "run", cwd=folder, hold="trew.runs:RunFolder.log:3"
        ).held()
        ballast = disk.fill(root, leave=0)
        rows = root / "run" / "metrics.jsonl"
        with rows.open("ab") as file:  # what is left of its last page
            room = -rows.stat().st_size % 4096
            file.write(b" " * room)
        command.go()
        assert command.wait() == 1
        text = command.text()
        assert text.count("metrics.jsonl: cannot be written: No space left on device") == 1
        assert "Traceback" not in text
        os.truncate(rows, rows.stat().st_size - room)
        assert rows.read_text().endswith("}\n")
        ballast.unlink()
        resume(server, recipe, root / "run")
        assert differences(whole, root / "run") == []


def test_a_disk_that_cannot_be_written_is_refused_before_a_model_is_loaded(server, folder, recipe, tmp_path):
    with disk.tmpfs(kilobytes=256) as root:
        disk.read_only(root)
        output = server.run("train", recipe, "--out", root / "run", cwd=folder, code=2)
        assert "out: " in output
        assert "parameters" not in output  # the headline that comes after loading
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        output = server.run("train", recipe, "--out", out, cwd=folder, code=2)
        assert "is a file, not a folder" in output


# ---- settings, data and models that are others


def test_harmless_changes_are_shown_and_go_through(server, recipe, cut):
    settings = ("learner.microbatch_tokens=70", "rollout.batch=5", "checkpoint.keep=1", "steps=4")
    output = resume(server, recipe, cut, "--set", *settings)
    assert "learner.microbatch_tokens: the run was started with 4096, now it is 70" in output
    assert "steps: the run was started with 3, now it is 4" in output
    assert "continuing after step 2" in output
    assert [row["step"] for row in crashing.rows(cut) if "loss" in row] == [1, 2, 3, 4]


def test_a_run_of_a_version_with_fewer_settings_goes_on(server, recipe, cut):
    """Its settings do not name them: each is at its default, which does what was done before."""
    lacking = ("head_std", "warmup_steps", "schedule", "on_failure", "floor")
    lines = (cut / "config.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.partition(" = ")[0] not in lacking]
    assert len(kept) < len(lines) - 3
    (cut / "config.toml").write_text("".join(kept))
    said = resume(server, recipe, cut, "--set", "learner.schedule='cosine'", code=2)
    assert "learner.schedule: the run was started with 'constant', now it is 'cosine'" in said
    assert not any(f"{name}:" in said for name in set(lacking) - {"schedule"}), said
    output = resume(server, recipe, cut)
    assert not any(f"{name}: the run was started with" in output for name in lacking)
    assert "continuing after step 2" in output
    assert not (cut / "changes.jsonl").exists()


def test_dangerous_changes_are_refused_with_each_difference_unless_allowed(server, recipe, cut):
    settings = ("seed=4", "rollout.completions=2", "objective.beta=0.02", "learner.lr=1e-3", "rewards=[{name='gsm8k'}]")
    said = ("seed: the run was started with 3, now it is 4", "rollout.completions: the run was started with 3, now",
            "objective.beta: the run was started with 0.01, now", "learner.lr: the run was started with 0.01, now",
            "rewards.1.name: the run was started with")  # fmt: skip
    config = (cut / "config.toml").read_bytes()
    output = resume(server, recipe, cut, "--set", *settings, code=2)
    for line in said:
        assert line in output
    assert "--allow-changes" in output
    assert (cut / "config.toml").read_bytes() == config
    output = resume(server, recipe, cut, "--set", *settings, "--allow-changes")
    for line in said:
        assert f"note: {line}" in output
    assert "continuing after step 2" in output
    assert "completions = 2" in (cut / "config.toml").read_text()
    # The rows of steps 1 and 2 are of other settings than config.toml's: whoever reads the run is told.
    told = "After step 2 the run went on with changes: learner.lr was 0.01, is 0.001; "
    assert told in (cut / "report.html").read_text()
    assert f"step 2: {told}" in (cut / "events.log").read_text()
    exported = folder_of_step(server, cut, 2), folder_of_step(server, cut, 3)
    before, after = ((path / "README.md").read_text() for path in exported)
    assert ("lr = 0.01\n" in before, "lr = 0.001\n" in before) == (True, False)
    assert ("lr = 0.01\n" in after, "lr = 0.001\n" in after) == (False, True)
    # The checkpoint of step 2 has seen nothing of it.
    assert (told in before, told in after) == (False, True)


def folder_of_step(server: Server, run: Path, step: int) -> Path:
    """The model of a checkpoint, with its card."""
    out = run.parent / f"{run.name} {step}"
    server.run("export", "model", run, "--step", step, "--out", out, cwd=run.parent)
    return out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("learner.optimizer=adamw-8bit",), "optimizer: 'adamw' in the checkpoint, 'adamw-8bit' here"),
        (("lora.rank=2",), "lora_A.default.weight: missing in the checkpoint"),
        (("model=other",), "in the checkpoint, (260, 32)"),
    ],
    ids=["optimizer", "adapters", "model"],
)
def test_what_does_not_fit_is_refused_with_the_differences_even_where_changes_are_allowed(
    server, folder, recipe, cut, settings, said
):
    import tiny

    if not (folder / "other").exists():
        tiny.save(folder / "other")
    before = (cut / "config.toml").read_bytes(), (cut / "metrics.jsonl").read_bytes()
    output = resume(server, recipe, cut, "--set", *settings, "--allow-changes", code=2)
    assert "the checkpoint is of another model or optimizer" in output
    assert said in output
    assert before == ((cut / "config.toml").read_bytes(), (cut / "metrics.jsonl").read_bytes())


def test_another_rank_of_adapters_is_refused_with_the_shapes(server, folder):
    path = crashing.recipe(folder, "lora", steps=1, checkpoint={"every": 1}, eval={"every": 0, "size": 2})
    server.run("train", path, "--out", "rank", cwd=folder)
    more = ("--set", "lora.rank=2", "steps=2")
    output = resume(server, path, folder / "rank", *more, "--allow-changes", code=2)
    assert "note: lora.rank: the run was started with 4, now it is 2" in output
    assert "(4, 64) torch.float32 in the checkpoint, (2, 64)" in output


def test_a_checkpoint_of_another_version_is_refused(server, recipe, cut):
    path = cut / "checkpoints" / "000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": manifest["format"] + 1}))
    assert "by a newer trew" in resume(server, recipe, cut, code=2)


def test_other_data_are_refused_unless_allowed(server, folder, recipe):
    rows = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1)} for i in range(12)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--set", "data.task=prompts", "data.args={}", f"data.train={data}", "steps=1")
    server.run("train", recipe, "--out", "data", *given, cwd=folder)
    rows[3]["answer"] = "5"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (*given[:-1], "steps=2")
    output = resume(server, recipe, folder / "data", *more, code=2)
    assert "the data changed since this run began" in output
    output = resume(server, recipe, folder / "data", *more, "--allow-changes")
    assert "the data changed since this run began" in output
    assert "continuing after step 1" in output
    assert "; the data changed since this run began" in (folder / "data" / "report.html").read_text()


def test_a_reward_or_an_environment_whose_file_changed_is_refused_unless_allowed(server, folder, recipe):
    def told(path: Path, *given: str) -> None:
        """Runs a step, changes the file, and goes on."""
        run = folder / path.stem
        server.run("train", recipe, "--out", run, "--set", *given, "steps=1", cwd=folder)
        assert "continuing after step 1" in resume(server, recipe, run, "--set", "steps=2")
        path.write_text(path.read_text().replace("1.0", "2.0"))
        output = resume(server, recipe, run, "--set", "steps=3", code=2)
        assert f"what this run reads besides its data changed since its checkpoint ({path.stem}: {path.name})" in output
        output = resume(server, recipe, run, "--set", "steps=3", "--allow-changes")
        assert "steps before and after cannot be compared" in output
        resume(server, recipe, run, "--set", "steps=4")

    (folder / "scores.py").write_text("def scores(completions, **_): return [1.0 * len(c) for c in completions]\n")
    told(folder / "scores.py", f"rewards=[{{name='{folder}/scores.py:scores'}}]")
    (folder / "environment.py").write_text("def e(row, seed):\n    yield f'{seed}?'\n    return 1.0\n")
    one_turn = (f"environment.name={folder}/environment.py:e", "environment.workers=1", "environment.turns=1")
    told(folder / "environment.py", *one_turn, "data.task=prompts", "data.args={}", "rewards=[]")


@pytest.mark.parametrize("role", ["reference", "teacher", "reward model"])
def test_a_model_beside_the_policy_that_changed_is_refused_unless_allowed(server, folder, recipe, role):
    """A folder that another training has written over since."""
    beside, run = folder / f"{role} beside", folder / f"{role} run"
    save = scorer_help.save_scorer if role == "reward model" else tiny.save
    save(beside, seed=1)
    sets = {
        "reference": (f"model={beside}", "objective.beta=0.1"),
        "teacher": (f"teacher.model={beside}", "objective.preset=opd"),
        "reward model": (f"rewards=[{{model='{beside}'}}]",),
    }[role]
    server.run("train", recipe, "--out", run, "--set", *sets, "steps=1", cwd=folder)
    assert "continuing after step 1" in resume(server, recipe, run, "--set", "steps=2")
    save(beside, seed=2)
    output = resume(server, recipe, run, "--set", "steps=3", code=2)
    assert f"what this run reads besides its data changed since its checkpoint ({role} {beside})" in output
    assert "continuing after step 2" in resume(server, recipe, run, "--set", "steps=3", "--allow-changes")


@pytest.mark.parametrize("what", ["chat template", "tokenizer"])
def test_another_tokenizer_or_chat_template_is_refused_unless_allowed(server, folder, recipe, what):
    """They are read again from the model's folder: the same data would become other prompts, without a word."""
    model, run = folder / f"model of another {what}", folder / f"another {what}"
    tiny.save(model)
    server.run("train", recipe, "--out", run, "--set", f"model={model}", "steps=1", cwd=folder)
    assert "continuing after step 1" in resume(server, recipe, run, "--set", "steps=2")
    if what == "tokenizer":
        file = model / "tokenizer.json"
        table = json.loads(file.read_text())
        vocabulary = table["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        file.write_text(json.dumps(table))
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "Now: " + tokenizer.chat_template
        tokenizer.save_pretrained(model)
    output = resume(server, recipe, run, "--set", "steps=3", code=2)
    assert f"what this run reads besides its data changed since its checkpoint ({what})" in output
    assert "continuing after step 2" in resume(server, recipe, run, "--set", "steps=3", "--allow-changes")


# ---- ends and clocks


def test_a_run_at_its_end_is_complete_and_nothing_is_touched(server, recipe, whole):
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in whole.rglob("*") if p.name != "run.lock"}
    output = resume(server, recipe, whole)
    assert "already complete: 3 of 3 steps" in output
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before}
    output = resume(server, recipe, whole, "--set", "steps=2", code=2)
    assert "steps: got 2" in output
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before}


def test_a_finished_run_that_takes_more_steps_is_not_a_finished_one_meanwhile(server, folder, recipe, whole):
    """Whoever read its summary took it for one, with the accuracy of its former end: a comparison counted it."""
    shutil.copytree(whole, folder / "more")
    more = ("--out", "more", "--resume", "--set", "steps=5")
    command = server.start("train", recipe, *more, cwd=folder, hold="trew.training.loop:update:1").held()
    command.kill(signal.SIGKILL)
    command.wait()
    for name in ("summary.json", "report.html"):
        assert (whole / name).exists()
        assert not (folder / "more" / name).exists()
    server.run("train", recipe, *more, cwd=folder)
    assert json.loads((folder / "more" / "summary.json").read_text())["steps"] == 5
    assert (folder / "more" / "report.html").exists()


def test_a_finished_run_without_checkpoints_is_not_started_over(server, folder, recipe):
    settings = ("--set", "checkpoint.every=0", "steps=1")
    server.run("train", recipe, "--out", "none", *settings, cwd=folder)
    assert "already complete" in resume(server, recipe, folder / "none", *settings)
    output = resume(server, recipe, folder / "none", "--set", "checkpoint.every=0", "steps=2", code=2)
    assert "is a finished run without a checkpoint" in output
    assert (folder / "none" / "summary.json").exists()


def test_a_run_that_was_stopped_before_its_first_step_starts_with_it(server, folder, recipe, whole):
    code, _ = crashing.run(server, folder, recipe, "--out", "start", instant="generation/before:2")
    assert code == -9
    output = resume(server, recipe, folder / "start")
    assert "has no checkpoint yet; starting at step 1" in output
    assert differences(whole, folder / "start") == []


def test_clocks_and_lines_from_the_future_have_no_effect(server, recipe, whole, cut):
    later = 4_000_000_000
    os.utime(cut / "checkpoints" / "000001" / "state.json", (later, later))
    os.utime(cut / "checkpoints" / "000001", (later, later))  # the older one looks newer
    os.utime(cut / "checkpoints" / "000002", (0, 0))
    with (cut / "events.log").open("a") as file:
        file.write("2096-10-02T07:06:40+00:00 hello\n")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": 1.0, "time": 4000000000}\n')
    shutil.copy(cut / "rollouts" / "000003.parquet", cut / "rollouts" / "000040.parquet")
    output = server.run("train", recipe, "--out", cut, "--resume", cwd=recipe.parent, TREW_CLOCK="jumps")
    assert "continuing after step 2" in output
    assert differences(whole, cut) == []
