"""What trew plan --cluster forecasts: by the rates that were given, and with its assumptions named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_help import recipe
from test_estimate import saved
from trew.cli.main import main
from trew.config import EnvironmentConfig, load
from trew.estimate.cluster import GIB, Fleet
from trew.estimate.forecast import Measured, outlook
from trew.estimate.simulation import Work, log_normal, simulate
from trew.estimate.sizes import sizes_of
from trew.estimate.virtual_servers import ServerSpecs
from trew.objective import preset
from trew.runs import changes
from trew.runs.changes import RunChange

RATES = ["token_s=0.02", "sequence_s=0.001", "update_s=3", "sync_s=0.5", "tokens=30", "sigma=0.7", "slots=16"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    text = recipe(
        saved(tmp_path, "smollm"), reward="arithmetic", rollout={"prompts": 8, "completions": 2, "max_tokens": 60},
        objective={"preset": "grpo", "correction": "tis"}, cluster={"rollout": "vllm", "servers": 2, "staleness": 1},
    )  # fmt: skip
    (tmp_path / "recipe.toml").write_text(text)
    return str(tmp_path / "recipe.toml")


def planned(capsys: Any, *args: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    shown = capsys.readouterr()
    assert ended.value.code == code, shown.err
    return shown.out if not code else " ".join(shown.err.split())


def test_given_rates_are_simulated(path, capsys):
    found = json.loads(planned(capsys, path, "--cluster", "--json", "--rates", *RATES))["forecast"]
    assert sorted(found["forecasts"]) == ["0", "1", "2", "4"]
    assert {rate["source"] for rate in found["rates"].values()} == {"given"}
    lengths = log_normal(30, 0.7, 60)
    expected = simulate(ServerSpecs(2, 16, 0.02, 0.001), Work(8, 2, 1, 3.0, 0.5, lengths, steps=26, warm_up=6))
    assert found["forecasts"]["1"]["seconds"] == expected.seconds


def test_the_text_names_every_assumption(path, capsys):
    out = planned(capsys, path, "--cluster", "--gpus", "8", "--gpu-gib", "80", "--rates", "update_s=3")
    assert "<- this recipe" in out
    assert "given; seconds that the learner" in out
    assert "assumed: 40% of an H100's memory bandwidth" in out
    assert "assumed: a third of rollout.max_tokens" in out
    assert "may be wrong by a factor" in out
    assert "may be wrong" not in planned(capsys, path, "--cluster", "--rates", *RATES)


@pytest.mark.parametrize(
    ("setting", "slots"), [("rollout.batch=48", 48), ("cluster.server_args={max-num-seqs=24}", 24), ("steps=3", 128)]
)
def test_a_server_decodes_as_many_sequences_as_it_is_started_with(setting, slots, path, capsys):
    found = json.loads(planned(capsys, path, "--cluster", "--json", "--rates", *RATES[:-1], "--set", setting))
    assert found["forecast"]["rates"]["slots"]["value"] == slots


def test_weights_in_bfloat16_stop_servers_for_half_as_long(path, capsys):
    rates = [rate for rate in RATES if not rate.startswith("sync_s")]
    seconds = []
    for dtype in ("float32", "bfloat16"):
        out = planned(capsys, path, "--cluster", "--json", "--rates", *rates, "--set", f"learner.dtype={dtype}")
        seconds.append(json.loads(out)["forecast"]["rates"]["sync_s"]["value"])
    assert seconds[1] == seconds[0] / 2


def test_an_objective_that_sees_a_whole_step_takes_one_more_pass(path, capsys):
    """Three for the gradient and one for the log-probs of before, as completions are of older weights."""
    found = {}
    for name in ("dapo", "kl-cov"):
        flags = ("--cluster", "--json", "--gpus", "8", "--gpu-gib", "80", "--set", f"objective.preset={name}")
        found[name] = json.loads(planned(capsys, path, *flags))["forecast"]["rates"]["update_s"]["value"]
    assert found["kl-cov"] == pytest.approx(5 / 4 * found["dapo"])


def test_a_critic_and_a_teacher_take_the_learners_time(path, capsys, tmp_path):
    """Of the policy three passes for the gradient and one of before; as many of a critic; and a teacher's own."""
    policy = sizes_of(load(Path(path)))
    teacher = saved(tmp_path / "teacher", "smollm", num_hidden_layers=4)
    larger = sizes_of(replace(load(Path(path)), model=teacher))
    shares = {
        ("objective.preset=dapo",): 4.0, ("objective.preset=ppo",): 8.0,
        ("objective.preset=opd", f"teacher.model={teacher}"):
            4.0 + (larger.linear + larger.head) / (policy.linear + policy.head),
    }  # fmt: skip
    found = {}
    for sets in shares:
        flags = ("--cluster", "--json", "--gpus", "8", "--gpu-gib", "80", "--set", *sets)
        found[sets] = json.loads(planned(capsys, path, *flags))["forecast"]["rates"]["update_s"]["value"]
    of_a_pass = found["objective.preset=dapo",] / 4
    assert {sets: value / of_a_pass for sets, value in found.items()} == pytest.approx(shares)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rates", "tokens=3"], "--rates: has no effect without --cluster"),
        (["--like", "runs/x"], "--like: has no effect without --cluster"),
        (["--cluster", "--rates", "speed=3", "slots=0", "sigma=x"], "got 'speed', accepts token_s (seconds of"),
        (["--cluster", "--rates", "speed=3", "slots=0", "sigma=x"], "got slots=0, accepts a number of at least 1"),
        (["--cluster", "--rates", "speed=3", "slots=0", "sigma=x"], "got sigma=x, accepts"),
        (["--cluster", "--like", "nowhere"], "--like: nowhere cannot be read"),
        (["--cluster", "--rates", "tokens=3", "--set", "cluster.rollout='embedded'", "cluster.servers=0",
          "cluster.staleness=0"], "forecasts are for runs on servers"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused(path, capsys, flags, said):
    assert said in planned(capsys, path, *flags, code=2)


def a_run(folder: Path, text: str, *, timed: bool) -> Path:
    """The files that a forecast reads of a run: 3 groups of 2, two steps."""
    run = folder / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.toml").write_text(text)
    rows = [{"step": step} | ({"update/seconds": 7.0 + step} if timed else {}) for step in range(3)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sampled = [[True] * n for n in (3, 4, 10, 12)] + [[False, True, True]] * 2  # the last: two of three were sampled
    table = {"step": [1, 1, 1, 1, 2, 2], "group": [0, 0, 1, 1, 0, 0], "sampled": sampled}
    pq.write_table(pa.table(table), run / "rollouts" / "000001.parquet")
    return run


@pytest.mark.parametrize("timed", [True, False])
def test_an_earlier_run_gives_lengths_by_group_and_the_learners_seconds(path, tmp_path, capsys, timed):
    run = a_run(tmp_path, Path(path).read_text(), timed=timed)
    found = Measured.of(run)
    assert [lengths.tolist() for lengths in found.groups] == [[3, 4], [10, 12], [2, 2]]
    assert found.update_s == (pytest.approx(8.5 / 16) if timed else None)
    drawn = [sorted(found.draw(np.random.default_rng(seed), 2).tolist()) for seed in range(30)]
    assert {tuple(each) for each in drawn} == {(3, 4), (10, 12), (2, 2)}, "completions of different prompts are mixed"
    out = planned(capsys, path, "--cluster", "--like", str(run), "--rates", "token_s=1", "sequence_s=0", "sync_s=0")
    assert "3 groups of" in out
    assert ("measured in" in out) == timed


def test_an_earlier_run_that_went_on_under_other_settings_is_read_from_there_on(path, tmp_path):
    """Rows before are of other numbers of prompts, completions or tokens than config.toml says."""
    run = a_run(tmp_path, Path(path).read_text(), timed=True)
    change = RunChange(1, (run / "config.toml").read_text(), ("rollout.prompts was 2, is 4",))
    (run / "changes.jsonl").write_text(changes.write([change]))
    found = Measured.of(run)
    assert [lengths.tolist() for lengths in found.groups] == [[2, 2]]
    assert found.update_s is None, "one step is left, which may compile"


def test_an_episode_samples_in_all_of_its_turns(path):
    c, found = load(Path(path)), {}
    for turns in (1, 4):
        plays = replace(c, environment=EnvironmentConfig(name="guess", turns=turns))
        given = {"fleet": Fleet(1, 8, 80 * GIB), "sequences": None, "given": {}, "like": None}
        found[turns] = outlook(plays, objective=preset("grpo"), prompt=12, **given)
    assert found[1].rates["tokens"].value == 20
    assert found[4].rates["tokens"].value == 80
    assert found[4].rates["tokens"].source == "assumed: a third of rollout.max_tokens in each of environment.turns"
    assert found[4].forecasts[1].seconds > found[1].forecasts[1].seconds


def test_a_run_without_servers_has_no_forecast(path, capsys):
    out = planned(
        capsys, path, "--cluster", "--set", "cluster.rollout='embedded'", "cluster.servers=0", "cluster.staleness=0",
        "objective.correction='none'",
    )  # fmt: skip
    assert "forecast" not in out
