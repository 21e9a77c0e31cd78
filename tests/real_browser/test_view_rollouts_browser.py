"""Rollouts, prompts, search and tokens, clicked through in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browser_help import Visit, serving
from browser_runs import HOSTILE, hostile, many, sums
from playwright.sync_api import expect

import recipe_help


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, server) -> Iterator[str]:
    """Runs from the writer, and one that was really trained, with several updates per step."""
    folder = tmp_path_factory.mktemp("runs")
    sums(folder / "sums")
    hostile(folder / "hostile")
    many(folder / "many")
    place = recipe_help.run_folder(
        tmp_path_factory.mktemp("trained"),
        recipe_help.recipe(
            "lm", chat_template="plain", learner={"lr": 2e-2, "inner_updates": 4}, rollout={"max_tokens": 12}
        ),
    )
    server.run("train", "r.toml", "--out", folder / "trained", cwd=place)
    with serving(folder) as (found, _process):
        yield found


def test_the_slider_walks_through_the_steps(visit) -> None:
    page = visit.open("#rollouts?run=sums")
    expect(page.locator(".histogram")).to_contain_text("Step 12")
    expect(page.locator(".group")).to_have_count(2)
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".histogram")).to_contain_text("Step 11 · 5 completions in 2 groups")
    assert "step=11" in page.url
    page.keyboard.press("Home")
    expect(page.locator(".histogram")).to_contain_text("Step 1 ")
    page.get_by_label("Step", exact=True).fill("5")
    expect(page.locator(".histogram")).to_contain_text("Step 6")
    expect(page.locator(".group").first).to_contain_text("six times seven is 36")
    page.get_by_role("button", name="Latest").click()
    expect(page.locator(".histogram")).to_contain_text("Step 12")
    heat = page.locator(".heatmap canvas")
    box = heat.bounding_box()
    heat.click(position={"x": box["width"] * 0.3, "y": 20})
    expect(page.locator(".histogram")).to_contain_text("Step 4")


def test_completions_of_a_group_are_side_by_side_with_their_parts(visit) -> None:
    page = visit.open("#rollouts?run=sums&step=12")
    group = page.locator(".group").first
    cards = group.locator(".card")
    expect(cards).to_have_count(3)
    tops = {round(card.bounding_box()["y"]) for card in cards.all()}
    assert len(tops) == 1
    expect(cards.nth(0)).to_contain_text("right 1")
    expect(cards.nth(0)).to_contain_text("form 0.5")
    expect(cards.nth(0).locator(".answer")).to_have_text(re.compile(r"extracted1\.0gold4"))
    expect(cards.nth(2)).to_contain_text("no score")
    expect(cards.nth(2).locator(".tag", has_text="timeout").first).to_be_visible()
    page.get_by_label("Order of groups").select_option("mean")
    expect(page.locator(".group").first).to_contain_text("Group 1")
    page.get_by_role("button", name=re.compile("Held-out")).click()
    expect(page.locator(".card").first).to_contain_text("yes")


def test_filters_reach_over_all_steps(visit) -> None:
    page = visit.open("#search?run=sums")
    count = page.locator(".count")
    expect(count).to_have_text("60 completions")
    page.keyboard.press("/")
    page.keyboard.type("is 35")
    expect(count).to_have_text("1 completion match")
    expect(page.locator("mark").first).to_have_text("is 35")
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Score from").fill("0.9")
    expect(count).to_have_text("3 completions match")
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Status").select_option("timeout")
    expect(page.locator(".line").first).to_contain_text("no score")
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_label("Prompt's uid").fill("b")
    expect(count).to_have_text("24 completions match")
    page.get_by_label("Text").fill("there is no such text")
    expect(page.get_by_text("No completion matches.")).to_be_visible()
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_role("button", name="Held-out").click()
    expect(count).to_have_text("8 completions match")


def test_a_long_list_is_scrolled_through(visit) -> None:
    page = visit.open("#search?run=many")
    expect(page.locator(".count")).to_have_text("1,200 completions")
    assert page.locator(".virtual-row").count() < 60
    page.mouse.wheel(0, 45_000)
    row = page.locator(".virtual-row[aria-posinset='601'] .line")
    row.scroll_into_view_if_needed()
    expect(row).to_contain_text("step 11")
    assert page.locator(".virtual-row").count() < 60


def test_prompts_are_sorted_and_shown_through_time(visit) -> None:
    page = visit.open("#prompts?run=sums")
    expect(page.locator(".line").first).to_contain_text("question held-")  # from 0 to 1 between the evaluations
    gains = [float(text.replace("−", "-")) for text in page.locator(".line b").all_text_contents()]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == 6
    page.get_by_label("Order").select_option("loss")
    expect(page.locator(".line").first).to_contain_text("What is 2 + 2?")
    page.locator(".line").first.click()
    expect(page.locator("h2", has_text="Training step 1").first).to_be_visible()
    expect(page.locator("details.section")).to_have_count(12)
    expect(page.get_by_role("img", name=re.compile("^Score over steps: step 1 mean"))).to_be_visible()
    page.locator(".visit").nth(5).dispatch_event("click")
    expect(page.locator("#visit-5")).to_have_attribute("open", "")
    page.get_by_role("button", name="All prompts").click()
    expect(page.locator(".line").first).to_be_visible()


def test_what_the_objective_did_to_each_token(visit) -> None:
    page = visit.open("#tokens?run=trained&step=4")
    # A group whose rewards differ: the others teach nothing.
    summary = page.locator(".push-words")
    expect(summary).to_contain_text(re.compile("pushed up|pushed down|no signal"))
    names = page.get_by_role("group", name="Colour tokens by").get_by_role("button")
    titles = names.all_text_contents()
    assert titles[:2] == ["Coefficient C", "Advantage A"], titles
    assert {"Ratio r", "Weight w(r, A)", "Entropy", "Log-prob"} <= set(titles), titles
    for name in names.all():
        name.click()
        expect(name).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".legend-box b")).to_have_text(name.text_content() or "")
    assert "value=" in page.url


def test_a_token_shows_its_values_on_hover_tap_and_by_keys(visit) -> None:
    page = visit.open("#tokens?run=trained&step=4&value=entropy")
    tokens = page.locator(".tok")
    tokens.nth(3).hover()
    inspector = page.locator(".inspector")
    expect(inspector).to_contain_text("token 3,")
    for title in ("Coefficient C", "Advantage A", "Ratio r", "Entropy", "Log-prob"):
        expect(inspector.get_by_role("row", name=re.compile(re.escape(title))).first).to_contain_text(
            re.compile(r"[\d−+]")
        )
    page.mouse.move(3, 3)
    expect(inspector).to_contain_text("Point at a token")
    tokens.nth(5).click()
    assert "token=5" in page.url
    page.mouse.move(3, 3)
    expect(inspector).to_contain_text("token 5,")
    page.locator(".token-area").focus()
    page.keyboard.press("ArrowRight")
    expect(inspector).to_contain_text("token 6,")
    assert "token=6" in page.url
    page.reload()
    visit.settled()
    expect(inspector).to_contain_text("token 6,")
    expect(page.locator("#t6")).to_have_class(re.compile(r"\bat\b"))
    page.keyboard.press("Escape")
    assert "token=" not in page.url
    page.locator(".strong-token").first.click()
    assert "token=" in page.url


def test_from_one_completion_to_the_others(visit) -> None:
    page = visit.open("#tokens?run=sums&step=3&group=0&sample=0")
    expect(page.locator(".sibling")).to_have_count(3)
    page.keyboard.press("ArrowRight")
    assert "sample=1" in page.url
    expect(page.locator(".token-area")).to_contain_text("I do not know")
    page.keyboard.press("]")
    assert "group=1" in page.url
    page.keyboard.press(".")
    assert "step=4" in page.url
    page.get_by_role("link", name="All of this step").click()
    assert page.url.endswith("#rollouts?run=sums&step=4")
    page.go_back()
    visit.settled()
    page.get_by_role("link", name="This prompt through time").click()
    expect(page.locator("details.section").first).to_be_visible()


def test_a_conversation_has_turns_and_what_was_not_sampled_looks_different(visit) -> None:
    page = visit.open("#tokens?run=hostile&step=2&group=0&sample=0")
    turns = page.locator(".turn")
    expect(turns).to_have_count(3)
    expect(turns.nth(0)).to_contain_text("Turn 1: model")
    expect(turns.nth(0)).to_contain_text("reward 0.25")
    expect(turns.nth(0)).to_contain_text('look({"where":"up"})')
    expect(turns.nth(1)).to_contain_text("the model read this and did not write it")
    expect(page.locator(".push-words")).to_contain_text("3 not sampled")
    given, sampled = turns.nth(1).locator(".tok").first, turns.nth(2).locator(".tok").first
    style = "e => [getComputedStyle(e).fontStyle, getComputedStyle(e).backgroundImage]"
    assert given.evaluate(style) != sampled.evaluate(style)


@pytest.mark.parametrize("view", ["rollouts?run=hostile&step=2", "prompts?run=hostile&uid=talk"])
def test_cards_of_episodes_have_the_whole_conversation(visit, view) -> None:
    page = visit.open(f"#{view}")
    said = page.locator(".card").first.locator(".conversation > li")
    expect(said).to_have_count(4)
    expect(said.nth(0)).to_contain_text("user" + "go")
    expect(said.nth(1)).to_contain_text("look(where='up')")
    expect(said.nth(1)).to_contain_text("reward 0.25")
    expect(said.nth(2)).to_contain_text("tool" + "warm <b>")
    expect(said.nth(3)).to_contain_text("model" + "CD")


@pytest.mark.parametrize("view", ["rollouts", "search", "prompts", "tokens"])
def test_what_a_model_wrote_is_text_and_never_markup(visit, view) -> None:
    page = visit.open(f"#{view}?run=hostile&step=1&group=0&sample=0")
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main style, main base, main img:not([role])").count() == 0
    assert page.locator("body").evaluate("e => getComputedStyle(e).display") == "block"
    page.get_by_text(HOSTILE[0] if view == "tokens" else "window.pwned").first.wait_for()


def test_characters_without_a_form_are_labelled_and_turn_nothing_around(visit) -> None:
    page = visit.open("#rollouts?run=hostile&step=1")
    card = page.locator(".card").nth(2)
    labels = card.locator(".ctl").all_text_contents()
    assert {"U+202E", "U+202C", "U+2066", "U+200B", "\\x00", "\\x1b", "U+FEFF", "\\xad"} <= set(labels), labels
    left, right = (card.locator(".ctl", has_text=name).first.bounding_box()["x"] for name in ("U+202E", "U+202C"))
    assert card.locator("bdi").first.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
    assert left != right
    family = page.locator(".card").nth(3)
    expect(family).to_contain_text("👩‍👩‍👧")


def test_a_line_of_a_megabyte_does_not_stop_the_page(visit) -> None:
    page = visit.open("#tokens?run=hostile&step=1&group=0&sample=4")
    expect(page.locator(".facts").first).to_contain_text("100,000 tokens")
    assert page.locator(".tok").count() < 20_000  # only what is near the screen exists
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440
    page.locator(".tok").nth(10).click()
    expect(page.locator(".inspector")).to_contain_text("token 10,")
    page.locator(".token-plot canvas").click(position={"x": 700, "y": 40})
    expect(page.locator(".inspector")).not_to_contain_text("token 10,")
    at = int(re.search(r"token=(\d+)", page.url)[1])
    assert at > 10_000
    expect(page.locator(f"#t{at}")).to_be_in_viewport()


def test_a_question_that_is_refused_has_no_count(chromium, address) -> None:
    """The count of the question before stood above the refusal."""
    window = Visit(chromium, address, expected=("400",))
    page = window.open("#search?run=sums")
    expect(page.locator(".count")).to_have_text("60 completions")
    page.get_by_label("Text").fill("x" * 300)
    expect(page.locator(".failure")).to_contain_text("text: got 300 characters, accepts 200 at most")
    expect(page.locator(".count")).to_have_text(re.compile(r"^\s*$"))
    window.close()
