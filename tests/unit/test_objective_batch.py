"""Packing, selecting and counting, on a batch small enough to write down."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

import trew
from trew import TokenBatch
from trew.errors import DataError
from trew.objective import batch as objective_batch
from trew.objective.batch import Denominators, ReasoningSteps
from trew.objective.turns import Turns

F64 = torch.float64
MASK = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
L = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0], [-7.0, -8.0, -9.0], [-10.0, -11.0, -12.0]], dtype=F64)


def make(*, unchecked: bool = False, **changes) -> TokenBatch:
    """A batch; ``unchecked`` by the tests' own type checker, as a user's program is."""
    data = {
        "logprobs": L, "mask": MASK, "group_ids": torch.tensor([5, 5, 2, 9]),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=F64), "old_logprobs": L - 0.5, "rollout_logprobs": L - 0.25,
        "ref_logprobs": L + 0.5, "teacher_logprobs": L + 0.75, "entropies": -L, "correct": torch.tensor([1, 0, 0, 1]),
        "truncated": torch.tensor([0, 0, 1, 1]), "baselines": torch.tensor([1, 0, 1, 0]),
        "step_rewards": [[(1, 0.5), (2, 1.0)], [(1, 2.0), (3, 3.0)], [(3, 4.0)], []], "max_length": 3,
        "turns": [[(1, 0.0), (2, 1.0)], [(1, 0.5), (2, 0.0), (3, 0.25)], [(3, 4.0)], [(1, 0.0)]],
        "states": [["a", "b"], ["a", "a", "c"], ["a"], ["b"]],
    }  # fmt: skip
    from_padded = TokenBatch.from_padded.__func__
    return (inspect.unwrap(from_padded) if unchecked else from_padded)(TokenBatch, **(data | changes))


def test_packed_streams():
    batch = make(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert batch.logprobs.tolist() == [-1, -2, -5, -6, -7]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 1, 2]
    assert batch.mask.tolist() == [True] * 5
    assert batch.lengths.tolist() == [2, 2, 1, 0]
    assert batch.size == 4
    assert batch.old.tolist() == [-1.5, -2.5, -5.5, -6.5, -7.5]
    assert batch.rollout_logprobs.tolist() == [-1.25, -2.25, -5.25, -6.25, -7.25]
    assert batch.ref_logprobs.tolist() == [-0.5, -1.5, -4.5, -5.5, -6.5]
    assert (batch.teacher_logprobs - batch.logprobs).tolist() == [0.75] * 5
    assert batch.entropies.tolist() == [1, 2, 5, 6, 7]
    assert batch.advantages.tolist() == [1, 1, 2, 2, 3]
    assert batch.advantages.dtype == F64
    assert batch.correct.tolist() == [True, False, False, True]
    assert batch.truncated.tolist() == [False, False, True, True]
    assert (batch.baselines.tolist(), batch.baselines.dtype) == ([1, 0, 1, 0], torch.float32)
    assert batch.max_length == 3
    assert make(advantages=L).advantages.tolist() == [-1, -2, -5, -6, -7]
    assert make(group_ids=torch.tensor([5, 5, 2, 9], dtype=torch.int32)).group_ids.dtype == torch.int64


def test_what_is_not_given_has_a_default():
    batch = make(old_logprobs=None, correct=None, logprobs=L.clone().requires_grad_())
    assert batch.old.tolist() == [-1, -2, -5, -6, -7]
    assert not batch.old.requires_grad
    assert not batch.policy.requires_grad
    assert batch.logprobs.requires_grad
    assert batch.is_correct.tolist() == [True, False, True, True]
    assert make(rewards=torch.tensor([1, 0, -1, 0]), correct=None).is_correct.tolist() == [True, False, False, False]
    assert make(rewards=torch.tensor([1, 0, -1, 0])).is_correct.tolist() == [True, False, False, True]  # as given


def test_unpacked_again():
    batch = make()
    assert batch.unpack(batch.logprobs).tolist() == [[-1, -2, 0], [0, -5, -6], [-7, 0, 0], [0, 0, 0]]
    stream = batch.replace(padded_mask=None)
    assert stream.unpack(batch.logprobs).tolist() == [-1, -2, -5, -6, -7]


def test_several_rewards_are_summed_by_weight():
    nan = math.nan
    rewards = torch.tensor([[1.0, 2.0], [nan, 3.0], [nan, nan], [-1.0, 1.0]])
    assert make(rewards=rewards).total_rewards[[0, 1, 3]].tolist() == [3, 3, 0]
    assert make(rewards=rewards).total_rewards[2].isnan()
    assert make(rewards=rewards).total_rewards.dtype == F64
    weighted = make(rewards=rewards, reward_weights=torch.tensor([2, 10])).total_rewards
    assert weighted[[0, 1, 3]].tolist() == [22, 30, 8]
    assert make(rewards=rewards[:, 0]).total_rewards.isnan().tolist() == [False, True, True, False]


def test_what_only_a_logged_reward_has_judged_is_not_judged() -> None:
    nan = math.nan
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.5, nan], [nan, nan]])
    batch = make(rewards=rewards, reward_weights=torch.tensor([0.0, 1.0]), group_ids=torch.zeros(4, dtype=torch.int64))
    assert batch.total_rewards[:2].tolist() == [1.0, 0.0]
    assert batch.total_rewards[2:].isnan().all()  # no 0, by which it would count as wrong
    advantages = trew.preset("grpo", beta=0.0, ddof=0).loss(batch).advantages
    assert [row[row != 0].tolist() for row in advantages] == [[1, 1], [-1, -1], [], []]
    unweighted = make(rewards=rewards, reward_weights=torch.zeros(2)).total_rewards
    assert unweighted[:3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sequences", "says"),
    [([-1], "got -1"), ([0, 4], "got 4, accepts"), ([1, 0, 1], "got 1 more than once"), ([[0], [1]], "of shape"),
     ([True, False, True, True], "of a mask"), ([0.0, 1.0], "float32")],
)  # fmt: skip
def test_sequences_that_cannot_be_selected_are_refused(sequences: list, says: str) -> None:
    with pytest.raises(DataError, match=f"^sequences: .*{says}"):
        inspect.unwrap(TokenBatch.select)(make(), torch.tensor(sequences))


def test_sequences_are_selected_by_a_tensor():
    with pytest.raises(
        DataError, match=r"sequences: got a list, accepts whole numbers \(M,\) from 0 to 3, .* a tensor"
    ):
        inspect.unwrap(TokenBatch.select)(make(), [0, 1])


def test_denominators_leave_out_what_has_no_tokens():
    assert Denominators.of(make()) == Denominators(3, 5, max_length=3, groups=2, correct_tokens=2)
    batch = make()
    without = batch.replace(mask=batch.mask & (batch.sequence_ids != 2))
    assert Denominators.of(without) == Denominators(2, 4, max_length=3, groups=1, correct_tokens=2)
    assert Denominators(1, 1) == Denominators(1, 1, None, 0)


def test_steps_end_at_tokens_of_the_stream():
    steps = make().step_rewards
    assert steps.values.tolist() == [0.5, 1.0, 2.0, 3.0, 4.0]
    assert steps.values.dtype == F64
    assert steps.sequence_ids.tolist() == [0, 0, 1, 1, 2]
    assert steps.ends.tolist() == [1, 2, 0, 2, 1]  # column 1 of the second is outside the mask


@pytest.mark.parametrize(
    ("steps", "message"),
    [([[(0, 1.0)], [], [], []], "sequence 0 has a step that ends at 0, accepts 1 to 3"),
     ([[], [(4, 1.0)], [], []], "sequence 1 has a step that ends at 4, accepts 1 to 3"),
     ([[], [], [(3, 1.0), (3, math.nan)], []], "sequence 2 has the value nan, accepts finite numbers"),
     ([[], [], []], "got 3 lists, accepts 4, one per sequence")],
)  # fmt: skip
def test_steps_that_cannot_be(steps, message):
    with pytest.raises(DataError, match=f"^step_rewards: {message}"):
        make(step_rewards=steps)


def test_turns_end_at_tokens_of_the_stream():
    turns = make().turns
    assert turns.rewards.tolist() == [0.0, 1.0, 0.5, 0.0, 0.25, 4.0, 0.0]
    assert turns.rewards.dtype == F64
    assert turns.sequence_ids.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert turns.ends.tolist() == [1, 2, 0, 1, 2, 1, 0]  # the first turn of the second has no token inside the mask
    assert turns.states.tolist() == [0, 1, 0, 0, 2, 0, 1]
    assert turns.numbers.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert turns.is_last.tolist() == [False, True, False, False, True, True, True]
    assert turns.of_tokens(make().sequence_ids).tolist() == [0, 1, 3, 4, 5]
    assert make(states=None).states is None
    assert make(turns=None, states=None).states is None


@pytest.mark.parametrize(
    ("turns", "message"),
    [([[(0, 1.0)], [(3, 0.0)], [(1, 0.0)], [(1, 0.0)]], "sequence 0 has a turn that ends at 0 after one at 0, acc"),
     ([[(2, 1.0)], [(2, 0.0), (4, 1.0)], [(1, 0.0)], [(1, 0.0)]], "sequence 1 has a turn that ends at 4 after one"),
     ([[(2, 1.0)], [(3, 0.0), (3, 1.0)], [(1, 0.0)], [(1, 0.0)]], "sequence 1 has a turn that ends at 3 after one"),
     ([[(2, 1.0)], [(2, 0.0)], [(1, 0.0)], [(1, 0.0)]], "sequence 1 has loss tokens up to column 3, but its la"),
     ([[(2, 1.0)], [(3, 0.0)], [(1, math.nan)], [(1, 0.0)]], "sequence 2 has the reward nan, accepts finite numbers"),
     ([[(2, 1.0)], [(3, 0.0)], [(1, 0.0)], []], "sequence 3 has none, accepts at least one"),
     ([[(2, 1.0)]], "got 1 lists, accepts 4, one per sequence")],
)  # fmt: skip
def test_turns_that_cannot_be(turns, message):
    with pytest.raises(DataError, match=f"^turns: {message}"):
        make(turns=turns, states=None)


@pytest.mark.parametrize(
    ("states", "message"),
    [([["a", "b"], ["a"], ["a"], ["b"]], "got 1 states for sequence 1, accepts 3, one per turn"),
     ([["a", "b"]], "got 1 lists, accepts 4, one per sequence")],
)  # fmt: skip
def test_states_belong_to_turns(states, message):
    with pytest.raises(DataError, match=f"^states: {message}"):
        make(states=states)
    with pytest.raises(DataError, match=r"^states: got some, but turns is None"):
        make(turns=None)


def test_a_token_behind_the_last_turn_is_noticed():
    """In a stream that was packed by hand: it would take over the advantage of another sequence's turn."""
    turns = make().turns
    for cut in (dataclasses.replace(turns, ends=turns.ends - 1),
                Turns(turns.rewards[:5], turns.sequence_ids[:5], turns.ends[:5])):  # fmt: skip
        with pytest.raises(DataError, match=r"turns: sequence . has tokens that belong to no turn"):
            cut.of_tokens(make().sequence_ids)


def test_selected_sequences_in_another_order():
    batch = make(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0])).replace(
        denominators=Denominators(3, 5), token_weights=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=F64)
    )
    part = batch.select(torch.tensor([2, 0]))
    assert part.size == 2
    assert part.logprobs.tolist() == [-7, -1, -2]
    assert part.sequence_ids.tolist() == [0, 1, 1]
    assert part.mask.tolist() == [True] * 3
    assert part.advantages.tolist() == [3, 1, 1]
    assert part.token_weights.tolist() == [0.5, 0.1, 0.2]
    assert (part.old - part.logprobs).tolist() == [-0.5] * 3
    assert (part.rollout_logprobs - part.logprobs).tolist() == [-0.25] * 3
    assert (part.ref_logprobs - part.logprobs).tolist() == [0.5] * 3
    assert (part.teacher_logprobs - part.logprobs).tolist() == [0.75] * 3
    assert part.entropies.tolist() == [7, 1, 2]
    assert part.group_ids.tolist() == [2, 5]
    assert part.rewards.tolist() == [0.5, 1.0]
    assert part.correct.tolist() == [False, True]
    assert part.truncated.tolist() == [True, False]
    assert part.baselines.tolist() == [1, 1]
    assert part.denominators == Denominators(3, 5)
    assert part.padded_mask is None
    assert part.step_rewards.values.tolist() == [0.5, 1.0, 4.0]
    assert part.step_rewards.sequence_ids.tolist() == [1, 1, 0]
    assert part.step_rewards.ends.tolist() == [1, 2, 1]
    assert part.turns.rewards.tolist() == [4.0, 0.0, 1.0]
    assert part.turns.sequence_ids.tolist() == [0, 1, 1]
    assert part.turns.ends.tolist() == [1, 1, 2]
    assert part.states.tolist() == [0, 0, 1]


def same(one: TokenBatch, other: TokenBatch) -> None:
    """Every field of the two is equal."""
    for field in dataclasses.fields(TokenBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("step_rewards", "turns") and a is not None:
            a, b = (torch.cat([getattr(s, f.name) for f in dataclasses.fields(s)]) for s in (a, b))
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


@pytest.mark.parametrize("first", range(4))
def test_consecutive_sequences_are_views_and_what_any_selection_gives(first):
    batch = make()
    backwards = torch.arange(3, -1, -1)
    for end in range(first + 1, 5):
        chosen = torch.arange(first, end)
        part = batch.select(chosen)
        same(part, batch.select(backwards).select(3 - chosen))
        assert part.mask.untyped_storage().data_ptr() == batch.mask.untyped_storage().data_ptr()


def test_selected_tokens_cut_sequences_and_keep_what_belongs_to_them():
    batch = make(advantages=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    part = batch.select_tokens(slice(1, 3))
    ids = batch.sequence_ids[1:3]
    assert part.sequence_ids.tolist() == (ids - ids[0]).tolist()
    assert part.logprobs.tolist() == batch.logprobs[1:3].tolist()
    assert part.advantages.tolist() == batch.advantages[1:3].tolist()
    assert part.rewards.tolist() == batch.rewards[int(ids[0]) : int(ids[-1]) + 1].tolist()
    assert part.step_rewards is part.turns is part.states is None
    assert part.padded_mask is None
    whole = batch.select_tokens(slice(0, len(batch.mask)))
    same(whole, batch.select(torch.arange(int(batch.sequence_ids[-1]) + 1)).replace(step_rewards=None, turns=None))


def test_every_field_of_a_batch_is_cut_with_its_tokens_or_its_sequences_or_belongs_to_the_step():
    of_the_step = {
        "step_rewards",
        "turns",
        "reward_weights",
        "max_length",
        "denominators",
        "mean_entropy",
        "prepared_by",
        "padded_mask",
    }
    cut = {*objective_batch._PER_TOKEN, *objective_batch._PER_SEQUENCE}
    assert cut | of_the_step == {field.name for field in dataclasses.fields(TokenBatch)}


def test_selection_without_optional_fields():
    batch = TokenBatch.from_padded(logprobs=L, mask=MASK, group_ids=torch.arange(4), rewards=torch.zeros(4))
    part = batch.select(torch.tensor([1, 3]))
    assert (part.logprobs.tolist(), part.sequence_ids.tolist(), part.size) == ([-5, -6], [0, 0], 2)
    assert part.step_rewards is part.old_logprobs is part.correct is None
    assert batch.select(torch.tensor([3])).logprobs.tolist() == []


def test_tokens_of_a_selected_sequence_keep_their_order():
    long = TokenBatch.from_padded(
        logprobs=torch.arange(200.0)[None].expand(3, 200) * -1, mask=torch.ones(3, 200), group_ids=torch.arange(3),
        rewards=torch.zeros(3),
    )  # fmt: skip
    assert (-long.select(torch.tensor([2, 1])).logprobs).tolist() == [*range(200), *range(200)]


def test_one_source_of_advantages_is_enough():
    for given in ({"rewards": None}, {"step_rewards": None},
                  {"rewards": None, "step_rewards": None, "advantages": torch.zeros(4)}):  # fmt: skip
        make(**given)
    with pytest.raises(DataError, match=r"^rewards: got None; give rewards"):
        make(rewards=None, step_rewards=None, teacher_logprobs=None)
    assert make(rewards=None, step_rewards=None).rewards is None
    weighted = make(rewards=torch.zeros(4, 2), reward_weights=torch.ones(2))
    assert weighted.reward_weights.tolist() == [1, 1]
    with pytest.raises(DataError, match=r"^reward_weights: got shape \(3,\), accepts \(2,\)"):
        make(rewards=torch.zeros(4, 2), reward_weights=torch.ones(3))


def test_empty_steps():
    none = ReasoningSteps.of([[], []], mask=torch.ones(2, 3, dtype=torch.bool))
    assert (len(none.values), len(none.ends), len(none.sequence_ids)) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float16])
def test_ones_and_zeros_of_any_type_are_a_mask(dtype):
    batch = make(mask=MASK.to(dtype), correct=torch.tensor([1, 0, 0, 1], dtype=dtype))
    assert torch.equal(batch.padded_mask, MASK)
    assert batch.correct.tolist() == [True, False, False, True]


LOG_PROBS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
REFUSED = [
    *((name, torch.zeros(4, 2), r"shape \(4, 2\), accepts \(4, 3\)")
      for name in ("mask", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "entropies")),
    *((name, torch.zeros(3), r"shape \(3,\), accepts \(4,\)")
      for name in ("group_ids", "correct", "truncated", "baselines")),
    ("logprobs", L[0], r"torch.float64 of shape \(3,\), accepts a floating-point tensor \(B, T\)"),
    ("logprobs", L.long(), r"torch.int64 of shape \(4, 3\), accepts a floating-point"),
    ("logprobs", L.tolist(), "a list, accepts a floating-point"),
    ("mask", None, r"None, accepts a tensor \(4, 3\)"),
    ("mask", MASK.tolist(), r"a list, accepts a tensor \(4, 3\)"),
    ("mask", MASK.double() * 0.5, "0.5, accepts True and False, or 1 and 0"),
    ("mask", MASK.int() * 2, "2, accepts True and False"),
    ("mask", torch.where(MASK, 0.0, -math.inf), "-inf, accepts True and False"),
    ("mask", MASK.to("meta"), "a tensor on meta, accepts cpu, where logprobs are"),
    ("group_ids", None, r"None, accepts a tensor \(4,\)"),
    ("group_ids", torch.tensor([0.0, 0.0, 1.0, 1.0]), r"torch.float32, accepts whole numbers: pass group_ids.long\(\)"),
    ("rewards", [1.0, 0.0, 0.5, 2.0], r"a list, accepts a tensor \(4,\) or \(4, K\)"),
    ("rewards", torch.zeros(3), r"shape \(3,\), accepts \(4,\) or \(4, K\)"),
    ("rewards", torch.zeros(3, 4), r"shape \(3, 4\), accepts \(4,\) or \(4, K\)"),
    ("rewards", torch.zeros(4, 0), r"shape \(4, 0\), accepts \(4,\) or \(4, K\)"),
    ("rewards", torch.zeros(4, 1, 1), r"shape \(4, 1, 1\), accepts \(4,\) or \(4, K\)"),
    ("reward_weights", torch.ones(1), r"weights, but rewards \(B,\) are one reward; accepts None here"),
    ("advantages", torch.zeros(3), r"shape \(3,\), accepts \(4,\) or \(4, 3\)"),
    ("advantages", torch.zeros(4, 1), r"shape \(4, 1\), accepts \(4,\) or \(4, 3\)"),
    ("correct", torch.tensor([0.3, 0.0, 1.0, 1.0]), "0.3.*, accepts True and False"),
    ("truncated", MASK, r"shape \(4, 3\), accepts \(4,\)"),
    ("max_length", 0, "0, accepts a whole number of at least 1"),
    ("max_length", 2.5, "2.5, accepts a whole number"),
    ("denominators", 5, "a int, accepts trew.objective.Denominators"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_meant_is_refused(name, value, message):
    with pytest.raises(DataError, match=f"^{name}: got {message}"):
        make(unchecked=True, **{name: value})


@pytest.mark.parametrize("name", [*LOG_PROBS, "entropies"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_streams_are_finite_inside_the_mask(name, value):
    outside, inside = (-L.clone(), -L.clone()) if name == "entropies" else (L.clone(), L.clone())
    outside[~MASK] = value
    inside[1, 2] = value
    assert getattr(make(**{name: outside}), name).isfinite().all()
    with pytest.raises(DataError, match=f"^{name}: got {value} in 1 of 5 places inside the mask, accepts finite"):
        make(**{name: inside})


@pytest.mark.parametrize("name", LOG_PROBS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_negative_log_likelihoods_are_refused(name, dtype):
    """With them the loss changed its sign, and every monitor looked well."""
    wanted = rf"^{name}: got 7 and 5 of 5 above 0 inside the mask, accepts log-probabilities, 0 at most; these look"
    with pytest.raises(DataError, match=rf"{wanted} like negative log-likelihoods: pass -{name}$"):
        make(**{name: -L.to(dtype)})
    outside = L.clone()
    outside[~MASK] = 5.0
    make(**{name: outside})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_negative_log_likelihoods_of_a_part_of_a_prepared_step_are_refused(dtype):
    """They come by ``replace``, which checks nothing."""
    objective = trew.preset("grpo", beta=0.0)
    step = objective.prepare(make())
    wanted = r"^logprobs: got a mean of 4\.2, accepts log-probabilities, 0 at most; these look like negative"
    with pytest.raises(DataError, match=wanted):
        objective.loss(step.replace(logprobs=-step.logprobs.to(dtype)))
    # What rounding raises above 0, and what counters of bad steps are for.
    objective.loss(step.replace(logprobs=torch.full_like(step.logprobs, 9e-4)))
    assert objective.loss(step.replace(logprobs=step.logprobs * math.nan)).loss.isnan()


def test_tensors_of_inference_mode_take_part_in_a_loss():
    """A sampler may have made all of them but the policy's log-probs there."""
    names = ("mask", "group_ids", "rewards", "old_logprobs", "correct", "truncated", "baselines", "entropies")
    with torch.inference_mode():
        made = {name: getattr(make(), name).clone() for name in ("rewards", "correct", "truncated", "baselines")}
        made |= {"mask": MASK.clone(), "group_ids": torch.tensor([5, 5, 2, 9]), "old_logprobs": L - 0.5}
        made |= {"entropies": -L}
    assert made.keys() == set(names)
    policy = L.clone().requires_grad_()
    out = trew.preset("grpo", beta=0.0).loss(make(logprobs=policy, **made))
    out.loss.backward()
    expected = L.clone().requires_grad_()
    trew.preset("grpo", beta=0.0).loss(make(logprobs=expected)).loss.backward()
    assert torch.equal(policy.grad, expected.grad)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_single_log_probs_above_zero_are_refused_but_for_rounding(name):
    above = L.clone()
    above[1, 2] = 2e-3
    with pytest.raises(DataError, match=rf"^{name}: got 0.002 and 1 of 5 above 0 .*: logits, or rounding"):
        make(**{name: above})
    above[1, 2] = 9e-4
    assert getattr(make(**{name: above}), name).max() == 9e-4
    above[1, 2] = 0.25  # the distance of two bfloat16 numbers at 60
    make(**{name: above.to(torch.bfloat16)})
    above[1, 2] = 0.5
    with pytest.raises(DataError, match=rf"^{name}: got 0.5 and 1 of 5 above 0"):
        make(**{name: above.to(torch.bfloat16)})


def test_weights_of_rewards():
    two = torch.ones(4, 2)
    with pytest.raises(DataError, match=r"^reward_weights: got shape \(3,\), accepts \(2,\)"):
        make(rewards=two, reward_weights=torch.ones(3))
    with pytest.raises(DataError, match=r"^reward_weights: got nan in 1 of 2 places, accepts finite"):
        make(rewards=two, reward_weights=torch.tensor([1.0, math.nan]))
    with pytest.raises(DataError, match=r"^rewards: got None, accepts a tensor"):
        make(rewards=None, advantages=torch.ones(4), reward_weights=torch.ones(2))


def test_only_the_policy_and_its_entropies_keep_a_gradient():
    names = (*LOG_PROBS, "entropies")
    given = {name: (-L if name == "entropies" else L).clone().requires_grad_() for name in names}
    rewards = torch.ones(4, 2, requires_grad=True)
    four = torch.ones(4, requires_grad=True)
    more = {"rewards": rewards, "reward_weights": rewards[0], "advantages": four, "baselines": four}
    batch = make(**given, **more)
    assert {name for name in (*names, *more) if getattr(batch, name).requires_grad} == {"logprobs", "entropies"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_computed_in_thirty_two(dtype):
    short = L.to(dtype).requires_grad_()
    # exp(15) is more than float16 can hold.
    given = {"rewards": torch.tensor([0, 1, 1, 0]), "group_ids": torch.tensor([0, 0, 1, 1]), "correct": None}
    old = (L - 15).to(dtype)
    batch = make(logprobs=short, old_logprobs=old, entropies=(-L).to(dtype), **given)
    assert {batch.logprobs.dtype, batch.old.dtype, batch.entropies.dtype} == {torch.float32}
    out = trew.preset("grpo", beta=0.0).loss(batch)
    out.loss.backward()
    exact = L.clone().requires_grad_()
    wide = trew.preset("grpo", beta=0.0).loss(make(logprobs=exact, old_logprobs=old.double(), **given))
    wide.loss.backward()
    assert out.coefficients.dtype == torch.float32
    assert out.coefficients.tolist() == [pytest.approx(row, rel=1e-5) for row in wide.coefficients.tolist()]
    assert short.grad.dtype == dtype
    if dtype == torch.bfloat16:  # float16 has no room for a gradient of 1e6
        assert short.grad.double().flatten().tolist() == pytest.approx(exact.grad.flatten().tolist(), rel=1e-2)
