"""Every key of ``trew train-reward`` and of ``[iterate]`` does something, or is refused where it would do nothing."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import tiers
from scorer_help import group, save_scorer
from settings_help import Case, Runs, Seen, collect, furnish, holds, keys, same_result, says, watch_work
from trew.config import RewardConfig
from trew.errors import TrewError
from trew.iterate import Iterate, iterate, load_recipe
from trew.iterate.rounds import Rounds
from trew.iterate.settings import Recipe
from trew.reward_training import RewardTraining, load_settings, packed, plain, train_reward
from trew.runs.rollouts import write_rollouts
from trew.types import Score, ScoredGroup
from trew.utils.console import Display, Silent
from trew.utils.toml import toml_value

PAIRS = {
    "model": "lm", "steps": 2, "threads": 1, "data.pairs": "pairs.jsonl", "data.held_out": 0.3, "learner.lr": 1e-2,
    "learner.batch": 4, "checkpoint.every": 0, "learner.schedule": "constant", "learner.adam_eps": 1e-4,
}  # fmt: skip


def prepare(place: Path) -> Path:
    """Pairs as files, as chats and as the rollouts of a run."""
    rows = [{"prompt": f"q{i}", "chosen": "y" * (i + 1), "rejected": "no " * (12 - i)} for i in range(12)]
    for name, these in (("pairs", rows), ("held", rows[:5]), ("other", rows[2:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in these))
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    values = (1.0, 0.5, 0.2, 0.0)
    scored = [
        ScoredGroup(
            group("a", "bb", "ccc", "dddd", uid=f"u{i}", asked=f"q{i}"),
            tuple(Score(v, parts={"up": v, "down": -v}) for v in values),
        )
        for i in range(8)
    ]
    (place / "ranked" / "rollouts").mkdir(parents=True)
    write_rollouts(place / "ranked" / "rollouts" / "000001.parquet", scored, step=1)
    return place


class RewardRuns(Runs):
    """Trainings of reward models."""

    base = PAIRS

    def run(self, settings: Mapping[str, Any]) -> Seen:
        self.count += 1
        seen, said = Seen(folder=str(settings.get("out", f"reward-{self.count}"))), io.StringIO()
        display = Display(Console(file=said, width=200))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place)
            watch_work(patch, seen)
            real = plain.token_batches

            def batches(lengths: Any, *, budget: int) -> Any:
                found = list(real(lengths, budget=budget))
                seen.work["passes"] = seen.work.get("passes", 0) + len(found)
                return found

            packs = packed.PackedPairs._batches

            def packed_batches(pairs: Any, given: Any) -> Any:
                found = list(packs(pairs, given))
                seen.work["passes"] = seen.work.get("passes", 0) + len(found)
                seen.work["packed"] = True
                return iter(found)

            patch.setattr(plain, "token_batches", batches)
            patch.setattr(packed.PackedPairs, "_batches", packed_batches)
            try:
                train_reward(load_settings(None, flags={"out": seen.folder, **settings}), display=display)
            except TrewError as error:
                seen.refused = str(error)
            collect(Path(seen.folder), seen)
        seen.said = said.getvalue()
        return seen


REWARD_CASES: dict[str, Case] = {
    "model": Case("lm2", "weights"),
    "tokenizer": Case("tokenizer", "weights", CHATS := {"data.pairs": "chats.jsonl"}),
    "chat_template": Case("plain", "weights", CHATS),
    "device": Case("cuda:7", "device: got 'cuda:7'"),
    "threads": Case(2, says("on 1 CPU threads")),
    "kernels": Case("plain", same_result("packed"), {"model": "wide"}),  # heads as wide as a vector of this machine
    "seed": Case(7, "weights"),
    "epochs": Case(2, lambda a, b: len(b.rows) == 2 * len(a.rows), {"steps": 0}),
    "steps": Case(3, lambda a, b: (len(a.rows), len(b.rows)) == (2, 3)),
    "out": Case("elsewhere-2", lambda a, b: b.folder == "elsewhere-2" and "summary.json" in b.files),
    "data.pairs": Case("other.jsonl", "weights"),
    "data.runs": Case(["ranked"], "weights"),
    "data.reward": Case("down", "weights", RANKED := {"data.runs": ["ranked"], "data.pairs": "", "data.reward": "up"}),
    "data.pairs_per_prompt": Case(1, "weights", RANKED),
    "data.eval": Case("held.jsonl", lambda a, b: a.evals[0]["eval_n"] != b.evals[0]["eval_n"], {"data.held_out": 0.1}),
    "data.held_out": Case(0.5, lambda a, b: a.evals[0]["eval_n"] != b.evals[0]["eval_n"]),
    "data.max_tokens": Case(20, "data.max_tokens"),
    "data.overlong": Case("drop", "refused", {"data.max_tokens": 25}),
    "learner.lr": Case(1e-3, "weights"),
    "learner.schedule": Case("linear", "weights"),
    "learner.warmup_steps": Case(2, "weights"),
    "learner.weight_decay": Case(0.5, "weights"),
    "learner.adam_beta1": Case(0.1, "weights"),
    "learner.adam_beta2": Case(0.1, "weights"),
    "learner.adam_eps": Case(1.0, "weights"),
    "learner.max_grad_norm": Case(1e-5, "weights"),
    "learner.batch": Case(2, "weights"),
    "learner.microbatch_tokens": Case(40, same_result("passes")),
    "learner.dtype": Case("bfloat16", "weights"),
    "learner.gradient_checkpointing": Case(True, same_result("again")),
    "learner.centre": Case(0.5, "weights", {"learner.max_grad_norm": 100.0}),
    "eval.every": Case(1, lambda a, b: (len(a.evals), len(b.evals)) == (2, 3)),
    "checkpoint.every": Case(1, lambda a, b: "checkpoints/000001" in b.files - a.files),
    "checkpoint.keep": Case(1, lambda a, b: "checkpoints/000001" in a.files - b.files, {"checkpoint.every": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> RewardRuns:
    return RewardRuns(prepare(furnish(tmp_path_factory.mktemp("rewards"))))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_key_has_a_case_and_nothing_else_has():
    assert sorted(REWARD_CASES) == sorted(keys(RewardTraining))


ALWAYS = ("model", "steps", "data.pairs", "data.runs", "data.held_out", "learner.centre", "out")
"""One of each kind of effect; the other keys run in the nightly tests."""


@pytest.mark.parametrize("key", tiers.some(REWARD_CASES, ALWAYS))
def test_a_key_of_train_reward_does_something(key, runs):
    case = REWARD_CASES[key]
    before, after = runs(case.given), runs({**case.given, key: case.to})
    assert holds(case, before, after), f"{key} changes nothing: {before.refused or after.refused}"


# --------------------------------------------------------------------------------------------------------------------
# [iterate]

ROUNDS: dict[str, Any] = {
    "rounds": 1, "prompts": 8, "first_prompts": 8, "pairs_per_prompt": 3, "held_out": 0.4, "replay": 0.3,
    "verifier": {"name": "f.py:first"}, "learner": {"lr": 1e-3, "batch": 8},
}  # fmt: skip
POLICY: dict[str, Any] = {
    "model": "lm", "steps": 1, "threads": 1,
    "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 9}},
    "rollout": {"prompts": 2, "completions": 4, "max_tokens": 4}, "learner": {"lr": 1e-3},
    "eval": {"size": 2}, "checkpoint": {"every": 0},
}  # fmt: skip
IN_ROUNDS: dict[str, Any] = {
    "rounds": 2, "verifier": {"name": "f.py:second"}, "weight": 3.0, "args": {"dtype": "bfloat16"}, "completions": 6,
    "pairs_per_prompt": 1, "replay": 0.0, "held_out": 0.7, "prompts": 12,
}  # fmt: skip
"""Values that another result of the rounds shows."""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    place = furnish(tmp_path_factory.mktemp("rounds"))
    (place / "f.py").write_text(
        "def first(completion_ids, **_): return [float(ids[0] % 2) for ids in completion_ids]\n"
        "def second(completion_ids, **_): return [float(ids[-1] % 3) for ids in completion_ids]\n"
    )
    known: dict[str, dict[str, Any]] = {}

    def run(changes: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(changes)
        if key not in known:
            recipe = made(place, changes, out=f"out-{len(known)}")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(place)
                summary = iterate(recipe, display=Silent())
            rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in summary["rows"]]
            metrics = (place / recipe.policy.out / "round-01" / "policy" / "metrics.jsonl").read_text().splitlines()
            known[key] = {"rows": rows, "reward": json.loads(metrics[1])["reward"]}
        return known[key]

    return run


def made(place: Path, changes: Mapping[str, Any], *, out: str = "out") -> Recipe:
    """The recipe with some keys of [iterate] changed."""
    table = {**POLICY, "out": out, "iterate": {**ROUNDS, **changes}}
    path = place / f"{out}.toml"
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in table.items()))
    return load_recipe(path)


@pytest.mark.slow  # five seconds each
@pytest.mark.parametrize("key", IN_ROUNDS)
def test_a_key_of_the_rounds_changes_their_result(key, rounds):
    assert rounds({}) != rounds({key: IN_ROUNDS[key]})


def trained(recipe: Recipe, number: int) -> RewardTraining:
    there = Path("x")
    return recipe.reward_training(number, model="m", pairs=there, held=there, out=there)


def test_a_key_of_the_rounds_reaches_the_reward_models_training(tmp_path):
    """``iterate.learner`` has the keys of train-reward, which are tried above."""
    plain = made(tmp_path, {})
    changed = made(tmp_path, {"first_lr": 0.5, "first_epochs": 7, "epochs": 3, "learner": {"centre": 0.25}})
    assert (trained(plain, 0).learner.lr, trained(changed, 0).learner.lr, trained(changed, 1).learner.lr) == (
        1e-3, 0.5, 1e-5,
    )  # fmt: skip
    assert [trained(changed, n).epochs for n in (0, 1)] == [7, 3]
    assert [trained(plain, n).epochs for n in (0, 1)] == [1, 1]
    assert trained(changed, 1).learner.centre == 0.25


def test_a_key_of_the_rounds_says_what_the_first_reward_model_is_made_of(tmp_path):
    scorer = str(save_scorer(tmp_path / "scorer"))

    def opened(**changes: Any) -> Rounds:
        verifier = RewardConfig(name="x")
        return Rounds(made(tmp_path, changes), verifier, "x", tmp_path, Silent(), False, False)

    assert (opened().first_prompts, opened(first_prompts=5).first_prompts, opened(first_prompts=0).first_prompts) == (
        8, 5, 8,
    )  # fmt: skip
    assert opened(first_prompts=0, reward_model=scorer).first_prompts == 0
    assert opened(first_prompts=0, reward_model=scorer).reward_model(0) == scorer
    assert opened().reward_model(0) == str(tmp_path / "round-00" / "reward" / "final")


def test_every_key_of_the_rounds_is_tried():
    rest = {"first_lr", "first_epochs", "epochs", "learner", "first_prompts", "reward_model"}
    assert {f.name for f in dataclasses.fields(Iterate)} == {*IN_ROUNDS, *rest}
