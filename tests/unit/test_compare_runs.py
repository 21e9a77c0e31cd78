"""trew compare on folders with planted accuracies: groups, pairs, metrics, and what it refuses."""

import json
from pathlib import Path

import pytest

import compare_help
from compare_help import study, write
from recipe_help import merged
from trew.cli.main import main
from trew.errors import ConfigError, DataError
from trew.runs import RunFolder
from trew.runs.compare import Choices, compare_runs, describe, to_json
from trew.runs.compare.members import load_member
from trew.runs.compare.page import _curves

LOW, HIGH = [4, 6, 5, 7, 3, 5, 6], [9, 12, 11, 13, 8, 10, 13]
"""Right answers of 20, by seed: the second is 5 to 7 above the first at every seed."""
SLOW, FAST = {"learner": {"lr": 1e-3}}, {"learner": {"lr": 2e-3}}


def told(folders, **choices):
    return to_json(compare_runs(folders, Choices(**choices)))


def refused(folders, *lines, **choices):
    """The refusal, which must have all these parts."""
    with pytest.raises((ConfigError, DataError)) as caught:
        compare_runs(folders, Choices(**choices))
    assert caught.value.exit_code == 2
    for line in lines:
        assert line in str(caught.value)
    return str(caught.value)


def test_groups_are_the_settings_that_differ_and_pairs_are_seeds(tmp_path):
    found = told(study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)}))
    assert found["settings_that_differ"] == {"learner.lr": {"lr=0.001": 0.001, "lr=0.002": 0.002}}
    assert found["baseline"] == "lr=0.001"
    (versus,) = found["comparisons"]
    assert versus["difference"]["mean"] == pytest.approx(sum(b - a for a, b in zip(LOW, HIGH, strict=True)) / 7 / 20)
    assert versus["verdict"] == "better"
    assert versus["p_value"] == pytest.approx(2 / 2**7)
    assert [r["score"] for r in found["groups"][0]["runs"]] == [x / 20 for x in LOW]


def test_the_baseline_may_be_named_by_group_value_or_run_and_turns_the_verdict_round(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    written = (str(folders[-1]), f"{folders[-1]}/", f"{tmp_path}/./{folders[-1].name}")
    for name in ("lr=0.002", "0.002", "b-3", *written):
        found = told(folders, baseline=name)
        assert found["baseline"] == "lr=0.002"
        assert found["comparisons"][0]["verdict"] == "worse"
    refused(folders, "--baseline", "lr=0.001; lr=0.002", baseline="lr=3")


def test_what_does_not_change_learning_makes_no_group_but_is_told(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW)})
    folders.append(write(tmp_path / "other", 9, 5, track={"to": ["wandb"]}))
    found = told(folders)
    assert len(found["groups"]) == 1
    assert any("track.to, which does not change" in note for note in found["notes"])


def test_teachers_on_servers_are_told_apart_by_their_models_and_not_by_their_addresses(tmp_path):
    folders = []
    for i, name in enumerate(("small", "small", "large", "large")):
        teacher = {"endpoint": f"10.0.0.{i}:8000", "model": ""}
        folders.append(write(tmp_path / f"{name}-{i}", i % 2, 5 + i, teacher=teacher))
        (folders[-1] / "teacher.json").write_text(json.dumps({"model": name, "ids": [1, 2], "logprobs": [-1.0]}))
    found = told(folders)
    assert found["settings_that_differ"] == {"teacher.model": {"small": "small", "large": "large"}}
    (folders[2] / "teacher.json").unlink()
    assert load_member(folders[2]).settings["teacher.model"] == ""


def test_settings_that_by_leaves_out_are_told_or_refused(tmp_path):
    folders = [write(tmp_path / "x0", 0, 5), write(tmp_path / "x1", 1, 6, **FAST)]
    assert any("runs differ in learner.lr" in note for note in told(folders, by=("objective.preset",))["notes"])
    folders.append(write(tmp_path / "y0", 0, 5, **FAST))
    refused(folders, "seed 0", "they differ in learner.lr", by=("objective.preset",))
    refused(folders, "--by", "learner.lr", by=("learner.lrr",))


DIFFERENT = {
    "data": ("data.args.largest", {"data": {"args": {"largest": 30}}}),
    "model": ("model", {"model": "other"}),
    "version": ("version of trew", {"version": "2.0"}),
    "eval": ("eval.size", {"eval": {"size": 30}}),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_runs_that_measure_different_things_are_refused_unless_allowed(tmp_path, kind):
    key, other = DIFFERENT[kind]
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, {**FAST, **other})})
    assert len(refused(folders, f"{key}: differs", f"--allow {kind}").splitlines()) == 1
    if kind != "data":
        assert told(folders, allow=(kind,))["comparisons"][0]["verdict"] == "better"


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("eval.samples", {"eval": {"samples": 4}}),
        ("eval.max_tokens", {"rollout": {"max_tokens": 24}}),  # evaluations have the length of training
        ("rollout.stop", {"rollout": {"stop": ["\n"]}}),
        ("rewards.name", {"rewards": [{"name": "lenient", "model": "", "args": {}}]}),
    ],
)
def test_evaluations_of_another_kind_are_noticed(tmp_path, key, settings):
    refused(study(tmp_path, {"a": (LOW, {}), "b": (HIGH, settings)}), f"{key}: differs", "--allow eval")


EXACT, MODEL = {"name": "exact", "model": "", "args": {}}, {"name": "", "model": "rm/strict", "args": {}}


@pytest.mark.parametrize(
    ("key", "settings", "other"),
    [
        # The first that is no reward model decides.
        ("rewards.name", {"rewards": [MODEL, EXACT]}, {"rewards": [MODEL, {**EXACT, "name": "lenient"}]}),
        # The second of a name is called exact_2.
        (
            "rewards.args.tolerance",
            {"eval": {"correct_reward": "exact_2"}, "rewards": [EXACT, EXACT]},
            {"eval": {"correct_reward": "exact_2"}, "rewards": [EXACT, {**EXACT, "args": {"tolerance": 1}}]},
        ),
        # Each of several data sets has a reward of its own.
        (
            "rewards.b.name",
            {"rewards": [{**EXACT, "sets": ["a"]}, {**EXACT, "sets": ["b"]}]},
            {"rewards": [{**EXACT, "sets": ["a"]}, {**EXACT, "name": "lenient", "sets": ["b"]}]},
        ),
    ],
    ids=["behind-a-model", "second-of-a-name", "of-another-set"],
)
def test_what_decides_that_an_answer_is_correct_is_found_as_training_finds_it(tmp_path, key, settings, other):
    sets = {"data": [{"name": "a", "task": "arithmetic"}, {"name": "b", "task": "arithmetic"}]} if ".b." in key else {}
    folders = study(tmp_path, {"a": (LOW, {**settings, **sets}), "b": (HIGH, {**other, **sets})})
    refused(folders, f"{key}: differs", "--allow eval")


def test_a_reward_model_that_decides_nothing_may_differ(tmp_path):
    other = {"rewards": [{**MODEL, "model": "rm/mild"}, EXACT]}
    assert told(study(tmp_path, {"a": (LOW, {"rewards": [MODEL, EXACT]}), "b": (HIGH, other)}))["comparisons"]


def test_presets_differ_in_the_options_that_they_have_and_not_in_what_their_method_is(tmp_path):
    """dro and prime-rl pull towards the sampler, gpg and prime-rl drop groups: none of it is an option's value."""
    named = ("dro", "gpg", "prime-rl")
    notes = told(study(tmp_path, {p: (LOW, {"objective": {"preset": p}}) for p in named}))["notes"]
    assert not [note for note in notes if "objective." in note]
    groups = {p: (LOW, {"objective": {"preset": p}}) for p in ("gpg", "dapo", "grpo")}
    notes = told(study(tmp_path / "other", groups))["notes"]
    assert any("objective.beta is 0 in gpg, 0 in dapo, 0.04 in grpo" in note for note in notes)
    assert any("objective.dynamic_sampling is False in gpg, True in dapo, False in grpo" in note for note in notes)


def test_other_prompts_under_the_same_settings_are_noticed(tmp_path):
    """A data file that was replaced between two runs leaves no trace in their settings."""
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, {**FAST, "shift": 3})})
    refused(folders, "b-0", "6 of them are in one set only")
    refused(study(tmp_path / "n", {"a": (LOW, SLOW), "b": (HIGH, {**FAST, "prompts": 18})}), "on 18 prompts")


def test_prompts_without_a_verdict_are_no_other_prompts_but_are_told(tmp_path):
    found = told(study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, {**FAST, "unjudged": 2})}))
    assert any("2 held-out prompts without a verdict" in note for note in found["notes"])


def test_runs_that_were_computed_by_other_threads_or_kernels_are_told(tmp_path):
    alike = told(study(tmp_path / "alike", {"a": (LOW, SLOW), "b": (HIGH, FAST)}))
    assert not any("computed alike" in note for note in alike["notes"])
    found = told(study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, {**FAST, "threads": 2})}))
    [note] = [note for note in found["notes"] if "were not computed alike" in note]
    assert "cpu, 1 thread, trew's kernels: " in note
    assert "cpu, 2 threads, trew's kernels: " in note


def test_one_seed_says_what_can_be_said_and_what_cannot(tmp_path):
    folders = study(tmp_path, {"a": ([4], SLOW), "b": ([12], FAST)})
    refused(folders, "one seed", "on 20 held-out prompts", "+0.400 [", "6 or more", "--allow one-seed")
    found = told(folders, allow=("one-seed",))
    assert found["comparisons"] == []
    assert found["groups"][0]["mean"] == {"mean": 0.2, "low": None, "high": None}
    assert any("not compared: lr=0.002" in note for note in found["notes"])
    # Seeds that no other group has are one seed too.
    apart = [write(tmp_path / f"c-{seed}", seed, 5, **FAST) for seed in (5, 6)]
    refused([*study(tmp_path / "d", {"a": ([4, 5], SLOW)}), *apart], "lr=0.002: 5, 6")


def test_a_run_whose_evaluation_judged_nothing_is_refused(tmp_path):
    """Its accuracy at the end was that of an earlier evaluation."""
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    rows = [json.loads(line) for line in (folders[3] / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["eval_accuracy"] = None
    (folders[3] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(folders, "a-3: nothing was judged in its evaluation after step 10")


def test_unfinished_runs_are_refused_left_out_or_counted(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    folders.append(write(tmp_path / "open", 7, 20, finished=False, **FAST))
    refused(folders, "1 of 15 runs have not finished", "open (step 10 of 10)", "--unfinished count")
    assert told(folders, unfinished="leave-out")["left_out"] == [str(folders[-1])]
    counted = told(folders, unfinished="count")
    assert counted["groups"][1]["runs"][-1]["score"] == 0.5
    assert any("did not finish" in note for note in counted["notes"])


def test_a_run_that_has_only_begun_is_left_out_without_an_evaluation(tmp_path):
    """It was refused, although it was to be left out."""
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    folders.append(write(tmp_path / "begun", 7, 20, finished=False, **FAST))
    (folders[-1] / "metrics.jsonl").write_text("")
    assert told(folders, unfinished="leave-out")["left_out"] == [str(folders[-1])]
    for other in ("refuse", "count"):
        refused(folders, "begun: has no evaluation in metrics.jsonl", unfinished=other)


def test_a_change_is_told_with_one_full_stop(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    line = {"step": 4, "config": "", "settings": ["learner.lr was 0.1, is 0.2"], "others": [], "versions": []}
    (folders[0] / "changes.jsonl").write_text(json.dumps(line) + "\n")
    said = describe(compare_runs(folders, Choices(allow=("changes",))))
    assert "config.toml has the settings of its last steps.\n" in said + "\n"
    assert ".." not in said.replace(str(tmp_path), "")


def test_seeds_that_agree_have_shown_no_spread_and_have_no_interval(tmp_path):
    """Two seeds of 0.7 gave "0.700 [0.700, 0.700]", as if that were certain."""
    result = compare_runs(study(tmp_path, {"a": ([14, 14], SLOW), "b": ([16, 16], FAST)}), Choices())
    said = describe(result)
    assert said.count("0.700 [no interval]") == said.count("0.800 [no interval]") == 2
    assert "+0.100 [no interval]" in said
    # Runs that are equal to the last bit differ by 0: that is known.
    same = describe(compare_runs(study(tmp_path / "same", {"a": ([14, 14], SLOW), "b": ([14, 14], FAST)}), Choices()))
    assert "+0.000 [+0.000, +0.000]" in same


def test_a_run_that_ended_before_its_first_evaluation_is_counted_with_its_start(tmp_path):
    """As with eval.every = 0, where the evaluation after the start is that of the end."""
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    failed = write(tmp_path / "failed", 7, 20, finished=False, **FAST)
    rows = [json.loads(line) for line in (failed / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if "eval_accuracy" not in row or row["step"] == 0]
    (failed / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    counted = told([*folders, failed], unfinished="count")
    assert counted["groups"][1]["runs"][-1]["score"] == 0.1


GUESS = {"environment": {"name": "guess", "args": {"largest": 9}, "turns": 4, "workers": 1}}


@pytest.mark.parametrize(("key", "changes", "flag"), [
    ("environment.turns", {"turns": 12}, "eval"),
    ("environment.observation_tokens", {"observation_tokens": 64}, "eval"),
    ("environment.args.largest", {"args": {"largest": 3}}, "data"), ("environment.name", {"name": "grid"}, "data"),
])  # fmt: skip
def test_other_environments_measure_other_things(tmp_path, key, changes, flag):
    """Their episodes have numbers, the same in every environment."""
    other = merged(GUESS, {"environment": changes})
    refused(study(tmp_path, {"a": (LOW, GUESS), "b": (HIGH, other)}), f"{key}: differs", f"--allow {flag}")


def test_how_fast_an_environment_is_does_not_matter(tmp_path):
    other = merged(GUESS, {"environment": {"workers": 4}, **FAST})
    assert told(study(tmp_path, {"a": (LOW, merged(GUESS, SLOW)), "b": (HIGH, other)}))["comparisons"]


def test_a_seed_or_a_folder_given_twice_is_refused(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW)})
    refused([*folders, folders[0]], "is given 2 times")
    refused([*folders, write(tmp_path / "again", 3, 7, **SLOW)], "seed 3", "one run twice")


def test_two_data_sets_are_compared_within_each(tmp_path):
    """A group that is better on an easy set must not look better for having been run on it more often."""
    hard = {"data": {"args": {"largest": 99}}}
    folders = study(
        tmp_path,
        {"a": (LOW, SLOW), "b": (HIGH, FAST), "c": ([1, 2, 1], {**SLOW, **hard}), "d": ([2, 3, 2], {**FAST, **hard})},
    )
    found = told(folders, allow=("data",))
    assert [len(g["runs"]) for g in found["groups"]] == [10, 10]
    first = sum(b - a for a, b in zip(LOW, HIGH, strict=True)) / 7 / 20
    assert found["comparisons"][0]["difference"]["mean"] == pytest.approx((first + 0.05) / 2)


def test_curves_over_two_data_sets_count_each_the_same_and_leave_their_distance_out_of_the_band(tmp_path):
    """As the tables do. Three runs end at 0.2 and two at 0.8: a mean over runs would be 0.44, with a band of +- 0.4."""
    hard = {"data": {"args": {"largest": 99}}}
    folders = study(tmp_path, {"a": ([16, 16], {}), "b": ([4, 4, 4], hard)})
    (group,) = compare_runs(folders, Choices(allow=("data",))).groups
    *faint, mean = _curves(group, "eval_accuracy", 0, (0.0, 1.0))
    assert len(faint) == 5
    assert (mean.y[-1], mean.low[-1], mean.high[-1]) == (pytest.approx(0.5),) * 3


COUNTDOWN = {"data": {"task": "countdown"}, "rewards": [{"name": "countdown", "model": "", "args": {}}]}


@pytest.mark.parametrize(
    ("first", "second"), [(GUESS, merged(GUESS, {"environment": {"name": "grid"}})), ({}, COUNTDOWN)]
)
def test_what_a_task_brings_separates_no_groups(tmp_path, first, second):
    """Environments, and rewards: with other ones on the second task, its runs were groups of their own, without a
    pair."""
    of = {"a": (LOW, merged(SLOW, first)), "b": (HIGH, merged(FAST, first)),
          "c": (LOW, merged(SLOW, second)), "d": (HIGH, merged(FAST, second))}  # fmt: skip
    found = told(study(tmp_path, of), allow=("data",))
    assert [len(group["runs"]) for group in found["groups"]] == [2 * len(LOW), 2 * len(HIGH)]
    assert len(found["pairs"]) == 2 * len(LOW)
    assert not any(" runs differ in " in note for note in found["notes"])


def test_rewards_that_differ_within_a_task_separate_groups_on_several_tasks(tmp_path):
    hard = {"data": {"args": {"largest": 99}}}
    runs = {"a": (LOW, {}), "b": (HIGH, {"rewards": COUNTDOWN["rewards"]}), "c": (LOW, hard)}
    found = told(study(tmp_path, runs), allow=("data", "eval"))
    assert [len(group["runs"]) for group in found["groups"]] == [2 * len(LOW), len(HIGH)]


def test_groups_without_a_seed_in_common_on_one_data_set_are_called_so(tmp_path):
    hard = {"data": {"args": {"largest": 99}}}
    runs = {"a": (LOW, SLOW), "b": (HIGH, FAST), "c": (HIGH, {**hard, "learner": {"lr": 0.5}})}
    notes = told(study(tmp_path, runs), allow=("data",))["notes"]
    assert any("fewer than two seeds in common with lr=0.001 on one data set, and" in note for note in notes), notes


def test_metrics_other_than_the_end(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})

    def first(metric):
        found = told(folders, metric=metric)
        return found["groups"][0]["runs"][0]["score"], found["comparisons"][0]["verdict"]

    assert first("last:2") == (pytest.approx((4 / 40 + 4 / 20) / 2), "better")
    assert first("area") == (pytest.approx(0.25 * 0.1 + 0.5 * 4 / 40 + 0.25 * 4 / 20), "better")
    assert first("reward:2") == (pytest.approx(9.5 * 4 / 200), "better")
    # 4 groups of 8 completions each step; 0.35 is reached at the end by one of a, by all of b.
    found = told(folders, metric="reach:0.35")
    assert {r["score"] for g in found["groups"] for r in g["runs"]} == {320.0}
    assert any("6 of 14 runs did not reach 0.35 within 320" in note for note in found["notes"])
    assert told(folders, metric="reach:0.2")["comparisons"][0]["verdict"] == "better"
    for wrong in ("best", "reach:0", "reach:2", "last:0", "last:0000000001", "reward", "final:3", ":3"):
        refused(folders, "--metric: ", metric=wrong)
    refused(folders, "reward", metric="reword:3")
    refused(folders, "has fewer than 11 steps in metrics.jsonl", metric="reward:11")
    refused(folders, "fewer than 3 evaluations", metric="last:3")


def test_small_numbers_of_a_column_are_not_rounded_to_nothing(tmp_path):
    folders = study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})
    for folder in folders:
        faster, own = folder.name.startswith("b"), int(folder.name[2:])
        rows = [{"step": step, "kl": (3 if faster else 1) * 1e-4 + own * 1e-6} for step in (11, 12)]
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    said = describe(compare_runs(folders, Choices(metric="kl:2")))
    assert "0.000103 [" in said
    assert "+0.0002 [" in said


def test_a_small_p_value_is_not_rounded_to_none(tmp_path):
    result = compare_runs(study(tmp_path, {"a": (LOW * 2, SLOW), "b": (HIGH * 2, FAST)}), Choices())
    assert to_json(result)["comparisons"][0]["p_value"] < 0.0005
    assert " < 0.001 " in describe(result)


def test_presets_with_other_defaults_are_told(tmp_path):
    folders = study(
        tmp_path, {"a": (LOW, {}), "b": (HIGH, {"objective": {"preset": "dapo"}})}
    )  # fmt: skip
    notes = "\n".join(told(folders)["notes"])
    assert "objective.beta is 0.04 in grpo, 0 in dapo" in notes
    assert "objective.dynamic_sampling is False in grpo, True in dapo" in notes
    same = study(
        tmp_path / "same",
        {"a": (LOW, {"objective": {"beta": 0.0}}), "b": (HIGH, {"objective": {"beta": 0.0, "preset": "dr-grpo"}})},
    )
    assert "objective.beta" not in "\n".join(told(same)["notes"])


def test_groups_that_sampled_more_are_told(tmp_path):
    more = {"rollout": {"completions": 16}}
    notes = told(study(tmp_path, {"a": (LOW, {}), "b": (HIGH, more)}))["notes"]
    assert any("320 in completions=8, 640 in completions=16" in note for note in notes)


def test_few_seeds_say_that_nothing_could_have_been_found(tmp_path):
    folders = study(tmp_path, {"a": (LOW[:4], SLOW), "b": (HIGH[:4], FAST)})
    text = describe(compare_runs(folders, Choices()))
    assert "4 pairs of runs cannot show any difference" in text
    assert "It takes 6 or more" in text
    assert "better  " not in text


def test_the_command_prints_tables_json_and_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [str(f) for f in study(tmp_path, {"a": (LOW, SLOW), "b": (HIGH, FAST)})]
    for args, code in (([], 0), (["--json", "--html", "page.html"], 0), (["--allow", "x"], 2), (["--html", "no/x"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *folders, *args])
        assert ended.value.code == code
        out = capsys.readouterr().out
        if code == 0:
            assert "lr=0.002" in out
            assert out.startswith("{") == bool(args)
            if args:
                assert json.loads(out)["comparisons"][0]["verdict"] == "better"
    assert "lr=0.002" in (tmp_path / "page.html").read_text()


def test_a_setting_may_be_infinite(tmp_path, capsys):
    """No limit above, as of a clip: JSON has no such number."""
    groups = {"a": (LOW, {"objective": {"eps_high": float("inf")}}), "b": (HIGH, {"objective": {"eps_high": 0.3}})}
    folders = [str(folder) for folder in study(tmp_path, groups)]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *folders, "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["settings_that_differ"]["objective.eps_high"] == {"eps_high=inf": "inf", "eps_high=0.3": 0.3}


def test_folders_that_are_no_runs_of_training_are_refused(tmp_path):
    run = write(tmp_path / "a", 0, 5)
    refused([run], "two run folders or more")
    refused([run, tmp_path / "none"], "no such run folder")
    broken = write(tmp_path / "b", 1, 5)
    (broken / "config.toml").write_text("seed = ")
    refused([run, broken], "config.toml does not tell its settings")
    reward_model = write(tmp_path / "c", 1, 5)
    (reward_model / "config.toml").write_text('model = "m"\nseed = 1\n')
    refused([run, reward_model], "not a run of trew train")


def test_a_page_of_hostile_names_and_settings_is_text(tmp_path):
    from report_help import HOSTILE, Elements
    from trew.runs.compare.page import render

    folders = study(
        tmp_path, {f"g{i}": ([i + 2, i + 3], {"chat_template": text}) for i, text in enumerate(HOSTILE[:4])}
    )  # fmt: skip
    page = render(compare_runs(folders, Choices(allow=("eval",))))
    seen = Elements(page)
    assert not {"script", "img", "comment", "base", "iframe"} & set(seen.seen)
    assert not [a for a in seen.attributes if a[1].startswith("on") or (a[1] in ("src", "href"))]
    assert "<script>alert(1)</script>" in "".join(seen.text)
    assert compare_help.SETTINGS["chat_template"] == "plain"


def test_the_example_in_the_documentation_is_the_result_that_was_measured():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "compare.md").read_text()
    result = json.loads((root / "benchmarks" / "results" / "compare.json").read_text())["result"]
    for found in result["groups"]:
        ends = "{mean:.3f} [{low:.3f}, {high:.3f}]"
        assert f"{ends.format(**found['mean'])}  {found['sd']:.3f}  {ends.format(**found['iqm'])}" in page
    for versus in result["comparisons"]:
        assert "{mean:+.3f} [{low:+.3f}, {high:+.3f}]  ".format(**versus["difference"]) in page
        assert f"{versus['detectable_difference']:.3f}" in page


def test_a_run_that_was_evaluated_by_a_loss_is_refused_as_such(tmp_path):
    """The message said that it has no evaluation, and to let it run."""
    folder = tmp_path / "sft"
    with RunFolder.open(folder) as run:
        run.write_config('model = "lm"\nseed = 0\n[objective]\npreset = "sft"\n')
        run.log({"step": 0, "eval_loss": 2.0, "eval_loss_low": 1.5, "eval_loss_high": 2.5, "eval_n": 4})
    with pytest.raises(DataError, match=r"by the loss of its data \(trew sft\)"):
        load_member(folder)


def test_values_that_differ_late_are_told_apart(tmp_path):
    """A long path that ends otherwise, and a number that differs in its seventh digit."""
    models = [f"/scratch/groups/language/experiments/of-the-third-week/checkpoint-{n}" for n in (100, 200)]
    folders = [write(tmp_path / str(i), 0, 5, model=model) for i, model in enumerate(models)]
    assert "checkpoint-100 (" in (text := refused(folders, "model: differs: /scratch/"))
    assert "checkpoint-200 (" in text
    folders = study(tmp_path, {f"lr{n}": (LOW, {"learner": {"lr": float(f"1.23456{n}e-3")}}) for n in (71, 72)})
    found = told(folders)
    assert [group["name"] for group in found["groups"]] == ["lr=0.0012345671", "lr=0.0012345672"]
