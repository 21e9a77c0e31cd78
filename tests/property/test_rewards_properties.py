"""Rewards hold for whatever a model writes: they never raise, take linear time, and are exact."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_help import answers
from trew.config import RewardConfig
from trew.rewards import RewardSet, builtin, grade, numbers
from trew.rewards.builtin import expression, layout
from trew.rewards.builtin.expression import evaluate, tokenize
from trew.types import Prompt

FRAGMENTS = [
    "####", "<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "(", ")", "[", "]", "$", "%", "-",
    "\u2212", "+",
    "*", "**", "/", "=", ",", ".", "..", "_", "^", "e", "E", "x", " ", "\n", "\t", "\r", "\x00", "\ud800", "\udfff",
    "\u202e", "0", "7",
    "72", "1,200", "1/2", "\uff17", "\u0667", "²", "½", "①", "√", "or", "and", "to", "million", "k", "\\frac", "\\,",
    "{,}", "\u00a0",
    "\u202f", "答案", "\U0001d7d5", "9" * 50,
]  # fmt: skip
junk = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=30).map("".join)
wrapped = st.one_of(junk, junk.map(lambda t: f"<answer>{t}</answer>"), junk.map(lambda t: f"a 3 b\n#### {t}"))
CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gsm8k", "72", {}),
    ("gsm8k", "72", {"mode": "flexible"}),
    ("gsm8k", "72", {"mode": "flexible", "thinking": True}),
    ("arithmetic", 72, {}),
    ("countdown", None, {"numbers": [7, 2, 72], "target": 72}),
    ("countdown", 72, {"numbers": [7, 2, 72], "require_all": False}),
    ("format", None, {}),
    ("format", None, {"prefilled": "<think>"}),
    ("soft_overlong", None, {"length": 7, "max_completion_len": 10, "soft_punish_cache": 5}),
]


@given(wrapped)
def test_any_text_is_judged(text: str) -> None:
    for kind, gold, args in CALLS:
        first, second = grade(kind, text, gold, **args), grade(kind, text, gold, **args)
        assert first.status in ("scored", "no_answer")
        assert first.score == (-0.4 if kind == "soft_overlong" else first.score)
        assert first.score in (0.0, 1.0, -0.4)
        assert (first.score, first.status, first.extracted) == (second.score, second.status, second.extracted)
        if first.extracted is not None:
            assert len(first.extracted.encode("utf-8")) <= 4 * 200


@given(st.one_of(junk, st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.integers()), st.binary()))
def test_any_gold_is_judged_or_bad(gold: Any) -> None:
    for kind in ("gsm8k", "arithmetic", "countdown"):
        verdict = grade(kind, "#### 72 <answer>72</answer>", gold)
        assert (verdict.score is None) == (verdict.status == "bad_gold")
    assert isinstance(
        RewardSet.from_config([RewardConfig(name="gsm8k")]).check_golds([Prompt("q", text="", columns={"gold": gold})]),
        list,
    )


# ------------------------------------------------------------------------------------------------------ exactness

small = st.integers(-10_000, 10_000)
decimals = st.decimals(min_value=-(10**12), max_value=10**12, places=4, allow_nan=False, allow_infinity=False)
STYLES: list[Callable[[str], str]] = [
    lambda s: s,
    lambda s: s.replace("-", "\u2212"),
    lambda s: f"${s}",
    lambda s: f"**{s}**",
    lambda s: f"\\boxed{{{s}}}",
    lambda s: f"{s} apples.",
    lambda s: f"{s}%",
    lambda s: f"x = {s}",
    lambda s: s.translate({ord(d): chr(0xFF10 + int(d)) for d in "0123456789"}),
    lambda s: s + "00",
]


@given(decimals, st.sampled_from(STYLES), st.booleans())
def test_a_number_in_any_spelling_is_itself_and_no_other(
    number: Any, style: Callable[[str], str], grouped: bool
) -> None:
    text = style(f"{number:,f}" if grouped else f"{number:f}")
    assert grade("gsm8k", f"so 3 + 4 = 7.\n#### {text}", str(number)).score == 1.0
    assert grade("gsm8k", f"so 3 + 4 = 7.\nIt is {text}", number, mode="flexible").score == 1.0
    assert grade("gsm8k", f"#### {text}", number + 1).score == 0.0
    nearby = Fraction(number) + Fraction(1, 10**30)
    assert grade("gsm8k", f"#### {text}", nearby).score == 0.0


@given(small, small, st.sampled_from(["-", "\u2212", "- ", "\u2212 ", "-\u00a0"]))
def test_a_result_has_its_sign_however_the_minus_stands(a: int, b: int, minus: str) -> None:
    result = str(a - b).replace("-", minus)
    for text in (f"({a}) - ({b}) = {result}", f"{a} less {b} is {result}", f"so ${result}$", f"{a} and {b}: {result}."):
        assert grade("arithmetic", text, a - b).score == 1
        assert grade("arithmetic", text, b - a).score == (a == b)


@given(
    st.integers(-999, 999),
    st.integers(-999, 999),
    st.sampled_from(["or", "and", "to", ",", ";", "-", "*", "+", "×", ", or"]),
)
def test_two_numbers_are_neither(a: int, b: int, between: str) -> None:
    for text in (f"{a} {between} {b}", f"{a} apples or {b} apples"):
        for gold in (a, b):
            assert grade("gsm8k", f"#### {text}", gold).score == 0.0
            assert grade("arithmetic", text, gold).score == 0.0


@st.composite
def sums(draw: st.DrawFn, depth: int = 4) -> tuple[str, Fraction | None]:
    """An expression as text and its value (None: divides by zero), bracketed throughout."""
    if depth == 0 or draw(st.booleans()):
        n = draw(st.integers(0, 99))
        return str(n), Fraction(n)
    (left, a), (right, b) = draw(sums(depth - 1)), draw(sums(depth - 1))
    op = draw(st.sampled_from("+-*/"))
    text = f"({left}{draw(st.sampled_from(['', ' ']))}{op}{right})"
    if a is None or b is None or (op == "/" and b == 0):
        return text, None
    return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[op]


@given(sums())
def test_expressions_have_their_exact_value(case: tuple[str, Fraction | None]) -> None:
    text, value = case
    if value is None:
        with pytest.raises(expression.ExpressionError, match="divides by zero"):
            evaluate(tokenize(text))
    else:
        assert evaluate(tokenize(text)) == value
        given_numbers = expression.operands(tokenize(text))
        right = grade("countdown", f"<answer>{text}</answer>", numbers=given_numbers, target=str(value))
        assert right.score == 1.0
        assert grade("countdown", f"<answer>{text}</answer>", numbers=given_numbers, target=value + 1).score == 0.0
        assert grade("countdown", f"<answer>{text}</answer>", numbers=[*given_numbers, 5], target=value).score == 0.0


@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.data())
def test_precedence_is_that_of_arithmetic(operands: list[int], data: st.DataObject) -> None:
    """Without brackets: products and quotients first, then left to right (computed here by two plain passes)."""
    operators = [data.draw(st.sampled_from("+-*/")) for _ in operands[1:]]
    terms = [Fraction(operands[0])]
    for op, n in zip(operators, operands[1:], strict=True):
        if op == "/" and n == 0:
            return
        if op in "*/":
            terms[-1] = terms[-1] * n if op == "*" else terms[-1] / n
        else:
            terms.append(Fraction(n if op == "+" else -n))
    text = str(operands[0]) + "".join(f" {op} {n}" for op, n in zip(operators, operands[1:], strict=True))
    assert evaluate(tokenize(text)) == sum(terms)


# ----------------------------------------------------------------------------------------------------- linear time


def steps(call: Callable[[], object]) -> int:
    """Lines of trew.rewards that run during ``call``: a count of work that does not depend on the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if "rewards" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


ADVERSARIES = [
    "(", "1+", "1,", "1.", "7 or ", "-", "- ", "<answer>", "</answer>", "<think>", "</think>", "#### 7\n", "#### ",
    "{", "}{", "1e", "1 ", "=1", " ", "$-", "^{7", "7\n", "1,000", "9", "\uff17 ", "<answer>1", "<think></think>",
]  # fmt: skip


@pytest.mark.parametrize("unit", ADVERSARIES)
def test_work_grows_linearly(unit: str) -> None:
    for kind, gold, args in CALLS:
        for frame in ("{}", "<answer>{}</answer>", "#### {}", "<think>{}</think><answer>{}</answer>"):
            small, large = (frame.replace("{}", unit * n) for n in (200, 800))
            few = steps(partial(grade, kind, small, gold, **args))
            many = steps(partial(grade, kind, large, gold, **args))
            assert few > 0
            assert many <= 4.2 * few + 50, (kind, frame, few, many)


@pytest.mark.parametrize("unit", ["(", "[" * 3, "1,", "<answer>", "9", "- ", "\ud800"])
def test_megabytes_are_ordinary(unit: str) -> None:
    text = unit * (2_000_000 // len(unit))
    for kind, gold, args in CALLS:
        assert grade(kind, "<answer>" + text + "</answer>", gold, **args).score in (0.0, -0.4)


def test_patterns_have_no_nested_repetition() -> None:
    """What a count of lines cannot see: a repetition inside a repetition may take time beyond linear in one match.

    Allowed inside one is a part of fixed length, whose repetitions cannot be divided in two ways.
    """
    patterns = [
        v for m in (numbers, expression, layout, builtin) for v in vars(m).values() if isinstance(v, re.Pattern)
    ]
    assert len(patterns) >= 7
    parser = re._parser  # type: ignore[attr-defined]

    def check(tree: Any, repeated: bool, pattern: str) -> None:
        for op, value in tree:
            name = str(op)
            if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                low, high, inner = value
                assert not repeated or low == high, pattern
                check(inner, repeated or high > 64, pattern)
            elif name == "SUBPATTERN":
                check(value[-1], repeated, pattern)
            elif name == "BRANCH":
                for branch in value[1]:
                    check(branch, repeated, pattern)
            elif name in ("ASSERT", "ASSERT_NOT"):
                check(value[1], repeated, pattern)

    for pattern in patterns:
        check(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE), False, pattern.pattern)


# ----------------------------------------------------------------------------------------------------- combination


TEXTS = ["#### 72", "#### 7", "72", "<think>a</think><answer>#### 72</answer>", ""]


@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6),
    st.permutations(range(6)),
    st.floats(-2, 2),
    st.sampled_from(["72", None, "bad"]),
)
def test_scores_do_not_depend_on_the_order(texts: list[str], order: list[int], weight: float, gold: str | None) -> None:
    rewards = RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name="format", weight=weight)])
    prompt = Prompt("q", text="?", columns={"answer": gold})
    order = [i for i in order if i < len(texts)]

    def score(texts: list[str]) -> list[tuple[float | None, str]]:
        [scored] = rewards.score([answers(prompt, *texts, tokens=0)])
        return [(s.value, s.status) for s in scored.scores]

    straight = score(texts)
    assert score([texts[i] for i in order]) == [straight[i] for i in order]
    if gold == "bad":
        assert all(pair == (None, "bad_gold") for pair in straight)
    elif gold is None and weight == 0:  # nothing that counts applies
        assert all(pair == (None, "not_applicable") for pair in straight)
    else:
        assert all(value is not None for value, _ in straight)
