"""Runs of unusual sizes and texts in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from browser_help import Visit, serving, until
from browser_runs import hostile, many, sums
from playwright.sync_api import Route, expect

from rollouts_help import rollout
from trew.runs import RunFolder
from trew.types import Group, Prompt, Score, ScoredGroup
from view_help import CONFIG, group, write_eval, write_step


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    found: dict[str, Any] = {}
    many(folder / "wide", steps=1, groups=110)
    hostile(folder / "hostile")
    many(folder / "many", steps=2, groups=1)
    for lr in (1.2345e-4, 1.23456e-4):
        sums(folder / f"lr-{lr}", steps=1, seed=20_240_607, lr=lr)
    with RunFolder.open(folder / "short") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        run.log({"step": 1, "reward": 0.5})
        run.write_summary({"steps": 1, "seconds": 119.7})
    with RunFolder.open(folder / "pairs") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        gold = "a" + "😀" * 200
        write_step(run, 1, group("pairs", f"x{'😀' * 400}", "x", prompt=f"?{'😀' * 200}", answer=gold))
    with RunFolder.open(folder / "one") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_step(run, 1, *(group("a", *["x"] * 90) for _ in range(3)))
    with RunFolder.open(folder / "sure") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        ids = np.arange(65, 75)
        answer = rollout(ids, text="ABCDEFGHIJ", logprobs=-0.003, policy_logprobs=-0.004, entropies=0.01)
        write_step(run, 1, ScoredGroup(Group(Prompt("sure", text="?"), (answer,)), (Score(1.0),)))
    with RunFolder.open(folder / "pushed") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        scored = ScoredGroup(Group(Prompt("pushed", text="?"), (answer,)), (Score(1.0),))
        pushed = {"coefficients": [np.array([*[1.0] * 9, -0.03], np.float32)]}
        run.write_rollouts(1, [scored], advantages=[[1.0]], trained_on=[scored], effects=pushed)
        run.log({"step": 1, "reward": 1.0})
    with RunFolder.open(folder / "flat") as run:
        run.write_config(CONFIG.format(steps=9, seed=0, lr=1e-3))
        for step in range(1, 10):
            run.log({"step": step, "ratio": 1.0 + step * 1e-6, "environment/out of turns": 0.5})
    with RunFolder.open(folder / "held") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_eval(run, 0, group("held", "yes", "yes too", scores=(1.0, 1.0)))
    with RunFolder.open(folder / "nearly") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        run.log({"step": 1, "reward": 0.5})
        before, after = ({"mean": mean, "low": 0.1, "high": 1.0} for mean in (0.25, 0.9975))
        run.write_summary({"steps": 1, "accuracy_before": before, "accuracy_after": after})
    with RunFolder.open(folder / "apart-n") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        run.log({"step": 1, "reward": 0.5})
        for when, n, mean in (("before", 4, 0.25), ("after", 2, 0.5)):
            found[f"accuracy_{when}"], found[when] = {"mean": mean, "low": 0.1, "high": 1.0}, {"n": n}
        run.write_summary({"steps": 1, "seconds": 60 * 3600.0, **found})
    with RunFolder.open(folder / "twins") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_eval(run, 0, group("0", "no", prompt="held out"))
        write_step(run, 1, group("0", "yes", "no", prompt="trained on"))
        write_eval(run, 1, group("0", "yes", prompt="held out"))
    with RunFolder.open(folder / "ten") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_step(run, 1, group("low", "x", "y", scores=(2.0, 2.0)), group("ends", "x", "y", scores=(0.0, 10.0)))
    with RunFolder.open(folder / "judge") as run:
        run.write_config('model = "none"\n')
        run.log({"step": 1, "loss": 0.5})
        for step, value in ((0, 0.5), (1, 0.75)):
            row = {"eval_accuracy": value, "eval_low": 0.25, "eval_high": 1.0, "eval_n": 8, "eval_auc": value}
            run.log({"step": step, **row})
    with RunFolder.open(folder / "sets") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        row = {f"eval_{name}{of}": 0.5 for name in ("accuracy", "low", "high") for of in ("", "/GSM8K", "/code")}
        run.log({"step": 1, "eval_n": 4, **row})
        judged = Score(1.0, parts={"sums": 1.0, "code": None}, statuses={"sums": "scored", "code": "other_set"})
        write_step(run, 1, replace(group("a/1", "x"), scores=(judged,)))
    with RunFolder.open(folder / "apart") as run:
        run.write_config(CONFIG.format(steps=3, seed=0, lr=1e-3))
        write_eval(run, 0, group("held", "no", "yes"))
        write_step(run, 3, group("a", "no", "yes"))
    with RunFolder.open(folder / "still") as run:
        run.write_config(CONFIG.format(steps=2, seed=0, lr=1e-3))
        for step in (1, 2):
            write_step(run, step, group("same", "x", "y", scores=(0.0, 1.0)))
    with RunFolder.open(folder / "bare") as run:
        run.write_config('steps = 1\n[objective]\npreset = "grpo"\n')
        run.log({"step": 1, "reward": 0.5})
    with RunFolder.open(folder / "gold") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
        write_step(run, 1, group("pi", "3.14159265", "12345678", answer=3.14159265))
    for seed in range(14):
        sums(folder / f"seed-{seed}", steps=2, seed=seed)
    with RunFolder.open(folder / "torn") as run:
        run.write_config(CONFIG.format(steps=1, seed=0, lr=1e-3))
    (folder / "torn" / "metrics.jsonl").write_text('{"step": 1, "reward":\n')
    with serving(folder) as (found, _process):
        yield found


def test_every_group_of_a_step_can_be_reached(visit) -> None:
    page = visit.open("#rollouts?run=wide")
    for shown in range(12, 110, 12):
        expect(page.locator(".group")).to_have_count(shown)
        page.get_by_role("button", name=re.compile(f"^{110 - shown} more group")).click()
    expect(page.locator(".group")).to_have_count(110)
    expect(page.locator(".group").last).to_contain_text("Group 109")
    expect(page.locator(".failure")).to_have_count(0)


def test_every_run_has_its_own_interval_under_the_cursor(visit) -> None:
    page = visit.open("#curves?" + "&".join(f"run=seed-{seed}" for seed in range(9)))  # one more than colours
    chart = page.get_by_role("img", name=re.compile("^held-out accuracy over step"))
    chart.focus()
    page.keyboard.press("ArrowRight")
    rows = page.locator(".tip-row")
    expect(rows).to_have_count(9)
    for row in rows.all():
        expect(row).to_have_text(re.compile(r"^seed-\d0\.25 \(95 %: 0\.1 to 0\.4\)$"))


def test_settings_and_golds_have_all_their_digits(visit) -> None:
    page = visit.open("#config?run=lr-0.00012345&run=lr-0.000123456")
    row = page.get_by_role("row", name=re.compile("^learner.lr"))
    expect(row).to_contain_text("0.000123450.000123456")
    page = visit.open("#config?run=lr-0.00012345")
    expect(page.get_by_role("row", name=re.compile("^seed"))).to_contain_text("20240607")
    page = visit.open("#health?run=lr-0.00012345")
    expect(page.locator(".figures")).to_contain_text("seed20240607")
    page = visit.open("#rollouts?run=gold")
    expect(page.locator(".answer").first).to_contain_text("gold3.14159265")


def test_a_minute_has_sixty_seconds(visit) -> None:
    page = visit.open("#health?run=short")
    expect(page.locator(".figures")).to_contain_text("training time2 min 0 s")


def test_days_are_not_rounded_to_whole_ones(visit) -> None:
    page = visit.open("#health?run=apart-n")
    expect(page.locator(".figures")).to_contain_text("training time2.5 days")


def test_both_numbers_of_prompts_are_shown_where_they_differ(visit) -> None:
    page = visit.open("#health?run=apart-n")
    expect(page.locator(".ba-words")).to_contain_text("4, then 2 prompts, +25 points")


@pytest.mark.parametrize(
    "origin", ["prompts?run=twins&sort=uid", "rollouts?run=twins&step=1", "tokens?run=twins&step=1&group=0&sample=1"]
)
def test_prompts_with_one_uid_are_shown_apart(origin, visit) -> None:
    page = visit.open(f"#{origin}")
    if origin.startswith("prompts"):
        expect(page.locator(".line")).to_have_count(2)
        expect(page.locator(".count")).to_have_text("2 prompts")
        page.locator(".line", has_text="trained on").click()
    else:
        page.get_by_role("link", name=re.compile("through time", re.IGNORECASE)).first.click()
    expect(page.locator(".group .prompt")).to_have_text("trained on")
    expect(page.locator("details.section h2")).to_have_text("Training step 1")
    page.get_by_role("button", name="All prompts").click()
    page.locator(".line", has_text="held out").click()
    expect(page.locator("details.section h2")).to_have_text(
        ["Held-out evaluation after step 0", "Held-out evaluation after step 1"]
    )


def test_an_address_that_leads_to_several_prompts_says_so(chromium: Any, address: str) -> None:
    window = Visit(chromium, address, expected=("404",))
    page = window.open("#prompts?run=twins&uid=0")
    expect(page.get_by_role("alert")).to_contain_text("which 2 prompts of twins have, with different texts")
    page.get_by_role("button", name="All prompts").click()
    expect(page.locator(".line")).to_have_count(2)
    page = window.open("#prompts?run=still&uid=same")
    expect(page.locator("details.section")).to_have_count(2)
    window.close()


def test_turns_have_their_texts_where_tokens_have_none(visit) -> None:
    page = visit.open("#tokens?run=hostile&step=2&group=0&sample=0")
    expect(page.locator(".token-area .note")).to_contain_text("the tokenizer of this run is not on this machine")
    texts = page.locator(".turn .recorded")
    expect(texts).to_have_text(["AB", "warm <b>", "CD"])


@pytest.mark.parametrize("view", ["rollouts", "search", "prompts", "prompts?uid=pairs"])
def test_no_character_is_cut_in_half(visit, view) -> None:
    view, _, more = view.partition("?")
    page = visit.open(f"#{view}?run=pairs&{more}")
    page.get_by_text("😀").first.wait_for()
    assert page.locator(".ctl").count() == 0
    if view != "search":  # a gold that is not shown to its end says so
        expect(page.locator(".gold, .line-answer").first).to_have_text(re.compile(r"^gold a(😀)+ …$"))


def test_every_group_has_its_samples_however_often_its_prompt_is_in_the_step(visit) -> None:
    page = visit.open("#tokens?run=one&step=1&group=2&sample=0")
    expect(page.locator(".sibling")).to_have_count(90)
    page.keyboard.press("ArrowRight")
    assert "group=2&sample=1" in page.url


def test_a_value_near_another_is_not_rounded_to_it(visit) -> None:
    page = visit.open("#tokens?run=sure&step=1&group=0&sample=0&token=1")
    row = page.locator(".inspector").get_by_role("row", name=re.compile("^Log-prob"))
    expect(row).to_contain_text("-0.004 (p 0.996)")


def test_places_on_an_axis_are_told_apart(visit) -> None:
    """The canvas is not read: what is drawn on it is noted instead."""
    page = visit.open("#runs")
    page.evaluate("""() => {
        window.drawn = new Set();
        const usual = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
            window.drawn.add(text);
            return usual.call(this, text, ...where);
        };
    }""")
    page.evaluate("location.hash = '#curves?run=flat&metric=ratio'")
    page.get_by_role("img", name=re.compile("^ratio over step")).wait_for()
    until(page, "() => [...window.drawn].filter(text => /^1\\.0000/.test(text)).length >= 2")


def test_a_metric_with_spaces_in_its_name_can_be_pinned(visit) -> None:
    page = visit.open("#curves?run=flat&metric=out+of")
    page.get_by_label("Pin environment/out of turns").click()
    expect(page.locator("details.section h2").first).to_have_text("Pinned")
    page.reload()
    visit.settled()
    expect(page.locator("details.section h2").first).to_have_text("Pinned")


def test_held_out_groups_are_not_said_to_be_without_signal(visit) -> None:
    page = visit.open("#rollouts?run=held&eval=1")
    expect(page.locator(".card")).to_have_count(2)
    expect(page.get_by_text("no signal")).to_have_count(0)


def test_nearly_all_is_not_all(visit) -> None:
    page = visit.open("#health?run=nearly")
    expect(page.locator(".ba-words")).to_contain_text("after 99.7 % (10 to 100 %)")


def test_a_number_of_prompts_that_is_not_known_is_not_null(visit) -> None:
    page = visit.open("#health?run=nearly")
    expect(page.locator(".ba-words")).to_contain_text("+75 points")
    expect(page.locator(".ba-words")).not_to_contain_text("null")


def test_completions_side_by_side_are_scrolled_by_the_arrow_keys(visit) -> None:
    page = visit.open("#rollouts?run=many")
    expect(page.locator(".histogram")).to_contain_text("Step 2")
    page.set_viewport_size({"width": 500, "height": 800})
    cards = page.locator(".cards").first
    cards.focus()
    page.keyboard.press("ArrowRight")
    until(page, "() => document.querySelector('.cards').scrollLeft > 30")
    page.keyboard.press("ArrowLeft")
    until(page, "() => document.querySelector('.cards').scrollLeft < 10")  # it comes to rest beside an edge
    expect(page.locator(".histogram")).to_contain_text("Step 2")


def test_values_that_have_no_room_under_the_cursor_are_counted(visit) -> None:
    page = visit.open("#curves?" + "&".join(f"run=seed-{seed}" for seed in range(14)))
    page.get_by_role("img", name=re.compile("^held-out accuracy over step")).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip-row")).to_have_count(12)
    expect(page.locator(".tip")).to_contain_text("and 2 more")


def test_a_score_has_the_same_colour_in_the_list_of_prompts_as_elsewhere(visit) -> None:
    colour = "e => getComputedStyle(e).backgroundColor"
    page = visit.open("#rollouts?run=ten")
    score = page.locator(".score", has_text=re.compile("^2$")).first
    expected = score.evaluate(colour)
    page = visit.open("#prompts?run=ten&sort=uid")
    score = page.locator(".score", has_text=re.compile("^2$"))
    expect(score).to_have_css("background-color", expected)


def test_a_reward_model_is_measured_on_pairs(visit) -> None:
    page = visit.open("#curves?run=judge")
    expect(page.locator(".ba-words")).to_contain_text("8 pairs, +25 points")
    panel = page.locator(".panel", has_text="held-out accuracy").first
    expect(panel.locator(".panel-help")).to_contain_text("agreement with held-out pairs")


def test_what_evaluations_measured_besides_has_curves(visit) -> None:
    page = visit.open("#curves?run=judge")
    chart = page.get_by_role("img", name=re.compile("^held-out auc over step"))
    expect(chart).to_have_attribute("aria-label", re.compile(r"first 0\.5, last 0\.75"))


def test_a_reward_of_another_data_set_is_no_trouble(visit) -> None:
    page = visit.open("#rollouts?run=sets")
    tag = page.locator(".parts .tag", has_text="other_set")
    expect(tag).to_have_class(re.compile(r"^tag\s*$"))
    expect(page.locator(".parts li", has_text="other_set")).to_have_attribute("title", re.compile("other data sets"))
    page = visit.open("#search?run=sets")
    page.get_by_label("Status").select_option("other_set")
    expect(page.locator(".count")).to_have_text("1 completion match")


def test_no_error_flashes_between_training_and_held_out(visit) -> None:
    page = visit.open("#rollouts?run=apart")
    page.evaluate("""() => {
        window.failures = 0;
        const count = () => { window.failures += document.querySelectorAll(".failure").length };
        new MutationObserver(count).observe(document.body, { childList: true, subtree: true });
    }""")
    for name, uid in (("Held-out", "held"), ("Training", "a"), ("Held-out", "held")):
        page.get_by_role("button", name=re.compile(f"^{name}")).click()
        expect(page.locator(".group")).to_contain_text(f"question {uid}")
        page.wait_for_timeout(300)
    assert page.evaluate("window.failures") == 0


def test_a_run_without_a_summary_says_why_it_has_no_figures(visit) -> None:
    """An empty list, and {} as everything in a summary.json that was not there."""
    page = visit.open("#health?run=flat")
    expect(page.get_by_text("The run did not finish, so it wrote no summary.")).to_be_visible()
    expect(page.get_by_text("Everything in summary.json")).to_have_count(0)


def test_curves_say_what_could_not_be_read_of_the_metrics(visit) -> None:
    """They said that the first step had not finished."""
    page = visit.open("#curves?run=torn")
    expect(page.get_by_text("torn: metrics.jsonl: left out 1 lines that are not metrics rows")).to_be_visible()
    expect(page.get_by_text("The first step has not finished")).to_have_count(0)


def test_the_held_out_accuracy_of_a_data_set_is_found_by_its_name(visit) -> None:
    """No metric had the name of the set, while a chart had it as its title."""
    page = visit.open("#curves?run=sets&metric=gsm8k")
    expect(page.locator(".panel-name")).to_have_text(["held-out accuracy of GSM8K"])
    page = visit.open("#curves?run=sets&metric=accuracy")
    expect(page.locator(".panel-name", has_text="held-out")).to_have_count(3)


def test_a_chart_without_intervals_is_not_described_as_one_with_them(visit) -> None:
    page = visit.open("#curves?run=judge")
    accuracy, auc = (page.get_by_role("img", name=re.compile(f"^held-out {n} over step")) for n in ("accuracy", "auc"))
    expect(accuracy).to_have_attribute("aria-label", re.compile("With 95 % intervals"))
    expect(auc).not_to_have_attribute("aria-label", re.compile("intervals"))


def test_held_out_completions_are_found_before_the_first_step(visit) -> None:
    """Search and prompts said that there were no rollouts, while other views showed them."""
    page = visit.open("#search?run=held")
    expect(page.locator(".count")).to_have_text("2 completions")
    expect(page.get_by_role("button", name="Held-out")).to_have_attribute("aria-pressed", "true")
    page = visit.open("#prompts?run=held")
    expect(page.locator(".count")).to_have_text("1 prompt")


def test_the_shares_of_a_push_are_neither_all_nor_nothing_where_both_were_pushed(visit) -> None:
    """9 tokens of coefficient 1 had 100 % of the push, and one of -0.03 had 0 %."""
    words = visit.open("#tokens?run=pushed").locator(".push-words")
    expect(words).to_contain_text("pushed up · 99.6 % of the push")
    expect(words).to_contain_text("pushed down · 0.3 % of the push")


def test_a_setting_that_a_run_does_not_name_is_not_changed(visit) -> None:
    page = visit.open("#config?run=bare&run=lr-0.00012345")
    cells = page.get_by_role("row", name=re.compile("^learner.lr")).locator("td")
    expect(cells.nth(0)).not_to_have_class(re.compile("changed"))
    expect(cells.nth(1)).to_have_class(re.compile("changed"))


def test_a_prompt_that_did_not_change_has_no_colour_of_a_gain(visit) -> None:
    gain = visit.open("#prompts?run=still").locator(".line-facts > b")
    expect(gain).to_have_text("0")
    expect(gain).not_to_have_class(re.compile("up|down"))


def test_no_empty_picture_stands_for_the_rewards_of_evaluations(visit) -> None:
    """They have no histograms: a box without anything in it was named after their rewards."""
    page = visit.open("#rollouts?run=apart")
    expect(page.locator(".heatmap")).to_have_count(1)
    page = visit.open("#rollouts?run=apart&eval=1")
    expect(page.locator(".histogram")).to_contain_text("mean reward")
    expect(page.locator(".heatmap")).to_have_count(0)


def test_a_list_whose_later_page_is_refused_asks_no_more(chromium: Any, address: str) -> None:
    """It asked for the first page again, and the refusal was gone before it could be read."""
    window = Visit(chromium, address, expected=("500",))
    page = window.open("#search?run=one")
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.fulfill(status=500, json={"error": "no"}) if "offset=50" in route.request.url else route.continue_()

    page.route("**/rollouts?*", refuse)
    page.evaluate("() => window.scrollTo(0, document.body.scrollHeight / 4)")
    expect(page.locator(".failure")).to_be_visible()
    page.wait_for_timeout(2000)
    expect(page.locator(".failure")).to_be_visible(timeout=100)
    assert ["offset=50" in url for url in asked].count(True) == 1
    window.close()
