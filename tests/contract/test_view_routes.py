"""What every route of `trew view` answers, on run folders that the writer of runs wrote."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from trew.config import Config, parse
from trew.runs import RunFolder
from trew.runs.compare import Choices
from trew.runs.metric_help import HELP
from trew.runs.rollouts import schema
from trew.view.about_values import ABOUT
from trew.view.completion import GAPS, VALUES
from view_help import client, episode, get, group, make_run, write_eval, write_step

ROW = {
    "step", "eval", "group", "trained_group", "uid", "sample", "prompt", "completion", "score", "status", "parts",
    "statuses", "extracted", "gold", "finish_reason", "rollout_status", "rollout_error", "truncated", "length",
    "advantage", "policy_version", "turns", "ending", "prompt_hash",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        make_run(folder / f"slow-{seed}", seed=seed)
        make_run(folder / f"fast-{seed}", seed=seed, lr=1e-2)
    make_run(folder / "two words & more", finished=False)
    return folder


@pytest.fixture(scope="module")
def page(runs):
    return client(runs)


def test_a_run_says_what_it_is(page):
    found = {run["name"]: run for run in get(page, "runs")["runs"]}
    assert [*found] == ["fast-0", "fast-1", "slow-0", "slow-1", "two words & more"]
    assert found["slow-0"] == {
        **found["slow-0"], "id": "slow-0", "kind": "policy", "state": "finished", "step": 3, "steps": 3,
        "model": "none", "preset": "grpo", "seed": 0, "warnings": 0, "has_rollouts": True, "has_tokens": True,
    }  # fmt: skip
    assert found["two words & more"]["id"] == "two-words-more"
    assert found["two words & more"]["state"] == "stopped"


def test_runs_that_differ_in_their_seed_share_a_setting(page):
    of = {run["name"]: run["setting"] for run in get(page, "runs")["runs"]}
    assert of["slow-0"] == of["slow-1"] != of["fast-0"] == of["fast-1"]


def test_a_running_run_is_told_from_one_that_stopped(tmp_path):
    make_run(tmp_path / "x", finished=False)
    page = client(tmp_path)
    assert get(page, "runs")["runs"][0]["state"] == "stopped"
    with RunFolder.open(tmp_path / "x", resume=True):
        assert get(page, "runs")["runs"][0]["state"] == "running"
    assert get(page, "runs")["runs"][0]["state"] == "stopped"


def test_metrics_are_columns_of_equal_length(page):
    found = get(page, "runs/slow-0/metrics")
    assert found["steps"] == [1, 2, 3]
    assert found["columns"]["reward"] == [0.1, 0.2, 0.3]
    assert {len(column) for column in found["columns"].values()} == {3}
    assert found["evals"] == [{"step": at, "accuracy": 0.25, "low": 0.1, "high": 0.4, "n": 1} for at in (0, 3)]
    assert found["groups"][0] == {"title": "Reward", "columns": ["reward", "accuracy"]}
    assert found["help"]["accuracy"] == HELP["accuracy"]


def test_metrics_since_a_step_are_the_rest_of_the_same(page):
    whole, rest = get(page, "runs/slow-0/metrics"), get(page, "runs/slow-0/metrics", since=1)
    assert rest["steps"] == [2, 3]
    assert rest["columns"] == {name: column[1:] for name, column in whole["columns"].items()}
    assert [rest[k] for k in ("evals", "marks", "groups", "revision")] == [
        whole[k] for k in ("evals", "marks", "groups", "revision")
    ]
    assert [*get(page, "runs/slow-0/metrics", columns="reward")["columns"]] == ["reward"]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 2\n[objective]\npreset = 'grpo'\n")
        write_step(run, 1, group("a", "x", "y", scores=(float("nan"), float("inf"))), loss=float("nan"), kl=1.0)
        write_step(run, 2, group("a", "x", "y", scores=(0.0, 1.0)), loss=0.5, late=7.0)
    page = client(tmp_path)
    columns = get(page, "runs/x/metrics")["columns"]
    assert (columns["loss"], columns["kl"], columns["late"]) == ([None, 0.5], [1.0, None], [None, 7.0])
    assert [row["score"] for row in get(page, "runs/x/rollouts", step=1)["rows"]] == [None, None]
    assert get(page, "runs/x/steps")["steps"][0]["mean"] is None


@pytest.mark.parametrize(
    ("task", "columns", "names"),
    [
        ("demonstrations", {"demonstration": [{"role": "assistant", "content": "4"}]}, ["demonstration"] * 2),
        ("pairs", {"pair": {"chosen": "4", "rejected": "5"}}, ["chosen", "rejected"]),
    ],
)
def test_what_the_data_gave_has_no_score(task, columns, names, tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(f"steps = 1\n[data]\ntask = '{task}'\n[objective]\npreset = 'sft'\n")
        write_step(run, 1, group("a", "4", "5", scores=(1.0, 0.0), **columns))
    page = client(tmp_path)
    assert get(page, "runs")["runs"][0]["given"] == task
    [found] = get(page, "runs/x/groups", step=1)["groups"]
    assert [(row["given"], row["score"]) for row in found["rows"]] == [(name, None) for name in names]
    assert (found["mean"], found["std"], found["gold"]) == (None, None, None)
    assert get(page, "runs/x/steps")["steps"][0]["mean"] is None
    assert get(page, "runs/x/completion", step=1, group=0, sample=1)["row"]["given"] == names[1]
    [prompt] = get(page, "runs/x/prompts")["prompts"]
    assert (prompt["last"]["mean"], prompt["gold"], prompt["disagreement"]) == (None, None, None)
    assert get(page, "runs/x/rollouts", min_score=0)["total"] == 0


def test_what_a_reward_accepted_keeps_its_score(page, tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[[data]]\ntask = 'rollouts'\n[objective]\npreset = 'rft'\n")
        write_step(run, 1, group("a", "4", scores=(0.75,)))
    [row] = get(client(tmp_path), "runs/x/rollouts")["rows"]
    assert row["score"] == 0.75
    assert "given" not in row
    assert {run["given"] for run in get(page, "runs")["runs"]} == {""}


def test_every_data_set_has_its_evaluations(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        of_a = {"eval_accuracy/a": 0.25, "eval_low/a": 0.0, "eval_high/a": 0.5, "eval_n/a": 4}
        run.log({"step": 0, "eval_accuracy": 0.5, "eval_low": 0.25, "eval_high": 0.75, "eval_n": 8, **of_a})
    found = get(client(tmp_path), "runs/x/metrics")
    assert found["evals"][0]["accuracy"] == 0.5
    assert found["eval_sets"] == {"a": [{"step": 0, "accuracy": 0.25, "low": 0.0, "high": 0.5, "n": 4}]}


def test_marks_say_what_happened(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 30\n[objective]\npreset = 'grpo'\n[rollout]\nmax_tokens = 6\n")
        for step in range(1, 21):
            run.log({"step": step, "reward": 0.0, "truncated_share": 0.9 if step < 13 else 0.0})
        run.event("step 12: a reward failed")
        run.write_bad_step(7, {"loss": float("nan")})
        (run.checkpoints / "000010").mkdir()
        run.rewind(18)
    page = client(tmp_path)
    found = {(mark["kind"], mark["step"]) for mark in get(page, "runs/x/metrics")["marks"]}
    assert found == {("warning", 10), ("event", 12), ("bad_step", 7), ("checkpoint", 10), ("resumed", 18)}
    warning = get(page, "runs/x/summary")["health"][0]
    assert (warning["rule"], warning["step_from"], warning["step_to"]) == (
        "truncated",
        10,
        16,
    )  # the mean over the last ten steps falls below a half
    assert warning["text"] == "90% of completions are cut off at the limit of rollout.max_tokens = 6"
    assert "Raise rollout.max_tokens" in warning["advice"]


def test_the_summary_has_both_ends(page):
    found = get(page, "runs/slow-0/summary")
    assert found["before"] == {"accuracy": 0.25, "low": 0.1, "high": 0.4, "n": None}
    assert found["after"]["accuracy"] == 0.25  # of the last evaluation, since summary.json has none
    assert found["memory"] == {"processes": [], "why": None, "prompt_tokens": None, "measured_peak_bytes": 2**30}
    assert found["cluster"] is None


def test_memory_is_shown_by_process_planned_and_measured(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 2\n[objective]\npreset = 'grpo'\n")
        both = {"generating": {"weights": 8, "cache": 2}, "training": {"weights": 8, "gradients": 8}}
        planned = [{"who": f"rank {i}", "device": "cpu", "memory": both, "peak_bytes": 16} for i in range(2)]
        wrong = [7, {"who": "rank 1", "memory": {"training": "much", "generating": 3}, "peak_bytes": None}]
        measured = [{"who": "rank 0", "memory": {"loading": 9, "training": 15}, "peak_bytes": 15}, *wrong]
        run.write_memory({"planned": {"processes": planned, "prompt_tokens": 5}, "measured": measured})
    page = client(tmp_path)
    found = get(page, "runs/x/summary")["memory"]
    assert found["prompt_tokens"] == 5
    first, second = found["processes"]
    assert first == {"who": "rank 0", "device": "cpu", "planned": both, "measured": {"loading": 9, "training": 15},
                     "measured_peak_bytes": 15}  # fmt: skip
    assert (second["planned"], second["measured"]) == (both, {"generating": 3})  # what is not a number is left out
    (tmp_path / "x" / "memory.json").write_text('{"planned": [1], "measured": {"a": 1}}')
    assert get(page, "runs/x/summary")["memory"]["processes"] == []


def test_lists_have_what_was_said_in_episodes(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        write_step(run, 1, episode("talk"), group("a", "one", "two"))
    page = client(tmp_path)
    talk, *others = get(page, "runs/x/rollouts")["rows"]
    assert [(said["who"], said["text"]) for said in talk["said"]] == [
        ("user", "go"), ("policy", "AB"), ("tool", "warm <b>"), ("policy", "CD"),
    ]  # fmt: skip
    assert ["call", "look(where='up')"] in talk["said"][1]["facts"]
    assert ["reward", "0.25"] in talk["said"][1]["facts"]
    assert not any("said" in row for row in others)
    assert "said" in get(page, "runs/x/groups", step=1)["groups"][0]["rows"][0]
    assert "said" in get(page, "runs/x/prompt", uid="talk")["visits"][0]["rows"][0]


def test_the_processes_of_a_run_are_shown(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config(
            "steps = 2\n[objective]\npreset = 'grpo'\n[cluster]\nlearner = 2\nrollout = 'vllm'\nstaleness = 1\n"
            "endpoints = ['http://a:1']\n"
        )
        run.log({"step": 1, "policy_version": 4, "age/0": 0.75, "age/1": 0.25, "age_mean": 0.25})
    found = get(client(tmp_path), "runs/x/summary")["cluster"]
    assert (found["ranks"], found["servers"], found["versions"]) == (2, ["http://a:1"], 4)
    assert found["ages"] == {"0": 0.75, "1": 0.25}


def test_settings_of_runs_side_by_side(page):
    assert get(page, "runs/slow-0/config")["values"]["learner.lr"] == 1e-3
    assert "lr = 0.001" in get(page, "runs/slow-0/config")["text"]
    keys = {key["key"]: key for key in get(page, "config?run=slow-0&run=fast-0")["keys"]}
    assert keys["learner.lr"] == {
        "key": "learner.lr", "values": {"slow-0": 1e-3, "fast-0": 1e-2}, "differs": True,
        "default": parse({"model": "m"}).learner.lr,
    }  # fmt: skip
    assert not keys["model"]["differs"]
    assert isinstance(Config(model="m").learner.lr, float)


def test_the_histograms_of_all_steps_have_the_same_edges(page):
    found = get(page, "runs/slow-0/steps")
    assert [(s["step"], s["rows"], s["groups"]) for s in found["steps"]] == [(1, 5, 2), (2, 5, 2), (3, 5, 2)]
    edges = {tuple(s["histogram"]["edges"]) for s in found["steps"]}
    assert len(edges) == 1
    assert min(edges.pop()) == 0.0
    assert [sum(s["histogram"]["counts"]) for s in found["steps"]] == [4, 4, 4]  # one completion has no score
    assert found["steps"][0]["mean"] == 0.25
    assert found["evals"] == [
        {"step": 0, "rows": 1, "groups": 1, "mean": 0.0},
        {"step": 3, "rows": 1, "groups": 1, "mean": 1.0},
    ]
    assert found["unreadable"] == []


def test_a_completion_in_a_list_has_everything_that_was_recorded(page):
    row = get(page, "runs/slow-0/rollouts", step=1, uid="a")["rows"][1]
    assert set(row) == ROW
    assert row == {
        **row, "step": 1, "eval": False, "group": 0, "trained_group": 0, "uid": "a", "sample": 1, "score": 0.0,
        "prompt": "question a", "completion": "long answer", "parts": {"right": 0.0, "form": 0.5},
        "statuses": {"right": "scored"}, "extracted": "0.0", "gold": "4", "length": 11, "advantage": -0.5, "turns": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({}, 17), ({"eval": 0}, 15), ({"eval": 1}, 2), ({"step": 2}, 5), ({"step": 0}, 1), ({"uid": "a"}, 6),
        ({"uid": "never"}, 0), ({"min_score": 0.5, "eval": 0}, 6), ({"max_score": 0.0, "eval": 0}, 6),
        ({"min_score": 0.4, "max_score": 0.6}, 3), ({"status": "timeout"}, 3), ({"status": "scored"}, 14),
        ({"status": "never"}, 0), ({"part": "right", "eval": 0}, 12), ({"part": "form", "min_part": 0.5}, 14),
        ({"part": "never"}, 0), ({"trained": 1}, 6), ({"trained": 0, "eval": 0}, 9), ({"truncated": 1}, 0),
        ({"truncated": 0}, 17), ({"text": "LONG ans"}, 3), ({"text": "question b"}, 9), ({"text": "wrong 2"}, 1),
        ({"text": "wrong", "step": 3}, 1), ({"text": ".*"}, 0),
    ],
)  # fmt: skip
def test_filters_leave_what_they_say(page, query, count):
    assert get(page, "runs/slow-0/rollouts", **query)["total"] == count


def test_sorting_and_paging_cover_everything_once(page):
    for sort, key in (("score", 1), ("-score", -1)):
        pages = [get(page, "runs/slow-0/rollouts", sort=sort, offset=at, limit=5)["rows"] for at in (0, 5, 10, 15)]
        rows = [row for page_ in pages for row in page_]
        assert len({(r["step"], r["eval"], r["group"], r["sample"]) for r in rows}) == 17
        scores = [r["score"] for r in rows]
        assert scores[-3:] == [None] * 3  # what has no score comes last, whichever way
        assert scores[:-3] == sorted(scores[:-3], key=lambda score: key * score)
    lengths = [r["length"] for r in get(page, "runs/slow-0/rollouts", sort="-length")["rows"]]
    assert lengths == sorted(lengths, reverse=True)
    steps = [(r["step"], r["eval"]) for r in get(page, "runs/slow-0/rollouts", sort="step")["rows"]]
    assert steps == sorted(steps)


def test_groups_are_whole_and_sorted(page):
    found = get(page, "runs/slow-0/groups", step=2, sort="disagreement")
    assert found["total"] == 2
    assert [g["uid"] for g in found["groups"]] == ["b", "a"]
    assert (found["groups"][0]["mean"], found["groups"][0]["std"]) == (0.25, 0.25)
    assert [row["sample"] for row in found["groups"][0]["rows"]] == [0, 1, 2]
    assert set(found["groups"][0]["rows"][0]) == ROW
    assert [g["uid"] for g in get(page, "runs/slow-0/groups", step=2, sort="-mean")["groups"]] == ["a", "b"]
    assert get(page, "runs/slow-0/groups", step=3, eval=1)["groups"][0]["rows"][0]["completion"] == "yes"
    message = get(page, "runs/slow-0/groups", 404, step=9)["error"]["message"]
    assert message == "step: got 9, but slow-0 has no readable rollouts of step 9"


def test_a_prompt_through_time(page):
    found = get(page, "runs/slow-0/prompts", sort="gain")["prompts"]
    assert [(p["uid"], p["gain"], p["times"]) for p in found] == [("a", 1.0, 3), ("held", 1.0, 2), ("b", -0.5, 3)]
    assert found[0]["first"] == {"step": 1, "mean": 0.0}
    assert found[0]["last"] == {"step": 3, "mean": 1.0}
    assert (found[0]["prompt"], found[0]["gold"]) == ("question a", "4")
    assert get(page, "runs/slow-0/prompts", sort="loss")["prompts"][0]["uid"] == "b"
    assert get(page, "runs/slow-0/prompts", sort="disagreement")["prompts"][0]["uid"] == "b"
    assert [p["uid"] for p in get(page, "runs/slow-0/prompts", sort="uid", offset=1)["prompts"]] == ["b", "held"]
    assert [p["uid"] for p in get(page, "runs/slow-0/prompts", text="TION b")["prompts"]] == ["b"]
    visits = get(page, "runs/slow-0/prompts/a")["visits"]
    assert [(v["step"], v["eval"], v["mean"]) for v in visits] == [(1, False, 0.0), (2, False, 0.5), (3, False, 1.0)]
    assert [r["completion"] for r in visits[0]["rows"]] == ["wrong 1", "long answer"]


@pytest.mark.parametrize("uid", ["a/b", "../x", "%2F", "é 漢", "a?b#c&d", ".."])
def test_any_uid_can_be_asked_for(uid, tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        write_step(run, 1, group(uid, "one", "two"))
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
    page = client(tmp_path)
    assert len(get(page, "runs/x/prompt", uid=uid)["visits"]) == 1
    if uid != ".." and "%" not in uid:  # clients resolve the first, and this one decodes twice
        assert get(page, f"runs/x/prompts/{quote(uid, safe='')}")["uid"] == uid


def test_a_completion_has_every_value_of_its_tokens(page):
    found = get(page, "runs/slow-0/completion", step=1, group=0, sample=1)
    assert set(found["row"]) == ROW
    assert [t["id"] for t in found["tokens"]] == list(b"long answer")
    assert all(t["sampled"] and t["text"] is None for t in found["tokens"])
    assert "tokenizer of this run is not on this machine" in found["pieces"]["why"]
    assert {len(values) for values in found["values"].values()} == {11}
    assert found["values"]["advantage"] == [-0.5] * 11
    assert found["values"]["sampler_gap"] == [-0.5] * 11  # policy -1.5, sampler -1
    assert set(found["about"]) == set(found["values"])
    assert found["versions"] == [{"version": 0, "start": 0, "end": 11}]
    assert get(page, "runs/slow-0/completion", 404, step=1, group=0, sample=9)


def test_all_values_of_tokens_are_explained():
    assert set(ABOUT) == {*VALUES, *GAPS}
    assert set(schema().names) >= {VALUES[name] for name in ("advantage", "logprob", "sampling_logprob", "entropy")}


def test_an_episode_has_its_turns(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        write_step(run, 1, episode("e"))
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
    found = get(client(tmp_path), "runs/x/completion", step=1, group=0, sample=0)
    assert found["row"]["turns"] == 2
    assert found["row"]["length"] == 4
    assert [t["sampled"] for t in found["tokens"]] == [True, True, False, False, False, True, True]
    assert found["values"]["entropy"] == [0.0, 0.0, None, None, None, 0.0, 0.0]
    turns = [(t["role"], t["start"], t["end"], t["text"], t["reward"]) for t in found["turns"]]
    assert turns == [
        ("environment", 0, 0, "go", None), ("policy", 0, 2, "AB", 0.25), ("environment", 2, 5, "warm <b>", None),
        ("policy", 5, 7, "CD", None),
    ]  # fmt: skip
    assert found["turns"][1]["tool_calls"] == [{"name": "look", "arguments": {"where": "up"}}]
    assert [m["role"] for m in found["messages"]][:1] == ["user"]


def test_comparisons_are_those_of_trew_compare_and_kept_until_a_run_changes(tmp_path, monkeypatch):
    asked = []

    def compared(folders, choices):
        asked.append((tuple(folders), choices))
        return len(asked)

    monkeypatch.setattr("trew.runs.compare.compare_runs", compared)
    monkeypatch.setattr("trew.runs.compare.to_json", lambda number: {"comparison": number})
    for name in "ab":
        make_run(tmp_path / name)
    page = client(tmp_path)
    query = "compare?run=a&run=b&metric=last:2&by=learner.lr,seed&allow=one-seed&unfinished=count&baseline=a"
    assert get(page, query) == get(page, query) == {"comparison": 1}
    choices = Choices(
        metric="last:2", by=("learner.lr", "seed"), allow=("one-seed",), unfinished="count", baseline="a"
    )  # fmt: skip
    assert asked == [((tmp_path / "a", tmp_path / "b"), choices)]
    with RunFolder.open(tmp_path / "a", resume=True) as run:
        run.log({"step": 4, "reward": 1.0})
    assert get(page, query) == {"comparison": 2}


def test_what_trew_compare_refuses_is_refused_with_its_reason(page):
    message = get(page, "compare?run=slow-0&run=two-words-more", 409)["error"]["message"]
    assert "have not finished" in message


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("runs/never/metrics", 404, "run: got 'never', which is not one of the runs of this server"),
        ("runs/slow-0/nothing", 404, "there is nothing at this address"),
        ("runs/slow-0/rollouts?sort=best", 400, "sort: got 'best', accepts step, score, -score, length, -length"),
        ("runs/slow-0/rollouts?limit=100000", 400, "limit: got 100000, accepts 1 to 200"),
        ("runs/slow-0/rollouts?min_score=nan", 400, "min_score: got 'nan', accepts a number"),
        ("runs/slow-0/rollouts?step=1.5", 400, "step: got '1.5', accepts a whole number"),
        ("runs/slow-0/rollouts?trained=maybe", 400, "trained: got 'maybe', accepts 1 or 0"),
        ("runs/slow-0/rollouts?min_part=1", 400, "min_part: has no effect without part"),
        ("runs/slow-0/rollouts?text=" + "x" * 300, 400, "text: got 300 characters, accepts 200 at most"),
        ("runs/slow-0/completion?step=1&group=0", 400, "sample: is missing, accepts a whole number"),
        ("runs/slow-0/prompts/never", 404, "uid: got 'never', which is none of the prompts of slow-0"),
        ("config", 400, "run: is missing"),
        ("compare?run=slow-0&allow=all", 400, "allow: got 'all', accepts data, eval"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_sentence(page, path, status, message):
    assert message in get(page, path, status)["error"]["message"]


def test_an_evaluation_alone_has_completions_too(tmp_path):
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config("steps = 1\n[objective]\npreset = 'grpo'\n")
        write_eval(run, 0, group("held", "no"))
    page = client(tmp_path)
    about = get(page, "runs")["runs"][0]
    assert (about["has_rollouts"], about["has_tokens"], about["step"]) == (False, True, 0)
    assert get(page, "runs/x/rollouts")["total"] == 1
    assert get(page, "runs/x/steps")["steps"] == []
    assert get(page, "runs/x/metrics")["steps"] == []


def test_rounds_of_training_are_shown_as_steps_with_the_runs_inside(tmp_path):
    with RunFolder.open(tmp_path / "it") as run:
        run.write_config("model = 'm'\n[iterate]\nrounds = 2\n[objective]\npreset = 'grpo'\n")
    (tmp_path / "it" / "rounds.jsonl").write_text(
        '{"round": 0, "agreement": 0.5}\n{"round": 1, "policy": {"x": [1, 2]}}\n'
    )
    make_run(tmp_path / "it" / "round-01")
    page = client(tmp_path)
    found = {run["name"]: run for run in get(page, "runs")["runs"]}
    assert (found["it"]["kind"], found["it"]["step"], found["it"]["steps"]) == ("rounds", 1, 2)
    assert "it/round-01" in found
    columns = get(page, "runs/it/metrics")["columns"]
    assert columns == {"agreement": [0.5, None], "policy/x": [None, 2.0]}


def test_a_held_out_loss_has_its_interval_and_is_no_accuracy(tmp_path):
    with RunFolder.open(tmp_path / "sft") as run:
        run.write_config("model = 'm'\nsteps = 2\n[objective]\npreset = 'sft'\n")
        for step, loss in ((0, 2.0), (1, None), (2, None), (2, 0.5)):
            if loss is None:
                run.log({"step": step, "loss": 1.0})
            else:
                row = {"eval_loss": loss, "eval_loss_low": loss - 0.1, "eval_loss_high": loss + 0.1, "eval_n": 3}
                run.log({"step": step, **row})
    page = client(tmp_path)
    found = get(page, "runs/sft/metrics")
    assert found["losses"] == [
        {"step": 0, "loss": 2, "low": 1.9, "high": 2.1, "n": 3},
        {"step": 2, "loss": 0.5, "low": 0.4, "high": 0.6, "n": 3},
    ]
    assert (found["evals"], list(found["columns"])) == ([], ["loss"])
    summary = get(page, "runs/sft/summary")
    assert (summary["loss_before"]["loss"], summary["loss_after"]["loss"]) == (2, 0.5)
    assert (summary["before"], summary["after"]) == (None, None)


def test_the_runs_of_a_study_are_found_though_they_lie_deep(tmp_path):
    study = tmp_path / "study"
    for seeds in (tmp_path / "much" / "deeper" / "than" / "runs", study / "runs" / "sums" / "off" / "clip" / "0.001"):
        seeds.mkdir(parents=True)
        make_run(seeds / "1", steps=1)
    (study / "study.lock").touch()
    names = [run["name"] for run in get(client(tmp_path), "runs")["runs"]]
    assert names == ["study/runs/sums/off/clip/0.001/1"]
    assert [run["name"] for run in get(client(study), "runs")["runs"]] == ["runs/sums/off/clip/0.001/1"]


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    for name in ("grpo", "dapo"):
        (tmp_path / name / "0.001").mkdir(parents=True)
        make_run(tmp_path / name / "0.001" / "1", steps=1)

    def names(*folders):
        return [run["name"] for run in get(client(*folders), "runs")["runs"]]

    two = [tmp_path / "grpo", tmp_path / "dapo"]
    assert names(*two) == ["grpo/0.001/1", "dapo/0.001/1"]
    assert names(*(folder / "0.001" / "1" for folder in two)) == ["grpo/0.001/1", "dapo/0.001/1"]
    assert names(two[0], two[0] / "0.001" / "1") == ["0.001/1"]


def test_a_demonstration_is_no_gold(tmp_path):
    said = [{"role": "assistant", "content": "yes"}]
    with RunFolder.open(tmp_path / "sft") as run:
        run.write_config("model = 'm'\n[objective]\npreset = 'sft'\n")
        write_step(run, 1, group("a", "yes", demonstration=said), group("b", "no", demonstration=said, answer="4"))
    found = get(client(tmp_path), "runs/sft/groups", step=1)["groups"]
    assert [each["gold"] for each in found] == [None, "4"]


def test_every_metric_in_the_documentation_has_help_in_the_page():
    text = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    table = text[text.index("| field | meaning |") : text.index("Those of the objective")]
    named = {name.strip("` ") for line in table.splitlines()[2:] if line for name in line.split("|")[1].split(",")}
    # Evaluations have curves of their own.
    named -= {"…", ""} | {n for n in named if n.startswith(("eval_", "age/1"))}
    assert named == set(HELP)
