"""DPO as a user runs it: a planted preference is learned, stopped runs go on, and what does not fit is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sft_help
import tiny
from ranks_help import free_port, variables
from sft_help import rows, weights
from sft_help import trained as dpo
from trew.cli.main import run as command
from trew.errors import ConfigError
from trew.utils.toml import dump_table


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    tiny.save(folder / "model")
    # The better answer says "yes", whatever is asked: a rule that held-out pairs share.
    asked = [f"{i} < {j}?" for i in range(8) for j in range(4)]
    pairs = [{"prompt": [{"role": "user", "content": q}], "chosen": "yes", "rejected": "no"} for q in asked]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    return folder


def recipe(place: Path, name: str, *, data: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    own = {"task": "pairs", "train": str(place / "pairs.jsonl")} | (data or {})
    return sft_help.recipe(place, name, data=own, batch=4, held=4, **sections)


def test_held_out_pairs_are_measured_by_the_reference_that_a_step_was_trained_with(place):
    """By the one that the policy becomes after it, every margin was 0 and no pair counted as right."""
    moved = {"lr": 3e-3, "reference_every": 2}
    summary = dpo(recipe(place, "copied", sft={"epochs": 0}, steps=4, learner=moved))
    assert summary["after"]["accuracy"]["mean"] == 1.0
    assert summary["loss_after"]["high"] < summary["loss_before"]["low"]
    # And it moves once where a run is stopped right before.
    mixed = moved | {"reference_mix": 0.75}
    dpo(recipe(place, "mixed", sft={"epochs": 0}, steps=4, learner=mixed))
    dpo(recipe(place, "mixed-part", sft={"epochs": 0}, steps=2, learner=mixed))
    dpo(recipe(place, "mixed-part", sft={"epochs": 0}, steps=4, learner=mixed), resume=True)
    a, b = weights(place / "mixed"), weights(place / "mixed-part")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_planted_preference_is_learned_and_holds_for_pairs_held_out(place):
    summary = dpo(recipe(place, "learns"))
    assert summary["objective"] == "dpo"
    first, last = ([r for r in rows(place / "learns") if "loss" in r][i] for i in (0, -1))
    # Before the first update policy and reference are one: every margin is 0, and the loss log 2.
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["preference_margin"] == pytest.approx(0, abs=1e-6)
    assert summary["loss_before"]["mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["before"]["margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < 0.6
    assert last["preference_accuracy"] == 1.0
    assert last["preference_margin"] > 0.2
    assert summary["loss_after"]["high"] < summary["loss_before"]["low"]
    assert summary["after"]["accuracy"]["mean"] == 1.0
    evals = [r for r in rows(place / "learns") if "eval_loss" in r]
    assert [r["step"] for r in evals] == [0, 2, 4, 6, 7]
    assert evals[-1]["eval_preference_accuracy"] == 1.0
    assert evals[-1]["eval_preference_margin"] > 0.2
    assert "eval_perplexity" not in evals[-1]
    assert not {"ratio", "ess", "reward", "kl"} & last.keys()
    report = (place / "learns" / "report.html").read_text()
    assert ">chosen<" in report
    assert ">rejected<" in report
    assert ">score <" not in report


def test_a_resumed_training_is_equal_to_the_bit(place):
    own = {"sft": {"epochs": 0}, "objective": {"preset": "dpo", "dpo_beta": 0.5}}
    dpo(recipe(place, "whole", steps=6, **own))
    dpo(recipe(place, "part", steps=4, **own))
    dpo(recipe(place, "part", steps=6, **own), resume=True)
    a, b = weights(place / "whole"), weights(place / "part")
    assert all(torch.equal(a[name], b[name]) for name in a)
    one, two = ([{k: v for k, v in r.items() if "second" not in k} for r in rows(place / n)] for n in ("whole", "part"))
    assert [r for r in one if "loss" in r] == [r for r in two if "loss" in r]


def test_dpo_beta_and_adapters_and_micro_batches_change_what_they_should(place):
    plain = recipe(place, "plain", sft={"epochs": 0}, steps=2, checkpoint={"every": 0}, eval={"every": 0})
    dpo(plain)
    dpo(plain | {"out": str(place / "small"), "learner": plain["learner"] | {"microbatch_tokens": 40}})
    a, b = weights(place / "plain"), weights(place / "small")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4, msg=name)
    dpo(plain | {"out": str(place / "steep"), "objective": {"preset": "dpo", "dpo_beta": 2.0}})
    margins = [rows(place / name)[2]["preference_margin"] for name in ("plain", "steep")]
    assert margins[1] > 5 * margins[0] > 0
    dpo(plain | {"out": str(place / "lora"), "lora": {"rank": 2}})
    assert (place / "lora" / "final" / "adapter").is_dir()


@pytest.mark.nightly
def test_two_ranks_are_one_process(server, place):
    small = recipe(place, "two", sft={"batch": 8}, eval={"every": 0}, checkpoint={"every": 0})
    dpo(small | {"out": str(place / "one")})
    (place / "r.toml").write_text(dump_table(small | {"cluster": {"learner": 2}}))
    port = free_port()
    ranks = [server.start("sft", "r.toml", cwd=place, **variables(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
    one, two = ([r.get("loss") or r["eval_loss"] for r in rows(place / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": {"preset": "sft"}}, "got 'sft', which learns from demonstrations; accepts dpo for pairs"),
        ({"objective": {"preset": "grpo"}}, "got 'grpo', which learns from what a policy samples; accepts dpo"),
        ({"objective": {"preset": "dpo", "beta": 0.3}}, r"DPO's beta is objective\.dpo_beta = 0\.1; set that"),
        ({"objective": {"preset": "dpo", "nll": 0.3}}, "objective.nll: got 0.3, accepts 0 here: dpo compares"),
        ({"objective": {"preset": "dpo", "dynamic_sampling": True}}, "demonstrations are not sampled"),
        ({"sft": {"overlong": "truncate"}}, "sft.overlong: got 'truncate', accepts 'error' or 'drop' for pairs"),
        ({"sft": {"loss_on": "last"}}, "sft.loss_on: got 'last', but each answer of a pair is a single one"),
        ({"sft": {"max_tokens": 8}}, "rows are longer than 8 tokens"),
        ({"rewards": [{"name": "gsm8k"}]}, "rewards: got 1"),
        ({"data": {"task": "demonstrations", "train": "ROWS"}, "objective": {"preset": "dpo"}},
         "got 'dpo', which learns from preference pairs; accepts sft or rft for demonstrations"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(place, changes, why):
    table = recipe(place, "refused", **changes)
    if table["data"]["train"] == "ROWS":
        table["data"]["train"] = str(place / "rows.jsonl")
    with pytest.raises(ConfigError, match=why):
        dpo(table)
    assert not (place / "refused").exists()


def test_pairs_beside_demonstrations_are_refused(place):
    sets = [{"task": task, "train": str(place / file), "name": task, "weight": 1.0}
            for task, file in (("pairs", "pairs.jsonl"), ("demonstrations", "rows.jsonl"))]  # fmt: skip
    with pytest.raises(ConfigError, match=r"got 'demonstrations' beside 'pairs', accepts 'pairs' for every set"):
        dpo(recipe(place, "refused") | {"data": sets})


@pytest.mark.nightly  # as in test_sft_runs.py, on pairs
def test_the_commands(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    Path("pairs.toml").write_text(
        'model = "model"\nthreads = 1\n[data]\ntask = "pairs"\ntrain = "pairs.jsonl"\n[sft]\nbatch = 8\n'
        "[eval]\nsize = 2\n[learner]\nlr = 1e-3\n"
    )
    assert command(["sft", "pairs.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert 'preset = "dpo"' in shown
    assert "row 1 of step 1, chosen: " in shown
    assert "+│ yes" in shown
    assert "row 1 of step 1, rejected: " in shown
    assert "+│ no<" in shown
    assert "tokens are compared" in shown
    assert "steps of 8 pairs" in shown
    assert command(["plan", "pairs.toml"]) == 0
    plan = capsys.readouterr().out
    assert "8 pairs of up to" in plan
    assert "reference" in plan
    assert command(["sft", "pairs.toml"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert command(["export", "model", "runs/pairs", "--out", "exported"]) == 0
    card = Path("exported/README.md").read_text()
    assert "by direct preference optimisation" in card
    assert "Mean of DPO's loss over pairs" in card
    assert command(["report", "runs/pairs", "--out", "page.html"]) == 0
    Path("sampled.toml").write_text('model = "model"\n[data]\ntask = "gsm8k"\n[objective]\npreset = "dpo"\n')
    with pytest.raises(ConfigError, match=r"which learns from preference pairs, and here the policy samples"):
        command(["train", "sampled.toml", "--dry-run"])
