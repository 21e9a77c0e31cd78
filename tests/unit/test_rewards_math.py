"""The reward ``math``: its three steps one by one, golds, and what happens without math-verify."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import tiers
from trew.errors import ConfigError
from trew.rewards import KINDS, grade
from trew.rewards.builtin import kinds
from trew.rewards.maths import algebra, compare, extract
from trew.rewards.maths import grade as maths
from trew.rewards.maths.answers import read
from trew.rewards.maths.normalise import normalise
from trew.rewards.maths.primes import factored
from trew.rewards.maths.shapes import AnswerList, Scalar, Unknown, Words

DATA = Path(__file__).parents[3] / "shared" / "data"


# ------------------------------------------------------------------------------------------------------- extract


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{1}+1}", r"\boxed{1}+1"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"}}} \boxed{1} {{{", "1"),
        (r"{ \boxed{1}", "1"),
        (r"\boxed{1\\}", r"1\\"),
        (r"\fbox{1}", "1"),
        (r"\boxed 1", "1"),
        (r"\boxed 72.$", "72."),
        (r"\boxed{1} in \boxed form", "1"),
        (r"\boxed x", "x"),
        (r"\boxed\frac12", None),
        (r"\boxed{1", None),
        ("", None),
    ],
)
def test_the_last_complete_box(text: str, box: str | None) -> None:
    assert extract.last_box(text) == box


def test_only_the_end_of_a_very_long_completion_is_searched() -> None:
    assert extract.answer(r"\boxed{7}" + "x" * extract.MAX_READ)[0] is None
    assert extract.answer("x" * extract.MAX_READ + r"\boxed{7}")[0] == "7"


# ----------------------------------------------------------------------------------------------------- normalise


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"$\left(1,\,2\right)$", "(1, 2 )"),
        (r"10,\!080", "10080"),
        (r"\$5", r"\$5"),
        ("$5", r"\$5"),
        ("$5$", "5"),
        (r"5\%", r"5\%"),
        (r"90^{\circ}", r"90\degree"),
        (r"\sin 30^\circ", r"\sin 30\degree"),
        (r"5 \mbox{ cm}^2", r"5 \text{ cm}^2"),
        ("5 km/h", "5 km/h"),
        ("5 €", r"5 \euro"),
        (r"5 \text{ or } 6", r"5 \text{ or } 6"),
        (r"3+4\mathrm{i}", "3+4 i"),
        (r"\text{Alice and Bob}", r"\text{Alice and Bob}"),
        (r"5 {\rm million}", r"5 \text{ million}"),
        (r"\text{not } 5", r"\text{not } 5"),
        ("−5", "-5"),
        ("2²", "2^{2}"),
        ("1½", r"1\frac{1}{2}"),
        ("٣", "3"),
        (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{matrix}1\\2\end{matrix}"),
        ("5.", "5"),
        ("**5**", "5"),
    ],
)
def test_one_spelling(text: str, plain: str) -> None:
    assert normalise(text) == plain
    assert normalise(plain) == plain


# ---------------------------------------------------------------------------------------------- read and compare


def value(text: str) -> Fraction | None:
    shape = read(normalise(text)).shape
    return algebra.rational(shape.value) if isinstance(shape, Scalar) else None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 * 4", 14),
        ("2^3^2", 512),
        ("-2^2", -4),
        ("(-2)^2", 4),
        ("2^{-1}", Fraction(1, 2)),
        ("1/2/2", Fraction(1, 4)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        ("1 4/5", Fraction(9, 5)),
        (r"2\frac{3}{2}", 3),
        (r"0.\overline{12}", Fraction(4, 33)),
        ("1.5e-3", Fraction(3, 2000)),
        ("5!", 120),
        (r"\binom{5}{2}", 10),
        (r"\binom52 + \binom{10}3", 130),
        (r"\sqrt{2}\sqrt{8}", 4),
        (r"\sqrt[3]{-27}", -3),
        (r"(1+\sqrt2)(1-\sqrt2)", -1),
        (r"\frac{1}{\sqrt{2}-1}-\sqrt2", 1),
        ("i^{10}", -1),
        (r"\sin 30^\circ", Fraction(1, 2)),
        (r"\tan\frac{5\pi}{4}", 1),
        (r"\log_2 8", 3),
        (r"\ln e^5", 5),
        (r"e^{i\pi}", -1),
        (r"\frac{2006!}{2005!}", 2006),
        ("7 8", None),
        ("--7", None),
        ("7.7.7", None),
        ("1/0", None),
        ("9^{9^9}", None),
        ("0^0", None),
    ],
)
def test_numbers_are_computed_exactly(text: str, number: Fraction | int | None) -> None:
    assert value(text) == number


def test_very_close_numbers_differ() -> None:
    for a, b in [
        ("2^{-98}", "2^{-99}"),
        ("1/2006!", "1/2004!"),
        ("10^{-40}", "0"),
        (r"\sqrt2", "1." + "4142135623730951"),
    ]:
        assert compare.same(read(normalise(a)), read(normalise(b))) is False


def test_roots_of_large_numbers_are_exact_or_undecided_never_guessed() -> None:
    p, q = 2**61 - 1, 2**31 - 1
    assert factored(p * q) is None
    assert compare.same(read(rf"\sqrt{{{p * p}}}"), read(str(p))) is True
    assert compare.same(read(rf"\sqrt{{{p * q}}}"), read("7")) is None


def test_what_is_too_large_is_no_answer_and_costs_nothing() -> None:
    for text in (
        "9^{9^{9^9}}",
        "100000000!",
        "(x+y+z+w)^{64}",
        "(" * 50 + "7" + ")" * 50,
        r"\frac{1}{" * 90 + "2" + "}" * 90,
    ):
        shape = read(text).shape
        assert isinstance(shape, Unknown)
        assert shape.too_large


def test_shapes() -> None:
    assert isinstance(read(r"\text{East}").shape, Words)
    for text, ends in [
        ("(1,2]", "(]"),
        ("]1,2[", "()"),
        (r"\{1,2\}", "{}"),
        ("1, 2", ","),
        (r"1 \pm 2", "±"),
        ("3:4", ":"),
    ]:
        shape = read(text).shape
        assert isinstance(shape, AnswerList)
        assert (shape.ends, len(shape.items)) == (ends, 2)


def test_equality_is_symmetric_on_the_corpus() -> None:
    lines = (Path(__file__).parents[1] / "corpus" / "rewards.jsonl").read_text("utf-8").splitlines()
    cases = [c for c in map(json.loads, lines) if c["kind"] == "math" and isinstance(c["completion"], str)]
    tried = 0
    for case in cases:
        box = extract.last_box(case["completion"])
        if box and isinstance(case["gold"], str) and case["expected"] is not None:
            answer, gold = read(normalise(box)), read(normalise(case["gold"]))
            if not isinstance(answer.shape, Unknown):
                assert compare.same(answer, gold) == compare.same(gold, answer), case
                tried += 1
    assert tried >= 240


# --------------------------------------------------------------------------------------------------------- golds


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        ("", "empty"),
        ("7 8", "side by side"),
        ("((7", "ends in the middle"),
        (r"\frac{1}{0}", "division by zero"),
        ("7=8", "not equal"),
        (None, "NoneType"),
        (True, "bool"),
        ([7], "list"),
        (float("nan"), "float"),
        (10**2000, "too long"),
        ("7" * 3000, "longer"),
        (r"x \equiv 3 \pmod 5", "cannot read"),
    ],
)
def test_bad_golds_are_found_before_training_and_never_judged(gold: Any, why: str) -> None:
    verdict = grade("math", r"\boxed{7}", gold)
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    if gold is not None:
        assert why in kinds.gold_problem("math", {"answer": gold}, {})


@pytest.mark.parametrize(
    "gold", ["(1,2)", "[1,2)", "x^2+1", r"\text{east}", r"\cot x", r"\int x dx", "x=5", 7, 0.5, r"\{1,2\}"]
)
@pytest.mark.parametrize("settings", [{}, {"thinking": True}, {"require_boxed": False}])
def test_golds_need_no_dollars(gold: Any, settings: dict[str, bool]) -> None:
    assert kinds.gold_problem("math", {"answer": gold}, settings) == ""


def test_the_gold_may_stand_in_the_box_of_a_solution() -> None:
    found = KINDS["math"].gold({"solution": r"so it is \boxed{7}"})
    assert found is not None
    assert grade("math", r"\boxed{7}", found[0]).score == 1
    assert KINDS["math"].gold({"solution": "no box"}) is None


@pytest.mark.skipif(not (DATA / "math" / "math500.jsonl").exists(), reason="the data are not there")
def test_every_gold_of_math500_and_gsm8k_scores_1_against_itself_and_its_own_solution() -> None:
    rows = [json.loads(line) for line in (DATA / "math" / "math500.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 500
    some = 1 if tiers.tier() == "nightly" else 4  # one row in so many
    for row in rows[::some]:
        assert kinds.gold_problem("math", row, {}) == ""
        assert grade("math", row["solution"], row["answer"]).score == 1
        answer = read(normalise(row["answer"]))
        assert compare.same(answer, read(normalise(r"\left. " + row["answer"] + " "))) is True
    for row in map(json.loads, (DATA / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()[::some]):
        assert kinds.gold_problem("gsm8k", row, {}) == kinds.gold_problem("math", row, {}) == ""


@pytest.mark.skipif(not (DATA / "math" / "math500.jsonl").exists(), reason="the data are not there")
def test_no_gold_of_math500_is_right_for_another_problem_unless_it_is_the_same() -> None:
    rows = [json.loads(line)["answer"] for line in (DATA / "math" / "math500.jsonl").read_text("utf-8").splitlines()]
    answers = [read(normalise(gold)) for gold in dict.fromkeys(rows)]
    assert len(answers) > 290
    equal = {(a.text, b.text) for a in answers for b in answers if a.text < b.text and compare.same(a, b)}
    assert equal == {
        ("40", "40_9"),
        ("5", "x=5"),
        ("(-2,1)", "-2,1"),
        ("-2,1", "1,-2"),
        (r"2 \sqrt{5}", r"2\sqrt{5}"),
        (r"\frac14", r"\frac{1}{4}"),
        *((number, rf"{number}\degree") for number in ("30", "36", "90", "120")),
        ("36", r"\$36"),
        ("15", r"15\text{ cm}^2"),
    }


# ------------------------------------------------------------------------------- the same verdict from everywhere

MIXED = [
    (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
    (r"\boxed{\frac{\cos x}{\sin x}}", r"\cot x", 1.0),
    (r"\boxed{\tan x}", r"\cot x", 0.0),
    (r"\boxed{1+\sqrt2}", r"\sqrt{3+2\sqrt2}", 1.0),
    (r"\boxed{0.8414709848}", r"\sin 1", 0.0),
    ("7", "7", 0.0),
    (r"\boxed{7}", "", None),
]


def scores(_: int = 0) -> list[float | None]:
    return [grade("math", text, gold).score for text, gold, _ in MIXED]


def test_the_same_verdicts_alone_together_in_threads_and_in_another_process() -> None:
    expected = [score for _, _, score in MIXED]
    assert scores() == expected
    together = KINDS["math"].grade_many
    assert together is not None
    assert [v.score for v in together([(text, gold, {}) for text, gold, _ in MIXED])] == expected
    found: list[list[float | None]] = []
    threads = [threading.Thread(target=lambda: found.append(scores())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(scores, [0]) == [expected]


def test_a_completion_that_runs_past_its_limit_scores_0_and_says_so() -> None:
    verdict = grade("math", r"\boxed{\prod_{k=1}^{10^{9}} \sin k}", "7")
    assert (verdict.score, verdict.status) == (0.0, "scored")
    assert "2 s of CPU time" in verdict.detail


def test_a_worker_that_fails_twice_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("import os\ndef prepare(): pass\ndef run(payload): os.abort()\n")
    broken = maths.TaskPool(task, size=1)
    monkeypatch.setattr(maths, "POOL", broken)
    verdict = grade("math", r"\boxed{\frac{\cos x}{\sin x}}", r"\cot x")
    broken.close()
    assert (verdict.score, verdict.status) == (None, "timeout")


# ------------------------------------------------------------------------------------------- without math-verify


@pytest.fixture
def _no_math_verify(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(maths.importlib.util, "find_spec", lambda name: None)
    maths.math_verify_is_there.cache_clear()
    yield
    maths.math_verify_is_there.cache_clear()


@pytest.mark.usefixtures("_no_math_verify")
def test_without_math_verify_exact_algebra_goes_on_and_the_rest_is_refused() -> None:
    assert grade("math", r"\boxed{\frac{2}{4}}", "0.5").score == 1
    assert grade("math", r"\boxed{\sqrt{8}}", r"2\sqrt2").score == 1
    assert kinds.gold_problem("math", {"answer": r"\frac{1}{2}"}, {}) == ""
    with pytest.raises(ConfigError, match=r"install .*'math-verify>="):
        kinds.gold_problem("math", {"answer": r"\cot x"}, {})
    verdict = grade("math", r"\boxed{\frac{\cos x}{\sin x}}", r"\cot x")
    assert (verdict.score, verdict.status) == (None, "sandbox_error")
    assert "'math-verify>=" in verdict.detail


@pytest.mark.parametrize(("answer", "gold", "score"), [
    ("0:0", "3:4", 0), ("0:0:0", "1:2:3", 0), ("3:4", "0:0", 0), ("0:1:2", "0:5:7", 0),
    ("0:5:10", "0:1:2", 1), ("6:8", "3:4", 1), ("0:4", "0:1", 1),
])  # fmt: skip
def test_zeros_equal_no_other_ratio(answer, gold, score):
    """Multiplied out, 0 : 0 would equal every ratio: a reward that costs nothing."""
    assert grade("math", rf"\boxed{{{answer}}}", gold).score == score
