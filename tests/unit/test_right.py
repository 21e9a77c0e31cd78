"""Which completions count as right: by the reward that judges answers, and behind no closed gate."""

from __future__ import annotations

import dataclasses

import pytest

from rollouts_help import rollout
from trew.config import Config, EvalConfig, RewardConfig
from trew.integrations.verl.export import _judge
from trew.rewards import RewardSet
from trew.rewards.builtin.kinds import KINDS
from trew.rewards.combine import Reward, combined
from trew.rewards.names import SHAPES, judge_rank
from trew.rewards.verdict import Verdict
from trew.runs.compare.members import _judges
from trew.training.batch import was_cut_off
from trew.training.right import correct_of, note, right_of
from trew.types import Group, Prompt, Score

LAYOUT = RewardConfig(name="format", gate=True, weight=0.0)
ANSWER = RewardConfig(name="gsm8k")


def config(*rewards: RewardConfig, correct_reward: str = "") -> Config:
    return Config(model="m", rewards=rewards, eval=EvalConfig(correct_reward=correct_reward))


@pytest.mark.parametrize(
    ("rewards", "judge"),
    [
        ([LAYOUT, ANSWER], "gsm8k"),  # the recipe of docs/rewards.md
        ([ANSWER, LAYOUT], "gsm8k"),
        ([dataclasses.replace(LAYOUT, weight=0.25), ANSWER], "gsm8k"),  # a layout is none, whatever its weight
        ([RewardConfig(name="soft_overlong", args={"max_completion_len": 9, "soft_punish_cache": 4}), ANSWER], "gsm8k"),
        ([dataclasses.replace(ANSWER, gate=True), RewardConfig(name="math")], "gsm8k"),  # a gate that counts
        ([dataclasses.replace(ANSWER, gate=True, weight=0.0), RewardConfig(name="math")], "math"),
        ([dataclasses.replace(ANSWER, gate=True, weight=0.0), RewardConfig(name="repetition")], "gsm8k"),
        ([dataclasses.replace(ANSWER, weight=0.0), RewardConfig(name="math")], "gsm8k"),  # logged, and first
        ([LAYOUT, RewardConfig(name="repetition")], "repetition"),
    ],
)
def test_the_reward_that_judges_answers_says_what_is_correct_wherever_that_is_asked(rewards, judge):
    loaded = RewardSet.from_config(rewards)
    assert loaded.judges[0].name == judge
    table = [{k: v for k, v in dataclasses.asdict(reward).items() if k != "sets"} for reward in rewards]
    assert _judges({"rewards": table}, "")["name"] == judge
    if not {"repetition", "soft_overlong"} & {*loaded.names}:  # which are not exported
        assert _judge(config(*rewards)) == judge
    found = correct_of(config(*rewards), loaded)
    assert found(Score(1.0, parts={name: float(name == judge) for name in loaded.names})) is True
    assert found(Score(1.0, parts={name: float(name != judge) for name in loaded.names})) is False
    assert (
        note(config(*rewards), loaded) == [] if loaded.names[0] == judge else judge in note(config(*rewards), loaded)[0]
    )


def test_the_reward_that_the_recipe_names_says_it_in_any_case():
    loaded = RewardSet.from_config([LAYOUT, ANSWER])
    found = correct_of(config(LAYOUT, ANSWER, correct_reward="format"), loaded)
    assert found(Score(0.0, parts={"format": 1.0, "gsm8k": 0.0})) is True
    assert note(config(LAYOUT, ANSWER, correct_reward="format"), loaded) == []


def test_what_says_nothing_about_answers_is_known():
    assert {kind for kind, spec in KINDS.items() if kind in SHAPES} == SHAPES
    assert judge_rank(name="format", model=True, gate=False, weight=1.0) > judge_rank(
        name="format", model=False, gate=True, weight=0.0
    )


def test_behind_a_closed_gate_nothing_is_right_to_learn():
    loaded = RewardSet.from_config([ANSWER, LAYOUT])
    correct = correct_of(config(ANSWER, LAYOUT), loaded)
    right = right_of(correct, loaded)
    for layout, answer, learned in ((1.0, 1.0, True), (0.0, 1.0, False), (1.0, 0.0, False), (None, 1.0, True)):
        score = Score(0.0, parts={"gsm8k": answer, "format": layout})
        assert correct(score) is (answer == 1.0)  # accuracy goes by the answer alone
        assert right(score) is learned
    assert right(Score(None, parts={"gsm8k": None, "format": 1.0})) is None


def test_cosine_asks_the_reward_that_judges_answers():
    cosine = RewardConfig(name="cosine", args={"max_len": 100})
    prompt = Prompt("a", text="1 + 1?", columns={"answer": "2"})
    texts = ["<think>x</think><answer>2</answer>", "<think>x</think><answer>3</answer>"]
    wanted = Group(prompt, tuple(rollout(list(text.encode()), text=text) for text in texts))
    (scored,) = RewardSet.from_config([LAYOUT, dataclasses.replace(ANSWER, args={"mode": "flexible"}), cosine]).score(
        [wanted]
    )
    right, wrong = (score.parts["cosine"] for score in scored.scores)
    assert [score.parts["gsm8k"] for score in scored.scores] == [1.0, 0.0]
    assert [score.parts["format"] for score in scored.scores] == [1.0, 1.0]
    assert right > 0 > wrong


@pytest.mark.parametrize(
    ("ending", "status", "cut"),
    [("turns", "truncated", False), ("wrong_end", "truncated", False), ("tokens", "truncated", True),
     ("length", "truncated", True), ("done", "finished", False), ("", "truncated", True), ("", "finished", False)],
)  # fmt: skip
def test_an_episode_that_used_up_its_turns_was_not_cut_off(ending, status, cut):
    made = dataclasses.replace(rollout([1, 2]), status=status, ending=ending)
    assert was_cut_off(made) is cut


def test_a_missing_number_of_a_whole_completion_is_the_mean_among_steps_too():
    """Left out, it would count as 0, and reward or punish the completion relative to its group."""
    steps, style = Reward("steps", "f", 1.0), Reward("style", "g", 0.5)
    of_steps = [Verdict(1.0, steps=((2, 0.4), (4, 0.6))) for _ in range(4)]
    of_style = [Verdict(1.0), Verdict(1.0), Verdict(1.0), Verdict(None, "not_applicable")]
    scores = combined([steps, style], [of_steps, of_style], lengths=[4] * 4)
    assert len({score.steps for score in scores}) == 1
    assert all(sum(value for _, value in score.steps) == pytest.approx(score.value) for score in scores)


def test_missing_scores_of_steps_have_no_stand_in():
    steps = Reward("steps", "f", 1.0)
    of_steps = [Verdict(1.0, steps=((2, 0.4), (4, 0.6))), Verdict(None, "not_applicable")]
    other = Reward("other", "g", 1.0)
    of_other = [Verdict(0.5, steps=((4, 0.5),)), Verdict(0.5, steps=((4, 0.5),))]
    first, second = combined([steps, other], [of_steps, of_other], lengths=[4, 4])
    assert first.steps == ((2, 0.4), (4, 1.1))
    assert second.steps == ((4, 0.5),)


def test_steps_that_are_only_logged_make_no_completion_one_of_steps():
    """Behind a closed gate a completion gets its value as one step only where the others learn from steps."""
    gate, logged, answer = Reward("g", "g", 0.0, gate=True), Reward("s", "s", 0.0), Reward("a", "a", 1.0)
    of_steps = [Verdict(1.0, steps=((2, 0.4), (4, 0.6)))] * 2
    of_gate, of_answer = [Verdict(1.0), Verdict(0.0)], [Verdict(1.0), Verdict(1.0)]
    found = combined([gate, logged, answer], [of_gate, of_steps, of_answer], lengths=[4, 4])
    assert [score.steps for score in found] == [(), ()]
    counted = Reward("s", "s", 1.0)
    found = combined([gate, counted, answer], [of_gate, of_steps, of_answer], lengths=[4, 4])
    assert [score.steps for score in found] == [((2, 0.4), (4, 1.6)), ((4, 0.0),)]
