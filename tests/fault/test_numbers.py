"""Numbers that are not finite: the step is left out and shown, the run goes on, and ends if it happens again and again.

They are planted where they would arise: in a gradient after a backward pass, in log-probs on their way to the loss, in
what a reward returns, in the model's weights while it generates.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiers
import trew
from run_help import PATHS, Watching, configured, rows, save_models
from trew.config import Config
from trew.errors import NumericsError
from trew.learner.autograd import AutogradRunner
from trew.learner.choose import VerifiedRunner
from trew.learner.step import Learner
from trew.objective import Objective
from trew.rollout import sync
from trew.rollout.sync import SyncRollouts
from trew.training import frozen, loop
from trew.training.run import TrainingRun
from trew.utils.console import Silent


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def evidence(config: Config, step: int) -> dict[str, Any]:
    text = (Path(config.out) / "bad_steps" / f"{step:06d}.json").read_text()
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def at_call(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> Callable[[], bool]:
    """Whether this is one of the ``calls`` of ``Learner.accumulate``, counted from 1; it and the ``apply`` after it
    must leave no trace then."""
    number = [0]

    def traceless(name: str) -> Callable[..., Any]:
        real = getattr(Learner, name)

        def half(self: Learner, *args: Any, **kwargs: Any) -> Any:
            number[0] += name == "accumulate"
            before = {name: t.clone() for name, t in self.state()[0].items()}
            meta = self.state()[1]
            try:
                return real(self, *args, **kwargs)
            except NumericsError:
                after, now = self.state()
                assert after.keys() == before.keys()
                assert all(torch.equal(t, before[name]) for name, t in after.items())
                assert now == meta
                assert all(p.grad is None for p in self.model.parameters())
                raise

        return half

    for name in ("accumulate", "apply"):
        monkeypatch.setattr(Learner, name, traceless(name))
    return lambda: number[0] in calls


def around_runners(monkeypatch: pytest.MonkeyPatch, name: str, around: Callable[..., Any]) -> None:
    """``around(real, *args)`` instead of a method of whatever runs samples."""
    for owner in (AutogradRunner, VerifiedRunner):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, **k: around(real, *a, **k))


def poison_gradient(monkeypatch: pytest.MonkeyPatch, calls: set[int], value: float = math.nan) -> None:
    now = at_call(monkeypatch, calls)

    def poisoned(real: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if now():
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            grads[-1].view(-1)[0] = value

    around_runners(monkeypatch, "accumulate", poisoned)


def poison_logprobs(monkeypatch: pytest.MonkeyPatch, calls: set[int], value: float = math.nan) -> None:
    now = at_call(monkeypatch, calls)

    def poisoned(real: Callable[..., None], self: Any, pack: Any, rule: Any, **kwargs: Any) -> None:
        def given(where: slice, logprobs: torch.Tensor, entropies: Any) -> Any:
            if now():
                logprobs = logprobs.clone()
                logprobs[0] = value
            return rule(where, logprobs, entropies)

        real(self, pack, given, **kwargs)

    around_runners(monkeypatch, "accumulate", poisoned)


def poison_loss(monkeypatch: pytest.MonkeyPatch, calls: set[int], value: float = math.inf) -> None:
    now, real = at_call(monkeypatch, calls), Objective.loss

    def loss(self: Objective, batch: Any) -> Any:
        out = real(self, batch)
        if now():
            object.__setattr__(out, "loss", out.loss * 0 + value)
        return out

    monkeypatch.setattr(Objective, "loss", loss)


POISONS = {"grad_norm": poison_gradient, "logprobs": poison_logprobs, "loss": poison_loss}


@pytest.mark.parametrize(("path", "quantity"), tiers.thinned(PATHS, POISONS, keep=3))
def test_a_step_with_broken_numbers_is_left_out_and_shown(path, quantity, models, tmp_path, monkeypatch):
    config, display = configured(tmp_path, models[path], **PATHS[path]), Watching()
    POISONS[quantity](monkeypatch, {2})
    seen: list[Any] = []
    real = loop.update
    monkeypatch.setattr(loop, "update", lambda run, *a: (seen.append(run.policy._runner.path), real(run, *a))[1])
    summary = trew.train(config, display=display)
    assert seen[-1].fused == (path != "generic")
    assert summary["steps"] == 3
    found = rows(config)
    assert [found[s]["bad_steps"] for s in (1, 2, 3)] == [0, 1, 0]
    assert math.isnan(found[2]["loss"])
    assert math.isnan(found[2]["grad_norm"])
    assert all(math.isfinite(found[s][name]) for s in (1, 3) for name in ("loss", "grad_norm"))
    assert [found[s]["policy_version"] for s in (1, 2, 3)] == [1, 1, 2]
    line = (Path(config.out) / "metrics.jsonl").read_text().splitlines()[2]
    assert json.loads(line)["not_finite"]["loss"] == "nan"
    told = [text for text in display.warnings if "step 2 was not applied: " in text]
    assert len(told) == 1
    assert "Weights and optimizer are as before" in told[0]
    assert str(Path(config.out) / "bad_steps" / "000002.json") in told[0]
    # The file has what was drawn, as it is in rollouts/ too.
    kept = evidence(config, 2)
    assert (kept["step"], kept["quantity"], kept["policy_version"]) == (2, quantity, 1)
    table = pq.read_table(Path(config.out) / "rollouts" / "000002.parquet").to_pylist()
    drawn = {(row["uid"], row["sample"]): row for row in table}
    assert kept["completions"]
    for row in kept["completions"]:
        own = drawn[row["uid"], row["sample"]]
        assert (row["prompt"], row["completion"], row["reward"]) == (own["prompt"], own["completion"], own["score"])
        assert row["token_ids"] == own["token_ids"]
        assert row["advantages"] == pytest.approx(own["advantages"])
        assert len(row["sampling_logprobs"]) == len(row["token_ids"])
    if quantity == "logprobs":
        assert len(kept["completions"]) == 1
        assert kept["completions"][0]["logprobs"][0] == "nan"


def test_numbers_of_other_policies_and_of_rewards_are_looked_at_too(models, tmp_path, monkeypatch):
    """The reference's and the old policy's log-probs, the sampler's, a reward that float32 cannot hold."""

    def run(name: str, **settings: Any) -> tuple[Config, dict[int, dict[str, Any]]]:
        folder = tmp_path / name
        folder.mkdir()
        config = configured(folder, models["native"], steps=2, **settings)
        trew.train(config, display=Silent())
        return config, rows(config)

    def check(config: Config, found: dict[int, dict[str, Any]], quantity: str) -> dict[str, Any]:
        assert [found[s]["bad_steps"] for s in (1, 2)] == [0, 1]
        assert found[2]["policy_version"] == found[1]["policy_version"]
        kept = evidence(config, 2)
        assert kept["quantity"] == quantity
        return kept["completions"][0]

    row = check(*run("reward", reward="huge"), "reward")
    assert row["reward"] == 1e39
    real, calls = Learner.logprobs, {False: 0, True: 0}

    def logprobs(self: Learner, samples: Any, *, reference: bool = False, **kwargs: Any) -> torch.Tensor:
        calls[reference] += 1
        with monkeypatch.context() as within:
            if calls[reference] == wrong.get(reference):
                around_runners(within, "logprobs_of", lambda real, *a: torch.full_like(real(*a), -math.inf))
            return real(self, samples, reference=reference, **kwargs)

    monkeypatch.setattr(Learner, "logprobs", logprobs)
    wrong = {True: 2}
    row = check(*run("reference", objective={"preset": "grpo", "beta": 0.1}), "ref_logprobs")
    assert set(row["ref_logprobs"]) == {"-inf"}
    wrong, calls = {False: 4}, {False: 0, True: 0}  # a few of step 1, all; a few of step 2, all
    monkeypatch.setattr(frozen, "ROUNDING", -1.0)  # the sampler's own never serve
    row = check(*run("old", learner={"minibatch_prompts": 2}), "logprobs")
    wrong = {}
    generate, steps = sync.generate, [0]

    def unlikely(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        groups = generate(*args, **kwargs)
        if steps[0] == 2:
            groups[0].rollouts[1].logprobs[0] = -np.inf
        return groups

    monkeypatch.setattr(sync, "generate", unlikely)
    row = check(*run("sampler"), "rollout_logprobs")
    assert (row["sample"], row["sampling_logprobs"][0]) == (1, "-inf")


def test_a_model_that_cannot_generate_costs_the_step(models, tmp_path, monkeypatch):
    config, display = configured(tmp_path, models["native"]), Watching()
    real = SyncRollouts.next

    def poisoned(source: Any, step: int) -> Any:
        head = source.engine.model.get_output_embeddings().weight
        kept = head.detach().clone()
        with torch.no_grad():
            head[5] = math.nan if step == 2 else head[5]
        try:
            return real(source, step)
        finally:
            with torch.no_grad():
                head.copy_(kept)

    monkeypatch.setattr(SyncRollouts, "next", poisoned)
    trew.train(config, display=display)
    found = rows(config)
    assert [found[s]["bad_steps"] for s in (1, 2, 3)] == [0, 1, 0]
    assert math.isnan(found[2]["loss"])
    assert "reward" not in found[2]  # nothing was drawn
    assert not (Path(config.out) / "rollouts" / "000002.parquet").exists()
    row = evidence(config, 2)["completions"][0]
    assert {"uid", "sample", "completion", "token_ids", "logprobs"} <= set(row)


def test_an_update_that_failed_is_left_out_with_those_after_it_and_those_before_it_stay(models, tmp_path, monkeypatch):
    config = configured(tmp_path, models["native"], steps=2, learner={"minibatch_prompts": 2, "inner_updates": 2})
    display = Watching()
    poison_gradient(monkeypatch, {4 + 2})
    trew.train(config, display=display)
    found = rows(config)
    assert [found[s]["policy_version"] for s in (1, 2)] == [4, 5]
    (told,) = [text for text in display.warnings if "step 2 was not applied in full" in text]
    assert "Its earlier updates stay: 1 of the policy; 1 of 3 in a row" in told
    assert math.isnan(found[2]["loss"])
    uids = list(dict.fromkeys(pq.read_table(Path(config.out) / "rollouts" / "000002.parquet")["uid"].to_pylist()))
    assert {row["uid"] for row in evidence(config, 2)["completions"]} <= set(uids[2:])  # of the second minibatch


def test_again_and_again_ends_the_run_with_the_cause_and_a_good_checkpoint(models, tmp_path, monkeypatch):
    config = configured(
        tmp_path, models["native"], steps=9, learner={"bad_steps": 3}, checkpoint={"every": 1, "keep": 1}
    )
    poison_gradient(monkeypatch, {3, 5, 6, 7})  # once: not enough
    with pytest.raises(NumericsError, match=r"3 steps in a row .* the gradient norm is nan.*saved in .*000007\.json"):
        trew.train(config, display=Silent())
    found = rows(config)
    assert [found[s]["bad_steps"] for s in sorted(found)] == [0, 0, 1, 0, 1, 2, 3]
    assert not (Path(config.out) / "summary.json").exists()
    folder = Path(config.out) / "checkpoints"
    assert "000004" in {p.name for p in folder.iterdir()}
    weights = load_file(folder / "000004" / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())


def test_a_resumed_run_counts_on(models, tmp_path, monkeypatch):
    """The counter is in the checkpoint: two bad steps before and one after are three."""
    out = tmp_path / "run"
    config = configured(tmp_path, models["native"], steps=6, checkpoint={"every": 1})
    with monkeypatch.context() as first:
        real, written = TrainingRun.record, [0]

        def record(*args: Any) -> None:
            real(*args)
            written[0] += 1
            if written[0] == 4:
                raise KeyboardInterrupt

        first.setattr(TrainingRun, "record", record)
        poison_gradient(first, {2, 3})
        with pytest.raises(KeyboardInterrupt):
            trew.train(config, display=Silent())
    for late in (out / "checkpoints").iterdir():
        if late.name.isdecimal() and int(late.name) > 3:
            shutil.rmtree(late)
    with monkeypatch.context() as again:
        poison_gradient(again, {1})
        with pytest.raises(NumericsError, match="3 steps in a row"):
            trew.train(config, resume=True, display=Silent())
    assert [rows(config)[s]["bad_steps"] for s in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [p.stem for p in sorted((out / "bad_steps").iterdir())] == ["000002", "000003", "000004"]


def test_one_bad_step_is_enough_where_that_was_asked_for(models, tmp_path, monkeypatch, capsys):
    from trew.cli.main import main

    config = configured(tmp_path, models["native"], learner={"bad_steps": 1})
    (tmp_path / "recipe.toml").write_text(trew.config.dumps(config))
    poison_gradient(monkeypatch, {1})
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "recipe.toml")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "1 step with numbers that are not finite (learner.bad_steps = 1)" in said
    assert "Traceback" not in said
