"""Training a reward model: the loss, the gradient, the pairs, the figures, and a training that continues."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

import tiers
import tiny
from scorer_help import group, save_scorer
from trew.errors import ConfigError, DataError, NumericsError, ResumeError
from trew.iterate import Iterate
from trew.models import loading
from trew.reward_training import RewardTraining, bradley_terry, pairs_of_groups, read_pairs, train_reward, write_pairs
from trew.reward_training.agreement import agreement, auc, pair_accuracy
from trew.reward_training.data import Encoded
from trew.reward_training.packed import best
from trew.reward_training.pairs import divide, make_pair, pairs_of_run
from trew.reward_training.planning import plan
from trew.reward_training.program import RewardProgram
from trew.reward_training.settings import dumps, load_settings
from trew.reward_training.settings import problems as value_problems
from trew.rewards.model.reward_model import DEFAULTS, ModelReward
from trew.rewards.model.scorer import Encoder, Scorer
from trew.runs.report import load_run
from trew.runs.rollouts import write_rollouts
from trew.types import Score, ScoredGroup
from trew.utils.console import Silent

scores = st.floats(-30, 30, allow_nan=False, width=32)


# --------------------------------------------------------------------------------------------------------------------
# The loss


def test_the_loss_is_the_textbooks():
    # -log(1 / (1 + exp(-(r_c - r_r)))) by hand
    chosen = torch.tensor([2.0, 0.0, -1.0, 3.0], dtype=torch.float64)
    rejected = torch.tensor([0.5, 0.0, 1.0, 3.5], dtype=torch.float64)
    expected = [-math.log(1 / (1 + math.exp(-d))) for d in (1.5, 0.0, -2.0, -0.5)]
    assert bradley_terry(chosen, rejected=rejected).tolist() == pytest.approx(expected, abs=1e-12)
    centred = [e + 0.1 * s * s for e, s in zip(expected, (2.5, 0.0, 0.0, 6.5), strict=True)]
    assert bradley_terry(chosen, rejected=rejected, centre=0.1).tolist() == pytest.approx(centred, abs=1e-12)


@given(scores, scores, st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_the_gradient_is_minus_the_chance_of_being_wrong(c, r, centre):
    chosen = torch.tensor([c], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    bradley_terry(chosen, rejected=rejected, centre=centre).sum().backward()
    wrong = 1 / (1 + math.exp(min(c - r, 700)))
    assert float(chosen.grad) == pytest.approx(-wrong + 2 * centre * (c + r), abs=1e-9)
    assert float(rejected.grad) == pytest.approx(wrong + 2 * centre * (c + r), abs=1e-9)


def test_the_loss_is_finite_for_any_scores():
    assert float(bradley_terry(torch.tensor([-1e30]), rejected=torch.tensor([1e30]))) == pytest.approx(2e30)
    assert float(bradley_terry(torch.tensor([1e30]), rejected=torch.tensor([-1e30]))) == 0


@pytest.fixture
def backend():
    """None; a backend's tests run the same with theirs."""
    return None


def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_split(tmp_path, backend):
    folder = save_scorer(tmp_path, **tiny.wide("llama"))
    rng = np.random.default_rng(0)
    pairs = [
        Encoded(str(i), rng.integers(0, 256, rng.integers(1, 30)).tolist(), rng.integers(0, 256, 9).tolist())
        for i in range(9)
    ]
    found = []
    for budget in (1, 100, 10**6):
        model = loading.load_scorer(str(folder))
        runner, _ = best(Scorer(model, Encoder.load(str(folder)), budget=budget), pairs, backend=backend)
        loss, _ = runner.accumulate(pairs, centre=0.01)
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    for loss, grad in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert torch.allclose(grad, found[0][1], atol=1e-5 * float(found[0][1].abs().max()))


# --------------------------------------------------------------------------------------------------------------------
# The figures


@given(st.lists(scores, min_size=1, max_size=20), st.lists(scores, min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_auc_is_mann_and_whitneys(good, bad):
    expected = mannwhitneyu(good, bad).statistic / (len(good) * len(bad))
    assert auc(good, bad=bad) == pytest.approx(expected, abs=1e-12)
    assert auc(good, bad=bad) == pytest.approx(1 - auc(bad, bad=good), abs=1e-12)


def test_figures_have_intervals_over_prompts():
    rng = np.random.default_rng(1)
    good, bad = rng.normal(0.5, 1, 200), rng.normal(0, 1, 200)
    single = agreement(good, rejected=bad, clusters=[str(i) for i in range(200)])
    few = agreement(good, rejected=bad, clusters=[str(i // 50) for i in range(200)])
    assert single["accuracy"]["mean"] == pytest.approx(pair_accuracy(good, rejected=bad))
    assert single["accuracy"]["low"] < single["accuracy"]["mean"] < single["accuracy"]["high"]
    assert single["auc"]["low"] < single["auc"]["mean"] < single["auc"]["high"]
    assert few["prompts"] == 4
    perfect = agreement([1.0, 2.0], rejected=[0.0, 0.5], clusters=["a", "b"])
    assert perfect["accuracy"]["mean"] == perfect["auc"]["mean"] == 1
    assert perfect["accuracy"]["low"] < 0.5, "two prompts prove little"
    assert perfect["auc"]["low"] < 0.5
    assert agreement(good, rejected=bad, clusters=["a"] * 200) == agreement(good, rejected=bad, clusters=["a"] * 200)


# --------------------------------------------------------------------------------------------------------------------
# Pairs


def scored(values, *texts, uid="p", chat=True):
    of = group(*texts, uid=uid, asked=f"question {uid}", chat=chat)
    return ScoredGroup(of, tuple(Score(v, parts={"exact": v, "other": 0.0}) for v in values))


def test_pairs_are_of_different_texts_with_different_values():
    groups = [
        scored([1.0, 0.0, 1.0, 0.0, None, 0.5], "a", "b", "a", "c", "d", "e"),
        scored([1.0, 1.0], "x", "y", uid="q"),
    ]
    pairs = pairs_of_groups(groups, reward="exact", most=100, seed=0)
    assert {(p.chosen, p.rejected) for p in pairs} == {("a", "b"), ("a", "c"), ("a", "e"), ("e", "b"), ("e", "c")}
    few = pairs_of_groups(groups, reward="exact", most=2, seed=0)
    assert len({(p.chosen, p.rejected) for p in few}) == 2
    assert few == pairs_of_groups(groups, reward="exact", most=2, seed=0)


@pytest.mark.parametrize("chat", [True, False])
def test_pairs_come_back_from_rollouts_and_from_files(tmp_path, chat):
    groups = [scored([1.0, 0.0], "right", "wrong ü\n", uid=str(i), chat=chat) for i in range(3)]
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "000001.parquet", groups, step=1)
    direct = pairs_of_groups(groups, reward="exact", most=8, seed=0)
    assert pairs_of_run(tmp_path, reward="exact", most=8, seed=0) == direct
    assert pairs_of_run(tmp_path, reward="", most=8, seed=0) == direct
    assert (direct[0].prompt.messages is not None) == chat
    write_pairs(tmp_path / "p.jsonl", direct)
    assert read_pairs(tmp_path / "p.jsonl") == direct


def test_rollouts_that_make_no_pairs_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no rollouts"):
        pairs_of_run(tmp_path, reward="", most=8, seed=0)
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "000001.parquet", [scored([1.0, 1.0], "a", "b")], step=1)
    with pytest.raises(DataError, match="makes no pairs"):
        pairs_of_run(tmp_path, reward="exact", most=8, seed=0)
    with pytest.raises(DataError, match="no reward is called 'exac'; accepts exact, other"):
        pairs_of_run(tmp_path, reward="exac", most=8, seed=0)


def test_rollouts_of_an_older_trew_make_pairs_or_are_said_to_be_older(tmp_path):
    file = tmp_path / "rollouts" / "000001.parquet"
    file.parent.mkdir()
    write_rollouts(file, [scored([1.0, 0.0], "right", "wrong")], step=1)
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["ending"]), file)
    assert [pair.chosen for pair in pairs_of_run(tmp_path, reward="", most=8, seed=0)] == ["right"]
    pq.write_table(table.drop_columns(["ending", "messages"]), file)
    with pytest.raises(DataError, match="was written by an older trew"):
        pairs_of_run(tmp_path, reward="", most=8, seed=0)


def test_episodes_make_no_pairs(tmp_path):
    # An episode of one turn, too: its first words are its environment's, not the row's.
    single = scored([1.0, 0.0], "right", "wrong")
    rollouts = tuple(dataclasses.replace(rollout, ending="done") for rollout in single.group.rollouts)
    episodes = ScoredGroup(dataclasses.replace(single.group, rollouts=rollouts), single.scores)
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts" / "000001.parquet", [episodes], step=1)
    with pytest.raises(DataError, match="got episodes of an environment, accepts completions of one turn") as refused:
        pairs_of_run(tmp_path, reward="", most=8, seed=0)
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(DataError, match="got episodes of an environment"):
        pairs_of_groups([episodes], reward="exact", most=8, seed=0)


USER = [{"role": "user", "content": "hi"}]
ROWS = [
    ({"prompt": "q", "chosen": "a"}, "has no 'rejected'"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
    ({"prompt": "q", "chosen": 1, "rejected": "b"}, "'chosen' must be text or a list of messages"),
    ({"prompt": "", "chosen": "a", "rejected": "b"}, "column 'prompt' is empty"),
    ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
    ({"prompt": USER, "chosen": USER, "rejected": "b"}, "must be a message of the assistant"),
    ({"prompt": USER, "chosen": "a", "rejected": "b", "tools": [1]}, "has 'tools'"),
    ({"prompt": USER, "chosen": "a", "rejected": "b", "chat_template_kwargs": {"x": 1}}, "has 'chat_template_kwargs'"),
    ({"prompt": USER, "chosen": [{"role": "assistant", "content": "a", "thinking": "b"}], "rejected": "b"}, "role and"),
    (
        {"prompt": "q", "chosen": [*USER, {"role": "assistant", "content": "a"}], "rejected": "b"},
        "another conversation",
    ),
]


@pytest.mark.parametrize(("row", "message"), ROWS, ids=[m[:25] for _, m in ROWS])
def test_rows_that_are_no_pairs_are_told_with_their_place(tmp_path, row, message):
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n" + json.dumps(row)
    )
    with pytest.raises(DataError) as error:
        read_pairs(tmp_path / "p.jsonl")
    assert "line 2" in str(error.value)
    assert message in str(error.value)


def test_whole_conversations_are_pairs_too(tmp_path):
    turns = [[*USER, {"role": "assistant", "content": text}] for text in ("yes", "no")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"chosen": turns[0], "rejected": turns[1]}))
    assert read_pairs(tmp_path / "p.jsonl") == [make_pair(USER, chosen="yes", rejected="no")]


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_no_prompt_is_on_both_sides(numbers, share, seed):
    pairs = [make_pair(f"q{n}", chosen="a", rejected=f"b{i}") for i, n in enumerate(numbers)]
    train, held = divide(pairs, share=share, seed=seed)
    assert not {p.key for p in train} & {p.key for p in held}
    assert len(train) + len(held) == len(pairs)
    if len(set(numbers)) > 1:
        assert train
        assert held


# --------------------------------------------------------------------------------------------------------------------
# Settings and training


def write_task(folder, *, count=40, wide=True):
    """Answers that end in '!' are better: learnable by anything that sees the last token. The kernels know a model
    only if it is ``wide``."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        word = "".join(chr(97 + x) for x in rng.integers(0, 26, 3))
        rows.append({"prompt": [{"role": "user", "content": f"{i}"}], "chosen": f"{word}!", "rejected": f"{word}?"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny.model(**(tiny.wide("llama") if wide else {})).save_pretrained(folder / "lm")
    tiny.tokenizer(pad=True).save_pretrained(folder / "lm")


def configured(folder, out="out", **learner):
    return load_settings(
        None,
        flags={
            "model": str(folder / "lm"), "data.pairs": str(folder / "pairs.jsonl"), "out": str(folder / out),
            "data.held_out": 0.3, "learner.lr": 1e-2, "learner.batch": 8, "epochs": 3, "device": "cpu",
            **{f"learner.{k}": v for k, v in learner.items()},
        },
    )  # fmt: skip


def test_a_batch_of_more_pairs_than_there_are_is_said_to_pass_over_them_more_often(tmp_path):
    write_task(tmp_path)
    ready = plan(configured(tmp_path, batch=2 * 40))
    passes = f"{ready.steps * 80 / len(ready.train):.3g} passes"
    assert ready.notes[-1] == f"a step has pairs several times, since learner.batch is more than they are: {passes}"
    assert not any("passes" in note for note in plan(configured(tmp_path, batch=8)).notes)


def test_training_learns_starts_at_chance_and_is_the_same_every_time(tmp_path):
    write_task(tmp_path)
    first = train_reward(configured(tmp_path), display=Silent())
    assert first["before"]["loss"] == pytest.approx(math.log(2))
    assert first["before"]["auc"]["mean"] == 0.5
    assert first["after"]["accuracy"]["mean"] == 1.0
    assert first["after"]["auc"]["low"] > 0.6
    again = train_reward(configured(tmp_path, "again"), display=Silent())
    assert again["after"] == first["after"]
    model = loading.load_scorer(str(tmp_path / "out" / "final"))
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    assert model.config.pad_token_id is not None
    # It is a reward, and a model that can be trained on.
    [[good, bad]] = ModelReward.open(str(tmp_path / "out" / "final"), {}).score([group("abc!", "abc?", asked="99")])
    assert good.score > bad.score
    settings = configured(tmp_path, "on")
    more = train_reward(
        load_settings(None, flags={"model": str(tmp_path / "out" / "final"), "data.pairs": settings.data.pairs,
                                   "out": str(tmp_path / "on"), "data.held_out": 0.3, "device": "cpu"}),
        display=Silent(),
    )  # fmt: skip
    assert more["before"]["accuracy"]["mean"] == 1.0


@pytest.mark.parametrize("wide", tiers.some([False, True], ["True"]))
def test_a_training_that_was_stopped_continues_to_the_same_weights(tmp_path, monkeypatch, wide):
    write_task(tmp_path, wide=wide)
    settings = configured(tmp_path)
    settings = load_settings(None, flags={"checkpoint.every": 2, **flags_of(settings)})
    train_reward(settings, display=Silent())
    whole = loading.load_scorer(str(tmp_path / "out" / "final")).state_dict()
    stopped = load_settings(None, flags={"checkpoint.every": 2, **flags_of(settings), "out": str(tmp_path / "cut")})
    real, calls = RewardProgram.step, []

    def failing(program, bar):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(program, bar)

    monkeypatch.setattr(RewardProgram, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        train_reward(stopped, display=Silent())
    monkeypatch.setattr(RewardProgram, "step", real)
    with pytest.raises(ConfigError, match="already holds a run"):
        train_reward(stopped, display=Silent())
    pairs = (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs.splitlines()[:-1]))
    with pytest.raises(ResumeError, match="the data changed"):
        train_reward(stopped, resume=True, display=Silent())
    (tmp_path / "pairs.jsonl").write_text(pairs)
    lost = (tmp_path / "cut" / "metrics.jsonl").read_bytes()
    (tmp_path / "cut" / "metrics.jsonl").write_bytes(b"".join(lost.splitlines(keepends=True)[1:]))
    with pytest.raises(ResumeError, match=r"metrics\.jsonl"):
        train_reward(stopped, resume=True, display=Silent())
    (tmp_path / "cut" / "metrics.jsonl").write_bytes(lost)
    train_reward(stopped, resume=True, display=Silent())
    continued = loading.load_scorer(str(tmp_path / "cut" / "final")).state_dict()
    assert all(torch.equal(continued[name], value) for name, value in whole.items())
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    changed = load_settings(None, flags={**flags_of(stopped), "learner.lr": 1e-3})
    with pytest.raises(ConfigError, match=r"learner.lr: the run was started with 0.01, now it is 0.001"):
        train_reward(changed, resume=True, display=Silent())
    display, said = Silent(), []
    monkeypatch.setattr(display, "line", said.append)
    assert train_reward(stopped, resume=True, display=display)["steps"] == max(steps)
    assert any("already complete" in line for line in said)
    more = load_settings(None, flags={"checkpoint.every": 2, **flags_of(stopped), "learner.lr": 1e-3, "epochs": 4})
    assert train_reward(more, resume=True, allow_changes=True, display=Silent())["steps"] > max(steps)
    (change,) = load_run(tmp_path / "cut").changes
    assert change.step == max(steps)
    assert "learner.lr was 0.01, is 0.001" in change.settings


def test_the_kernels_train_to_the_same_weights(tmp_path):
    write_task(tmp_path)
    found = []
    for kernels in ("plain", "auto"):
        settings = dataclasses.replace(configured(tmp_path, kernels, lr=1e-3), kernels=kernels)
        summary = train_reward(settings, display=Silent())
        found.append((summary["after"]["loss"], loading.load_scorer(str(tmp_path / kernels / "final")).state_dict()))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-4)
    for name, t in found[0][1].items():
        assert torch.allclose(found[1][1][name], t, rtol=0, atol=1e-3), name


def flags_of(settings):
    flat = {"learner.lr": settings.learner.lr, "learner.batch": settings.learner.batch, "epochs": settings.epochs,
            "model": settings.model, "data.pairs": settings.data.pairs, "out": settings.out,
            "data.held_out": settings.data.held_out, "device": settings.device}  # fmt: skip
    return flat


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path):
    from safetensors.torch import load_file, save_file

    write_task(tmp_path)
    path = tmp_path / "lm" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)  # whose products overflow
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(NumericsError, match="not finite"):
        train_reward(configured(tmp_path), display=Silent())


def test_settings_come_back_from_toml(tmp_path):
    settings = load_settings(
        None, ["data.runs=['a','b']", "learner.lr=1e-4", "learner.centre=0.01"], flags={"model": "m", "out": "o"}
    )
    (tmp_path / "r.toml").write_text(dumps(settings))
    assert load_settings(tmp_path / "r.toml") == settings


VALUES = [
    ("learner.batch", 0), ("epochs", 0), ("learner.lr", -1.0), ("learner.centre", -0.1), ("data.held_out", 1.0),
    ("data.overlong", "truncate"), ("seed", -1), ("learner.max_grad_norm", 0.0), ("steps", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[n for n, _ in VALUES])
def test_values_that_cannot_work_are_named(name, value):
    settings = load_settings(None, flags={"model": "m", "data.pairs": "p", name: value})
    assert [p for p in value_problems(settings) if p.startswith(f"{name}: got {value!r}")]


@pytest.mark.parametrize(
    ("name", "value", "given", "instead"),
    [
        ("data.held_out", 0.3, {"data.eval": "held.jsonl"}, {"data.eval": "auto"}),
        ("data.pairs_per_prompt", 3, {"data.pairs": "p.jsonl"}, {"data.runs": ["run"]}),
        ("epochs", 3, {"steps": 10}, {"steps": 0}),
    ],
)
def test_settings_that_would_do_nothing_are_refused(name, value, given, instead):
    base = {"model": "m", "data.pairs": "p.jsonl", name: value}
    [problem] = value_problems(load_settings(None, flags=base | given))
    assert problem.startswith(f"{name}: got {value}, but ")
    assert value_problems(load_settings(None, flags=base | instead)) == []


def test_everything_wrong_is_told_at_once(tmp_path):
    settings = load_settings(
        None, flags={"model": str(tmp_path / "no"), "data.pairs": str(tmp_path / "no.jsonl"), "learner.batch": 0}
    )
    with pytest.raises(ConfigError) as error:
        train_reward(settings, display=Silent())
    text = str(error.value)
    for part in ("learner.batch: got 0", "no such folder", "no.jsonl: no such file", "out: got ''"):
        assert part in text, text


# --------------------------------------------------------------------------------------------------------------------
# docs/reward-models.md


def documented(heading: str) -> dict[str, str]:
    """Keys and defaults of the first table behind a heading."""
    page = (Path(__file__).parents[2] / "docs" / "reward-models.md").read_text()
    found: dict[str, str] = {}
    for line in page.split(f"\n## {heading}")[1].split("\n## ")[0].splitlines():
        if row := re.match(r"\| (`[^|]+`) \| ([^|]+) \|", line):
            keys, values = (re.findall(r"`([^`]*)`", cell) for cell in row.groups())
            values = values or [row[2].strip()]
            found |= dict(zip(keys, values * len(keys) if len(values) == 1 else values, strict=True))
    return found


def defaults(cls: type, where: str = "") -> dict[str, str]:
    """Every key with its default as TOML."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        inner = typing.get_type_hints(cls)[field.name]
        if dataclasses.is_dataclass(inner):
            found |= defaults(inner, f"{where}{field.name}.")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            found[f"{where}{field.name}"] = "required"
        else:
            value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            found[f"{where}{field.name}"] = as_toml(value)
    return found


def as_toml(value: object) -> str:
    if isinstance(value, (bool, str, list, tuple)):
        return json.dumps(list(value) if isinstance(value, tuple) else value)
    return "{}" if isinstance(value, dict) else repr(value)


def test_every_key_of_train_reward_is_documented_with_its_default():
    assert documented("Training one") == defaults(RewardTraining)


def test_every_key_of_iterate_is_documented_with_its_default():
    told = documented("In rounds")
    true = {k: v for k, v in defaults(Iterate).items() if not k.startswith(("verifier.", "learner."))}
    assert told.pop("verifier") == "the task's own reward"
    assert told.pop("learner") == "as above"
    assert told == true


def test_every_argument_of_a_reward_model_is_documented_with_its_default():
    assert documented("As a reward") == {key: as_toml(value) for key, value in DEFAULTS.items()}
