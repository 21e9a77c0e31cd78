"""Whole runs through the real command line, on a tiny model: train, interrupt, resume, evaluate, report."""

from __future__ import annotations

import json
import signal
import stat
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiers
import tiny
import trew
from forks import wait_for
from recipe_help import assert_equal_weights, final_weights, metrics, training_rows
from recipe_help import recipe as recipe_of
from trew.cli.main import main
from trew.config import load
from trew.utils.console import Silent

SETTINGS = {
    "steps": 3, "reward": "reward.py:shorter", "objective": {"preset": "grpo", "beta": 0.01},
    "learner": {
        "lr": 1e-3, "minibatch_prompts": 2, "inner_updates": 2, "schedule": "cosine", "warmup_steps": 2,
    },
    "eval": {"size": 10, "every": 2}, "checkpoint": {"every": 1},
}  # fmt: skip

# A reward that a random model can get: differs within groups, and learning moves it.
REWARD = """
def shorter(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(answer)
    return [sum(i % 2 for i in ids) / 6 for ids in completion_ids]
"""


IN_STEP_3 = "trew.learner.step:Learner.accumulate:9"  # two minibatches a step, each learned from twice


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "llama")


def written(folder: Path, model: Path) -> Path:
    """The recipe in a folder, with its reward."""
    (folder / "reward.py").write_text(REWARD)
    path = folder / "tiny.toml"
    path.write_text(recipe_of(model, **SETTINGS))
    return path


@pytest.fixture
def recipe(tmp_path, model) -> Path:
    return written(tmp_path, model)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model, server) -> Callable[[int], Path]:
    """A run of the recipe with so many steps that nobody disturbed, made once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = written(folder, model)

    @cache
    def run(steps: int) -> Path:
        server.run("train", path, "--out", str(steps), "--set", f"steps={steps}", cwd=folder)
        return folder / str(steps)

    return run


@pytest.fixture
def cli(server, tmp_path) -> Callable[..., str]:
    """The command line, in a process of its own; what it printed."""
    return partial(server.run, cwd=tmp_path)


def same_learning(a: Path, b: Path) -> None:
    """Two runs learned the same to the last bit: weights, metrics (but for clocks), completions."""
    assert_equal_weights(a, b)
    clocks = {"seconds", "tokens_per_second"}
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert {k: v for k, v in x.items() if k not in clocks and not k.endswith("/seconds")} == {
            k: v for k, v in y.items() if k not in clocks and not k.endswith("/seconds")
        }
    for path in sorted((a / "rollouts").glob("*.parquet")):
        tables = [
            pq.read_table(run / "rollouts" / path.name).drop_columns(["reward_seconds", "part_seconds"])
            for run in (a, b)
        ]
        assert tables[0].equals(tables[1])


def test_a_run_leaves_everything_that_its_folder_promises(recipe, tmp_path, cli):
    out = cli("train", recipe, estimated=True)
    run = tmp_path / "runs" / "tiny"
    assert "before training (n = 10)" in out
    assert "tokens/s" in out
    summary = json.loads((run / "summary.json").read_text())
    for key in ("task", "model", "objective", "seed", "steps", "seconds", "tokens_per_second", "peak_memory_bytes",
                "n_eval", "accuracy_before", "accuracy_after", "versions", "device"):  # fmt: skip
        assert key in summary
    assert summary["n_eval"] == 10
    assert summary["accuracy_after"]["low"] <= summary["accuracy_after"]["mean"] <= summary["accuracy_after"]["high"]

    memory = json.loads((run / "memory.json").read_text())
    assert memory["planned"]["processes"][0]["memory"].keys() >= {"generating", "training"}
    assert memory["measured"][0]["who"] == "rank 0"
    assert memory["measured"][0]["peak_bytes"] <= summary["peak_memory_bytes"]

    assert [r["step"] for r in metrics(run) if "eval_accuracy" in r] == [0, 2, 3]
    table = training_rows(run)
    assert [r["step"] for r in table] == [1, 2, 3]
    for r in table:
        for name in ("reward", "entropy", "kl", "ratio", "clip_share", "completion_length", "lr", "grad_norm", "loss",
                     "truncated_share", "zero_signal_share", "tokens_per_second", "reward/shorter"):  # fmt: skip
            assert name in r, name
        parts = [r[f"{name}/seconds"] for name in ("rollouts", "update", "publish")]
        assert min(parts[:2]) > 0.001
        assert sum(parts) == pytest.approx(r["seconds"])
    assert table[0]["policy_version"] == 4  # two minibatches, two inner updates
    assert table[0]["ratio"] != 1.0

    rollouts = pq.read_table(run / "rollouts" / "000001.parquet").to_pylist()
    assert len(rollouts) == 12
    for row in rollouts:
        assert row["score"] == pytest.approx(sum(i % 2 for i in row["token_ids"]) / 6)
    by_prompt: dict[str, list[dict]] = {}
    for row in rollouts:
        by_prompt.setdefault(row["uid"], []).append(row)
    for group in by_prompt.values():
        assert sum(r["advantages"][0] for r in group) == pytest.approx(0, abs=1e-5)
        best = max(group, key=lambda r: r["score"])
        assert best["advantages"][0] >= 0

    final = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert len(tokenizer) <= final.get_input_embeddings().num_embeddings
    assert (run / "config.toml").exists()
    assert "<html" in (run / "report.html").read_text()
    # Nobody else reads them, whatever the umask, also where the folder was there before and others may enter it.
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.iterdir() if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.iterdir() if path.is_dir()} == {0o700}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000002", "000003"]


def test_the_same_command_twice_gives_the_same_bits_and_another_seed_others(recipe, tmp_path, cli, undisturbed):
    for name, seed in (("b", 3), ("c", 4)):
        cli("train", recipe, "--out", name, "--set", f"seed={seed}")
    same_learning(undisturbed(3), tmp_path / "b")
    first, other = final_weights(undisturbed(3)), final_weights(tmp_path / "c")
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("share", tiers.some(["true", "false"], ["true"]))
def test_how_the_step_is_cut_for_memory_does_not_change_what_is_learned(recipe, tmp_path, share, cli, undisturbed):
    settings = ("learner.microbatch_tokens=40", f"learner.share_prompts={share}", "rollout.batch=5")
    cli("train", recipe, "--out", "b", "--set", *settings)
    first, second = final_weights(undisturbed(3)), final_weights(tmp_path / "b")
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=2e-4)


def test_interrupt_then_resume_equals_never_interrupted(recipe, tmp_path, cli, server, undisturbed):
    settings = ("--set", "steps=6")
    command = server.start("train", recipe, "--out", "cut", *settings, cwd=tmp_path, hold=IN_STEP_3).held()
    command.kill(signal.SIGINT).says("stopping after this step").go()
    assert command.wait() == 130, command.text()
    assert "--resume" in command.text()
    assert "Traceback" not in command.text()

    refused = cli("train", recipe, "--out", "cut", *settings, code=2)
    assert "--resume" in refused
    out = cli("train", recipe, "--out", "cut", *settings, "--resume")
    assert "continuing after step 3" in out
    assert (tmp_path / "cut" / "events.log").read_text().endswith(" continued after step 3\n")
    same_learning(undisturbed(6), tmp_path / "cut")


@pytest.mark.nightly
def test_kill_9_then_resume_equals_never_killed(recipe, tmp_path, cli, server, undisturbed):
    command = server.start("train", recipe, "--out", "cut", "--set", "steps=6", cwd=tmp_path, hold=IN_STEP_3).held()
    wait_for(lambda: (tmp_path / "cut" / "checkpoints" / "000002").exists(), command.text)
    assert command.kill(signal.SIGKILL).wait() == -signal.SIGKILL
    cli("train", recipe, "--out", "cut", "--set", "steps=6", "--resume")
    same_learning(undisturbed(6), tmp_path / "cut")


def test_resuming_another_run_is_refused_with_the_differences(recipe, tmp_path, cli):
    first = cli("train", recipe, "--out", "a", "--resume", "--set", "steps=1")
    assert "a holds no run to continue: this one starts at step 1" in first
    out = cli("train", recipe, "--out", "a", "--resume", "--set", "learner.lr=1e-4", "steps=2", code=2)
    assert "learner.lr: the run was started with 0.001, now it is 0.0001" in out
    out = cli("train", recipe, "--out", "a", "--resume", "--set", "eval.temperature=1.0", code=2)
    assert "eval.temperature: the run was started with 0.0, now it is 1.0" in out
    more = cli("train", recipe, "--out", "a", "--resume", "--set", "steps=2")
    assert "continuing after step 1" in more
    assert [r["step"] for r in training_rows(tmp_path / "a")] == [1, 2]


def test_dry_run_shows_everything_and_trains_nothing(recipe, tmp_path, cli):
    out = cli("train", recipe, "--dry-run")
    for expected in ("[rollout]", "A_i = (R_i - mean(R)) / std(R)", "── prompt", "tokens", "Nothing was trained"):
        assert expected in out
    assert not (tmp_path / "runs").exists()


def test_dapo_replaces_groups_without_signal(recipe, tmp_path, cli):
    """A reward that only some prompts can earn: the others' groups are all equal and must be replaced."""
    (tmp_path / "reward.py").write_text(
        "def shorter(completions, completion_ids, answer, **_):\n"
        "    return [float(ids[0] % 2) if int(a) % 2 else 0.0 for ids, a in zip(completion_ids, answer)]\n"
    )
    settings = ("--set", "objective.preset=dapo", "objective.beta=0", "steps=2", "rollout.refills=20")
    cli("train", recipe, "--out", "a", *settings)
    for row in training_rows(tmp_path / "a"):
        assert row["groups_sampled"] > 4
        assert row["zero_signal_share"] > 0
    for path in (tmp_path / "a" / "rollouts").glob("*.parquet"):
        trained = [r for r in pq.read_table(path).to_pylist() if r["advantages"] is not None]
        assert len(trained) == 12
        assert all(r["advantages"][0] != 0 for r in trained)


BAD = [
    ("model=./nowhere", "nowhere"),
    ("rollout.completions=1", "rollout.completions: got 1"),
    ("data.task=aritmetic", "did you mean 'arithmetic'"),
    ("data.args.larges=3", "larges"),
    ("objective.preset=grop", "did you mean 'grpo'"),
    ("objective.eps_hi=0.3", "eps_hi"),
    ("rewards=[{name='gsm9k'}]", "gsm9k"),
    ("rewards=[{name='missing.py:f'}]", "missing.py"),
    ("eval.correct_reward=x", "eval.correct_reward: got 'x'"),
    ("data.max_prompt_tokens=3", "max_prompt_tokens"),
    ("rollout.prompts=100000", "rollout.prompts: got 100000"),
    ("device=cuda:7", "cuda"),
]


@pytest.mark.parametrize(("setting", "expected"), BAD, ids=[s for s, _ in BAD])
def test_bad_settings_are_refused_before_anything_is_written(recipe, tmp_path, monkeypatch, capsys, setting, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["train", str(recipe), "--set", setting])
    assert left.value.code == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_problems_of_different_rooms_are_told_together(recipe, cli):
    settings = ("model=./nowhere", "objective.preset=grop", "rewards=[{name='gsm9k'}]", "learner.lr=-1")
    out = cli("train", recipe, "--set", *settings, code=2)
    for expected in ("nowhere", "grop", "gsm9k", "learner.lr"):
        assert expected in out


def test_eval_and_report_commands(recipe, model, tmp_path, cli):
    cli("train", recipe, "--out", "a", "--set", "steps=1")
    out = cli("eval", model, "--task", "arithmetic", "--size", "8", "--max-tokens", "4")
    assert "n = 8" in out or "8" in out
    sampled = ("--samples", "4", "--temperature", "1.0")
    out = cli("eval", "a/final", "--task", "arithmetic", "--size", "8", "--max-tokens", "4", *sampled)
    assert "pass@4" in out
    cli("report", "a", "--out", "both.html")
    assert "<html" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    "kind", tiers.some(["qwen2", "qwen3", "gemma", "gemma3", "gpt_neox", "gpt2"], ["gemma3", "gpt2"])
)
def test_every_model_family_trains(recipe, tmp_path, kind):
    folder = tiny.save(tmp_path / "model", kind)
    config = load(recipe, [f"model={folder}", "steps=1", "eval.size=4", f"out={tmp_path / 'a'}"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prompts are computed once per completion.*window")  # gemma3's
        trew.train(config, display=Silent())
    assert training_rows(tmp_path / "a")[0]["grad_norm"] > 0
