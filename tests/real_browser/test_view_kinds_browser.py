"""Real runs of every kind in a real browser: asynchronous, fine-tuned, with a critic, and those of a study."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_help import Visit, serving
from playwright.sync_api import expect

import recipe_help
import study_help
import tiny
import trew
from fake_vllm import FakeVllm
from fake_vllm import serving as answering
from trew.utils.toml import dump_table

VIEWS = {
    f"{name}-{view}": f"#{view}?run={run}{more}"
    for name, run, views in (
        ("async", "async", ("curves", "rollouts", "tokens", "health", "config")),
        ("sft", "sft", ("curves", "rollouts", "tokens", "prompts", "search", "health", "config")),
        ("ppo", "ppo", ("curves", "rollouts", "tokens", "health", "config")),
    )
    for view, more in ((each, "&step=4" if each in ("rollouts", "tokens") else "") for each in views)
} | {"kinds-runs": "#runs"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Iterator[str]:
    place = tmp_path_factory.mktemp("kinds")
    (place / "reward.py").write_text(recipe_help.ODD)
    tiny.save(place / "lm", "smollm")
    runs = place / "runs"
    runs.mkdir()
    asynchronous(server, place, runs / "async")
    fine_tuned(server, place, runs / "sft")
    critic = recipe_help.recipe(
        place / "lm", objective={"preset": "ppo"}, critic={"lr": 1e-2, "warmup_steps": 1}, rollout={"completions": 2}
    )
    (place / "ppo.toml").write_text(critic)
    server.run("train", "ppo.toml", "--out", runs / "ppo", cwd=place)
    base = recipe_help.recipe(place / "lm", eval={"size": 8, "correct_at": 0.6, "every": 1})
    algorithms = {"clip": {"objective.preset": "grpo", "objective.eps_high": 0.2}, "same": None}
    study_help.write(place, base, seeds=2, tuning_seeds=1, algorithms=algorithms)
    server.run("study", "study.toml", "--out", runs / "study", cwd=place)
    with serving(runs) as (found, _process):
        yield found


def asynchronous(server: Any, place: Path, out: Path) -> None:
    """Trains on rollouts of two servers that generate while it learns; two versions in every step."""
    fakes = [FakeVllm(place / "lm", token="secret") for _ in range(2)]
    with answering(fakes[0], place / "0.sock"), answering(fakes[1], place / "1.sock"):
        for fake in fakes:
            fake.faults.slow = 0.002  # seconds per token: something is in flight when weights change
        cluster = {"rollout": "vllm", "endpoints": [f"unix:{place}/{i}.sock" for i in range(2)], "staleness": 1}
        text = recipe_help.recipe(
            place / "lm", steps=6, objective={"preset": "grpo", "correction": "tis"}, cluster=cluster,
            checkpoint={"every": 2}, eval={"every": 3}, learner={"minibatch_prompts": 2},
        )  # fmt: skip
        (place / "async.toml").write_text(text)
        server.run("train", "async.toml", "--out", out, cwd=place, TREW_SERVER_TOKEN="secret")


def fine_tuned(server: Any, place: Path, out: Path) -> None:
    """Trains on conversations about small sums."""
    prompts = trew.data.load_prompts(
        trew.config.DataConfig(task="arithmetic", args={"ops": ["+"], "smallest": 1, "largest": 4})
    )
    rows = [
        {"messages": [*map(dict, p.messages), {"role": "assistant", "content": f"#### {p.columns['answer']}"}]}
        for p in prompts
        for _ in range(6)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "model": str(place / "lm"), "data": {"task": "demonstrations", "train": "rows.jsonl"},
        "sft": {"epochs": 1, "batch": 8}, "learner": {"lr": 3e-3}, "eval": {"size": 2, "every": 2},
    }  # fmt: skip
    (place / "sft.toml").write_text(dump_table(table))
    server.run("sft", "sft.toml", "--out", out, cwd=place)


def test_an_asynchronous_run_shows_staleness_versions_and_servers(visit: Visit) -> None:
    page = visit.open("#health?run=async")
    several = page.locator("section", has=page.get_by_role("heading", name="Ranks, servers and versions"))
    expect(several.get_by_role("row", name=re.compile(r"unix:.*\.sock"))).to_have_count(2)
    expect(several).to_contain_text("version of the weights: updates so far12")
    expect(several).to_contain_text("bound (cluster.staleness)1")
    shares = several.get_by_role("row", name=re.compile(r"^\d \d+ %$")).all_text_contents()
    assert [share[0] for share in shares] == ["0", "1"]
    assert sum(int(share[1:].removesuffix(" %")) for share in shares) == 100
    page = visit.open("#tokens?run=async&step=4&token=2")
    expect(page.locator(".inspector")).to_contain_text("sampled by weights")


def test_a_fine_tuned_run_shows_its_loss_and_no_gold(visit: Visit) -> None:
    page = visit.open("#curves?run=sft")
    expect(page.locator("main h2").first).to_have_text("Held-out loss")
    expect(page.get_by_role("img", name=re.compile("^held-out loss over step.*With 95 % intervals"))).to_be_visible()
    expect(page.get_by_role("region", name="Held-out before and after")).to_contain_text(
        re.compile(r"before loss [\d.]+ \([\d.]+ to [\d.]+\)\s*after loss")
    )
    page = visit.open("#rollouts?run=sft&step=4")
    group = page.locator(".group").first
    expect(group).to_contain_text("####")
    for absent in ("gold", "extracted", "no signal", "spread", "no score"):
        expect(group).not_to_contain_text(absent)
    expect(page.locator(".histogram")).to_have_text(re.compile(r"^Step 4 · \d demonstrations$"))
    for view, shown in (("prompts", "number only"), ("search", "####"), ("tokens", "number only")):
        page = visit.open(f"#{view}?run=sft")
        expect(page.locator("main")).to_contain_text(shown)
        for absent in ("gold", "no score", "disagreement", "Score from", "reward"):
            expect(page.locator("main")).not_to_contain_text(absent)
    figures = visit.open("#health?run=sft").locator(".figures").first
    expect(figures).to_contain_text("held-out rows")
    expect(figures).not_to_contain_text("held-out prompts")
    page = visit.open("#runs")
    expect(page.get_by_role("row", name=re.compile("^Choose sft"))).to_contain_text(re.compile("loss.*loss"))


def test_a_critic_teaches_from_equal_rewards(visit: Visit) -> None:
    page = visit.open("#rollouts?run=ppo&step=4")
    expect(page.locator(".card .tag.advantage").first).to_be_visible()
    expect(page.get_by_text("no signal")).to_have_count(0)
    page = visit.open("#curves?run=ppo&metric=value_loss")
    expect(page.locator("details.section h2").first).to_have_text("Critic")


def test_the_runs_of_a_study_are_found_and_compared(visit: Visit) -> None:
    page = visit.open("#runs")
    page.get_by_label("Search runs").fill("off/clip")
    names = page.locator("tbody .run-name a")
    expect(names).to_have_count(4)  # two values for tuning, two seeds that are reported
    assert all("study/runs/sums/off/clip/" in name for name in names.all_text_contents())
    page.get_by_label("Search runs").fill("study/")
    expect(page.locator("tbody tr")).to_have_count(8)
    page.get_by_label("all 8").check()
    page.locator("main").get_by_role("link", name="Compare").click()
    visit.settled()
    expect(page.locator("main")).to_contain_text("4 groups of runs, paired by seed")
    expect(page.locator("main")).to_contain_text("lr=0.001 eps_high=0.2")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_every_kind_fits(chromium: Any, address: str, view: str, pictures: Path | None) -> None:
    window = Visit(chromium, address, expected=("409",), reduced_motion="reduce")
    window.open(VIEWS[view])
    window.fits(view, pictures)
    window.close()
