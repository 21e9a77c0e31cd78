"""Every key of a recipe does something: changing it changes what a run does, or is refused where it would do nothing.

One case per key. A key without a case fails the test, so that a new one comes with the proof that it is read. The runs
are real, on a tiny model; where the result must stay the same (keys about memory), the work behind it is looked at.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import tiers
from settings_help import (
    BASE,
    OUTSIDE,
    Case,
    Runs,
    differ,
    furnish,
    holds,
    keys,
    last,
    other_products,
    path,
    same_result,
    says,
    tracker,
)  # fmt: skip
from trew.config import Config, RewardConfig
from trew.diagnostics import health

PROMPTS = {"data.task": "prompts", "data.args": {}, "data.train": "a.jsonl"}
DYNAMIC = {"objective.preset": "dapo", "objective.beta": 0.0, "eval.correct_at": 99.0}
TWO = {"learner.inner_updates": 2}
LORA = {"lora.rank": 2}
TAUGHT = {"objective.preset": "opd", "objective.beta": 0.0, "teacher.model": "lm2"}
FIRST = {"name": "f.py:first"}
SAVED = {"checkpoint.every": 1, "steps": 3}
TALK = {"environment.name": "f.py:talk", "environment.turns": 3}
SETS = [
    {"name": name, "task": "arithmetic", "args": {"ops": [op], "smallest": 1, "largest": 6}}
    for name, op in (("plus", "+"), ("minus", "-"))
]
MIXED = {"data": SETS, "rollout.prompts": 4}
RATES = {"steps": 3, "eval.correct_at": -0.5, "curriculum.share": 0.75, "curriculum.low": 0.0, "curriculum.high": 1.0}
REFERENCE = {"objective.beta": 0.5, "steps": 2}
PPO = {"objective.preset": "ppo", "steps": 2, "critic.head_std": 0.1}


def rewards(*more: dict[str, Any], **of_first: Any) -> list[dict[str, Any]]:
    return [{**BASE["rewards"][0], **of_first}, *more]


def sets_of(seen: Any) -> set[str]:
    return {row["uid"].partition("/")[0] for row in seen.rollouts}


def by_rate(seen: Any) -> float:
    return sum(row["curriculum/by_rate"] for row in seen.rows)


CASES: dict[str, Case] = {
    "model": Case("lm2", "weights"),
    "tokenizer": Case("tokenizer", "prompt_ids"),
    "chat_template": Case("plain", "prompt_ids"),
    "device": Case("cuda:7", "device: got 'cuda:7'"),
    "threads": Case(2, says("on 1 CPU threads")),
    "kernels": Case("plain", path("fused"), {"model": "wide"}),
    "linear": Case("plain", other_products),
    "seed": Case(7, "tokens"),
    "steps": Case(2, lambda a, b: (len(a.rows), len(b.rows)) == (1, 2)),
    "out": Case("elsewhere", lambda a, b: (a.folder, b.folder) != (a.folder, a.folder) and "summary.json" in b.files),
    "data.task": Case("countdown", "prompts", {"data.args": {"size": 20}, "rewards": rewards()}),
    "data.train": Case("b.jsonl", "prompts", PROMPTS),
    "data.eval": Case("b.jsonl", lambda a, b: "which" in b.answers[0]["prompt"] not in a.answers[0]["prompt"], PROMPTS),
    "data.prompt_column": Case("other", "prompts", PROMPTS),
    "data.args": Case({"ops": ["-"]}, "prompts"),
    "data.max_prompt_tokens": Case(5, "longer than data.max_prompt_tokens = 5"),
    "data.overlong": Case("truncate", "prompts", {**PROMPTS, "data.train": "long.jsonl", "data.max_prompt_tokens": 20,
                                                  "data.overlong": "drop", "data.shuffle": False}),
    "data.shuffle": Case(False, "prompts"),
    "data.name": Case([{**SETS[0], "name": "add"}, SETS[1]], lambda a, b: (sets_of(a), sets_of(b)) ==
                      ({"plus", "minus"}, {"add", "minus"}), MIXED),
    "data.weight": Case([{**SETS[0], "weight": 3.0}, SETS[1]], last("data/plus/share"), MIXED),
    "curriculum.share": Case(0.5, lambda a, b: by_rate(a) > by_rate(b), RATES),
    "curriculum.low": Case(1.0, "prompts", RATES),
    "curriculum.high": Case(0.0, "prompts", RATES),
    "rewards": Case([FIRST], "scores"),
    "rewards.name": Case([{"name": "format"}], "scores"),
    "rewards.model": Case([{"model": "scorer"}], "scores"),
    "rewards.weight": Case(rewards(weight=2.0), "scores"),
    "rewards.args": Case(rewards(args={"max_completion_len": 8, "soft_punish_cache": 4}), "scores"),
    "rewards.gate": Case([{"name": "f.py:calls"}, {**FIRST, "gate": True}], "scores",
                         {"rewards": [{"name": "f.py:calls"}, FIRST]}),
    "rewards.verify_with": Case(rewards({**FIRST, "verify_with": "soft_overlong"}),
                                lambda a, b: set(a.rows[0]) != set(b.rows[0]), {"rewards": rewards(FIRST)}),
    "rewards.sets": Case(rewards({**FIRST, "sets": ["plus"]}), "scores", {**MIXED, "rewards": rewards(FIRST)}),
    "rewards.calls": Case(rewards({"name": "f.py:calls", "calls": "group"}), "scores",
                          {"rewards": rewards({"name": "f.py:calls"})}),
    "rewards.on_failure": Case(rewards({"name": "f.py:raises", "on_failure": "skip"}), "refused",
                               {"rewards": rewards({"name": "f.py:raises"})}),
    "environment.name": Case("f.py:talk", last("turns")),
    "environment.args": Case({"size": 3}, "prompt_ids", TALK),
    "environment.episodes": Case(4, "prompts", {**TALK, "data.task": "prompts", "data.args": {}}),
    "environment.turns": Case(1, last("turns"), TALK),
    "environment.episode_tokens": Case(60, last("environment/tokens"), TALK),
    "environment.observation_tokens": Case(
        32, last("environment/observations_cut"), {**TALK, "environment.args": {"size": 99}}
    ),
    "environment.workers": Case(
        3, lambda a, b: (len(a.program.player.hosts._hosts), len(b.program.player.hosts._hosts)) == (1, 3),
        {**TALK, "environment.workers": 1},
    ),
    "environment.on_failure": Case("abort", "refused", {"environment.name": "f.py:breaks"}),
    "rollout.prompts": Case(3, "shape"),
    "rollout.completions": Case(4, "shape"),
    "rollout.max_tokens": Case(5, "shape"),
    "rollout.temperature": Case(0.5, "tokens"),
    "rollout.top_p": Case(0.5, "tokens"),
    "rollout.top_k": Case(2, "tokens"),
    "rollout.min_p": Case(0.2, "tokens"),
    "rollout.stop": Case([], "tokens"),
    "rollout.batch": Case(2, same_result("slots")),
    "rollout.stale_steps": Case(1, last("staleness"), {"steps": 2}),
    "rollout.refills": Case(0, last("groups_sampled"), DYNAMIC),
    "rollout.overlap": Case(False, same_result("early")),
    "objective.preset": Case("dr-grpo", "weights"),
    "objective.args": Case(1e6, "weights", {"objective.eps_high": 0.2, **TWO}),
    "learner.lr": Case(1e-3, "weights"),
    "learner.schedule": Case("linear", "weights", {"steps": 2}),
    "learner.warmup_steps": Case(2, "weights", {"steps": 2}),
    "learner.weight_decay": Case(0.5, "weights"),
    "learner.adam_beta1": Case(0.1, "weights", {"steps": 2}),
    "learner.adam_beta2": Case(0.1, "weights", {"steps": 2}),
    "learner.adam_eps": Case(1.0, "weights"),
    "learner.max_grad_norm": Case(1e-5, "weights"),
    "learner.minibatch_prompts": Case(1, last("policy_version")),
    "learner.inner_updates": Case(2, last("policy_version")),
    "learner.microbatch_tokens": Case(80, same_result("passes")),
    "learner.dtype": Case("bfloat16", "weights"),
    "learner.optimizer": Case("adamw-8bit", "weights", {"steps": 2}),
    "learner.gradient_checkpointing": Case(True, same_result("again")),
    "learner.compile": Case(True, path("accelerator"), {"kernels": "plain"}),
    "learner.liger": Case(True, "learner.liger: got true, which needs a CUDA GPU"),
    "learner.share_prompts": Case(False, same_result("tokens")),
    "learner.reference_every": Case(1, "weights", REFERENCE),
    "learner.reference_mix": Case(0.5, "weights", {**REFERENCE, "learner.reference_every": 1}),
    "teacher.model": Case("lm", "weights", TAUGHT),
    "teacher.dtype": Case("bfloat16", "weights", TAUGHT),
    "critic.model": Case("lm2", "weights", PPO),
    "critic.lr": Case(1e-2, "weights", PPO),
    "critic.clip": Case(1e-3, "weights", {**PPO, "learner.inner_updates": 3, "critic.lr": 1e-2}),
    "critic.warmup_steps": Case(1, "weights", PPO),
    "critic.head_std": Case(1.0, "weights", PPO),
    "lora.rank": Case(2, "weights"),
    "lora.alpha": Case(4.0, "weights", LORA),
    "lora.dropout": Case(0.1, "lora.dropout: got 0.1", LORA),
    "lora.targets": Case(["q_proj"], "weights", LORA),
    "cluster.learner": Case(0, "cluster.learner: got 0, which means every GPU that servers leave"),
    "lora.base": Case("bfloat16", "weights", {**LORA, "learner.dtype": "bfloat16"}),
    "eval.every": Case(1, lambda a, b: (len(a.evals), len(b.evals)) == (2, 3), {"steps": 2}),
    "eval.size": Case(3, lambda a, b: (len(a.answers), len(b.answers)) == (2, 3)),
    "eval.samples": Case(2, lambda a, b: (len(a.answers), len(b.answers)) == (2, 4), {"eval.temperature": 1.0}),
    "eval.temperature": Case(1.0, "greedy"),
    "eval.max_tokens": Case(4, lambda a, b: [*map(len, b.greedy)] == [4, 4], {"rollout.stop": []}),
    "eval.correct_reward": Case("first", lambda a, b: a.evals != b.evals,
                                {"rewards": rewards(FIRST), "eval.correct_at": 0.0}),
    "eval.correct_at": Case(-9.0, lambda a, b: a.evals != b.evals),
    "checkpoint.every": Case(1, lambda a, b: "checkpoints/000001" in b.files - a.files),
    "checkpoint.keep": Case(1, lambda a, b: "checkpoints/000002" in a.files - b.files, SAVED),
    "checkpoint.best": Case(False, lambda a, b: "checkpoints/000001" in a.files - b.files,
                            {**SAVED, "eval.every": 1, "eval.correct_at": -9.0, "checkpoint.keep": 1}),
    "checkpoint.background": Case(True, same_result("waited"), SAVED),
    "stop.signals": Case(["SIGUSR2"], lambda a, b: "SIGUSR2" in {*b.work["handlers"]} - {*a.work["handlers"]}),
    "stop.grace_s": Case(3.0, lambda a, b: (a.program.interrupts.grace_s, b.program.interrupts.grace_s) == (20.0, 3.0)),
    "track.to": Case(["trackio"], lambda a, b: bool(OUTSIDE)),
    "track.samples_every": Case(0, says("  prompt      ")),
    "track.regrade_every": Case(0, says("differently from call to call"),
                                {"rewards": rewards({"name": "f.py:unsteady"})}),
}  # fmt: skip
"""By key; ``rewards.x`` is the key x of a table of ``[[rewards]]``, and ``to`` is then the whole list."""

ELSEWHERE = {
    "curriculum.floor": "tests/unit/test_drawing.py",
    "curriculum.decay": "tests/unit/test_drawing.py",
    "sft.epochs": "tests/integration/test_sft_runs.py",
    "sft.batch": "tests/integration/test_sft_runs.py",
    "sft.loss_on": "tests/unit/test_demonstrations.py",
    "sft.max_tokens": "tests/unit/test_demonstrations.py",
    "sft.overlong": "tests/unit/test_demonstrations.py",
    "learner.bad_steps": "tests/fault/test_numbers.py",
    "track.max_failed": "tests/fault/test_processes.py",
    "rewards.timeout_s": "tests/unit/test_rewards_process.py",
    "environment.timeout_s": "tests/unit/test_env_hosts.py",
    "environment.tools": "tests/unit/test_bridge.py",
    "environment.tools_format": "tests/unit/test_bridge.py",
    "rollout.replay": "tests/integration/test_replay.py",
    "cluster.launcher": "tests/unit/test_ray_launch.py",
    "cluster.resources_timeout_s": "tests/real_ray/test_ray_ranks.py",
    "cluster.shard": "tests/integration/test_ranks_cli.py",
    "cluster.offload": "tests/integration/test_ranks_cli.py",
    "cluster.restarts": "tests/integration/test_ranks_cli.py",
    "cluster.hang_s": "tests/integration/test_ranks_cli.py",
    "cluster.rollout": "tests/integration/test_cli_servers.py",
    "cluster.sync": "tests/unit/test_cluster_rules.py",
    "cluster.servers": "tests/unit/test_vllm_server.py",
    "cluster.server_gpus": "tests/unit/test_vllm_server.py",
    "cluster.server_args": "tests/unit/test_vllm_server.py",
    "cluster.python": "tests/unit/test_vllm_environment.py",
    "cluster.staleness": "tests/integration/test_cli_asynchronous.py",
    "cluster.in_flight": "tests/integration/test_cli_asynchronous.py",
    "cluster.colocate": "tests/integration/test_cli_colocated.py",
    "cluster.endpoints": "tests/unit/test_cluster_rules.py",
    "teacher.endpoint": "tests/fault/test_teacher_server.py",
    "teacher.wait_s": "tests/fault/test_teacher_server.py",
    "cluster.reward_hosts": "tests/integration/test_cli_reward_hosts.py",
    "cluster.request_timeout_s": "tests/unit/test_cluster_rules.py",
    "cluster.sync_timeout_s": "tests/unit/test_cluster_rules.py",
}
"""Keys whose effect takes a failure, a server or many steps to see: where it is shown."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(furnish(tmp_path_factory.mktemp("settings")))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    tracker(monkeypatch)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def all_keys() -> list[str]:
    of_rewards = [f"rewards.{f.name}" for f in dataclasses.fields(RewardConfig)]
    return [key for key in (*keys(Config), *of_rewards) if not key.startswith("health.")]


def test_every_key_has_a_case_and_nothing_else_has():
    assert sorted([*CASES, *ELSEWHERE]) == sorted(all_keys())
    for key, file in ELSEWHERE.items():
        assert key.rpartition(".")[2] in (Path(__file__).parents[2] / file).read_text(), key


ALWAYS = {
    "tokenizer", "seed", "out", "data.eval", "data.shuffle", "rewards.weight", "rollout.temperature", "rollout.overlap",
    "objective.preset", "learner.dtype", "learner.liger", "cluster.learner", "critic.warmup_steps", "stop.signals",
    "track.to",
}  # fmt: skip
"""Some of each way in which an effect is seen; the others run in the nightly tests. Each key is also tested where it is
read."""


@pytest.mark.parametrize("key", tiers.some(CASES, ALWAYS))
def test_a_key_does_something(key, runs):
    case = CASES[key]
    whole = {"objective.args": "objective.eps_high", "data.name": "data", "data.weight": "data"}
    name = whole.get(key, "rewards" if key.startswith("rewards.") else key)
    before, after = runs(case.given), runs({**case.given, name: case.to})
    assert holds(case, before, after), f"{key} changes nothing: {after.refused}"


def test_a_key_that_nothing_reads_would_be_noticed(runs, monkeypatch):
    """The comparison is exact: the same run twice is no difference."""
    a, b = runs.run(BASE), runs.run(BASE)
    assert a.rows == b.rows
    for what in ("weights", "tokens", "scores", "prompts", "shape"):
        assert not differ(a, b, what), what
    assert {f for f in a.files if "parquet" not in f} == {f for f in b.files if "parquet" not in f}


# --------------------------------------------------------------------------------------------------------------------
# [health]: the same rules on the same rows

SICK = {"entropy": 0.01, "kl": 2.0, "kl_old": 0.5, "ratio_q99": 9.0, "ratio_q01": 0.5, "advantage_share": 0.0,
        "zero_signal_share": 1.0, "truncated_share": 1.0, "completion_length": 50.0, "accuracy": 0.1,
        "changed_share": 0.0, "grad_norm": 1e4, "lr": 1e-9, "canary_gap": 1.0,
        "corrected_share": 1.0, "waited_s": 9.0, "idle_s": 9.0, "seconds": 10.0}  # fmt: skip
WELL = {"entropy": 2.0, "completion_length": 10.0, "accuracy": 0.1}


def found_with(**settings: Any) -> list[tuple[int, str]]:
    rows = [{"step": s, **(WELL if s <= 10 else SICK)} for s in range(1, 90)]
    return [(f.step, f.rule) for f in health.findings(rows, {"health": settings})]


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(health.HealthConfig)])
def test_a_key_of_health_changes_the_warnings(key):
    plain = found_with()
    if key in ("window", "cooldown"):
        assert found_with(**{key: 4}) != plain
        return
    assert key in {rule for _, rule in plain}
    assert found_with(**{key: 0}) == [(step, rule) for step, rule in plain if rule != key]
    out_of_reach = {"entropy": 1e-3, "unchanged": 1.1, "no_signal": 85}.get(key, 1e6)
    assert key not in {rule for _, rule in found_with(**{key: out_of_reach})}
