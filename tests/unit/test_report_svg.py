"""Charts: values end up where the axes say, gaps stay gaps, foreign names stay text."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trew.runs.report.forest import ForestRow, forest
from trew.runs.report.svg import Series, labels, line_chart, running_mean, side_by_side, ticks

NS = "{http://www.w3.org/2000/svg}"


def parse(svg):
    return ET.fromstring(svg)


def paths(svg, kind="tc-line"):
    """The point lists of drawn lines, without the legend's."""
    found = [p.get("d") for p in parse(svg).iter(f"{NS}path") if kind in p.get("class").split()]
    return [[tuple(map(float, pair.split())) for pair in d[1:].split("L")] for d in found if "h20" not in d]


def test_points_lie_where_the_axes_say():
    svg = line_chart([Series("a", [0, 5, 10], [0.0, 0.25, 1.0])], y_range=(0.0, 1.0))
    (points,) = paths(svg)
    ys = {t.text: float(t.get("y")) - 4 for t in parse(svg).iter(f"{NS}text") if t.get("text-anchor") == "end"}
    xs = {t.text: float(t.get("x")) for t in parse(svg).iter(f"{NS}text") if t.get("text-anchor") == "middle"}
    assert points[0] == pytest.approx((xs["0"], ys["0.0"]), abs=0.11)
    assert points[2] == pytest.approx((xs["10"], ys["1.0"]), abs=0.11)
    assert points[1][1] == pytest.approx(ys["0.0"] + 0.25 * (ys["1.0"] - ys["0.0"]), abs=0.11)


def test_missing_values_are_gaps_not_zeros():
    svg = line_chart([Series("a", range(7), [1.0, 2.0, None, 3.0, math.nan, 4.0, math.inf])])
    assert [len(p) for p in paths(svg)] == [2]
    lone = list(parse(svg).iter(f"{NS}circle"))
    assert len(lone) == 2  # 3.0 and 4.0 stand alone


def test_band_and_whiskers():
    band = line_chart([Series("a", [0, 1, 2], [1.0, 2.0, 3.0], low=[0.5, None, 2.5], high=[1.5, 2.5, 3.5])])
    (points,) = paths(band.replace("Z", ""), "tc-band")
    assert len(points) == 4  # the middle has no interval
    whiskers = line_chart([Series("a", [0, 1], [0.5, 0.6], low=[0.4, None], high=[0.6, None], style="points")])
    assert len([p for p in parse(whiskers).iter(f"{NS}path") if "tc-whisker" in p.get("class")]) == 1
    assert len(list(parse(whiskers).iter(f"{NS}circle"))) == 3  # two points and the legend


def test_values_outside_a_fixed_range_are_drawn_at_its_edge():
    (points,) = paths(line_chart([Series("a", [0, 1, 2], [0.0, 5.0, 1.0])], y_range=(0.0, 1.0)))
    assert points[1][1] == points[2][1]


def test_hostile_names_stay_text():
    name = '</text><script>x</script>"&\u202e\x1b'
    svg = line_chart([Series(name, [0, 1], [0, 1])], title=name, x_label=name, y_label=name)
    tags = {e.tag.removeprefix(NS) for e in parse(svg).iter()}
    assert tags == {"svg", "style", "rect", "text", "line", "path"}
    assert "\u202e" not in svg
    assert "\x1b" not in svg


def test_a_long_series_is_thinned_but_keeps_its_extremes_and_gaps():
    y = [math.sin(i / 500) for i in range(50_000)]
    y[12_345], y[33_333], y[40_000] = 9.0, -9.0, None
    svg = line_chart([Series("a", range(50_000), y)])
    assert len(svg) < 60_000
    lines = paths(svg)
    assert len(lines) == 2
    heights = [p[1] for line in lines for p in line]
    plain = line_chart([Series("a", [0, 1], [9.0, -9.0])])
    assert (min(heights), max(heights)) == (paths(plain)[0][0][1], paths(plain)[0][1][1])


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [1], [None])]])
def test_nothing_to_draw_says_so(series):
    assert "no values" in line_chart(series)


def test_constant_up_to_rounding_is_a_flat_line():
    y = [0.1, 0.1 + 1e-17, 0.10000000000000002]
    (points,) = paths(line_chart([Series("a", [1, 2, 3], y)]))
    assert max(p[1] for p in points) - min(p[1] for p in points) < 0.2


def test_light_and_dark_are_both_styled_once_per_page():
    assert line_chart([Series("a", [0], [0.0])]).count("prefers-color-scheme:dark") == 1
    assert "<style>" not in line_chart([Series("a", [0], [0.0])], standalone=False)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_the_axis_of_a_single_step_names_that_step(step):
    svg = line_chart([Series("a", [step], [0.5])], y_range=(0.0, 1.0), x_label="")
    assert [t.text for t in parse(svg).iter(f"{NS}text") if t.get("text-anchor") == "middle"] == [f"{step}"]


def test_many_lines_differ_in_colour_or_dash_and_look_as_in_the_legend():
    root = parse(line_chart([Series(f"run {i}", [0, 1], [i, i]) for i in range(32)]))
    lines = [p for p in root.iter(f"{NS}path") if "tc-line" in p.get("class")]
    drawn, named = ([(p.get("class"), p.get("stroke-dasharray")) for p in lines if ("h20" in p.get("d")) == legend]
                    for legend in (False, True))  # fmt: skip
    assert len(set(drawn)) == 32
    assert drawn == named


def test_long_names_that_differ_at_their_end_differ_in_pictures():
    names = [f"experiments-of-the-third-week-with-the-smaller-model/lr=3e-6/seed-{i}" for i in (1, 2)]
    charts = [
        line_chart([Series(name, [0, 1], [0, 1]) for name in names]),
        forest([ForestRow(name, 0.1, 0.0, 0.2) for name in names], title="t", x_label="x"),
    ]
    for svg in charts:
        words = [t.text for t in parse(svg).iter(f"{NS}text") if "…" in (t.text or "")]
        assert [word[-6:] for word in words] == ["seed-1", "seed-2"]
        assert max(map(len, words)) <= 48


def test_series_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="2 values of y for 1 of x"):
        Series("a", [0], [1.0, 2.0])


def test_running_mean_is_of_the_last_known_values():
    assert running_mean([2.0, 4.0, math.nan, 6.0, 8.0], window=3) == [2.0, 3.0, None, 4.0, 6.0]


def test_running_mean_of_steps_leaves_out_what_lies_further_back():
    assert running_mean([1.0, math.nan, 3.0, 5.0, 9.0], window=3, steps=[1, 2, 3, 4, 14]) == [1.0, None, 2.0, 4.0, 9.0]
    assert running_mean([0.0, 0.3, 0.6], window=5, steps=[0, 10, 20]) == [0.0, 0.3, 0.6]  # evaluations


finite = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 10**6), finite), min_size=1, max_size=40), st.booleans())
def test_every_series_gives_a_picture_inside_its_frame(points, fixed):
    xs, ys = zip(*sorted(points), strict=True)
    svg = line_chart([Series("a", xs, ys)], y_range=(0.0, 1.0) if fixed else None)
    root = parse(svg)
    height = float(root.get("height"))
    numbers = [float(v) for p in root.iter(f"{NS}path") for v in re.findall(r"-?\d+\.\d", p.get("d"))]
    assert all(-1 <= v <= max(560, height) + 1 for v in numbers)


@given(finite, st.floats(1e-9, 1e9), st.integers(2, 9))
def test_ticks_are_few_sorted_inside_and_told_apart(low, size, most):
    high = low + size
    assume(high - low > 1e-9 * max(abs(low), abs(high)))  # a chart widens what is narrower
    found = ticks(low, high, most=most)
    assert 1 <= len(found) <= most + 1
    assert list(found) == sorted(set(found))
    slack = 1e-6 * (high - low)
    assert all(low - slack <= t <= high + slack for t in found)
    assert len(set(labels(found))) == len(found)


@pytest.mark.parametrize(("low", "high"), [(1, 8), (0.7, 8.4), (4, 6), (9, 31)])
def test_an_axis_of_steps_with_room_for_two_labels_has_the_first_and_the_last(low, high):
    found = ticks(low, high, most=2, whole=True)
    assert len(found) >= 2
    assert all(tick == int(tick) for tick in found)


def test_a_fixed_horizontal_axis_and_lines_of_their_own_dash_and_thickness():
    svg = line_chart([Series("a", [0.5, 1.5], [0, 1], dash="5 3", thickness=3.5)], x_range=(0.0, 2.0), y_range=(0, 1))
    (points,) = paths(svg)
    xs = {t.text: float(t.get("x")) for t in parse(svg).iter(f"{NS}text") if t.get("text-anchor") == "middle"}
    assert points[0][0] == pytest.approx((xs["0.0"] * 3 + xs["2.0"]) / 4, abs=0.11)
    (line,) = [p for p in parse(svg).iter(f"{NS}path") if "h20" not in p.get("d")]
    assert line.get("stroke-dasharray") == "5 3"
    assert line.get("style") == "stroke-width:3.5"


def test_charts_side_by_side_share_title_legend_and_small_print():
    chart = line_chart([Series("", [0, 1], [0, 1])], width=300, height=200, standalone=False)
    legend = [Series("one <b>", [], []), Series("two", [], [], dash="6 4")]
    root = parse(side_by_side([chart, chart], width=300, height=200, title="T&T", legend=legend, note="small"))
    assert (root.get("width"), root.get("viewBox").split()[2]) == ("600", "600")
    assert len(root.findall(f"{NS}g/{NS}svg")) == 2
    assert len(list(root.iter(f"{NS}style"))) == 1
    words = [t.text for t in root.findall(f"{NS}text")]
    assert words == ["T&T", "one <b>", "two", "small"]
    heights = [float(t.get("y")) for t in root.findall(f"{NS}text")]
    assert heights[-1] > heights[1] > 230
    assert float(root.get("height")) > heights[-1]
