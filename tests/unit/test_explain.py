"""``trew explain``: what it prints is what the code says, and what it draws is what is trained with."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest
import torch

import trew
from trew.cli import curves, describe
from trew.cli.main import main
from trew.objective.options import Options

NAMES = trew.presets()
NS = "{http://www.w3.org/2000/svg}"


def run(capsys, *args: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as left:
        main(["explain", *args])
    out, err = capsys.readouterr()
    assert left.value.code == code, err
    return out, err


# ---- text


@pytest.mark.parametrize("name", NAMES)
def test_it_says_everything_about_a_preset_within_a_terminal(name, capsys):
    out, _ = run(capsys, name)
    d = describe.describe(name)
    assert out.startswith(f"{name}\n\n")
    assert d.use
    assert d.deviations
    flat = " ".join(out.split())
    for said in (d.summary, d.equation, d.deviations, d.use.removeprefix("Use it "), *d.papers):
        assert " ".join(said.replace("``", "").split()) in flat
    for _, component in d.objective.components():
        assert " ".join(component.equation().split()) in flat
    for key, (value, _) in d.settings.items():
        assert f"{key} = {describe.value(value)}" in flat
    for name in d.objective.needs:
        assert f"{name} (" in flat
    too_long = [line for line in out.splitlines() if len(line) > 100]
    assert not too_long


def test_every_axis_field_option_and_scope_has_words():
    objectives = [trew.preset(name) for name in NAMES]
    everything = trew.preset(
        "dapo", overlong_cache=1, overlong_filtering=True, entropy_bonus=0.1, correction="tis+opsm", beta=0.1
    )
    for o in (*objectives, everything):
        assert {axis for axis, _ in o.components()} <= set(describe.AXES)
        assert set(o.needs) <= set(describe.FIELDS)
        assert o.scope in describe.SCOPES
    assert list(describe.OPTIONS) == [f.name for f in dataclasses.fields(Options)]


def test_settings_that_are_changed_are_shown_with_their_defaults_and_act(capsys):
    out, _ = run(capsys, "dapo", "--set", "eps_high=0.5", "beta=0.1")
    assert "eps_high = 0.5 (default 0.28)" in out
    assert "beta = 0.1 (default 0.0)" in out
    assert "r > 1.5" in out
    out, _ = run(capsys, "grpo", "--set", "beta=0")
    assert "beta = 0.0 (default 0.04)" in out
    assert "divergence" not in out


def test_several_are_told_one_after_the_other(capsys):
    out, _ = run(capsys, "grpo", "gspo")
    assert out.index("grpo\n") < out.index("gspo\n")
    assert "2402.03300" in out
    assert "2507.18071" in out


@pytest.mark.parametrize("args", [(), ("--list",)])
def test_the_list_has_every_preset_and_is_aligned(args, capsys):
    lines = run(capsys, *args)[0].splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *NAMES]
    starts = [lines[0].index(column) for column in describe.BRIEF]
    assert starts[0] == 0
    for line in lines[1:]:
        for start in starts[1:]:
            assert line[start - 2 : start] == "  ", line
            assert line[start] != " "
    assert len({line[: starts[1]] for line in lines}) == len(lines)


def test_the_list_of_some_and_the_list_in_a_narrow_terminal(capsys):
    assert len(run(capsys, "--list", "dapo", "grpo")[0].splitlines()) == 3
    lines = describe.listed(width=100).splitlines()
    assert max(map(len, lines)) == 100
    assert [line.split()[0] for line in lines] == ["preset", *NAMES]  # names are not cut


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["dapoo"], "'dapoo' is not an objective (did you mean 'dapo'?)"),
        (["dapo", "grp", "nothing"], "'nothing' is not an objective"),
        (["--list", "grp"], "did you mean 'grpo'?"),
        (["dapo", "--set", "eps_hgh=1"], "did you mean 'eps_high'?"),
        (["dapo", "--set", "eps_high=-1"], "accepts a number above 0"),
        (["dapo", "--set", "eps_high"], "expected key=value"),
        (["--set", "eps_high=1"], "needs an objective"),
        (["--plot", "w.svg"], "needs an objective"),
        (["dapo", "--list", "--plot", "w.svg"], "no effect with --list"),
        (["dapo", "--ratios", "0", "1"], "add --plot"),
        (["dapo", "--plot", "w.svg", "--ratios", "1", "1"], "the lower first"),
        (["dapo", "--plot", "w.svg", "--ratios", "-1", "1"], "the lower first"),
        (["dapo", "--plot", "missing/w.svg"], "cannot be written"),
        ([*NAMES[:8], "--plot", "w.svg"], "got 8 objectives, accepts at most 7"),
    ],
)
def test_what_cannot_be_done_is_refused_with_one_message(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, err = run(capsys, *args, code=2)
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


# ---- curves


def near(found, wanted):
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-8)


def test_curves_are_the_formulas():
    r = torch.tensor([0.3, 0.7, 1.0, 1.25, 1.7, 4.5], dtype=torch.float64)
    clip = curves.evaluate(trew.preset("ppo-clip"), r)
    near(clip.weight[0], [1, 1, 1, 0, 0, 0])
    near(clip.weight[1], [0, 0, 1, 1, 1, 1])
    near(clip.coefficient[0], [0.3, 0.7, 1, 0, 0, 0])
    near(clip.coefficient[1], [0, 0, -1, -1.25, -1.7, -4.5])
    capped = curves.evaluate(trew.preset("cispo", cap=1.5), r)
    near(capped.weight[0], (1.5 / r).clamp(max=1))
    near(capped.coefficient[1], -r.clamp(max=1.5))
    soft = curves.evaluate(trew.preset("sapo"), r)
    near(soft.weight[0], 1 / torch.cosh((r - 1) / 2) ** 2)
    far = curves.evaluate(trew.preset("dppo-tv", delta=0.1), r, p_old=0.2)  # |pi - mu| = 0.2 |r - 1|
    near(far.weight[0], [1, 1, 1, 1, 0, 0])
    near(far.weight[1], [0, 1, 1, 1, 1, 1])
    left = curves.evaluate(trew.preset("deepseek-v3.2", eps_low=0.9), r)  # the mask acts below exp(-0.5) = 0.61
    near(left.coefficient[1], [0, -0.7, -1, -1.25, -1.7, -4.5])
    residual = curves.evaluate(trew.preset("kimi", tau=0.1), r)
    near(residual.coefficient[0], 1 - 0.1 * r.log())
    half = curves.evaluate(trew.preset("trw-logistic", gamma=0.0, eta=0.0), torch.ones(1, dtype=torch.float64))
    near(half.weight[0], [0.25])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregate", [None, "constant", "prompt-mean-token-mean", "seq-mean-token-sum"])
def test_every_preset_can_be_drawn_and_its_average_does_not_show(name, aggregate):
    r = torch.linspace(0.05, 4, 50, dtype=torch.float64)
    drawn = curves.evaluate(trew.preset(name), r)
    for value in (*drawn.weight, *drawn.coefficient):
        assert value.isfinite().all()
    assert (drawn.coefficient[0] >= -0.01).all()  # prime-rl pulls back a little
    assert (drawn.coefficient[1] <= 0.01).all()
    if aggregate:
        other = curves.evaluate(trew.preset(name, aggregate=aggregate), r)
        near(torch.stack(other.coefficient), torch.stack(drawn.coefficient))


@pytest.mark.parametrize("name", ["kl-cov", "clip-cov", "cppo", "dapo", "scalerl"])
def test_what_picks_tokens_or_completions_of_a_batch_does_not_pick_the_drawn_ones(name):
    r = torch.linspace(0.01, 4.9, 200, dtype=torch.float64)
    drawn = curves.evaluate(trew.preset(name), r)
    if name in ("cppo", "dapo"):
        near(drawn.weight[1], (r >= 0.8).double())
    else:
        near(drawn.coefficient[1], -r)


def test_the_range_of_a_picture_follows_the_region():
    def of(name, **settings):
        return curves.ratio_range(trew.preset(name, **settings))

    assert of("grpo") == of("reinforce") == of("kl-cov") == (0.0, 2.0)
    low, high = of("gspo")
    assert 0.998 < low < 1 - 4e-4 < 1 + 4e-4 < high < 1.002
    assert of("gspo", eps_low=0.2, eps_high=0.2) == (0.0, 2.0)
    for name, cap in (("dual-clip", "cap"), ("two-sided", "delta")):
        assert 4 < of(name, **{cap: 3.5})[1] <= 6
    assert of("cispo")[1] > 5
    assert of("dapo", eps_low=0.01, eps_high=0.01)[1] < 1.1


def test_steps_are_found_where_they_are():
    found = curves.trace(trew.preset("dapo"), 0.0, 2.0)
    falls = found.ratio[1:][found.weight[0].diff() < 0]
    rises = found.ratio[1:][found.weight[1].diff() > 0]
    assert falls.tolist() == pytest.approx([1.28], abs=1e-6)
    assert rises.tolist() == pytest.approx([0.8], abs=1e-6)


def test_no_probability_above_one():
    for high in (2.0, 3.0, 7.0, 10.0, 500.0):
        assert 0 < curves.probability(high) * high < 1


# ---- pictures


def polygons(svg):
    paths = [p for p in ET.fromstring(svg).iter(f"{NS}path") if "h20" not in p.get("d")]
    return [[tuple(map(float, xy.split())) for xy in p.get("d")[1:].split("L")] for p in paths]


def test_the_picture_of_a_clip_has_its_corners_at_the_bounds():
    svg = curves.figure([trew.preset("dapo")])
    up, down, push, pull = polygons(svg)
    assert [len(line) for line in (up, down, push, pull)] == [4, 4, 4, 4]
    left, right = up[0][0], up[-1][0]
    assert (up[1][0] - left) / (right - left) == pytest.approx(0.64, abs=0.002)  # 1.28 of [0, 2]
    assert (down[1][0] - left) / (right - left) == pytest.approx(0.4, abs=0.002)
    assert up[1][1] < up[2][1]  # 1 stands above 0
    assert all("nan" not in p for p in svg.split('"'))


def test_several_objectives_share_one_picture(capsys, tmp_path):
    run(capsys, "grpo", "sapo", "cispo", "--plot", str(tmp_path / "w.svg"))
    svg = (tmp_path / "w.svg").read_text()
    words = [t.text for t in ET.fromstring(svg).iter(f"{NS}text")]
    assert "grpo, sapo, cispo" in words
    assert {"grpo", "sapo", "cispo", "A > 0", "A < 0", "r", "weight w(r, A)"} <= set(words)
    assert any("π_old = 0.09" in w for w in words)  # up to r = 10
    assert len(polygons(svg)) == 12


def test_a_given_range_is_drawn(capsys, tmp_path):
    run(capsys, "gspo", "--plot", str(tmp_path / "w.svg"), "--ratios", "0.9", "1.1")
    words = [t.text for t in ET.parse(tmp_path / "w.svg").iter(f"{NS}text")]
    assert {"0.9", "1.1"} <= set(words)


def test_weights_without_end_leave_the_picture():
    svg = curves.figure([trew.preset("topr")])  # w = 1 / r for correct answers
    ticks = [t.text for t in ET.fromstring(svg).iter(f"{NS}text") if t.get("text-anchor") == "end"]
    assert max(float(t) for t in ticks if t.replace(".", "").isdigit()) <= curves.HIGHEST_WEIGHT + 0.5
