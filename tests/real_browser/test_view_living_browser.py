"""The page while runs grow and servers go; its width, contrast and labels; pictures of every view."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_help import Visit, serving
from browser_runs import grow, hostile, sums
from playwright.sync_api import expect

from trew.runs import RunFolder
from view_help import CONFIG, group, write_step


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(6):
        sums(folder / f"slow-{seed}", seed=seed)
        sums(folder / f"fast-{seed}", seed=seed, lr=1e-2)
    hostile(folder / "hostile")
    with serving(folder) as (found, _process):
        yield found


def test_new_steps_appear_by_themselves(chromium: Any, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "living") as run:
        run.write_config(CONFIG.format(steps=9, seed=0, lr=1e-3))
        with serving(tmp_path) as (address, _process):
            window = Visit(chromium, address)
            page = window.open("#curves?run=living")
            expect(page.get_by_text("No metrics yet.")).to_be_visible()
            grow(run, 1)
            grow(run, 2)
            chart = page.get_by_role("img", name=re.compile("^reward over step"))
            expect(chart).to_have_attribute("aria-label", re.compile(r"last 0\.2,"))
            grow(run, 3)
            expect(chart).to_have_attribute("aria-label", re.compile(r"last 0\.3,"))
            page.keyboard.press("3")
            expect(page.locator(".histogram")).to_contain_text("Step 3")
            grow(run, 4)
            expect(page.locator(".histogram")).to_contain_text("Step 4")  # the newest step is followed
            expect(page.locator(".card").first).to_contain_text("words of step 4")
            page.keyboard.press("ArrowLeft")
            grow(run, 5)
            page.keyboard.press("1")
            expect(page.locator("tbody tr")).to_contain_text("running")
            expect(page.locator("tbody tr")).to_contain_text("5 of 9")
            window.close()


def test_lists_of_completions_and_prompts_follow_a_run_that_trains(chromium: Any, tmp_path: Path) -> None:
    """They had what was there when they were opened; pages that were asked for later had other rows between."""
    with RunFolder.open(tmp_path / "living") as run:
        run.write_config(CONFIG.format(steps=99, seed=0, lr=1e-3))
        grow(run, 1)
        with serving(tmp_path) as (address, _process):
            windows = [Visit(chromium, address) for _ in range(2)]
            views = ("search?run=living&sort=-length", "prompts?run=living&sort=uid")
            found, prompts = (window.open(f"#{view}") for window, view in zip(windows, views, strict=True))
            expect(found.get_by_role("status")).to_have_text("2 completions")
            expect(prompts.get_by_role("status")).to_have_text("1 prompt")
            for step in range(2, 62):  # more than a page of 50
                write_step(run, step, group(f"a{step:02}", f"words{' more' * step}", "other"))
            expect(found.get_by_role("status")).to_have_text("122 completions")
            expect(found.locator(".line").first).to_contain_text("step 61")
            expect(prompts.get_by_role("status")).to_have_text("61 prompts")
            prompts.locator("main").press("End")
            expect(prompts.locator(".line").last).to_contain_text("question a61")
            for window in windows:
                window.close()


SLOWLY = """
() => {
  const usual = window.fetch;
  window.fetch = (url, how) => new Promise((yes, no) => {
    how.signal.addEventListener("abort", () => no(how.signal.reason));
    setTimeout(() => usual(url, how).then(yes, no), /metrics|summary/.test(url) ? 5000 : 0);
  });
}
"""


@pytest.mark.parametrize("view", ["curves", "rollouts", "search", "health"])
def test_what_failed_is_asked_for_again_once_the_server_answers(visit, view) -> None:
    """The list of runs was, and nothing else: a finished run's error stayed until the page was loaded again."""
    page = visit.open("#config?run=slow-0")
    page.evaluate("() => { window.usual = fetch; window.fetch = () => Promise.reject(new TypeError('away')) }")
    page.evaluate(f"location.hash = '#{view}?run=slow-0'")
    expect(page.locator(".failure").first).to_contain_text("The server does not answer.")
    page.evaluate("() => { window.fetch = window.usual }")
    expect(page.locator(".failure")).to_have_count(0)
    expect(page.locator(".chart, .card, .virtual-row, .warnings").first).to_be_visible()


def test_a_page_that_is_looked_at_again_asks_no_more_often(visit) -> None:
    page = visit.open("#runs")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/api/runs") else None)
    page.evaluate("for (let i = 0; i < 50; i += 1) document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(6000)
    assert len(asked) <= 5


def test_what_is_shown_stays_when_a_run_begins_that_is_listed_before_it(chromium: Any, tmp_path: Path) -> None:
    sums(tmp_path / "b", steps=2)
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open("#rollouts?step=1")
        expect(page.locator(".histogram")).to_contain_text("Step 1")
        assert page.url.endswith("#rollouts?step=1&run=b")
        sums(tmp_path / "a", steps=2)
        expect(page.locator(".top-run option")).to_have_count(2)
        expect(page.locator(".top-run select")).to_have_value("b")
        window.close()


def test_the_time_since_a_run_changed_goes_on(chromium: Any, tmp_path: Path) -> None:
    sums(tmp_path / "still", steps=1)
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open("#runs")
        changed = page.locator("td[data-label=changed]")
        before = changed.inner_text()
        expect(changed).not_to_have_text(before)
        expect(changed).to_have_text(re.compile(r"^\d+ s ago$"))
        window.close()


def test_a_run_that_changes_faster_than_its_server_answers_is_shown(chromium: Any, tmp_path: Path) -> None:
    """Every change took the question back that was on the way."""
    with RunFolder.open(tmp_path / "living") as run:
        run.write_config(CONFIG.format(steps=99, seed=0, lr=1e-3))
        grow(run, 1)
        with serving(tmp_path) as (address, _process):
            window = Visit(chromium, address)
            page = window.open("#config?run=living")
            page.evaluate(SLOWLY)
            page.evaluate("location.hash = '#curves?run=living'")
            for step in range(2, 16):
                grow(run, step)
                page.wait_for_timeout(1000)
            assert page.get_by_role("img", name=re.compile("^reward over step")).count() == 1
            page.evaluate("location.hash = '#health?run=living'")
            for step in range(16, 26):
                grow(run, step)
                page.wait_for_timeout(1000)
            assert page.get_by_role("heading", name="Warnings").count() == 1
            window.close()


def test_a_resumed_run_is_read_anew(chromium: Any, tmp_path: Path) -> None:
    """Rows that a resume removed must not stay on the page."""
    folder = sums(tmp_path / "back", steps=6)
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open("#curves?run=back")
        chart = page.get_by_role("img", name=re.compile("^reward over step"))
        expect(chart).to_have_attribute("aria-label", re.compile(r"last 0\.6,"))
        kept = [line for line in (folder / "metrics.jsonl").read_text().splitlines(True) if '"step": 6' not in line]
        (folder / "metrics.jsonl").write_text("".join(kept))
        expect(chart).to_have_attribute("aria-label", re.compile(r"last 0\.5,"))
        window.close()


def test_a_run_that_was_overwritten_meanwhile_shows_nothing_of_the_earlier_one(chromium: Any, tmp_path: Path) -> None:
    """It has gone beyond the steps of the earlier one, as overnight in a window that nobody looked at."""
    folder = sums(tmp_path / "runs" / "again", steps=6)
    with RunFolder.open(tmp_path / "new") as run:
        run.write_config(CONFIG.format(steps=9, seed=0, lr=1e-3))
        for step in range(1, 9):
            write_step(run, step, group("a", f"new words of step {step}", "other"), reward=step / 100)
    with serving(tmp_path / "runs") as (address, _process):
        windows = [Visit(chromium, address) for _ in range(2)]
        curves, tokens = (
            window.open(f"#{view}?run=again") for window, view in zip(windows, ("curves", "tokens"), strict=True)
        )
        tokens.evaluate("location.hash = '#tokens?run=again&step=2&group=0&sample=0'")
        expect(tokens.locator(".recorded")).to_contain_text("32")
        chart = curves.get_by_role("img", name=re.compile("^reward over step"))
        expect(chart).to_have_attribute("aria-label", re.compile(r"first 0\.1, last 0\.6,"))
        folder.rename(tmp_path / "old")
        (tmp_path / "new").rename(folder)
        expect(chart).to_have_attribute("aria-label", re.compile(r"first 0\.01, last 0\.08,"))
        expect(tokens.locator(".recorded")).to_contain_text("new")
        for window in windows:
            window.close()


def test_settings_that_a_run_goes_on_with_are_shown(chromium: Any, tmp_path: Path) -> None:
    """``--resume --set`` writes config.toml again."""
    folder = sums(tmp_path / "x")
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open("#config?run=x&key=steps")
        expect(page.locator("table.config")).to_contain_text("12")
        (folder / "config.toml").write_text(CONFIG.format(steps=4321, seed=0, lr=1e-3))
        expect(page.locator("table.config")).to_contain_text("4321")
        window.close()


def test_a_server_that_ends_is_said_and_one_that_returns_is_found(chromium: Any, tmp_path: Path) -> None:
    sums(tmp_path / "x")
    with serving(tmp_path) as (address, process):
        window = Visit(chromium, address, expected=("ERR_CONNECTION_REFUSED", "401", "403"))
        page = window.open("#curves?run=x")
        process.terminate()
        process.wait(20)
        alert = page.get_by_role("alert").first
        expect(alert).to_contain_text("The server does not answer. Is `trew view` still running?")
        expect(page.locator(".panel").first).to_be_visible()  # what was known stays
        port = int(re.search(r":(\d+)/", address)[1])
        with serving(tmp_path, port=port):
            page.get_by_role("button", name="Ask again").click()
            expect(alert).to_contain_text("Open the address that `trew view` printed.")
        window.close()


def test_a_folder_whose_runs_are_gone_says_what_to_do(chromium: Any, tmp_path: Path) -> None:
    sums(tmp_path / "x")
    with serving(tmp_path) as (address, _process):
        window = Visit(chromium, address)
        page = window.open()
        expect(page.locator("tbody tr")).to_have_count(1)
        shutil.rmtree(tmp_path / "x")
        expect(page.get_by_text("No runs here yet.")).to_be_visible()
        window.close()


SLOW = "run=slow-0"
VIEWS = {
    "runs": f"#runs?{SLOW}&run=fast-0", "curves": f"#curves?{SLOW}&run=fast-0&smooth=0.5",
    "rollouts": f"#rollouts?{SLOW}&step=6", "tokens": f"#tokens?{SLOW}&step=6&token=3",
    "prompts": f"#prompts?{SLOW}", "prompt": f"#prompts?{SLOW}&uid=a", "search": f"#search?{SLOW}&text=answer",
    "health": f"#health?{SLOW}", "config": f"#config?{SLOW}&run=fast-0&all=1",
    "compare": "#compare?" + "&".join(f"run=slow-{i}&run=fast-{i}" for i in range(6)),
    "hostile": "#rollouts?run=hostile&step=1", "talk": "#tokens?run=hostile&step=2",
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_can_be_read_and_is_labelled(
    chromium: Any, address: str, view: str, pictures: Path | None
) -> None:
    """At both widths and in both schemes of colours."""
    window = Visit(chromium, address, expected=("409",), reduced_motion="reduce")
    window.open(VIEWS[view])
    window.fits(view, pictures)
    window.close()


def test_a_chart_of_a_run_that_trains_is_drawn_as_one_that_is_opened_later(chromium: Any, tmp_path: Path) -> None:
    """A metric of every tenth step stayed points without a line: the first step alone had looked like every step."""
    with RunFolder.open(tmp_path / "thin") as run:
        run.write_config(CONFIG.format(steps=60, seed=0, lr=1e-3))
        run.log({"step": 1, "reward": 0.5, "kl": 0.1})
        with serving(tmp_path) as (address, _process):
            window = Visit(chromium, address)
            page = window.open("#curves?run=thin&metric=kl")
            chart = page.get_by_role("img", name=re.compile("^kl over step"))
            expect(chart).to_have_attribute("aria-label", re.compile(r"last 0\.1,"))
            for step in range(2, 62):
                run.log({"step": step, "reward": 0.5} | ({"kl": step / 10} if step % 10 == 1 else {}))
            expect(chart).to_have_attribute("aria-label", re.compile(r"last 6\.1,"))
            pictures = []
            for _ in range(2):
                page.wait_for_timeout(300)
                pictures.append(chart.locator("canvas").evaluate("canvas => canvas.toDataURL()"))
                page = window.open("#curves?run=thin&metric=kl")
            assert pictures[0] == pictures[1]
            window.close()
