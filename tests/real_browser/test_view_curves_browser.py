"""The list of runs, curves, configuration, health and comparison, clicked through in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_help import Visit, serving
from browser_runs import sums
from playwright.sync_api import expect

from trew.runs import RunFolder
from view_help import CONFIG, group, write_step


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(6):
        sums(folder / f"slow-{seed}", seed=seed)
        sums(folder / f"fast-{seed}", seed=seed, lr=1e-2, steps=8)
    with serving(folder) as (found, _process):
        yield found


def test_the_list_of_runs_leads_to_their_curves(visit) -> None:
    page = visit.open()
    expect(page.locator("tbody tr")).to_have_count(12)
    row = page.get_by_role("row", name=re.compile("slow-0"))
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("12 of 12")
    expect(row).to_contain_text("25 % (10 to 40 %)")
    page.get_by_label("Search runs").fill("fast seed")
    expect(page.locator("tbody tr")).to_have_count(6)
    page.get_by_label("Search runs").fill("nothing like that")
    expect(page.get_by_text('No run fits "nothing like that".')).to_be_visible()
    page.get_by_label("Search runs").fill("")
    page.get_by_role("button", name="Seed").click()
    assert page.locator("td[data-label=seed]").all_text_contents() == sorted(["0", "1", "2", "3", "4", "5"] * 2)
    page.get_by_label("Choose slow-0").check()
    page.get_by_label("Choose fast-0").check()
    page.get_by_role("link", name="Curves of 2").click()
    assert page.url.endswith("#curves?run=slow-0&run=fast-0")
    expect(page.locator(".legend").first).to_contain_text("slow-0")


def test_curves_show_values_on_hover_in_all_charts_at_once(visit) -> None:
    page = visit.open("#curves?run=slow-0&run=fast-0")
    chart = page.get_by_role("img", name=re.compile("^reward over step"))
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator(".tip")
    expect(tip).to_have_count(1)
    expect(tip).to_contain_text(re.compile(r"step \d+slow-00\.\d+fast-00?"))
    others = page.locator(".u-cursor-x").evaluate_all(
        "all => all.filter(e => getComputedStyle(e).transform !== 'none').length"
    )
    assert others >= 3  # the cursor is in every chart that has been drawn
    page.mouse.move(5, 5)
    expect(tip).to_have_count(0)
    chart.focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("step 1")
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("step 2")


def test_a_warning_is_a_mark_with_its_text(visit) -> None:
    page = visit.open("#curves?run=slow-0")
    chart = page.get_by_role("img", name=re.compile("^entropy over step"))
    chart.scroll_into_view_if_needed()
    expect(chart).to_have_attribute("aria-label", re.compile("1 warnings|[1-9]+ warnings"))
    chart.focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
        if page.locator(".tip-mark").count():
            break
    expect(page.locator(".tip-mark.warning").first).to_contain_text("cut off at the limit")


def test_smoothing_scale_search_and_pins_stay_in_the_address(visit) -> None:
    page = visit.open("#curves?run=slow-0")
    page.get_by_label(re.compile("^Smoothing")).fill("0.8")
    page.get_by_role("button", name="Log").click()
    page.get_by_label("Search metrics").fill("entr")
    expect(page.locator(".panel")).to_have_count(1)
    page.get_by_label("Pin entropy").click()
    page.get_by_label("Search metrics").fill("")
    expect(page.locator("details.section h2").first).to_have_text("Pinned")
    assert all(part in page.url for part in ("smooth=0.8", "log=1", "pin=entropy"))
    page.reload()
    visit.settled()
    expect(page.locator("details.section h2").first).to_have_text("Pinned")
    chart = page.get_by_role("img", name=re.compile("^entropy over step")).first
    chart.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip")).to_contain_text("raw")
    page.get_by_role("button", name="Hours").click()
    expect(page.get_by_role("img", name=re.compile("^entropy over hour")).first).to_be_visible()
    page.get_by_label("Search metrics").fill("no such thing")
    expect(page.get_by_text('No metric has "no such thing" in its name.')).to_be_visible()


def test_dragging_zooms_every_chart(visit) -> None:
    page = visit.open("#curves?run=slow-0")
    chart = page.get_by_role("img", name=re.compile("^reward over step"))
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.4, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    low, high = (float(re.search(rf"{key}=([\d.]+)", page.url)[1]) for key in ("from", "to"))
    assert 3 < low < high < 10
    page.get_by_role("button", name="Reset zoom").click()
    assert "from=" not in page.url


def test_runs_of_one_setting_become_a_mean_and_a_band(visit) -> None:
    page = visit.open("#curves?" + "&".join(f"run=slow-{i}&run=fast-{i}" for i in range(6)))
    page.get_by_role("button", name="Mean and band").click()
    legend = page.locator(".legend").first
    expect(legend.locator("li")).to_have_count(2)
    expect(legend).to_contain_text("slow-0 and 5 more of its setting")
    chart = page.get_by_role("img", name=re.compile("^entropy over step"))
    chart.scroll_into_view_if_needed()
    chart.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip")).to_contain_text(re.compile(r"1\.94\d* \(1\.917 to 1\.967\)"))  # seeds differ by 0.05


def test_the_mean_of_runs_over_hours_is_that_of_a_step(chromium: Any, tmp_path: Path) -> None:
    """Runs reach a step at other times: the mean was a line from one run's value to the other's and back."""
    for seed in (0, 1):
        with RunFolder.open(tmp_path / f"seed-{seed}") as run:
            run.write_config(CONFIG.format(steps=4, seed=seed, lr=1e-3))
            for step in range(1, 5):
                words = group("a", "x")
                write_step(run, step, words, reward=step / 10 + seed / 2, seconds=3600.0 * (1 + seed))
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open("#curves?run=seed-0&run=seed-1&seeds=1&time=1")
        chart = page.get_by_role("img", name=re.compile("^reward over hour"))
        expect(chart).to_have_attribute(
            "aria-label", re.compile(r"first 0\.35, last 0\.65, smallest 0\.35, largest 0\.65")
        )
        chart.hover()
        # A step takes 1 hour, or 2: in the mean 1.5.
        expect(page.locator(".tip").first).to_contain_text(re.compile(r"hour (3|4\.5)"))
        window.close()


def test_before_and_after_have_intervals(visit) -> None:
    page = visit.open("#curves?run=slow-0&run=slow-5")
    rows = page.locator(".ba-row")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("before 25 % (10 to 40 %)")
    expect(rows.first).to_contain_text("after 80 % (60 to 90 %)")
    expect(rows.first).to_contain_text("+55 points")


def test_the_configuration_shows_what_differs(visit) -> None:
    page = visit.open("#config?run=slow-0&run=fast-0")
    rows = page.locator("table.config tbody tr")
    expect(page.get_by_role("row", name=re.compile(r"learner\.lr"))).to_contain_text("0.001")
    differing = rows.count()
    assert all("differs" in (row.get_attribute("class") or "") for row in rows.all())
    page.get_by_label("only what differs").uncheck()
    expect(page.get_by_role("row", name=re.compile(r"objective\.preset"))).to_be_visible()
    assert rows.count() > differing
    page.keyboard.press("/")
    page.keyboard.type("preset")
    expect(rows).to_have_count(1)
    page.get_by_text("config.toml of slow-0").click()
    expect(page.locator(".text.code")).to_contain_text('preset = "grpo"')


def test_health_has_warnings_with_advice_and_memory(visit) -> None:
    page = visit.open("#health?run=slow-0")
    warning = page.locator(".warnings li").first
    expect(warning).to_contain_text("truncated")
    expect(warning).to_contain_text("cut off at the limit")
    expect(warning).to_contain_text("What to do:")
    rank = page.locator(".memory").first
    expect(rank).to_contain_text("planned 3.0 GiB · measured peak 2.5 GiB · 83 % of the plan")
    expect(rank.get_by_role("img", name="training: planned 3.0 GiB, measured 2.5 GiB")).to_be_visible()
    expect(rank.locator(".memory-phases dt")).to_have_text(["loading", "generating", "training"])
    rank.get_by_text("parts").last.click()
    expect(rank.get_by_role("row", name="gradients 1.0 GiB")).to_be_visible()
    expect(page.locator(".memory")).to_have_count(2)
    expect(page.locator(".memory").nth(1)).to_contain_text("rank 1")
    page = visit.open("#config?run=slow-0")
    expect(page.locator(".memory")).to_have_count(2)  # beside the settings too
    page = visit.open("#health?run=slow-0")
    warning = page.locator(".warnings li").first
    expect(page.locator(".figures")).to_contain_text("training time12 min")
    warning.get_by_role("link", name="Rollouts of this step").click()
    visit.settled()
    expect(page.locator(".steps")).to_be_visible()


def test_a_comparison_or_the_reason_why_there_is_none(visit) -> None:
    page = visit.open("#compare?run=slow-0")
    expect(page.get_by_text("A comparison needs several runs.")).to_be_visible()
    page = visit.open("#compare?" + "&".join(f"run=slow-{i}&run=fast-{i}" for i in range(6)))
    expect(page.get_by_role("heading", name="Against lr=0.001")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile(r"^lr=0\.01 .* 6 equal$"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile(r"^lr=0\.01 .*: "))).to_have_count(2)
    page = visit.open("#compare?run=slow-0&run=slow-1")
    expect(page.get_by_text("nothing is compared")).to_be_visible()


def test_a_comparison_of_one_seed_is_refused_in_words(chromium: Any, address: str) -> None:
    window = Visit(chromium, address, expected=("409",))
    page = window.open("#compare?run=slow-0&run=fast-0")
    expect(page.get_by_role("heading", name="No comparison of these runs")).to_be_visible()
    expect(page.locator(".refused")).to_contain_text("one seed")
    window.close()


def test_keys_and_help(visit) -> None:
    page = visit.open("#curves?run=slow-0")
    page.keyboard.press("3")
    assert page.url.endswith("#rollouts?run=slow-0")
    page.keyboard.press("?")
    help = page.get_by_role("dialog")
    expect(help).to_contain_text("to the search field of the view")
    page.keyboard.press("Escape")
    expect(help).to_have_count(0)
    page.keyboard.press("1")
    page.get_by_label("Search runs").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("3?")
    expect(page.get_by_label("Search runs")).to_have_value("3?")  # a field takes what is typed
    page.go_back()
    assert "#rollouts" in page.url


def test_a_run_that_this_server_does_not_have(visit) -> None:
    page = visit.open("#curves?run=gone")
    expect(page.get_by_text('This server has no run "gone".')).to_be_visible()


def test_all_runs_of_two_searches_can_be_chosen(visit) -> None:
    """Those of the first search were dropped by the second."""
    page = visit.open()
    for search in ("fast-0", "slow-0"):
        page.get_by_label("Search runs").fill(search)
        page.get_by_label("all 1", exact=True).check()
    expect(page.get_by_role("link", name="Curves of 2")).to_be_visible()
    page.get_by_label("all 1", exact=True).uncheck()
    expect(page.get_by_role("link", name="Curves of 1")).to_be_visible()
