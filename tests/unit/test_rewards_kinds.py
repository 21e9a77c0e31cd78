"""arithmetic, format and soft_overlong; and how ``grade`` takes its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import RewardSet, Verdict, grade
from trew.rewards.builtin.layout import THINK_ANSWER, mismatch, parse_template
from trew.rewards.builtin.length import soft_overlong
from trew.rewards.thinking import after_thinking
from trew.rewards.verdict import shown
from trew.types import Group, Prompt, Rollout, Span, Turn

# ---------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("56", 56, 1.0),
        (" 56\n", "56", 1.0),
        ("7 * 8 = 56", 56, 1.0),
        ("7*8=56.", 56, 1.0),
        ("The answer is **56**.", 56, 1.0),
        ("<answer>56</answer>", 56, 1.0),
        ("56.0", 56, 1.0),
        ("1,056", 1056, 1.0),
        ("3 - 8 = -5", -5, 1.0),
        ("3 - 8 = \u22125", -5, 1.0),
        ("First 12, then:\n56", 56, 1.0),
        ("56, I think", 56, 1.0),
        ("56 is the result of 7 times 8.", 56, 0.0),  # the last number counts
        ("57", 56, 0.0),
        ("-56", 56, 0.0),
        ("5 6", 56, 0.0),
        ("5.6", 56, 0.0),
        ("56.5", 56, 0.0),
        ("156", 56, 0.0),
        ("7 or 8", 7, 0.0),
        ("7 or 8", 8, 0.0),
        ("6, 7, 8", 8, 0.0),
        ("7-8", 8, 0.0),
        ("7 * 8", 8, 0.0),  # the problem repeated
        ("1 * 8", 8, 0.0),
        ("8 + 0", 0, 0.0),
        ("8/2", 4, 0.0),
        ("1/2", "0.5", 0.0),
        ("3/4 = 0.75", "0.75", 1.0),
        ("fifty-six", 56, 0.0),
        ("", 56, 0.0),
        ("\x00", 56, 0.0),
        ("<think>56", 56, 0.0),
        ("<think>55</think>56", 56, 1.0),
    ],
)
def test_arithmetic(text: str, gold: object, score: float) -> None:
    assert grade("arithmetic", text, gold).score == score


def test_arithmetic_statuses() -> None:
    assert grade("arithmetic", "nothing", 5).status == "no_answer"
    assert grade("arithmetic", "6", 5).status == "scored"
    assert grade("arithmetic", "6", None).status == "bad_gold"
    assert grade("arithmetic", "6", 6, thinking=True).detail == "the thought was not finished"


# -------------------------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a</think>\n\n\t <answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a <b> c</think><answer>1 < 2 > 0</answer>", 1.0),
        ("<think>a</think>\nso <answer>b</answer>", 0.0),
        ("Sure! <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> Done.", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think> \n </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think>", 0.0),
        ("<Think>a</Think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("< think>a</think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, score: float) -> None:
    verdict = grade("format", text)
    assert (verdict.score, verdict.status) == (score, "scored")
    assert bool(verdict.detail) == (score == 0)


def test_format_prefilled() -> None:
    text = "a</think><answer>b</answer>"
    assert grade("format", text).score == 0.0
    assert grade("format", text, prefilled="<think>").score == 1.0
    assert grade("format", "<think>" + text, prefilled="<think>\n").score == 0.0  # opened twice


def test_format_templates() -> None:
    assert grade("format", "<a>1</a>", template="<a>...</a>").score == 1.0
    assert grade("format", "so <a>1</a>", template="…<a>…</a>").score == 1.0
    assert grade("format", "<a>1</a>", template="…<a>…</a>").score == 0.0
    assert grade("format", "<a></a>", template="<a></a>").score == 1.0
    assert grade("format", "<a>1</a>", template="<a></a>").score == 0.0
    assert mismatch("<b></b><a></a>", parse_template("<a></a><b></b>")) == "text before <a>"


def test_format_says_what_is_wrong() -> None:
    template = parse_template(THINK_ANSWER)
    assert mismatch("<think>a</think>", template) == "<answer> is missing"
    assert mismatch("<think>a</think><answer>b</answer>!", template) == "text after the last tag"
    assert mismatch("<think></think><answer>b</answer>", template) == "nothing before </think>"
    assert mismatch("<think>" * 3, template) == "<think> occurs 3 times"
    assert mismatch("</think><think>a<answer>b</answer>", template) == "text before <think>"
    assert mismatch("<answer>b</answer><think>a</think>", template) == "text before <think>"


@pytest.mark.parametrize("template", ["", "words", "<a>…</a><a>", "<a>x</a>", 3, "<a b>…"])
def test_format_refuses_templates(template: object) -> None:
    with pytest.raises(ConfigError, match=r"args\.template: got"):
        grade("format", "", template=template)


# ------------------------------------------------------------------------------------------------- soft_overlong


@pytest.mark.parametrize(
    ("length", "value"),
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20480, -1.0),
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_soft_overlong(length: int, value: float) -> None:
    """DAPO, arXiv 2503.14476, eq. 13."""
    args = {"max_completion_len": 20480, "soft_punish_cache": 4096}
    assert soft_overlong(length, **args) == value
    assert grade("soft_overlong", "text", length=length, **args).score == value


def test_soft_overlong_as_documented_elsewhere() -> None:
    assert soft_overlong(90, max_completion_len=100, soft_punish_cache=20) == -0.5


def test_soft_overlong_has_no_defaults() -> None:
    with pytest.raises(ConfigError) as error:
        grade("soft_overlong", "text")
    assert len(error.value.problems) == 3
    with pytest.raises(ConfigError, match="at most max_completion_len = 10"):
        grade("soft_overlong", "text", length=1, max_completion_len=10, soft_punish_cache=11)
    with pytest.raises(ConfigError, match="at least 1"):
        grade("soft_overlong", "text", length=1, max_completion_len=10, soft_punish_cache=0)


# --------------------------------------------------------------------------------------------------------- grade


def test_unknown_kinds_and_arguments_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'gsm8' \(did you mean 'gsm8k'\?\).* gsm8k, "):
        grade("gsm8", "", "")
    with pytest.raises(ConfigError, match=r"args\.mod: .*\(did you mean 'mode'\?\).* mode, thinking"):
        grade("gsm8k", "", "", mod="strict")
    with pytest.raises(ConfigError, match=r"got 'lenient', accepts 'strict', 'flexible'"):
        grade("gsm8k", "", "", mode="lenient")
    with pytest.raises(ConfigError, match=r"got 1, accepts true or false"):
        grade("gsm8k", "", "", thinking=1)
    with pytest.raises(ConfigError) as error:
        grade("gsm8k", "", "", mode="x", thinking="yes", numbers=3)
    assert len(error.value.problems) == 3


def test_cosine_and_repetition_check_what_they_are_given() -> None:
    assert grade("cosine", "", length=50, correct=True, max_len=100).score == pytest.approx(0.75)
    assert grade("repetition", "", token_ids=np.array([1, 2, 1, 2]), ngram_size=2).score == pytest.approx(-1 / 3)
    for kind, args, match in [
        ("cosine", {"max_len": 100, "correct": True}, "args.length: is required"),
        ("cosine", {"max_len": 100, "length": 1}, "args.correct: is required"),
        ("cosine", {"length": 1, "correct": True}, "args.max_len: is required"),
        ("cosine", {"length": 1, "correct": 0.5, "max_len": 100}, "accepts true or false"),
        ("cosine", {"length": 1, "correct": True, "max_len": 0}, "at least 1"),
        ("cosine", {"length": 1, "correct": True, "max_len": 9, "min_value_correct": 2.0}, "at most max_value_correct"),
        ("cosine", {"length": 1, "correct": True, "max_len": 9, "max_value_wrong": float("nan")}, "finite"),
        ("repetition", {}, "args.token_ids: is required"),
        ("repetition", {"token_ids": [1, 2], "turn_lengths": [1]}, "args.turn_lengths: got .1., accepts how many of"),
        ("repetition", {"token_ids": [1, 2], "turn_lengths": [3, -1]}, "args.turn_lengths: got .3, -1."),
        ("repetition", {"token_ids": [1, 2], "turn_lengths": 2}, "args.turn_lengths: got 2"),
        ("repetition", {"token_ids": "abc"}, "accepts token ids"),
        ("repetition", {"token_ids": [1, -2]}, "accepts token ids"),
        ("repetition", {"token_ids": [1], "ngram_size": 0}, "at least 1"),
    ]:
        with pytest.raises(ConfigError, match=match):
            grade(kind, "", **args)


def test_a_completion_is_text() -> None:
    with pytest.raises(RewardError, match="text, got list"):
        grade("gsm8k", [{"role": "assistant", "content": "72"}], "72")  # type: ignore[arg-type]


def test_seconds_are_measured() -> None:
    assert 0 < grade("gsm8k", "#### 72", "72").seconds < 5


def test_verdicts_are_consistent() -> None:
    with pytest.raises(ValueError, match="does not go with"):
        Verdict(None, "scored")
    with pytest.raises(ValueError, match="does not go with"):
        Verdict(0.0, "timeout")


def test_small_parts() -> None:
    assert after_thinking("") == ""
    assert after_thinking("", thinking=True) is None
    assert shown("a\ud800b") == "a?b"


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_repetition_is_of_what_the_policy_says(turns):
    """An environment may say the same in every turn."""

    def turn(number: int) -> Turn:
        said, reply = np.array([] if number == 0 else [7, 8, 9, 7, 8, 9]), np.array([10 + number, 20 + number])
        return Turn(said, reply, np.zeros(2), None, None, (Span(0, 0, 2),), "", "stop")

    assert repetition(map(turn, range(turns)), ngram_size=2) == 0.0


def repetition(turns: Iterable[Turn], **args: Any) -> float | None:
    config = RewardConfig(name="repetition", args=args)
    with contextlib.closing(RewardSet.from_config([config])) as rewards:
        (scored,) = rewards.score([Group(Prompt("a", "p"), (Rollout(tuple(turns)),))], step=0)
    return scored.scores[0].value


def test_repetition_is_of_phrases_within_a_reply():
    """Two tokens that an observation separates are no phrase, but one reply may repeat what another said."""

    def turn(*ids: int) -> Turn:
        zeros = np.zeros(len(ids))
        return Turn(np.array([9]), np.array(ids), zeros, None, None, (Span(0, 0, len(ids)),) * bool(ids), "", "stop")

    alternating = [turn(1), turn(2), turn(1), turn(2)]
    assert repetition(alternating, ngram_size=2) == 0.0
    assert repetition(alternating, ngram_size=1) == -0.5
    assert repetition([turn(1, 2, 3), turn(), turn(4), turn(1, 2)], ngram_size=2) == pytest.approx(-1 / 3)
    assert repetition([turn(1, 2, 1, 2)], ngram_size=2) == pytest.approx(-1 / 3)
    assert grade("repetition", "", token_ids=[1, 2, 1, 2], turn_lengths=[2, 2], ngram_size=2).score == -0.5


@pytest.mark.parametrize("prefilled", ["<thinking>", "so <think>", "<think></think>", "<answer>", "<think><think>"])
def test_a_beginning_that_no_reply_could_complete_is_refused(prefilled: str) -> None:
    """Every reply scored 0, and a gate of it was closed for the whole run."""
    with pytest.raises(ConfigError, match="accepts the beginning of a reply with the layout of the template"):
        RewardSet.from_config([RewardConfig(name="format", args={"prefilled": prefilled})])


@pytest.mark.parametrize("prefilled", ["", " \n", "<think>", "<think>\nso", "<think>so</think>\n<answer>"])
def test_beginnings_of_the_layout_are_accepted(prefilled: str) -> None:
    assert RewardSet.from_config([RewardConfig(name="format", args={"prefilled": prefilled})]).names == ("format",)


@pytest.mark.parametrize(
    ("args", "noted"),
    [({}, True), ({"prefilled": "<think>\n"}, False), ({"template": "<answer>…</answer>"}, False)],
)
def test_a_layout_that_asks_for_a_thought_which_the_prompt_has_begun_is_noted(args: dict, noted: bool) -> None:
    notes = RewardSet.from_config([RewardConfig(name="format", args=args)]).thought_notes()
    assert [note[:58] for note in notes] == ["rewards: prompts end with <think>, and format asks for it "] * noted
