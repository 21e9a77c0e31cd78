"""The report: complete, self-contained, and inert whatever a model wrote."""

import base64
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

import trew
from report_help import HOSTILE, Elements, make
from trew.errors import ConfigError, DataError
from trew.runs import RunFolder
from trew.runs.report import load_run, render_report, write_report
from trew.runs.report.text import number, shorten, visible
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, Turn


@pytest.mark.parametrize("evals", [True, False])
def test_no_completion_becomes_an_element(tmp_path, evals):
    friendly = ["harmless words"] * len(HOSTILE)
    plain = Elements(render_report([load_run(make(tmp_path / "a", friendly, evals=evals))]))
    for shift in range(0, len(HOSTILE), 4):
        texts = HOSTILE[shift:] + HOSTILE[:shift]
        page = render_report([load_run(make(tmp_path / "a", texts, evals=evals))])
        hostile = Elements(page)
        assert hostile.seen == plain.seen
        assert "script" not in hostile.seen
        assert not [a for a in hostile.attributes if a[1].startswith("on") or a[1] in ("src", "href", "style")]
        acting = {c for c in page if c not in "\n\t" and visible(c) != c}
        assert acting == set()


def test_completions_are_shown_as_they_are(tmp_path):
    text = "".join(Elements(render_report([load_run(make(tmp_path / "a", HOSTILE))])).text)
    for hostile in HOSTILE[:8]:  # the first eight pairs are shown
        assert visible(hostile) in text


def test_the_policy_allows_this_style_and_nothing_else(tmp_path):
    page = render_report([load_run(make(tmp_path / "a"))])
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(a[2] for a in Elements(page).attributes if a[0] == "meta" and (a[2] or "").startswith("default-src"))
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert page.count("<style>") == 1
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_before_and_after_with_intervals(tmp_path):
    text = " ".join(" ".join(Elements(render_report([load_run(make(tmp_path / "a"))])).text).split())
    assert "10.0 % [5.0, 20.0] 80.0 % [70.0, 90.0] +70.0 points, intervals apart" in text
    assert "1 min 15 s" in text
    assert "before training" in text
    assert "after step 4" in text


def test_a_run_that_is_not_finished(tmp_path):
    folder = make(tmp_path / "a", evals=False, finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rewa')
    text = " ".join(" ".join(Elements(render_report([load_run(folder)])).text).split())
    assert "4 of 4, not finished" in text
    assert "10.0 % [5.0, 20.0] 80.0 % [70.0, 90.0]" in text  # from the metric rows
    assert "1 lines that are incomplete" in text


def test_several_runs_share_their_charts_and_keep_their_names(tmp_path):
    a, b = make(tmp_path / "x" / "same"), make(tmp_path / "y" / "same")
    one, two = (render_report([load_run(f) for f in folders]) for folders in ([a], [a, b]))
    assert one.count("<svg") == two.count("<svg") - 1, "each run has a strip of scores of its own"
    assert "x/same" in two
    assert "y/same" in two


@pytest.mark.parametrize(("name", "text"), [("rounds.jsonl", '{"round": 0}\n'), ("config.toml", "[iterate]\n")])
def test_the_page_of_rounds_is_not_replaced(tmp_path, name, text):
    """It cannot be made again but by the training."""
    folder, page = tmp_path / "rounds", tmp_path / "rounds" / "report.html"
    folder.mkdir()
    there = {"config.toml": "model = 'm'\n", "summary.json": "{}", "report.html": "rounds"}
    for file, content in {**there, name: text}.items():
        (folder / file).write_text(content)
    with pytest.raises(DataError, match=r"is a run of trew iterate.*such as .*rounds/round-01/policy"):
        write_report([folder])
    assert page.read_text() == "rounds"


def test_a_report_of_several_runs_does_not_replace_the_page_of_a_run(tmp_path, monkeypatch):
    """In the folder of rounds, whose policies are to be seen together."""
    runs = [make(tmp_path / name) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("rounds")
    Path("config.toml").write_text("[iterate]\n")
    with pytest.raises(ConfigError, match=r"report\.html: is the page of the run whose folder this is; .* --out"):
        write_report(runs)
    assert Path("report.html").read_text() == "rounds"
    assert write_report(runs, tmp_path / "both.html").exists()
    Path("config.toml").unlink()
    assert write_report(runs).read_text() != "rounds"  # a report of several runs, of before


def test_runs_of_a_study_are_told_apart_by_the_folders_above_their_seeds(tmp_path):
    folders = [tmp_path / name / "0.001" for name in ("grpo", "dapo")]
    for folder in folders:
        folder.mkdir(parents=True)
    runs = [load_run(make(folder / "1")) for folder in folders]
    page, picture = render_report(runs), trew.curves(*runs, metrics="reward").svg
    for name in ("grpo/0.001/1", "dapo/0.001/1"):
        assert name in page
        assert f"{name} reward" in picture


def test_quantiles_of_the_ratio_stand_beside_its_mean_and_apart_where_there_are_several_runs(tmp_path):
    for name in ("one", "two"):
        make(tmp_path / name)
        path = tmp_path / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        more = {"ratio": 1.0, "ratio_q01": 0.5, "ratio_q99": 2.5, "ess": 0.9, "clip_high_positive": 0.1}
        path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    alone = render_report([load_run(tmp_path / "one")])
    assert "99 % of tokens below" in alone
    assert ">Effective sample size<" in alone
    assert ">clip_high_positive<" in alone
    assert ">ratio_q99<" not in alone
    both = render_report([load_run(tmp_path / name) for name in ("one", "two")])
    assert ">ratio_q99<" in both
    assert "99 % of tokens below" not in both


def test_steps_that_were_not_finite_are_named(tmp_path):
    folder = make(tmp_path / "a")
    with RunFolder.open(folder, resume=True) as run:
        run.log({"step": 5, "loss": math.nan})
    assert "loss was not a finite number at step 5" in render_report([load_run(folder)])


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    folder = make(tmp_path / "a", evals=False)
    (folder / "summary.json").write_text("{")
    (folder / "config.toml").write_text("= =")
    (folder / "rollouts" / "000009.parquet").write_bytes(b"PAR1 broken")
    page = render_report([load_run(folder)])
    assert "summary.json: cannot be read" in page
    assert "config.toml: cannot be read" in page
    assert page.count("<svg") >= 3


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path, what):
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    if what == "file":
        path.write_text("x")
    with pytest.raises(DataError, match="run"):
        load_run(path)


def test_the_file_lies_in_the_run_or_where_asked_and_holds_no_secret(tmp_path, monkeypatch):
    texts = ["canary<&>secret"] * 16
    texts[1] = "odd"  # names a column: those are never masked
    folder = make(tmp_path / "a", texts)
    monkeypatch.setenv("SOME_TOKEN", "canary<&>secret")
    assert write_report([folder]) == folder / "report.html"
    assert "canary" not in (folder / "report.html").read_text()
    out = tmp_path / "both.html"
    assert write_report([folder, make(tmp_path / "b")], out=out) == out
    assert out.read_text().startswith("<!doctype html>")


def test_text_helpers():
    assert shorten("abcdef", 4) == "abcd… (2 more characters)"
    assert number(math.nan) == "–"
    assert number(0.00012345) == "0.000123"
    assert visible("naïve 日本 👩‍🚀 x²") == "naïve 日本 👩‍🚀 x²"


def test_numbers_that_round_up_to_a_power_of_ten_are_written_in_full():
    assert [number(x) for x in (999.4, 999.6, -999.7, 99.96)] == ["999", "1000", "-1000", "100"]
    assert [number(x, 4) for x in (9999.4, 9999.7)] == ["9999", "10000"]


def test_an_episode_is_shown_as_a_conversation(tmp_path):
    said = ({"role": "user", "content": "Guess <b>my</b> number."},)
    again = ({"role": "user", "content": "higher"},)
    call = {"function": {"name": "search", "arguments": {"query": "seven"}}}
    group = episode(
        turn(said, "5", reward=0.1), turn(again, "7", calls=(call,), reward=1.0, metrics={"moves": 2.0}), ending="done"
    )
    folder = make(tmp_path / "a", evals=False)
    with RunFolder.open(folder, overwrite=True) as run:
        run.write_config("model = 'm'\nsteps = 1\n")
        run.log({"step": 1, "reward": 1.0})
        run.write_rollouts(1, [ScoredGroup(group, (Score(1.1),))])
    text = " ".join(" ".join(Elements(render_report([load_run(folder)])).text).split())
    assert "Guess <b>my</b> number. policy 5 reward 0.1 user higher policy 7" in text
    assert "call search(query='seven')" in text
    assert "moves 2" in text


def test_a_failed_episode_shows_its_traceback(tmp_path):
    group = episode(turn(({"role": "user", "content": "hi"},), "5"), ending="failed", error="raised: ValueError: no")
    folder = make(tmp_path / "a", evals=False)
    with RunFolder.open(folder, overwrite=True) as run:
        run.write_config("model = 'm'\nsteps = 1\n")
        run.log({"step": 1, "reward": 1.0})
        run.write_rollouts(1, [ScoredGroup(group, (Score(None, "environment_error"),))])
    text = " ".join(" ".join(Elements(render_report([load_run(folder)])).text).split())
    assert "episode ended by failed" in text
    assert "raised: ValueError: no" in text


def turn(messages, text, **known):
    zeros = np.zeros(2, np.float32)
    spans = (Span(0, 0, 2),)
    return Turn(
        np.zeros(3, np.int64), np.ones(2, np.int64), zeros, zeros, zeros, spans, text, "stop", "s", messages, **known
    )


def episode(*turns, ending, error=""):
    status = "finished" if ending == "done" else "failed"
    return Group(Prompt("p", text="row"), (Rollout(turns, status, error, ending),))


@pytest.mark.parametrize("finished", [True, False])
def test_evaluations_of_other_numbers_of_prompts_are_told_apart(tmp_path, finished):
    """The accuracy before was said to be of as many prompts as the one after: without a verdict they do not count."""
    whole = {"eval_accuracy": 0.5, "eval_low": 0.3, "eval_high": 0.7}
    sets = {"eval_accuracy/a": 0.5, "eval_low/a": 0.2, "eval_high/a": 0.8}
    ends = {"mean": 0.5, "low": 0.3, "high": 0.7}
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config('model = "m"\nsteps = 1\n')
        run.log({"step": 0, **whole, "eval_n": 14, **sets, "eval_n/a": 6})
        run.log({"step": 1, **whole, "eval_n": 16, **sets, "eval_n/a": 8})
        if finished:
            run.write_summary(
                {"n_eval": 16, "accuracy_before": ends, "accuracy_after": ends, "before": {"n": 14}, "after": {"n": 16}}
            )
    page = render_report([load_run(tmp_path / "x")])
    assert "<td>x</td><td>14, then 16</td>" in page
    assert "<td>x: a</td><td>6, then 8</td>" in page


def test_a_reward_model_is_reported_by_its_accuracy_on_pairs(tmp_path):
    """Its evaluations have a loss, too, without an interval."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config('model = "m"\nsteps = 1\n')
        for step, mean in enumerate((0.5, 0.75)):
            ends = {"eval_low": mean - 0.1, "eval_high": mean + 0.1}
            run.log({"step": step, "eval_accuracy": mean, **ends, "eval_auc": mean, "eval_loss": 0.7, "eval_n": 20})
    text = " ".join(" ".join(Elements(render_report([load_run(tmp_path / "x")])).text).split())
    assert "accuracy before accuracy after" in text
    assert "50.0 % [40.0, 60.0] 75.0 % [65.0, 85.0] +25.0 points, intervals apart" in text
    assert text.count("held-out, 95 % interval") == 1
    assert text.count("held-out") == text.count("held-out prompts") + 2, "the loss has points, too"


def test_held_out_agreement_with_preference_pairs_is_drawn(tmp_path):
    """Of DPO: the report had the loss alone."""
    with RunFolder.open(tmp_path / "x") as run:
        run.write_config('model = "m"\nsteps = 1\n')
        ends = {"eval_loss": 0.7, "eval_loss_low": 0.6, "eval_loss_high": 0.8}
        run.log({"step": 0, **ends, "eval_preference_accuracy": 0.5, "eval_preference_margin": 0.0, "eval_n": 20})
    text = " ".join(Elements(render_report([load_run(tmp_path / "x")])).text)
    assert "eval_preference_accuracy" in text
    assert "eval_preference_margin" in text
