"""Whether objective and run fit: refused with what to do, noted where a choice does nothing, silent elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import trew
from trew.config import Config, parse
from trew.objective import preset
from trew.training import compatibility
from trew.training.planning import length_problems

ALONE = ("reinforce", "remax", "reinforce-pp", "ppo", "vapo", "online-rft")
"""Presets that learn from one completion per prompt."""
NOT_IN_A_RUN = ("ppo-clip", "grpo-process", "gigpo", "mt-grpo", "turn-returns", "sft", "rft", "dpo")


def run(preset: str, *, rollout: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **settings: Any):
    config = parse({
        "model": "m", "rollout": {"prompts": 4, "completions": 4, **(rollout or {})}, "learner": learner or {},
        "objective": {"preset": preset, **settings},
    })  # fmt: skip
    return trew.preset(preset, **settings), config


def problems(*args: Any, **how: Any) -> list[str]:
    return compatibility.problems(*run(*args, **how))


def notes(*args: Any, **how: Any) -> list[str]:
    return compatibility.notes(*run(*args, **how))


@pytest.mark.parametrize("name", trew.presets())
def test_every_preset_fits_a_usual_run_or_says_what_is_missing(name):
    found = problems(name, **({"k": 2} if name == "pass-at-k" else {}))
    assert len(found) == (name in NOT_IN_A_RUN)
    for problem in found:
        assert problem.startswith(f"objective.preset: got '{name}', ")
        assert "; choose another preset, or call" in problem


def test_refills_are_refused_where_no_group_is_replaced():
    some = {"refills": 3}
    assert problems("dapo", rollout=some) == problems("grpo", rollout=some, dynamic_sampling=True) == []
    assert problems("grpo", rollout={"refills": 8}) == []  # the default
    assert problems("grpo", rollout={"replay": "runs/dapo", **some}) == []  # as in the run that is replayed
    for found in (problems("grpo", rollout=some), problems("dapo", rollout=some, dynamic_sampling=False)):
        [problem] = found
        assert problem.startswith("rollout.refills: got 3, accepts 8 (the default) here: ")
        assert problem.endswith("remove it, or set objective.dynamic_sampling = true")


TRIED: dict[tuple[str, int, int], bool] = {}


@pytest.fixture
def each_tried_once(monkeypatch):
    """A refusal names the presets that would do: here each is tried once, instead of once a test."""
    teaches = compatibility.teaches

    def once(objective, config):
        key = (repr(objective), config.rollout.prompts, config.rollout.completions)
        if key not in TRIED:
            TRIED[key] = teaches(objective, config)
        return TRIED[key]

    monkeypatch.setattr(compatibility, "teaches", once)


@pytest.mark.parametrize("name", trew.presets())
def test_one_completion_per_prompt_is_refused_where_completions_are_compared(name, each_tried_once):
    found = problems(name, rollout={"completions": 1}, **({"k": 1} if name == "pass-at-k" else {}))
    if name in (*ALONE, "opd"):  # which is not proposed: it needs a teacher
        assert found == []
    elif name not in (*NOT_IN_A_RUN, "pass-at-k"):
        (problem,) = found
        assert problem.startswith(f"rollout.completions: got 1, accepts at least 2 for {name}: ")
        assert problem.endswith(f"raise it, or choose {' or '.join(ALONE)} as objective.preset")


def test_with_one_completion_dynamic_sampling_would_keep_nothing_and_a_batch_baseline_needs_several_prompts():
    one = {"completions": 1}
    assert problems("reinforce", rollout=one, baseline="batch") == []
    assert problems("reinforce", rollout={**one, "prompts": 1}, baseline="none") == []
    for found in (
        problems("reinforce", rollout=one, dynamic_sampling=True),
        problems("reinforce", rollout=one, baseline="group"),
        problems("reinforce", rollout={**one, "prompts": 1}, baseline="batch"),
    ):
        assert found[0].startswith("rollout.completions: got 1")


def test_settings_that_leave_no_advantage_are_refused():
    (problem,) = problems("gtpo", a1=0.0, a2=0.0)
    assert problem == (
        "objective: got gtpo with {'a1': 0.0, 'a2': 0.0}, which gives every completion the advantage 0: nothing would "
        "be learned; change a1, a2"
    )


@pytest.mark.parametrize(("completions", "ok"), [(3, False), (4, False), (5, True)])
def test_k_must_be_less_than_the_group(completions, ok):
    found = problems("pass-at-k", rollout={"completions": completions})
    assert (found == []) == ok
    if not ok:
        assert found[0].startswith(f"objective.k: got 4, accepts less than rollout.completions = {completions}")


def test_an_overlong_cache_must_fit_into_the_completion():
    assert problems("dapo", rollout={"max_tokens": 16}, overlong_cache=16) == []
    assert len(notes("dapo", rollout={"max_tokens": 16}, overlong_cache=16)) == 1
    (problem,) = problems("dapo", rollout={"max_tokens": 16}, overlong_cache=17)
    assert problem.startswith("objective.overlong_cache: got 17, accepts at most rollout.max_tokens = 16")


def test_an_overlong_cache_does_not_fit_episodes_of_several_turns():
    """A reply that is cut off in the first turn would be far from the limit of all of them."""
    table = {"model": "m", "rollout": {"max_tokens": 16}, "objective": {"preset": "dapo", "overlong_cache": 12}}
    for turns in (1, 2):
        config = parse({**table, "environment": {"name": "guess", "turns": turns}})
        found = compatibility.problems(trew.preset("dapo", overlong_cache=12), config)
        assert [p.partition(": a reply")[0] for p in found] == [
            "objective.overlong_cache: got 12, accepts 0 with episodes of 2 turns"
        ] * (turns == 2)


def test_a_filter_that_does_not_see_lengths_is_noted():
    (note,) = [note for note in notes("gpg", overlong_cache=8) if "overlong_cache" in note]
    assert "gpg leaves out groups whose rewards are equal before lengths count" in note
    assert not any("overlong_cache" in note for note in (*notes("gpg"), *notes("grpo", overlong_cache=8)))


READS_THE_SAMPLER = [
    ("aipo", {}, "ratio"), ("dppo-tv", {}, "ratio, weight"), ("deepseek-v3.2", {}, "ratio, divergence"),
    ("grpo", {"correction": "tis"}, "correction"), ("prime-rl", {}, "ratio, weight, divergence"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "reader"), READS_THE_SAMPLER)
def test_the_samplers_log_probs_need_an_uncut_distribution(name, settings, reader):
    found = problems(name, rollout={"top_p": 0.9, "top_k": 20}, **settings)
    assert [p.partition(":")[0] for p in found] == ["rollout.top_p", "rollout.top_k"]
    assert f"got 0.9, accepts 1.0 here: {name} reads the sampler's log-probs ({reader})" in found[0]
    assert problems(name, rollout={"min_p": 0.1}, **settings)[0].startswith("rollout.min_p: got 0.1, accepts 0.0")
    assert problems("dr-grpo", rollout={"top_p": 0.9, "top_k": 20, "min_p": 0.1}) == []


IDLE_ON_POLICY = {
    "its trust region": ("grpo", "gspo", "vespo", "sapo", "cispo", "topr", "dual-clip", "gmpo", "grpo-s", "ce-gppo",
                         "aspo", "dppo-kl", "rloo", "m2po"),
    "its pull back": ("kl-cov", "kimi", "prime-rl"),
    "its correction": ("deepseek-v3.2",),
}  # fmt: skip
ACTS_ON_POLICY = ("reinforce", "remax", "gpg", "opo", "trw-logistic", "trw-entropy", "clip-cov")


@pytest.mark.parametrize(("what", "name"), [(w, n) for w, names in IDLE_ON_POLICY.items() for n in names])
def test_what_does_nothing_at_ratio_one_is_noted_for_a_single_optimizer_step(what, name):
    (note,) = notes(name)
    assert note.startswith(f"{name}: one optimizer step per set of rollouts, so that the ratio is ")
    assert f"{what} (" in note
    anchored = trew.preset(name).ratio.anchor == "rollout"
    assert ("1 but for rounding" in note) == anchored
    for learner in ({"inner_updates": 2}, {"minibatch_prompts": 2}):
        assert notes(name, learner=learner) == []


@pytest.mark.parametrize("name", ACTS_ON_POLICY)
def test_what_acts_at_ratio_one_is_not_noted(name):
    assert notes(name) == []


def test_rollouts_of_older_weights_have_a_ratio_that_is_not_1():
    stale = {"stale_steps": 2}
    for name in ("grpo", "gspo", "kimi", "dppo-tv", "deepseek-v3.2"):
        assert len(notes(name)) == 1
        corrected = {"correction": "tis"} if name == "kimi" else {}  # without a ratio it is refused otherwise
        assert (notes(name, rollout=stale, **corrected) == []) == (name != "kimi")
        objective, config = run(name)
        assert compatibility.notes(objective, config, departs=True) == []  # of a replay with another rate, say
    # A correction accounts for the sampler: the ratio is measured against the policy at the beginning of the step.
    (note,) = notes("grpo", rollout=stale, correction="tis+opsm")
    assert "the ratio is exactly 1 and nothing is done by its trust region" in note
    assert "its correction" not in note
    config = parse({"model": "m", "cluster": {"rollout": "vllm", "servers": 1, "staleness": 1}})
    assert compatibility.notes(trew.preset("aipo"), config) == []


def test_opsm_is_noted_and_corrections_for_the_mismatch_are_not():
    both = notes("opo", correction="tis+opsm")
    assert len(both) == 1
    assert "its correction (c_t = 0 if A < 0" in both[0]
    assert notes("opo", correction="tis") == []


def test_options_that_belong_to_another_are_noted_without_it():
    several = {"inner_updates": 2}
    assert notes("dapo", learner=several, kl="k2") == ["objective.kl: does nothing while beta = 0"]
    assert notes("dapo", learner=several, kl_place="reward") == ["objective.kl_place: does nothing while beta = 0"]
    assert notes("dapo", learner=several, kl="k2", kl_place="reward", beta=0.1) == []
    assert notes("dapo", learner=several, entropy_bonus=0.1, entropy_step=0.1) == [
        "objective.entropy_step: does nothing while entropy_target = 0"
    ]
    assert notes("dapo", learner=several, entropy_target=0.1, entropy_step=0.1) == []


def test_the_configuration_alone_allows_one_completion():
    assert isinstance(parse({"model": "m", "rollout": {"completions": 1}}), Config)


@pytest.mark.parametrize("aggregate", ["token-mean", "constant", "seq-mean-token-sum", ""])
def test_dpo_learns_and_logs_its_own_mean_over_pairs(aggregate):
    chosen = {"preset": "dpo", **({"aggregate": aggregate} if aggregate else {})}
    config = parse({"model": "m", "data": {"task": "pairs", "train": "pairs.jsonl"}, "objective": chosen})
    objective = preset("dpo", **config.objective.args)
    found = compatibility.demonstration_problems(objective, config)
    assert [line.partition(", accepts")[0] for line in found] == (
        [f"objective.aggregate: got {aggregate!r}"] if aggregate else []
    )


@pytest.mark.parametrize("name", ["sft", "rft"])
def test_a_kl_to_go_has_no_sampler_among_demonstrations(name):
    # It would read the old policy's log-probs, which demonstrations do not have: every advantage would be NaN.
    objective, config = run(name, beta=0.1, kl="k1", kl_place="to-go")
    (found,) = compatibility.demonstration_problems(objective, config)
    assert found.startswith(f"objective.kl_place: got 'to-go', accepts 'loss' for {name}: ")
    assert not compatibility.demonstration_problems(*run(name, beta=0.1))
    assert not compatibility.demonstration_problems(*run(name, kl_place="to-go"))


@pytest.mark.parametrize(
    ("most", "longest", "ways"),
    [
        (400, 200, 'lower it to 312, or set data.max_prompt_tokens = 112 and data.overlong = "drop" or "truncate", or '
                   "take a model with more positions"),
        (6, 701, 'set data.max_prompt_tokens = 506 and data.overlong = "drop" or "truncate", or take a model'),
        (600, 100, "lower it to 412, or take a model with more positions"),
        (600, 600, "; take a model with more positions"),
    ],
)  # fmt: skip
def test_every_way_out_of_a_sequence_that_is_too_long_is_one(most, longest, ways):
    (problem,) = length_problems({"rollout.max_tokens": most, "eval.max_tokens": 0}, longest=longest, limit=512)
    assert problem.startswith(
        f"rollout.max_tokens: got {most} after prompts of up to {longest} tokens, more than the 512"
    )
    assert problem.partition("; ")[2].startswith(ways.removeprefix("; "))
    assert length_problems({"rollout.max_tokens": 12}, longest=500, limit=512) == []
    assert length_problems({"rollout.max_tokens": 12}, longest=500, limit=None) == []
