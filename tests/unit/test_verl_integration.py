"""What of verl's integration needs no verl: the table, the page about it, the command line."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import trew
from trew.cli.main import run
from trew.config import parse
from trew.errors import ConfigError
from trew.integrations import verl
from trew.integrations.verl import from_variable, offer
from trew.integrations.verl.export import Export, export, hydra
from trew.integrations.verl.hooks import AdvantageEstimator, PolicyLoss
from trew.integrations.verl.offered import table

ROOT = Path(__file__).parents[2]


def test_every_preset_is_offered_or_has_a_reason() -> None:
    found = table()
    assert tuple(found) == trew.presets()
    assert {name for name, o in found.items() if o.loss and o.advantage} == {
        "grpo-process", "gigpo", "mt-grpo", "turn-returns", "gtpo", "grpo-s", "cppo", "high-entropy-tokens",
        "entropy-advantage", "otb", "sft", "rft", "vapo", "dpo",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "reason"),
    [({"correction": "tis"}, "rollout_correction"), ({"entropy_bonus": 0.1}, "entropy_coeff"),
     ({"overlong_filtering": True}, "denominators"), ({"beta": 0.1, "kl": "k3-corrected"}, "no estimator"),
     ({"aggregate": "prompt-mean-token-mean"}, "one micro-batch at a time")],
)  # fmt: skip
def test_options_that_verl_cannot_honour_are_refused(override: dict, reason: str) -> None:
    assert not offer(trew.preset("dapo")).loss
    assert reason in offer(trew.preset("dapo", **override)).loss


def test_an_overlong_punishment_and_a_kl_to_go_with_a_baseline_have_no_estimator() -> None:
    assert "reward_manager.name=dapo" in offer(trew.preset("dapo", overlong_cache=8)).advantage
    assert "baseline cannot tell" in offer(trew.preset("grpo", beta=0.1, kl="k1", kl_place="to-go")).advantage
    assert not offer(trew.preset("reinforce", beta=0.1, kl="k1", kl_place="to-go")).advantage


def test_a_kl_in_the_advantages_that_verl_s_own_estimators_compute() -> None:
    found = offer(trew.preset("remax", beta=0.1))  # verl's remax sums token rewards from each token on, KL included
    assert not found.loss
    assert ("algorithm.use_kl_in_reward", "True") in found.settings
    assert ("algorithm.kl_ctrl.kl_coef", "0.1") in found.settings
    for name, given, reason in (
        ("remax", {"kl_place": "reward"}, "kl_place = to-go"),
        ("gdpo", {"kl_place": "to-go"}, "without the KL"),
        ("otb", {"tail": "reward", "kl_place": "reward"}, "baseline cannot tell"),
    ):
        objective = trew.preset(name, beta=0.1, kl="k1", **given)
        assert reason in offer(objective).loss  # not silently without it
        assert not offer(objective.replace(divergence=(trew.objective.divergence.KL(),))).loss


def test_the_variable() -> None:
    made = from_variable('{"mine": {"preset": "dapo", "eps_high": 0.4}}')
    assert made == {"mine": trew.preset("dapo", eps_high=0.4)}
    for wrong in ("dapo", "[]", '{"mine": "dapo"}', '{"mine": {"eps_high": 0.4}}'):
        with pytest.raises(ConfigError, match=r"TREW_VERL.*dapo-wide"):
            from_variable(wrong)
    assert verl.registered() == {}  # there is no verl here


def exported(objective: dict, *rewards: dict, **tables: dict) -> Export:
    """The export of a recipe for gsm8k with this objective and these rewards."""
    given = {"model": "m", "data": {"task": "gsm8k", "train": "rows"}, "objective": objective, "rewards": list(rewards)}
    return export(parse(given | tables))


FORMATS = ({"name": "format"}, {"name": "format", "args": {"prefilled": "<think>"}})


def test_rewards_of_one_name_are_told_apart_by_their_numbers() -> None:
    keys = exported({"preset": "gdpo"}, {"name": "gsm8k"}, *FORMATS).keys
    assert keys["+algorithm.gdpo_reward_keys"] == "['gsm8k', 'format', 'format_2']"


def test_settings_that_are_switched_off_are_not_lost() -> None:
    off = {"overlong_filtering": False, "nll": 0.0, "entropy_bonus": 0.0, "correction": "none", "overlong_cache": 0}
    made = exported({"preset": "grpo", **off}, {"name": "gsm8k"})
    assert not any(key in line for line in made.lost for key in off)
    assert made.keys["algorithm.adv_estimator"] == "trew-grpo"
    # Switching off what the preset has makes it another objective, which verl can run.
    made = exported({"preset": "deepseek-v3.2", "kl": "k3", "correction": "none"}, {"name": "gsm8k"})
    assert '"correction": "none"' in made.environment["TREW_VERL"]


def test_that_nothing_watches_two_rewards_is_listed() -> None:
    made = exported({"preset": "grpo"}, {"name": "gsm8k", "verify_with": "format"}, FORMATS[0])
    assert any(line.startswith("rewards[0].verify_with = 'format': ") for line in made.lost)
    assert not any("verify_with" in value for value in made.keys.values())


def test_that_verl_has_no_not_judged_is_listed_where_a_function_could_say_so() -> None:
    own, built_in = (exported({"preset": "grpo"}, {"name": name}).lost for name in ("mine.py:f", "gsm8k"))
    assert [line for line in own if line.startswith("not judged, None of a reward function")]
    assert not any(line.startswith("not judged") for line in built_in)


def test_that_verl_puts_strings_into_the_chat_template_is_listed() -> None:
    def told(**data: object) -> bool:
        lost = exported({}, {"name": "gsm8k"}, data={"train": "rows", "eval": "rows", **data}).lost
        return any(line.startswith("prompts that are strings") for line in lost)

    assert [told(), told(args={"chat": True}), told(task="gsm8k")] == [True, False, False]


def test_that_verl_decays_norms_and_biases_is_listed() -> None:
    def told(decay: float, rank: int = 0) -> bool:
        tables = {"learner": {"weight_decay": decay}, "lora": {"rank": rank}}
        lost = exported({}, {"name": "gsm8k"}, **tables).lost
        return any(line.startswith(f"learner.weight_decay = {decay:g}: ") for line in lost)

    assert [told(0.01), told(0.0), told(0.01, rank=8)] == [True, False, False]


def test_bfloat16_carries_over_since_verl_has_it_anyway() -> None:
    wide, narrow = (
        "\n".join(exported({}, {"name": "gsm8k"}, learner={"dtype": dtype}).lost) for dtype in ("float32", "bfloat16")
    )
    assert "bfloat16" not in narrow
    assert "dtype" not in narrow
    assert "precision: verl computes in bfloat16" in wide


def test_a_function_called_score_is_told_apart_from_the_sum() -> None:
    own = {"name": "mine.py:score"}
    assert exported({"preset": "gdpo"}, own, *FORMATS).keys["+algorithm.gdpo_reward_keys"].startswith("['score_2', ")
    assert exported({"preset": "dapo"}, own, *FORMATS).keys["algorithm.filter_groups.metric"] == "'score_2'"


@pytest.mark.parametrize(
    ("objective", "rewards", "tables", "metric"),
    [({"preset": "dapo"}, (), {}, "reward"),
     # A group is replaced where all answers are right, also if they differ in form, or in length.
     ({"preset": "dapo"}, FORMATS, {}, "'gsm8k'"), ({"preset": "dapo", "overlong_cache": 8}, (), {}, "'gsm8k'"),
     ({"preset": "grpo", "dynamic_sampling": True, "overlong_cache": 8}, (), {}, "'gsm8k'"),
     ({"preset": "dapo"}, FORMATS, {"eval": {"correct_reward": "format_2"}}, "'format_2'"),
     # gpg compares the sum of all rewards, before the punishment.
     ({"preset": "gpg"}, FORMATS, {}, "reward"), ({"preset": "gpg", "overlong_cache": 8}, FORMATS, {}, "score")],
)  # fmt: skip
def test_verl_s_filter_of_groups_compares_what_ours_does(
    objective: dict, rewards: tuple, tables: dict, metric: str
) -> None:
    keys = exported(objective, {"name": "gsm8k"}, *rewards, **tables).keys
    assert keys["algorithm.filter_groups.metric"] == metric


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_a_reward_that_decides_what_is_correct_and_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"eval.correct_reward: got 'gsm9k' \(did you mean 'gsm8k'\?\), accepts gsm8k"
    ):
        exported({"preset": name}, {"name": "gsm8k"}, *FORMATS, eval={"correct_reward": "gsm9k"})


def test_what_verl_s_old_trainer_and_its_gdpo_leave_out_is_listed() -> None:
    made = exported({"preset": "gdpo", "dynamic_sampling": True, "overlong_cache": 8}, {"name": "gsm8k"}, *FORMATS)
    assert made.keys["trainer.use_v1"] == "False"
    assert not [
        key for key in made.keys if "filter_groups" in key or "overlong_buffer" in key or "reward_manager" in key
    ]
    lost = "\n".join(made.lost)
    assert "groups without signal stay" in lost
    assert "objective.overlong_cache = 8" in lost


@pytest.mark.parametrize("name", ["pass-at-k", "online-rft", "topr"])
def test_what_verl_takes_for_correct_is_listed(name: str) -> None:
    several = exported({"preset": name}, {"name": "gsm8k"}, *FORMATS).lost
    assert any(line.startswith("which answers are correct: ") for line in several)
    assert not any(line.startswith("which answers") for line in exported({"preset": name}, {"name": "gsm8k"}).lost)
    assert not any(line.startswith("which answers") for line in exported({"preset": "grpo"}, *FORMATS).lost)


def test_only_an_objective_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"^objective: got 'dapo', accepts an Objective, such as trew\.preset"):
        verl.register("x", "dapo")  # type: ignore[arg-type]


def test_export_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(ROOT / "recipes" / "gsm8k.toml"), tmp_path / "run.sh"
    assert run(["export", "verl", recipe]) == 0
    assert "python3 -m verl.trainer.main_ppo" in capsys.readouterr().out
    assert run(["export", "verl", recipe, "--out", str(out), "--set", "rollout.completions=16"]) == 0
    assert "actor_rollout_ref.rollout.n=16" in out.read_text()
    with pytest.raises(ConfigError, match="already exists"):
        run(["export", "verl", recipe, "--out", str(out)])


def test_files_of_prompts_are_named_after_their_recipe(tmp_path: Path) -> None:
    """Two scripts in one folder trained on the prompts of the first."""
    config = parse({"model": "m", "data": {"task": "arithmetic"}, "rewards": [{"name": "arithmetic"}]})
    made = export(config, recipe="recipes/first one.toml")
    assert made.keys["data.train_files"] == "'first one-train.parquet'"
    assert made.keys["data.val_files"] == "'first one-test.parquet'"
    assert "'first one-train.parquet' --to verl --split train" in made.script()
    named = export(config, recipe="b.toml", files=("rows.parquet", ""))
    assert (named.keys["data.train_files"], named.keys["data.val_files"]) == ("rows.parquet", "b-test.parquet")
    recipe = ROOT / "recipes" / "gsm8k.toml"
    assert run(["export", "verl", str(recipe), "--out", str(tmp_path / "run.sh")]) == 0
    assert "data.train_files=gsm8k-train.parquet" in (tmp_path / "run.sh").read_text()


def test_the_script_says_that_it_takes_rows_which_are_there_already(tmp_path: Path) -> None:
    script = exported({"preset": "grpo"}, {"name": "gsm8k"}).script().partition("python3 -m verl")[0]
    (tmp_path / "recipe-train.parquet").touch()
    (tmp_path / "test.parquet").touch()  # of something else
    (tmp_path / "trew").write_text('#!/bin/sh\necho converted "$4"\n')
    (tmp_path / "trew").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (
        done.stderr == "recipe-train.parquet: exists, and is taken as it is; remove it to convert the prompts of "
        "recipe.toml again\n"
    )
    assert done.stdout == "converted recipe-test.parquet\n"


def test_the_doctor_without_verl(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "verl"]) == 0
    assert "is not installed" in capsys.readouterr().out


def test_16_bit_log_probs_do_not_round_the_advantages() -> None:
    loss = PolicyLoss("grpo", trew.preset("grpo", beta=0.0))
    logprobs, advantages = torch.full((2, 2), -0.5, dtype=torch.bfloat16), torch.tensor([[1 / 3] * 2, [0.7] * 2])
    mask = torch.ones(2, 2)
    wide = loss(logprobs.float(), logprobs.float(), advantages, mask, "seq-mean-token-mean")[0]
    assert loss(logprobs, logprobs, advantages, mask, "seq-mean-token-mean")[0] == wide


@pytest.mark.parametrize("text", [r"\d+\.", "it's", r"a\'b", r"a\\'", "ends\\", "ends\\\\", "'", "", "two\n"])
def test_hydra_reads_the_text_that_was_written(text: str) -> None:
    written = hydra(text)
    # As its own reader has it: of backslashes before a quote every second one stays, and no other escapes anything; the
    # closing quote goes with those before it, or alone.
    read = re.sub(r"\\+'", lambda found: found[0][1::2], written[1:])
    assert (read if written.endswith("\\'") else read[:-1]) == text


def test_the_page_says_which_answers_topr_takes_for_correct():
    rewards, mask = torch.tensor([[1.5], [1.1], [0.4], [0.0]]), torch.ones(4, 1)
    advantages, _ = AdvantageEstimator("topr", trew.preset("topr"))(rewards, mask, np.array(["one prompt"] * 4))
    old = torch.full((4, 1), -1.0)
    now = (old + math.log(0.5)).requires_grad_()
    loss, _ = PolicyLoss("topr", trew.preset("topr"))(old, now, advantages, mask)
    loss.backward()
    # w r: 1 for correct answers, the ratio for wrong ones.
    assert (-4 * now.grad / advantages).flatten().tolist() == pytest.approx([1, 1, 0.5, 0.5])
    own = trew.preset("topr").loss(
        trew.TokenBatch.from_padded(
            logprobs=now.detach(), old_logprobs=old, mask=mask, rewards=rewards[:, 0], group_ids=torch.zeros(4).long()
        )
    )
    assert (own.weights * own.ratios).flatten().tolist() == pytest.approx([1, 1, 1, 0.5])
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    [told] = re.findall(r"\* \*\*Which answers are correct\*\*:(.*?)\n\*", page, re.S)
    assert "`topr` takes those with an advantage above 0" in told
